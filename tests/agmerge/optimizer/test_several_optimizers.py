# SPDX-License-Identifier: Apache-2.0
"""Several optimizers around one model: one exchange a step, and each of them steps as it would by itself."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from support import agreed, digest, on_ranks, residuals, same_bits, sgd, train, wrap
from support.several_optimizers import MODEL, MUON, SPARSE, WHOLE, alone, both, halves, moments, pair, sgds
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import agmerge

STEPS = range(6)


@pytest.mark.parametrize("options", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("size", [2, 1, 4])
def test_where_everything_is_sent_each_steps_as_it_would_alone(size: int, options: dict[str, Any]) -> None:
    """To the bit, state included."""
    twin = copy.deepcopy(MODEL)
    plain = pair(twin)
    expected = alone(twin, plain, size, STEPS)

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, **options, dense_sum="ordered")
        return train(model, optimizer, rank, STEPS), moments(optimizer.optimizers)

    seen, kept = agreed(on_ranks(size, MODEL, body))
    assert len(set(seen)) == len(seen)
    assert seen == expected and kept == moments(plain)


@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "powersgd", "density": None}, {"exchange": "oktopk"}, {"merging": "agmerge"}],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_equal_whatever_is_sent(size: int, options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, check_every=1, **options)
        seen = train(model, optimizer, rank, range(8))
        assert optimizer.stats()["steps"] == 8 and any(kept.any() for kept in residuals(optimizer).values())
        return seen, moments(optimizer.optimizers)

    assert len(set(agreed(on_ranks(size, MODEL, body))[0])) == 8


@pytest.mark.parametrize("compression", ["topk", "dgc", "none"])
def test_two_sgds_are_one_with_their_groups(compression: str) -> None:
    """To the bit, and the momentum that is applied before selection too: that of each one's groups."""

    def of_one(model: nn.Module) -> Any:
        first, second = ({**optimizer.param_groups[0]} for optimizer in sgds(model))
        return torch.optim.SGD([first, second])

    def body(rank: int, model: nn.Module, several: bool) -> Any:
        inner: Any = sgds(model) if several else of_one(model)
        optimizer = wrap(model, inner, **{**SPARSE, "compression": compression})
        seen: list[float] = []
        for each in optimizer.optimizers:
            each.register_step_pre_hook(lambda one, *_: seen.extend(group["momentum"] for group in one.param_groups))
        digests = train(model, optimizer, rank, STEPS)
        assert seen == [0.9, 0.5] * len(STEPS)
        return digests, digest(optimizer.state_dict()["agmerge"]["momenta"].values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, theirs = (on_ranks(2, MODEL, lambda r, m, s=s: body(r, m, s)) for s in (True, False))
    assert ours == theirs and len({seen[-1] for seen, _ in ours}) == 1


# -- what a script sees ---------------------------------------------------------------------------------------------


def test_groups_and_state_are_those_of_all() -> None:
    def body(rank: int, model: nn.Module) -> None:
        muon, adamw = inner = pair(model)
        optimizer = wrap(model, tuple(inner), **SPARSE)  # type: ignore[arg-type]
        train(model, optimizer, rank, range(2))
        assert optimizer.optimizers == inner and isinstance(optimizer, torch.optim.Optimizer)
        for ours, theirs in zip(optimizer.param_groups, [*muon.param_groups, *adamw.param_groups], strict=True):
            assert ours is theirs
        matrix, bias = model[0].weight, model[0].bias
        assert optimizer.state[matrix] is muon.state[matrix] and optimizer.state[bias] is adamw.state[bias]
        assert len(optimizer.state) == 6 and set(optimizer.state) == {*muon.state, *adamw.state}
        optimizer.state[matrix] = {"momentum_buffer": matrix.detach().clone()}
        assert same_bits(muon.state[matrix]["momentum_buffer"], matrix)
        assert optimizer.state.pop(bias) and bias not in adamw.state and optimizer.state.get(bias) is None
        optimizer.state[bias]["step"] = torch.tensor(1.0)  # as of an optimizer's: made where there is none
        assert adamw.state[bias] == {"step": torch.tensor(1.0)}
        with pytest.raises(KeyError):
            optimizer.state["nobody's"]
        assert f"{MUON.__name__} and AdamW" in repr(optimizer)

    on_ranks(2, MODEL, body)


def test_attributes_are_forwarded_where_all_agree() -> None:
    def body(rank: int, model: nn.Module) -> None:
        muon, adamw = inner = pair(model)
        optimizer: Any = wrap(model, inner, **SPARSE)  # type: ignore[arg-type]
        muon.flavour = adamw.flavour = "sweet"
        assert optimizer.flavour == "sweet"
        adamw.flavour = "sour"
        adamw.only_here = 1
        for name, words in {
            "flavour": r" and AdamW .* 'flavour'.*optimizers\[0\]\.flavour",
            "only_here": r"optimizers\[1\]\.only_here",
            "nowhere": "none of these optimizers has an attribute 'nowhere'",
            "optimizer": r"several optimizers \(.* and AdamW\). Use optimizer.optimizers",
        }.items():
            with pytest.raises(AttributeError, match=words):
                getattr(optimizer, name)
        assert "lr" in muon.defaults and "lr" not in optimizer.defaults

    on_ranks(1, MODEL, body)


def test_defaults_are_those_that_all_have_alike() -> None:
    def body(rank: int, model: nn.Module) -> None:
        matrices, others = halves(model)
        optimizer = wrap(model, [torch.optim.Adam(matrices, lr=0.1), torch.optim.AdamW(others)], **SPARSE)
        assert optimizer.defaults["betas"] == (0.9, 0.999) and not {"lr", "weight_decay"} & set(optimizer.defaults)

    on_ranks(1, MODEL, body)


def test_a_list_of_one_is_that_one() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = sgd(model)
        optimizer = wrap(model, [inner], **SPARSE)  # type: ignore[arg-type]
        assert optimizer.optimizer is inner and optimizer.optimizers == [inner]
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
        assert set(optimizer.state_dict()) == {"state", "param_groups", "agmerge"}
        assert optimizer.load_state_dict([inner.state_dict()]) is None
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
        assert len(inner.param_groups) == 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(1, MODEL, body)


class Closed(torch.optim.SGD):
    """Need a closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (lambda m: [], ValueError, ": expected at least one optimizer"),
    "no optimizer": (lambda m: [*pair(m), "adam"], TypeError, r"optimizers\[2\], a str: optimizer must be a torch"),
    "lbfgs": (
        lambda m: [sgds(m)[0], torch.optim.LBFGS(halves(m)[1])],
        ValueError,
        r"optimizers\[1\], a LBFGS: LBFGS .*calls a closure",
    ),
    "closed": (
        lambda m: [Closed(halves(m)[0]), sgds(m)[1]],
        ValueError,
        r"optimizers\[0\], a Closed: Closed .*calls a closure",
    ),
    "wrapped": (
        lambda m: [both(m)],
        TypeError,
        r"optimizers\[0\], a DistributedOptimizer: optimizer is already a Dist",
    ),
    "twice": (
        lambda m: [torch.optim.SGD(m.parameters(), lr=0.1), torch.optim.Adam([m[2].weight])],
        ValueError,
        r"parameter '2.weight' is in two of the optimizers, optimizers\[0\] \(SGD\) and optimizers\[1\] \(Adam\)",
    ),
    "itself": (lambda m: [sgd(m)] * 2, ValueError, r"parameter '0.weight' is in two .*\[0\] \(SGD\) .*\[1\] \(SGD\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_wrapped_is_refused_by_its_place(case: str) -> None:
    given, kind, words = REFUSED[case]

    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(kind, match=words):
            agmerge.DistributedOptimizer(given(model), model.named_parameters(), **SPARSE)

    on_ranks(1, MODEL, body)


def test_dear_and_momentum_of_others_are_refused_with_both_names() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner: Any = pair(model)
        with pytest.raises(
            ValueError, match=f"merging='dear' is not supported with several optimizers .*{MUON.__name__} and AdamW"
        ):
            agmerge.DistributedOptimizer(inner, merging="dear", model=model, compression="none")
        with pytest.raises(ValueError, match=f"before selection, but {MUON.__name__} and AdamW has its own .betas"):
            wrap(model, inner, **{**SPARSE, "compression": "dgc", "memory": "dgc"})
        matrices, others = halves(model)
        mixed: Any = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.RMSprop(others)]
        with pytest.raises(
            ValueError, match="group 0 of SGD and RMSprop has momentum=0.9 too. Only the momentum of torch"
        ):
            wrap(model, mixed, **{**SPARSE, "compression": "dgc", "memory": "dgc"})

    on_ranks(1, MODEL, body)


def test_the_strictest_one_decides_what_a_script_gets_that_names_no_compressor() -> None:
    def body(rank: int, model: nn.Module) -> None:
        matrices, others = halves(model)
        adamw, sgd_of = torch.optim.AdamW(others), torch.optim.SGD(matrices, lr=0.1, momentum=0.9)
        found = {}
        for name, inner, options in (
            ("muon", pair(model), {}),
            ("sgd", [sgd_of, adamw], {}),
            ("adams", [torch.optim.RAdam(matrices), adamw], {}),
            ("unknown", [sgd_of, torch.optim.RMSprop(others)], {}),
            ("sgds", sgds(model), {"density": 0.05}),
            ("selected", pair(model), {"density": 0.05}),
        ):
            optimizer = wrap(model, inner, compression="auto", exchange="auto", **options)  # type: ignore[arg-type]
            found[name] = optimizer._options.compression
            optimizer.close()
        if MUON is not torch.optim.RMSprop:
            assert found["muon"].candidates == ("none", "int8")
        assert found["unknown"].candidates == found["sgd"].candidates == ("none", "int8", "eden-4")
        assert len(found["adams"].candidates) == 4
        assert (found["sgds"], found["selected"]) == ("dgc", "topk")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(1, MODEL, body)


# -- param groups, schedulers and hooks -----------------------------------------------------------------------------


def test_a_group_is_given_to_one_of_them() -> None:
    """By itself, on every rank; from the next step on its gradients are combined as all others."""
    twin = copy.deepcopy(MODEL)
    muon, adamw = plain = pair(twin)
    for inner in plain:
        del inner.param_groups[0]["params"][2:]
    expected = alone(twin, plain, 2, range(3))
    muon.add_param_group({"params": [twin[4].weight], "lr": 0.5})
    adamw.add_param_group({"params": [twin[4].bias], "lr": 0.25})
    twin.zero_grad()
    expected += alone(twin, plain, 2, range(3, 6))

    def body(rank: int, model: nn.Module) -> list[str]:
        inner: Any = pair(model)
        for each in inner:
            del each.param_groups[0]["params"][2:]
        optimizer = wrap(model, inner, compression="none", dense_sum="ordered")
        seen = train(model, optimizer, rank, range(3))
        with pytest.raises(ValueError, match=r"Choose one, .* optimizer.optimizers\[0\].add_param_group"):
            optimizer.add_param_group({"params": [model[4].weight]})
        optimizer.optimizers[0].add_param_group({"params": [model[4].weight], "lr": 0.5})
        optimizer.optimizers[1].add_param_group({"params": [model[4].bias], "lr": 0.25})
        model.zero_grad()
        seen += train(model, optimizer, rank, range(3, 6))
        assert set(optimizer.plan.names) == {name for name, _ in model.named_parameters()}
        optimizer.optimizers[0].param_groups.append({**inner[1].param_groups[0]})
        with pytest.raises(ValueError, match="parameter '0.bias' is in two of the optimizers"):
            optimizer.step()
        return seen

    assert agreed(on_ranks(2, MODEL, body)) == expected


@pytest.mark.parametrize(
    "made, rates",
    [
        (lambda one: LambdaLR(one, lambda epoch: 0.9**epoch), lambda n: [0.02 * 0.9**n, 0.01 * 0.9**n]),
        (
            lambda one: LambdaLR(one, [lambda epoch: 0.9**epoch, lambda epoch: 0.5**epoch]),
            lambda n: [0.02 * 0.9**n, 0.01 * 0.5**n],
        ),
        (lambda one: OneCycleLR(one, [0.1, 0.2], total_steps=9, cycle_momentum=False), None),
    ],
    ids=["lambda", "lambdas", "cycle"],
)
def test_a_scheduler_of_the_wrapper_sees_the_groups_of_all(made: Any, rates: Any) -> None:
    def body(rank: int, model: nn.Module) -> list[list[float]]:
        optimizer = both(model, compression="none")
        scheduler, seen = made(optimizer), []
        for step in range(8):
            train(model, optimizer, rank, range(step, step + 1))
            seen.append([group["lr"] for each in optimizer.optimizers for group in each.param_groups])
            scheduler.step()
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = agreed(on_ranks(2, MODEL, body))
    if rates is None:
        assert len({tuple(row) for row in seen}) == 8 and all(row[1] == 2 * row[0] for row in seen)
    else:
        assert seen == [pytest.approx(rates(step)) for step in range(8)]


@pytest.mark.parametrize("before", [False, True], ids=["after wrapping", "before"])
@pytest.mark.parametrize(
    "made",
    [
        lambda each: [LambdaLR(one, lambda epoch: 0.9**epoch) for one in each],
        lambda each: [OneCycleLR(each[0], 0.1, 9, cycle_momentum=MUON.__name__ == "Muon"), OneCycleLR(each[1], 0.2, 9)],
    ],
    ids=["lambda", "cycle"],
)
def test_schedulers_of_each_do_what_they_do_without_us(made: Any, before: bool) -> None:
    """Of momenta, too; and without a warning."""

    def groups(optimizers: list[Any]) -> list[Any]:
        return [dict(group, params=0) for one in optimizers for group in one.param_groups]

    twin = copy.deepcopy(MODEL)
    plain, expected = pair(twin), []
    schedulers = made(plain)
    for step in range(8):
        alone(twin, plain, 2, range(step, step + 1))
        expected.append(groups(plain))
        for scheduler in schedulers:
            scheduler.step()

    def body(rank: int, model: nn.Module) -> Any:
        inner: Any = pair(model)
        schedulers = made(inner) if before else []
        optimizer = wrap(model, inner, compression="none", dense_sum="ordered")
        schedulers, seen = schedulers or made(inner), []
        for step in range(8):
            train(model, optimizer, rank, range(step, step + 1))
            seen.append(groups(inner))
            for scheduler in schedulers:
                scheduler.step()
        return seen, digest(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen, bits = agreed(on_ranks(2, MODEL, body))
    assert seen == expected and bits == digest(twin)


def test_hooks_of_the_wrapper_run_once_a_step_around_all() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        muon, adamw = inner = pair(model)
        optimizer = wrap(model, inner, compression="none")  # type: ignore[arg-type]
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda one, *_: seen.append(f"before {len(one.param_groups)}"))
        handle = optimizer.register_step_post_hook(lambda one, *_: seen.append("after"))
        muon.register_step_pre_hook(lambda *_: seen.append("muon"))
        adamw.register_step_pre_hook(lambda *_: seen.append("adamw"))
        for _ in range(2):
            train(model, optimizer, rank, range(1))
            handle.remove()
        saving = [
            optimizer.register_state_dict_pre_hook(lambda one: seen.append(f"save {one is muon}")),
            optimizer.register_state_dict_post_hook(lambda one, state: {**state, "more": one is muon}),
            optimizer.register_load_state_dict_post_hook(lambda one: seen.append(f"loaded {one is muon}")),
        ]
        state = optimizer.state_dict()
        assert [section.pop("more") for section in state["optimizers"]] == [True, False]
        optimizer.load_state_dict(state)
        for one in saving:
            one.remove()
        assert "more" not in optimizer.state_dict()["optimizers"][0]
        return seen

    steps = ["before 2", "muon", "adamw", "after", "before 2", "muon", "adamw"]
    saved = ["save True", "save False", "loaded True", "loaded False"]
    assert agreed(on_ranks(2, MODEL, body)) == steps + saved


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_trains_on_like_the_original(how: str) -> None:
    def copied(pair: Any) -> Any:
        if how == "deepcopy":
            return copy.deepcopy(pair)
        if how == "pickle":
            return pickle.loads(pickle.dumps(pair))
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str]]:
        optimizer = both(model)
        train(model, optimizer, rank, range(3))
        other, clone = copied((model, optimizer))
        assert clone.optimizers[0].param_groups[0]["params"][0] is other[0].weight is not model[0].weight
        assert [type(one) for one in clone.optimizers] == [type(one) for one in optimizer.optimizers]
        first, second = (train(m, o, rank, range(3, 6)) for m, o in ((other, clone), (model, optimizer)))
        return first, second

    for cloned, original in on_ranks(2, MODEL, body):
        assert cloned == original
