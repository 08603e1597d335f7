# SPDX-License-Identifier: Apache-2.0
"""An exception that a script survives, in ``backward()`` or between ``backward()`` and ``step()``: it goes on."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, same_bits, seeded, sgd, train, wrap
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)
SMALL = merging.get("threshold", bytes=4096)
COMPRESSIONS = ["none", "topk", "dgc", "eden", "powersgd", "fp16"]


class OutOfMemory(RuntimeError):
    """What a backward pass may raise."""


class Faulty(torch.autograd.Function):
    """Passes a tensor on; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise OutOfMemory("out of memory")


def broken_backward(model: nn.Module, rank: int, step: int) -> None:
    """A backward pass that raises when the last two layers have their gradients."""
    handle = model[2].register_forward_pre_hook(lambda module, args: (Faulty.apply(args[0]),))
    try:
        loss_of(model, rank, step).backward()
    finally:
        handle.remove()


def wrapped(model: nn.Module, compression: str, **options: Any) -> agmerge.DistributedOptimizer:
    return wrap(model, compression=compression, merging=SMALL, timeout=20.0, **options)


@pytest.mark.parametrize("where", ["in backward", "before step"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("start", [0, 3], ids=["first step", "later step"])
def test_alone_the_next_step_is_as_if_nothing_had_been(compression: str, where: str, start: int) -> None:
    def body(rank: int, model: nn.Module, stray: bool) -> list[str]:
        optimizer = wrapped(model, compression)
        train(model, optimizer, rank, range(start))
        if stray:
            with pytest.raises(OutOfMemory):
                optimizer.zero_grad()
                if where == "in backward":
                    broken_backward(model, rank, 77)
                loss_of(model, rank, 77).backward()
                raise OutOfMemory
        return train(model, optimizer, rank, range(start, start + 3))

    assert on_ranks(1, MODEL, lambda r, m: body(r, m, True)) == on_ranks(1, MODEL, lambda r, m: body(r, m, False))


def test_alone_zero_grad_between_backward_and_step_drops_gradients_as_in_torch() -> None:
    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        plain, optimizer = sgd(twin), wrapped(model, "none")
        for its_model, its_optimizer in ((twin, plain), (model, optimizer)):
            for step in range(4):
                loss_of(its_model, rank, step).backward()
                if step == 2:
                    its_optimizer.zero_grad()
                    loss_of(its_model, rank, 9).backward()
                its_optimizer.step()
                its_optimizer.zero_grad()
        assert digest(model) == digest(twin)

    on_ranks(1, MODEL, body)


def test_alone_an_interrupt_inside_of_the_exchange_does_not_lock_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a notebook falls wherever it likes: here into the hook of a parameter."""

    def body(rank: int, model: nn.Module, stray: bool) -> list[str]:
        optimizer = wrapped(model, "topk")
        train(model, optimizer, rank, range(3))
        if stray:
            optimizer.zero_grad()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("agmerge.step.round.Round._send", interrupted)
                loss_of(model, rank, 3).backward()
        return train(model, optimizer, rank, range(3, 6))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    assert on_ranks(1, MODEL, lambda r, m: body(r, m, True)) == on_ranks(1, MODEL, lambda r, m: body(r, m, False))


def test_passes_of_a_step_that_was_dropped_are_not_counted() -> None:
    def body(rank: int, model: nn.Module) -> int:
        optimizer = wrap(model, backward_passes_per_step=2)
        train(model, optimizer, rank, range(1))
        loss_of(model, rank, 1).backward()
        optimizer.zero_grad()  # an exception came, and the script begins the step anew
        for step in (2, 3):
            loss_of(model, rank, step).backward()
        optimizer.step()
        return optimizer.stats()["steps"]

    assert on_ranks(2, MODEL, body) == [2, 2]


WAYS = [*((name, "sparse") for name in COMPRESSIONS), ("none", "two-level"), ("topk", "two-level")]


@pytest.mark.parametrize("compression, exchange", WAYS)
def test_a_backward_pass_that_breaks_on_one_rank_is_given_up_on_all(compression: str, exchange: str) -> None:
    """Each rank's script has the same ``try``: one goes on with zero_grad(), the other gets an error and does so."""
    options = {} if exchange == "sparse" else {"exchange": exchange}

    def body(rank: int, model: nn.Module, stray: bool) -> tuple[list[str], str]:
        optimizer, told = wrapped(model, compression, **options), ""
        train(model, optimizer, rank, range(3))
        kept = residuals(optimizer)
        if stray:
            try:
                optimizer.zero_grad()
                (broken_backward if rank == 1 else lambda *_: loss_of(*_).backward())(model, rank, 3)
                optimizer.step()
            except OutOfMemory:
                assert rank == 1
            except agmerge.AGMergeError as error:
                told = str(error)
            optimizer.zero_grad()
            now = residuals(optimizer)
            assert all(same_bits(now[name], kept[name]) for name in kept)
        return train(model, optimizer, rank, range(4, 7)), told

    got, twin = (on_ranks(2, MODEL, lambda r, m, stray=stray: body(r, m, stray)) for stray in (True, False))
    assert [digests for digests, _ in got] == [digests for digests, _ in twin]
    assert got[0][1].startswith(
        "AGM119: Step 3 is abandoned on all ranks: rank 1 called zero_grad() in the middle of a"
    )
    assert "gradients of '0.weight', '0.bias'" in got[0][1] and got[1][1] == ""
    assert "Call zero_grad() to continue" in got[0][1]


def test_the_error_says_what_the_other_rank_has_survived() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrapped(model, "topk")
        train(model, optimizer, rank, range(2))
        try:
            optimizer.zero_grad()
            (broken_backward if rank == 1 else lambda *_: loss_of(*_).backward())(model, rank, 3)
            optimizer.step()
        except (OutOfMemory, agmerge.AGMergeError) as error:
            optimizer.zero_grad()
            return str(error)
        return ""

    assert "were computed (OutOfMemory: out of memory)" in on_ranks(2, MODEL, body)[0]


def test_with_nonfinite_skip_all_skip_it() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrapped(model, "topk", nonfinite="skip")
        train(model, optimizer, rank, range(3))
        before = digest(model)
        optimizer.zero_grad()
        if rank == 1:
            with pytest.raises(OutOfMemory):
                broken_backward(model, rank, 3)
            optimizer.zero_grad()
        else:
            loss_of(model, rank, 3).backward()
            optimizer.step()
        assert digest(model) == before
        return train(model, optimizer, rank, range(4, 7))

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("compression", [*COMPRESSIONS, "dear"])
@pytest.mark.parametrize("broken", [{1}, {0, 1}], ids=["one rank", "all ranks"])
def test_a_first_backward_pass_that_breaks_is_given_up_on_all_ranks(compression: str, broken: set[int]) -> None:
    """Ranks have not agreed on anything yet; all the same none is a batch ahead of the others afterwards."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], int]:
        if compression == "dear":
            more: dict[str, Any] = {"compression": "none", "merging": "dear", "model": model, "timeout": 20.0}
            optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **more)
        else:
            optimizer = wrapped(model, compression)
        told = ""
        try:
            optimizer.zero_grad()
            (broken_backward if rank in broken else lambda *_: loss_of(*_).backward())(model, rank, 0)
            optimizer.step()
        except OutOfMemory:
            assert rank in broken
        except agmerge.AGMergeError as error:
            told = str(error)
        assert ("abandoned on all ranks: rank 1 called zero_grad()" in told) is (rank not in broken)
        seen = train(model, optimizer, rank, range(1, 4))
        return ([] if compression == "dear" else seen), optimizer.stats()["steps"]  # its updates come a step later

    assert agreed(on_ranks(2, MODEL, body))[1] == 3


def test_a_survived_exception_behind_a_whole_backward_pass_is_an_error_that_says_what_to_call() -> None:
    """All of this rank's gradients have left, and the other rank steps with them: so must this one."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrapped(model, "topk")
        train(model, optimizer, rank, range(3))
        optimizer.zero_grad()
        loss_of(model, rank, 3).backward()
        if rank == 1:
            with pytest.raises(AssertionError, match="If your script continues after an exception"):
                optimizer.zero_grad()
        optimizer.step()
        return train(model, optimizer, rank, range(4, 6))

    agreed(on_ranks(2, MODEL, body))


def test_reset_on_every_rank_gives_a_whole_step_up() -> None:
    def body(rank: int, model: nn.Module, stray: bool) -> list[str]:
        optimizer = wrapped(model, "topk")
        train(model, optimizer, rank, range(3))
        if stray:
            optimizer.zero_grad()
            loss_of(model, rank, 3).backward()
        optimizer.reset()
        return train(model, optimizer, rank, range(4, 6))

    got = agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, True)))
    assert got == agreed(on_ranks(2, MODEL, lambda r, m: body(r, m, False)))


def test_after_a_broken_exchange_the_cause_is_told_and_what_to_call() -> None:
    """Not the AssertionError of a race, for which there was none."""
    broken, both = threading.Event(), threading.Barrier(2)

    def inject(call: testing.Call) -> None:
        if broken.is_set():
            raise ConnectionError("the cable is out")

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrapped(model, "topk")
        train(model, optimizer, rank, range(3))
        both.wait()
        broken.set()
        optimizer.zero_grad()
        with pytest.raises(ConnectionError):
            loss_of(model, rank, 3).backward()
        with pytest.raises(agmerge.AGMergeError, match="error ended this exchange: the cable is out") as told:
            optimizer.zero_grad()
        assert "If every rank is still running, call" in str(told.value)
        both.wait()
        broken.clear()
        both.wait()
        optimizer.reset()
        return train(model, optimizer, rank, range(4, 6))

    agreed(on_ranks(2, MODEL, body, inject=inject))


def test_dear_alone_and_among_two_goes_on() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        options: dict[str, Any] = {"merging": "dear", "model": model, "timeout": 20.0}
        optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), compression="none", **options)
        seen = []
        for step in range(6):
            try:
                optimizer.zero_grad()
                (broken_backward if step == 3 else lambda *_: loss_of(*_).backward())(model, rank, step)
                optimizer.step()
            except OutOfMemory:
                assert step == 3
        optimizer.flush()
        seen.append(digest(model))
        return seen

    for size in (1, 2):
        agreed(on_ranks(size, MODEL, body))
