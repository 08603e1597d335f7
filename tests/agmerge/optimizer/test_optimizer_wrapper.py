# SPDX-License-Identifier: Apache-2.0
"""What a training script sees of the wrapper: one optimizer with two names."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, same_bits, seeded, sgd, train, wrap
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import agmerge
from agmerge import testing

MODEL = seeded(mlp)
SCHEDULERS = [
    lambda o: StepLR(o, 2, gamma=0.5),
    lambda o: LambdaLR(o, lambda epoch: 0.9**epoch),
    lambda o: CosineAnnealingLR(o, 10),
    lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
]


@pytest.mark.parametrize("where", ["inner before", "inner after", "wrapper"])
@pytest.mark.parametrize("make", SCHEDULERS, ids=["step", "lambda", "cosine", "one cycle"])
def test_schedulers_work_without_a_warning(make: Any, where: str) -> None:
    expected = []
    reference = sgd(MODEL)
    scheduler = make(reference)
    for _ in range(6):
        reference.step()
        scheduler.step()
        expected.append(reference.param_groups[0]["lr"])

    def body(rank: int, model: nn.Module) -> list[float]:
        inner = sgd(model)
        scheduler = make(inner) if where == "inner before" else None
        optimizer = wrap(model, inner)
        scheduler = scheduler or make(inner if where == "inner after" else optimizer)
        seen = []
        for step in range(6):
            train(model, optimizer, rank, range(step, step + 1))
            scheduler.step()
            assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0]
            seen.append(optimizer.param_groups[0]["lr"])
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agreed(on_ranks(2, MODEL, body)) == expected


def test_a_plateau_scheduler_sees_the_optimizer_it_wants() -> None:
    def body(rank: int, model: nn.Module) -> float:
        optimizer = wrap(model)
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        for _ in range(3):
            scheduler.step(1.0)
        return optimizer.optimizer.param_groups[0]["lr"]

    assert agreed(on_ranks(2, MODEL, body)) == pytest.approx(0.001)


def test_groups_state_and_defaults_are_the_inner_optimizers() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = torch.optim.Adam(model.parameters(), lr=0.007, weight_decay=0.3)
        loss_of(model, 0, 0).backward()
        inner.step()
        held = {p: (state["exp_avg"], state["exp_avg"].clone()) for p, state in inner.state.items()}
        optimizer = wrap(model, inner)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.optimizer is inner and "Adam" in repr(optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state and optimizer.defaults is inner.defaults
        assert all(inner.state[p]["exp_avg"] is tensor for p, (tensor, _) in held.items())
        assert all(same_bits(tensor, before) for tensor, before in held.values())
        optimizer.zero_grad()
        loss_of(model, 0, 1).backward()
        optimizer.step()
        assert {int(state["step"]) for state in inner.state.values()} == {2}  # counted on, and counted once

    on_ranks(2, MODEL, body)


def test_a_group_without_options_gets_the_users_and_not_the_classes() -> None:
    def body(rank: int, model: nn.Sequential) -> dict[str, Any]:
        inner = torch.optim.SGD(model[0].parameters(), lr=0.0625, momentum=0.5, weight_decay=0.25)
        optimizer = wrap(model, inner)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
        assert inner.param_groups[2]["lr"] == 0.5
        return {key: inner.param_groups[1][key] for key in ("lr", "momentum", "weight_decay")}

    assert agreed(on_ranks(2, MODEL, body)) == {"lr": 0.0625, "momentum": 0.5, "weight_decay": 0.25}


@pytest.mark.parametrize("via", ["inner", "wrapper"])
def test_step_hooks_run_once_and_after_the_exchange(via: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = sgd(model)
        early: list[str] = []
        if via == "inner":
            inner.register_step_pre_hook(lambda *_: early.append("before wrapping"))
        optimizer = wrap(model, inner, compression="none")
        target = inner if via == "inner" else optimizer
        seen: list[str] = []
        target.register_step_pre_hook(lambda o, *_: seen.append("pre" + digest(p.grad for p in model.parameters())))
        target.register_step_post_hook(lambda o, *_: seen.append("post"))
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert seen == ["pre" + digest(p.grad for p in model.parameters()), "post"]
        assert len(early) == (via == "inner")

    on_ranks(2, MODEL, body)


def test_state_dict_hooks_run_once() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, seen = wrap(model), []
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
        optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        return seen

    assert on_ranks(1, MODEL, body) == [["save", "saved", "load", "loaded"]]


@pytest.mark.parametrize("compression", ["none", "topk", "bf16"])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_trains_on_like_the_original(steps: int, how: str, compression: str) -> None:
    def copied(pair: tuple[nn.Module, agmerge.DistributedOptimizer]) -> Any:
        if how == "deepcopy":
            return copy.deepcopy(pair)
        if how == "pickle":
            return pickle.loads(pickle.dumps(pair))
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str]]:
        optimizer = wrap(model, compression=compression)
        optimizer.set_backward_passes_per_step(2)
        optimizer.set_backward_passes_per_step(1)
        train(model, optimizer, rank, range(steps))
        other, clone = copied((model, optimizer))
        assert clone.param_groups[0]["params"][0] is next(other.parameters()) is not next(model.parameters())
        kept = residuals(optimizer)
        assert all(same_bits(value, kept[name]) for name, value in residuals(clone).items())
        assert len(residuals(clone)) == len(kept) and clone.state_dict()["agmerge"]["rank"] == rank
        ends = [
            [*train(m, o, rank, range(steps, steps + 4)), digest(residuals(o).values())]
            for m, o in ((other, clone), (model, optimizer))
        ]
        return ends[0], ends[1]

    for cloned, original in on_ranks(3, MODEL, body):
        assert cloned == original


def test_a_copy_that_is_unpickled_before_init_keeps_its_residuals() -> None:
    def save(rank: int, model: nn.Module) -> tuple[bytes, list[str]]:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        data = pickle.dumps((model, optimizer))
        return data, train(model, optimizer, rank, range(2, 4))

    found = on_ranks(2, MODEL, save)
    assert not agmerge.is_initialized()
    pairs = [pickle.loads(data) for data, _ in found]
    again = testing.run(2, lambda rank: train(*pairs[rank], rank, range(2, 4)))
    assert again == [seen for _, seen in found]


def test_a_copy_counts_backward_passes_as_the_original_does() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model)
        optimizer.set_backward_passes_per_step(2)
        other, clone = copy.deepcopy((model, optimizer))
        for step in range(2):
            loss_of(other, rank, step).backward()
        clone.step()
        return digest(other)

    agreed(on_ranks(2, MODEL, body))


def test_wrapping_leaves_nothing_in_a_saved_or_copied_model() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(model)):
            assert digest(other) == digest(model)
            for step in range(3):  # no guard, no hook: nobody exchanges this one
                loss_of(other, rank, step).backward()
        train(model, optimizer, rank, range(2, 4))

    on_ranks(2, MODEL, body)


def test_names_are_made_up_where_none_are_given_and_may_be_too_many() -> None:
    def body(rank: int, model: nn.Sequential) -> list[str]:
        made_up = agmerge.DistributedOptimizer(sgd(model), density=0.01)
        train(model, made_up, rank, range(1))
        names = sorted(name for name, one in residuals(made_up).items() if one.any())
        made_up.close()
        part = torch.optim.SGD(model[0].parameters(), lr=0.1)
        more = agmerge.DistributedOptimizer(part, (pair for pair in model.named_parameters()), density=0.01)
        train(model, more, rank, range(1))
        return [*names, *sorted(name for name, one in residuals(more).items() if one.any())]

    assert agreed(on_ranks(2, MODEL, body)) == ["noname.0.0", "noname.0.2", "0.weight"]


def test_unknown_attributes_are_the_inner_optimizers() -> None:
    class Named(torch.optim.SGD):
        colour = "green"

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, Named(model.parameters(), lr=0.1))
        assert optimizer.colour == "green" and not hasattr(optimizer, "shape")
        with pytest.raises(AttributeError, match="shape"):
            _ = optimizer.shape

    on_ranks(1, MODEL, body)


def test_stats_count_what_was_sent() -> None:
    def body(rank: int, model: nn.Module, compression: str) -> dict[str, Any]:
        optimizer = wrap(model, compression=compression)
        assert optimizer.stats()["steps"] == 0 and optimizer.stats()["residual_norm"] == 0
        train(model, optimizer, rank, range(5))
        kept = residuals(optimizer).values()
        norm = sum(float(value.double().square().sum()) for value in kept) ** 0.5
        assert optimizer.stats()["residual_norm"] == pytest.approx(norm)
        assert optimizer.stats()["exposed_seconds"] >= 0
        return optimizer.stats()

    numel = sum(p.numel() for p in MODEL.parameters())
    sparse = [p.numel() for p in MODEL.parameters() if p.dim() > 1 and p.numel() >= 1024]
    small = numel - sum(sparse)
    topk, none = (on_ranks(2, MODEL, lambda r, m, c=c: body(r, m, c))[0] for c in ("topk", "none"))
    assert topk["steps"] == none["steps"] == 5 and topk["buffers"] == 1
    assert none["elements_sent"] == 5 * numel and none["density"] == 1.0
    assert topk["elements_sent"] == 5 * (small + -(-sum(sparse) // 100))
    assert topk["density"] == topk["elements_sent"] / (5 * numel)
    assert topk["bytes_dense"] == none["bytes_dense"] == 5 * 4 * numel
    assert 5 * 4 * numel <= none["bytes_sent"] < 1.2 * 5 * 4 * numel
    assert topk["bytes_sent"] < none["bytes_sent"] / 2
    assert topk["residual_norm"] > 0 == none["residual_norm"]


def test_there_is_no_plan_before_the_first_step() -> None:
    def body(rank: int, model: nn.Module) -> tuple[int, ...]:
        optimizer = wrap(model)
        with pytest.raises(agmerge.AGMergeError, match="no plan yet"):
            _ = optimizer.plan
        train(model, optimizer, rank, range(1))
        assert set(optimizer.plan.names) == {name for name, _ in model.named_parameters()}
        return optimizer.plan.counts

    assert agreed(on_ranks(2, MODEL, body)) == (6,)


def test_a_gradient_scaler_module_can_be_imported_and_left_off() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return digest(model)

    plain = agreed(on_ranks(2, MODEL, lambda rank, model: train(model, wrap(model), rank, range(3))[-1]))
    assert agreed(on_ranks(2, MODEL, body)) == plain


@pytest.mark.parametrize("recipe", ["plain", "horovod"])
def test_a_scaler_that_was_not_attached_is_an_error_and_not_a_huge_step(recipe: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, rank, 0)).backward()
        with pytest.raises(agmerge.AGMergeError, match="AGM115"):
            if recipe == "plain":
                scaler.step(optimizer)
            else:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
        assert digest(model) == digest(MODEL)

    on_ranks(2, MODEL, body)
