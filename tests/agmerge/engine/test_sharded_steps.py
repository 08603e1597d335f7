# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` and optimizers that step shards and hand them round: refused, and nobody else is."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Parts, agreed, backward, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from support.updates import updating
from torch import nn

import agmerge
from agmerge import testing
from agmerge.engine import sharded_steps
from agmerge.engine.sharded_steps import LOOKS, codes_of, opposite_and_same

MODEL = seeded(mlp)
Inner = Callable[[Any], torch.optim.Optimizer]


class Board:
    """Let ranks see each other's tensors, past the library."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._shown: list[list[torch.Tensor]] = [[]] * size

    def show(self, own: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return what every rank shows, copied."""
        self._shown[agmerge.rank()] = [tensor.detach().clone() for tensor in own]
        self._barrier.wait()
        shown = list(self._shown)
        self._barrier.wait()
        return shown


class HandsRound(torch.optim.AdamW):
    """Step all, and take of each parameter what its owner has made of it."""

    def __init__(self, parameters: Any, board: Board, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.board = board

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, all_of_them in enumerate(zip(*self.board.show(parameters), strict=True)):
            parameters[number].detach().copy_(all_of_them[number % self.board.size])
        return result


class Averages(torch.optim.SGD):
    """Average gradients in its step, as some distributed optimizers do, and leave them as they were."""

    def __init__(self, parameters: Any, board: Board, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.board = board

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        own = [p.grad for p in parameters]
        for parameter, gradients in zip(parameters, zip(*self.board.show(own), strict=True), strict=True):
            parameter.grad = sum(gradients) / self.board.size  # type: ignore[assignment]
        result = super().step(closure)
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient
        return result


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
@pytest.mark.parametrize("kind", [HandsRound, Averages])
def test_what_is_handed_round_is_the_same_error_on_all_ranks_in_the_first_step(kind: Any, name: str, size: int) -> None:
    board = Board(size)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = WAYS[name](model, kind(model.parameters(), board, lr=0.01))
        said = refused(rank, model, optimizer)
        with pytest.raises(agmerge.AGMergeError, match="AGM124"):
            optimizer.step()
        return [said]

    (said,) = agreed(on_ranks(size, MODEL, body))
    assert said.startswith("0: parameter '0.weight' moved to the same values on ranks 0 and 1,")
    assert kind.__name__ in said and "sync='gradients'" in said


def test_by_hooks_and_with_a_closure_too() -> None:
    board = Board(2)
    torch.optim.AdamW(MODEL.parameters())  # from now on torch runs hooks around its step too, within HandsRound's

    def body(rank: int, model: nn.Module) -> list[str]:
        found = [stepped(rank, model, HandsRound(model.parameters(), board, lr=0.01))]
        other = copy.deepcopy(MODEL)
        optimizer = updating(other, HandsRound(other.parameters(), board, lr=0.01))

        def closure() -> torch.Tensor:
            loss = loss_of(other, rank, 0)
            loss.backward()
            return loss

        with pytest.raises(ValueError, match="moved to the same values") as error:
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
        for kind in (partial(HandsRound, board=Board(2)), torch.optim.AdamW)
    )
    assert handed == plain


def test_what_does_not_move_yet_is_found_when_it_does() -> None:
    """A schedule that begins at zero, and layers that are frozen and unused at first."""

    board = Board(2)

    def body(rank: int, model: Parts) -> str:
        model.trunk.requires_grad_(False)
        inner = HandsRound(model.parameters(), board, lr=0.0, weight_decay=0.0)
        optimizer = updating(model, inner)
        for step in range(6):
            optimizer.zero_grad()
            model.loss(rank, step, "ab"[: step // 2]).backward()
            inner.param_groups[0]["lr"] = 0.0 if step < 3 else 0.01
            try:
                optimizer.step()
            except ValueError as error:
                return f"{step}: {error}"
        return ""

    said = agreed(on_ranks(2, seeded(Parts), body))
    assert re.match("3: parameter '(a|head).weight'", said)


@pytest.mark.parametrize("kind", [partial(HandsRound, board=Board(2)), torch.optim.AdamW])
def test_of_what_a_rank_holds_nothing_there_is_nothing_to_see(kind: Any) -> None:
    """As of a shard; and what it holds of others is looked at, though all are small."""

    def body(rank: int, model: Any) -> str:
        model[0].empty = nn.Parameter(torch.zeros(0, 7))
        model[0].register_forward_hook(lambda layer, _, result: result + layer.empty.sum())
        return refused(rank, model, updating(model, kind(model.parameters(), lr=0.01)))

    said = agreed(on_ranks(2, seeded(lambda: nn.Sequential(nn.Linear(32, 1), nn.Linear(1, 10))), body))
    assert said.startswith("0: parameter '0.weight' moved") if kind is not torch.optim.AdamW else said == ""


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


@pytest.mark.parametrize("kind", [partial(HandsRound, board=Board(2)), torch.optim.AdamW])
def test_equal_batches_are_no_sign(kind: Any) -> None:
    def body(rank: int, model: nn.Module) -> str:
        return refused(0, model, updating(model, kind(model.parameters(), lr=0.01)))

    assert agreed(on_ranks(2, MODEL, body)) == ""


def test_what_is_skipped_unused_or_joined_is_no_sign() -> None:
    """A rank leaves its first steps out, uses other layers than the other one, and has no batches after three."""

    def body(rank: int, model: Parts) -> int:
        optimizer = updating(model, nonfinite="skip")
        for step in range(3 + 3 * rank):
            optimizer.zero_grad()
            (model.loss(rank, step, "ab"[rank]) * (torch.nan if rank == 0 and step < 2 else 1.0)).backward()
            optimizer.step()
        return int(optimizer.join())

    assert agreed(on_ranks(2, seeded(Parts), body)) == 1


def test_it_costs_a_small_message_in_the_first_step_and_none_later() -> None:
    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer = updating(model)
        sizes = []
        for step in range(4):
            before = len(testing.calls())
            refused(rank, model, optimizer, range(step, step + 1))
            sizes.append(sum(size for _, name, size in testing.calls()[before:] if name.startswith("updates/first")))
        return sizes

    first, *others = agreed(on_ranks(2, MODEL, body))
    assert 0 < first <= 20_000 and others == [0, 0, 0]


def test_ranks_whose_models_differ_are_told_so() -> None:
    def body(rank: int, model: Any) -> None:
        names = [(f"{rank}.{name}", parameter) for name, parameter in model.named_parameters()]
        inner = torch.optim.AdamW(model.parameters())
        optimizer = agmerge.DistributedOptimizer(inner, names, sync="updates", exchange="sparse")
        backward(model, rank, 0)
        optimizer.step()

    with pytest.raises(agmerge.RankMismatchError, match="tensor 0"):
        on_ranks(2, MODEL, body)


# -- codes --------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rate=st.floats(-9.0, 0.0),
    momentum=st.floats(0.0, 10.0),
    decay=st.floats(0.0, 1.0),
    signs=st.booleans(),
)
def test_no_step_of_each_ranks_own_looks_handed_round(
    seed: int, dtype: torch.dtype, rate: float, momentum: float, decay: float, signs: bool
) -> None:
    """With one momentum on all ranks, which may be much larger than gradients, in every precision."""
    source = torch.Generator().manual_seed(seed)
    before = (0.02 * torch.randn(128, generator=source)).to(dtype)
    common = momentum * torch.randn(128, generator=source)
    codes = []
    for _ in range(2):
        gradient = torch.randn(128, generator=source)
        way = common + gradient + decay * before.double()
        after = (before.double() - 10.0**rate * (way.sign() if signs else way)).to(dtype)
        codes.append(codes_of(before, after, gradient.to(dtype)).reshape(1, -1))
    opposite, same = opposite_and_same(*codes)
    assert not (opposite[0] >= sharded_steps.LEAST and opposite[0] == same[0])


def test_codes_of_one_step_are_those_of_the_owner() -> None:
    before, after = torch.zeros(128), torch.randn(128)
    gradient = torch.randn(128)
    one, other = (codes_of(before, after, sign * gradient).reshape(1, -1) for sign in (1, -1))
    opposite, same = opposite_and_same(one, other)
    assert opposite[0] == same[0] > 120
    changed = after * (1 + 2 * torch.finfo(torch.float32).eps)
    opposite, same = opposite_and_same(one, codes_of(before, changed, -gradient).reshape(1, -1))
    assert opposite[0] > 120 and same[0] < 20
    assert digest([after]) != digest([changed])
