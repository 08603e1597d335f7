# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` and optimizers that step shards and hand them round: refused, and nobody else is."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import agreed, backward, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from support.updates import updating
from torch import nn

import agmerge
from agmerge.runtime.collectives import operation
from agmerge.script.sharded_steps import LOOKS

MODEL = seeded(mlp)
Inner = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def optimizers_may_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow collectives inside functions of the library that make none: those here are the optimizers' own."""
    monkeypatch.setattr("agmerge.backends.base.require_marks", lambda name, frame: None)


class HandsRound(torch.optim.AdamW):
    """Step all, and take of each parameter what its owner has made of it."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            agmerge.broadcast_(parameter.detach(), number % agmerge.size())
        return result


class Gathers(torch.optim.AdamW):
    """Step all, and gather in tensors of its own what each rank has made of the parameters."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        parameters = [p.detach() for group in self.param_groups for p in group["params"]]
        agmerge.allgather(torch.cat([parameter.reshape(-1) for parameter in parameters]))
        return result


class Averages(torch.optim.SGD):
    """Average gradients in its step, as some distributed optimizers do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is not None:
                agmerge.allreduce_(parameter.grad)
        return super().step(closure)


class Figures(torch.optim.AdamW):
    """Sum a figure, such as the norm of all gradients, and hand round a small tensor."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        agmerge.allreduce(torch.stack([p.grad.square().sum() for p in parameters]).sum())
        agmerge.broadcast(torch.zeros(20), 0)
        return super().step(closure)


class Sign(torch.optim.Optimizer):
    """Move every element by the rate: those whose gradients agree land on the same bits."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Muon(Sign):
    """Have the arguments by which a distributed one is told."""

    def __init__(self, parameters: Any, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(parameters)
        self.world_size = world_size


class ZeroRedundancyOptimizer(Sign):
    """Have torch's name."""


class Mine(ZeroRedundancyOptimizer):
    """Derive from one that is known."""


def refused(rank: int, model: nn.Module, optimizer: Any, steps: range = range(LOOKS + 2)) -> str:
    """What is said, and in which step."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        try:
            optimizer.step()
        except ValueError as error:
            return f"{step}: {error}"
    return ""


def local(model: nn.Module, inner: torch.optim.Optimizer, **options: Any) -> Any:
    return agmerge.LocalOptimizer(inner, model.named_parameters(), every=3, exchange="sparse", **options)


def stepped(rank: int, model: nn.Module, inner: torch.optim.Optimizer) -> str:
    """The same by LocalSync, which wraps no optimizer."""
    with agmerge.LocalSync(model, inner, every=3, exchange="sparse"):
        return refused(rank, model, inner)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "apply": updating,
    "hold": partial(updating, carry="hold"),
    "overlap": partial(updating, overlap=1),
    "local": local,
    "two-level": partial(updating, carry="hold", exchange="two-level"),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("kind", [HandsRound, Gathers, Averages])
def test_what_is_handed_round_is_the_same_error_on_all_ranks_in_the_first_step(kind: Any, name: str, size: int) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = WAYS[name](model, kind(model.parameters(), lr=0.01))
        said = refused(rank, model, optimizer)
        with pytest.raises(agmerge.AGMergeError, match="AGM124"):
            optimizer.step()
        return [said]

    (said,) = agreed(on_ranks(size, MODEL, body))
    assert said.startswith(f"0: {kind.__name__} exchanges parameters or gradients in its own step (")
    assert "sync='gradients'" in said


def test_by_hooks_and_with_a_closure_too() -> None:
    torch.optim.AdamW(MODEL.parameters())  # from now on torch runs hooks around its step too, within HandsRound's

    def body(rank: int, model: nn.Module) -> list[str]:
        found = [stepped(rank, model, HandsRound(model.parameters(), lr=0.01))]
        other = copy.deepcopy(MODEL)
        optimizer = updating(other, HandsRound(other.parameters(), lr=0.01))

        def closure() -> torch.Tensor:
            loss = loss_of(other, rank, 0)
            loss.backward()
            return loss

        with pytest.raises(ValueError, match="in its own step") as error:
            optimizer.step(closure)
        return [*found, f"0: {error.value}"]

    hooked, closed = agreed(on_ranks(2, MODEL, body))
    assert hooked == closed and hooked.startswith("0: ")


def test_gradients_work_with_it_as_is_said() -> None:
    """To the bit those of the optimizer that it is made of."""

    def body(rank: int, model: nn.Module, kind: Any) -> list[str]:
        return train(model, wrap(model, kind(model.parameters(), lr=0.01), compression="topk"), rank, range(6))

    handed, plain = (
        agreed(on_ranks(2, MODEL, lambda rank, model, kind=kind: body(rank, model, kind)))
        for kind in (HandsRound, torch.optim.AdamW)
    )
    assert handed == plain


def test_exchanges_before_and_after_the_step_and_in_its_closure_are_the_scripts() -> None:
    """Whether they average gradients twice is another question: see AGM136."""

    def body(rank: int, model: nn.Module) -> int:
        optimizer, steps = updating(model), 0

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, steps)
            loss.backward()
            for parameter in model.parameters():
                agmerge.allreduce(parameter)
            return loss

        for _ in range(3):
            optimizer.step(closure)
            agmerge.broadcast(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), 0)
            steps += 1
        return steps

    assert on_ranks(2, MODEL, body) == [3, 3]


def test_small_tensors_and_figures_are_no_sign() -> None:
    def body(rank: int, model: nn.Module) -> str:
        return refused(rank, model, updating(model, Figures(model.parameters(), lr=0.01)))

    assert agreed(on_ranks(2, MODEL, body)) == ""


# -- classes that are known ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, Mine, partial(Muon, world_size=2)])
@pytest.mark.parametrize("make", [updating, local])
def test_a_class_that_is_known_is_refused_at_construction(make: Any, kind: Any) -> None:
    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(ValueError, match="steps a shard of the parameters") as error:
            make(model, kind(model.parameters()))
        return str(error.value)

    said = agreed(on_ranks(2, MODEL, body))
    assert "sync='gradients'" in said and re.match("(Mine|Muon|Zero)", said)


def test_local_sync_refuses_it_when_it_is_entered_and_several_are_asked_each() -> None:
    def body(rank: int, model: Any) -> list[str]:
        sync = agmerge.LocalSync(model, Mine(model.parameters()))
        with pytest.raises(ValueError, match="steps a shard") as error, sync:
            raise AssertionError
        other = copy.deepcopy(MODEL)
        both = [sgd(other[0]), Mine([*other[2].parameters(), *other[4].parameters()])]
        with pytest.raises(ValueError, match="Mine steps a shard"):
            updating(other, both)  # type: ignore[arg-type]
        return [str(error.value)]

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("kind", [ZeroRedundancyOptimizer, Muon])
def test_alone_and_among_part_of_the_workers_it_may_be(kind: Any) -> None:
    """What it hands round may be among others than those that exchange; and a Muon may be told to step all."""

    def body(rank: int, model: nn.Module, **options: Any) -> str:
        return refused(rank, model, updating(model, kind(model.parameters()), **options))

    assert on_ranks(1, MODEL, body) == [""]
    options = {"process_set": [0, 1]} if kind is ZeroRedundancyOptimizer else {}
    assert on_ranks(3, MODEL, lambda rank, model: body(rank, model, **options)) == [""] * 3


# -- nobody else --------------------------------------------------------------------------------------------------


HONEST: dict[str, Inner] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum, decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "tiny rate": lambda p: torch.optim.SGD(p, lr=1e-9, momentum=0.9),
    "Sign": Sign,
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_an_optimizer_that_steps_everything_on_each_rank_is_not_refused(name: str, dtype: torch.dtype) -> None:
    """Nor where all ranks begin with the state of one, as from its checkpoint."""

    def body(rank: int, model: nn.Module, state: Any) -> list[str]:
        inner = HONEST[name](model.parameters())
        if state is not None:
            inner.load_state_dict(copy.deepcopy(state))
        return [refused(rank, model, updating(model, inner))]

    model = copy.deepcopy(MODEL).to(dtype)
    before = HONEST[name](model.parameters())
    for step in range(5):
        before.zero_grad()
        backward(model, 0, 100 + step)
        before.step()
    for state in (None, before.state_dict()):
        found = on_ranks(2, model, lambda rank, model, state=state: body(rank, model, state))
        assert found == [[""]] * 2


def test_a_watch_of_an_optimizer_that_is_gone_ends() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = updating(model)
        refused(rank, model, optimizer, range(1))
        optimizer.close()

    on_ranks(2, MODEL, body)
    gc.collect()
    assert not operation._notes


def test_ranks_whose_models_differ_are_told_so() -> None:
    def body(rank: int, model: Any) -> None:
        names = [(f"{rank}.{name}", parameter) for name, parameter in model.named_parameters()]
        inner = torch.optim.AdamW(model.parameters())
        optimizer = agmerge.DistributedOptimizer(inner, names, sync="updates", exchange="sparse")
        backward(model, rank, 0)
        optimizer.step()

    with pytest.raises(agmerge.RankMismatchError, match="tensor 0"):
        on_ranks(2, MODEL, body)
