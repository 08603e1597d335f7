# SPDX-License-Identifier: Apache-2.0
"""Steps of several optimizers that share a model, of gradients and of updates: as of one that has all their groups."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, loss_of, on_ranks, train, wrap
from support.several_optimizers import MODEL, SMALL, alone, both, halves, moments, pair
from torch import nn

import agmerge

AdamW = partial(torch.optim.AdamW, weight_decay=0.1)
COMMON: dict[str, Any] = {"compression": "topk", "density": 0.05, "merging": SMALL}
UPDATES: dict[str, dict[str, Any]] = {
    "apply": {},
    "hold": {"carry": "hold", "decay": 0.9},
    "every, overlap": {"every": 3, "overlap": 1},
    "fragments": {"every": 4, "fragments": 2},
    "outer": {"every": 3, "outer": agmerge.Nesterov()},
}


def two(model: nn.Module, **more: Any) -> Any:
    """Two AdamWs."""
    matrices, others = halves(model)
    return [AdamW(matrices, lr=0.02, **more), AdamW(others, lr=0.01, **more)]


def one(model: nn.Module, **more: Any) -> Any:
    """One AdamW with the groups of both."""
    matrices, others = halves(model)
    return AdamW([{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.01}], **more)


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)


def accumulated(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward(model, rank, 100 + step)
    backward(model, rank, step)
    optimizer.step()


def counted(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad(set_to_none=False)
    for number in range(2):
        backward(model, rank, 100 * number + step)
    optimizer.step()


def clipped(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, step)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    with optimizer.skip_synchronize():
        optimizer.step()


def closed(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def uneven(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    if step < 4 or rank == 0:
        train(model, optimizer, rank, range(step, step + 1))
    if step == 5:
        assert optimizer.join() == 0


WAYS: dict[str, Callable[[nn.Module, Any, int, int], None]] = {
    "accumulated": accumulated,
    "counted": counted,
    "clipped": clipped,
    "closed": closed,
    "uneven": uneven,
}


def gone(make: Callable[[nn.Module], Any], way: str, **options: Any) -> str:
    """The bits after six steps in a way, of parameters and moments, the same on both ranks."""

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        optimizer = wrap(model, make(model), **{**COMMON, **options})
        for step in range(6):
            WAYS[way](model, optimizer, rank, step)
        optimizer.consolidate()
        return digest(model), "" if "sync" in options else moments(optimizer.optimizers)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return repr(agreed(on_ranks(2, MODEL, body)))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_travel_as_of_one_optimizer(way: str) -> None:
    assert gone(two, way) == gone(one, way)


@pytest.mark.parametrize("way", ["closed", "uneven"])
def test_updates_travel_as_of_one_optimizer(way: str) -> None:
    assert gone(two, way, sync="updates") == gone(one, way, sync="updates")


@pytest.mark.parametrize("sync", ["gradients", "updates"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_scaler_steps_all_or_none(fused: bool, sync: str) -> None:
    """In the fourth step rank 1 overflows: with updates in a parameter of one of them, and it alone leaves it out."""

    def body(rank: int, model: nn.Module, make: Any) -> Any:
        scaler, seen = scaler_of(), []
        own = {"scaler": scaler} if sync == "gradients" else {"sync": sync}
        optimizer = wrap(model, make(model, fused=fused), **COMMON, **own)
        for step in range(6):
            optimizer.zero_grad()
            bad = (rank, step) == (1, 3)
            scaler.scale(loss_of(model, rank, step) * (torch.inf if bad and sync == "gradients" else 1.0)).backward()
            if bad and sync == "updates":
                model[0].bias.grad[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            seen.append((digest(model), scaler.get_scale()))
        assert not any({"found_inf", "grad_scale"} & set(vars(each)) for each in optimizer.optimizers)
        return seen, optimizer.stats()["steps_skipped"], [int(s["step"]) for s in optimizer.state.values()]

    ours, theirs = (on_ranks(2, MODEL, lambda r, m, k=k: body(r, m, k)) for k in (two, one))
    assert ours == theirs
    if sync == "gradients":
        seen, skipped, steps = agreed(ours)
        assert seen[2][0] == seen[3][0] and skipped == 1 and set(steps) == {5}
    else:
        assert [(skipped, set(steps)) for _, skipped, steps in ours] == [(0, {6}), (1, {5})]


@pytest.mark.parametrize("case", UPDATES)
@pytest.mark.parametrize("sync", ["wrapper", "local"])
def test_local_steps_are_those_of_one_optimizer(sync: str, case: str) -> None:
    def body(rank: int, model: nn.Module, make: Any) -> Any:
        if sync == "wrapper":
            optimizer = wrap(model, make(model), sync="updates", **COMMON, **UPDATES[case])
        else:
            options = {"every": 2, "exchange": "sparse", "merging": SMALL, **UPDATES[case]}
            optimizer = agmerge.LocalOptimizer(make(model), model.named_parameters(), **options)
        seen = train(model, optimizer, rank, range(9))
        optimizer.consolidate()
        assert optimizer.stats()["steps"] > 0
        return seen, digest(model)

    ours, theirs = (on_ranks(2, MODEL, lambda r, m, k=k: body(r, m, k)) for k in (two, one))
    assert ours == theirs and ours[0][1] == ours[1][1]
    assert (ours[0][0] == ours[1][0]) == (sync == "wrapper" and case == "hold")


def test_a_worker_that_is_alone_steps_as_without_us() -> None:
    twin = copy.deepcopy(MODEL)
    expected = alone(twin, pair(twin), 1, range(5))
    options = {"sync": "updates", "exchange": "auto"}
    assert on_ranks(1, MODEL, lambda rank, model: train(model, both(model, **options), rank, range(5))) == [expected]


# -- steps that somebody else makes ---------------------------------------------------------------------------------


def spoilt(model: nn.Module, rank: int, step: int) -> None:
    """Gradients; in step 3 of rank 1 all are not finite."""
    backward(model, rank, step)
    if (rank, step) == (1, 3):
        for parameter in model.parameters():
            parameter.grad *= torch.nan


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
@pytest.mark.parametrize("case", ["apply", "hold", "every, overlap", "outer"])
def test_the_last_one_that_steps_is_followed_by_the_exchange(
    case: str, order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of the wrapper, whose step is all of them."""
    options: dict[str, Any] = {"exchange": "sparse", **COMMON, **UPDATES[case], "nonfinite": "skip"}

    def wrapped(rank: int, model: nn.Module) -> list[str]:
        optimizer, seen = wrap(model, two(model), sync="updates", **options), []
        for step in range(6):
            optimizer.zero_grad()
            spoilt(model, rank, step)
            optimizer.step()
            seen.append(digest(model))
        return seen

    def hooked(rank: int, model: nn.Module) -> list[str]:
        inner, seen = two(model), []
        with agmerge.LocalSync(model, inner, **{"every": 1, "wire": "auto", **options}) as local:
            reducer, begun = local._reducer, []
            begin = reducer.before_step
            monkeypatch.setattr(reducer, "before_step", lambda: (begun.append(len(seen)), begin()))
            for step in range(6):
                model.zero_grad()
                spoilt(model, rank, step)
                for number in order:
                    before = reducer.replica.steps
                    inner[number].step()
                    assert reducer.replica.steps == before + (number == order[-1])
                seen.append(digest(model))
            assert begun == list(range(6))
            assert local.optimizers == inner and local.stats()["steps_skipped"] == (rank == 1)
        assert not any(each._optimizer_step_pre_hooks or each._optimizer_step_post_hooks for each in inner)
        assert not any(hasattr(each, "_step_supports_amp_scaling") for each in inner)
        return seen

    assert on_ranks(2, MODEL, hooked) == on_ranks(2, MODEL, wrapped)


@pytest.mark.parametrize("how", ["scaler", "scaler, fused", "no scaler"])
def test_the_one_that_overflows_is_left_out_and_hangs_nobody(how: str) -> None:
    """By a scaler as without us: each optimizer by itself; the step counts as one that was left out."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, enabled=how != "no scaler") for _ in range(2)]

    def body(rank: int, model: nn.Module) -> list[list[int]]:
        inner, scaler, counts = two(model, fused="fused" in how), scalers[rank], []
        with agmerge.LocalSync(model, inner, every=1, nonfinite="skip", **COMMON) as local:
            for step in range(5):
                model.zero_grad()
                scaler.scale(loss_of(model, rank, step)).backward()
                if (rank, step) == (1, 3):
                    model[0].bias.grad[0] = torch.inf
                for each in inner:
                    scaler.step(each)
                scaler.update()
                at = (inner[0].state[model[0].weight], inner[1].state[model[0].bias])
                counts.append([int(state["step"]) for state in at])
            assert local.stats()["steps_skipped"] == (rank == 1)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return counts

    first, second = on_ranks(2, MODEL, body)
    assert first == [[n, n] for n in range(1, 6)]
    assert second == [[1, 1], [2, 2], [3, 3], [4, 3], [5, 4]]


def test_a_scaler_decides_what_is_no_error() -> None:
    """With ``nonfinite="raise"``, too: the scaler has looked."""

    def body(rank: int, model: nn.Module) -> None:
        inner, scaler = two(model), scaler_of()
        with agmerge.LocalSync(model, inner, every=1, nonfinite="raise", **COMMON) as local:
            scaler.scale(loss_of(model, rank, 0) * torch.inf).backward()
            for each in inner:
                scaler.step(each)
            assert local.stats()["steps_skipped"] == 1

    on_ranks(2, MODEL, body)


def test_gradients_of_one_that_are_not_finite_are_every_ranks_error() -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner = two(model)
        with agmerge.LocalSync(model, inner, every=1, **COMMON):
            for step in range(3):
                backward(model, rank, step)
                if (rank, step) == (1, 2):
                    model[2].bias.grad[0] = torch.nan
                if step < 2:
                    for each in inner:
                        each.step()
            inner[1].step()
            with pytest.raises(agmerge.NonFiniteError, match="rank 1: '2.bias'") as caught:
                inner[0].step()
        return str(caught.value)

    agreed(on_ranks(2, MODEL, body))


def test_one_that_steps_twice_before_another_is_an_error_before_anything_moves() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = pair(model)
        muon, adamw = inner
        with agmerge.LocalSync(model, inner, every=1, **COMMON):
            backward(model, rank, 0)
            adamw.step()
            before = digest(model)
            with pytest.raises(agmerge.AGMergeError, match=r"\[1\] .AdamW. stepped twice before optimizers\[0\]"):
                adamw.step()
            assert digest(model) == before
            muon.step()
            adamw.step()
            muon.step()

    on_ranks(2, MODEL, body)


def test_states_of_followed_optimizers_are_saved_and_loaded() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = pair(model)
        with agmerge.LocalSync(model, inner, every=1, **COMMON) as local:
            for step in range(3):
                backward(model, rank, step)
                for each in inner:
                    each.step()
            state, bits, kept = copy.deepcopy(local.state_dict()), digest(model), moments(inner)
            assert set(state) == {"optimizers", "agmerge"} and len(state["optimizers"]) == 2
            backward(model, rank, 3)
            for each in inner:
                each.step()
            assert moments(inner) != kept and digest(model) != bits
            local.load_state_dict(state)
            assert moments(inner) == kept and digest(model) == bits
            with pytest.raises(AttributeError, match="there are several optimizers"):
                _ = local.optimizer

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("road", ["hooks", "wrapper"])
def test_updates_of_parameters_that_a_script_freezes_between_its_optimizers_are_exchanged(road: str) -> None:
    """As a GAN's script does. Half of them are frozen when the first optimizer steps, or when all step together."""

    def body(rank: int, model: nn.Module) -> str:
        (matrices, others), optimizers = halves(model), two(model)
        held: Any = agmerge.LocalSync(model, optimizers, every=1) if road == "hooks" else None
        held = held.__enter__() if road == "hooks" else wrap(model, optimizers, sync="updates", **COMMON)
        for step in range(3):
            for optimizer, own, frozen in zip(optimizers, (matrices, others), (others, matrices), strict=True):
                for parameter in [*own, *frozen]:
                    parameter.requires_grad_(any(parameter is one for one in own))
                optimizer.zero_grad()
                backward(model, rank, step)
                if road == "hooks":
                    optimizer.step()
            if road == "wrapper":
                held.step()  # the first half is frozen, and has gradients
        own = digest(model)
        held.consolidate()
        assert digest(model) != own
        return digest(model)

    agreed(on_ranks(2, MODEL, body))
