# SPDX-License-Identifier: Apache-2.0
"""A rank that fails and a message that is damaged: nobody waits, everybody is told, nothing is stepped or lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import WIDTH, agreed, digest, loss_of, mlp, on_ranks, residuals, same_bits, seeded, train, wrap
from torch import Tensor, nn

import agmerge
from agmerge import testing
from agmerge.exchanges.message.format import FIXED, MAGIC, OF_SECTION

MODEL = seeded(mlp)


class Trap(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise FloatingPointError("in the middle of backward")


def trapped(model: nn.Sequential) -> Tensor:
    """A loss whose backward gets as far as the last layer."""
    return model[4](Trap.apply(model[:4](torch.ones(4, WIDTH)))).square().mean()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_rank_that_raises_in_backward_is_named_by_the_others(first: bool, size: int) -> None:
    failing, start = size - 1, 0 if first else 2
    left: list[Any] = [None] * size

    def body(rank: int, model: nn.Sequential) -> None:
        optimizer = wrap(model, merging="layerwise")
        train(model, optimizer, rank, range(start))
        left[rank] = (model, optimizer, digest(model), residuals(optimizer))
        optimizer.zero_grad()
        if rank == failing:
            trapped(model).backward()
        loss_of(model, rank, start).backward()
        optimizer.step()

    found = on_ranks(size, MODEL, body, return_errors=True)
    assert isinstance(found[failing], FloatingPointError)
    for error in found[:failing]:
        assert isinstance(error, agmerge.PeerLost)
        assert f"rank {failing} raised FloatingPointError: in the middle of backward" in str(error)
    for model, optimizer, bits, kept in left:
        assert digest(model) == bits
        now = residuals(optimizer)
        assert all(same_bits(value, kept.get(name, torch.zeros_like(value))) for name, value in now.items())


@pytest.mark.parametrize("when", ["handshake", "agreement", "gradients"])
def test_a_rank_that_fails_to_send_is_named_by_the_others(when: str) -> None:
    start = {"handshake": "DistributedOptimizer", "agreement": "membership", "gradients": "buffer"}[when]

    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.name.startswith(start):
            raise ConnectionError("cable")

    def body(rank: int, model: nn.Module) -> None:
        train(model, wrap(model), rank, range(3))

    found = on_ranks(3, MODEL, body, inject=inject, return_errors=True)
    assert isinstance(found[1], ConnectionError)
    for error in (found[0], found[2]):
        assert isinstance(error, agmerge.PeerLost) and "rank 1 raised ConnectionError: cable" in str(error)


def test_a_rank_that_has_already_finished_is_named_by_the_others() -> None:
    def body(rank: int, model: nn.Module) -> None:
        train(model, wrap(model), rank, range(3 if rank else 2))

    found = on_ranks(3, MODEL, body, return_errors=True)
    assert found[0] is None
    for error in found[1:]:
        assert isinstance(error, agmerge.PeerLost) and "rank 0 has already returned" in str(error)


def words(message: Tensor) -> Tensor:
    return message[:64].view(torch.int32)


CHANGED = "the messages of ranks [1] were damaged"


DAMAGE: dict[str, tuple[str, Callable[[Tensor], None], str]] = {
    "magic": ("topk", lambda m: words(m).__setitem__(0, MAGIC ^ 1), "AGM503"),
    "step": ("topk", lambda m: words(m)[1].add_(7), CHANGED),
    "plan": ("topk", lambda m: words(m)[2].add_(-7), CHANGED),
    "buffer": ("topk", lambda m: words(m)[3].add_(7), CHANGED),
    "count": ("topk", lambda m: words(m)[len(FIXED) + OF_SECTION.index("count")].add_(1_000_000), CHANGED),
    "one bit of a value": ("topk", lambda m: m[-1:].bitwise_xor_(1), CHANGED),
    "whole": ("topk", lambda m: m.fill_(255), "the messages of ranks [1] are not"),
    "a dense one, shifted": ("none", lambda m: m.copy_(m.roll(1)), "AGM502"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_message_is_the_same_error_everywhere_and_changes_nothing(what: str) -> None:
    compression, damage, text = DAMAGE[what]
    seen: list[Any] = [None] * 3

    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.name == "buffer 0" and seen[1]:
            damage(call.tensor)

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression=compression)
        train(model, optimizer, rank, range(2))
        seen[rank] = (model, optimizer, digest(model), residuals(optimizer))
        train(model, optimizer, rank, range(2, 3))

    found = on_ranks(3, MODEL, body, inject=inject, return_errors=True)
    assert all(type(error) is agmerge.MessageError for error in found), found
    assert text in agreed([str(error) for error in found])
    assert str(found[0]).startswith("AGM50")
    for model, optimizer, bits, kept in seen:
        assert digest(model) == bits
        assert all(same_bits(value, kept[name]) for name, value in residuals(optimizer).items())


def test_after_such_an_error_further_use_says_why_it_cannot_be() -> None:
    armed = [False]

    def inject(call: testing.Call) -> None:
        if armed[0] and call.rank == 1 and call.name == "buffer 0":
            call.tensor.fill_(255)

    def body(rank: int, model: nn.Module) -> dict[str, Tensor]:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        agmerge.barrier()
        armed[0] = True
        with pytest.raises(agmerge.MessageError):
            train(model, optimizer, rank, range(2, 3))
        for use in (
            optimizer.step,
            optimizer.synchronize,
            lambda: optimizer.step(lambda: loss_of(model, rank, 3).backward()),
            lambda: loss_of(model, rank, 3).backward(),
        ):
            with pytest.raises(agmerge.AGMergeError, match="AGM124: .*AGM503: buffer 0: ") as raised:
                use()
            assert isinstance(raised.value.__cause__, agmerge.MessageError)
        with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError):
            optimizer.step()
        return residuals(optimizer)  # a checkpoint can still be written

    assert all(kept for kept in on_ranks(2, MODEL, body, inject=inject))


def test_a_new_wrapper_goes_on_where_a_broken_one_stopped() -> None:
    armed = [False]

    def inject(call: testing.Call) -> None:
        if armed[0] and call.rank == 0 and call.name == "buffer 0":
            call.tensor.fill_(255)

    def body(rank: int, model: nn.Module, fault: bool) -> list[str]:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        if fault:
            agmerge.barrier()
            armed[0] = True
            with pytest.raises(agmerge.MessageError):
                train(model, optimizer, rank, range(2, 3))
            agmerge.barrier()
            armed[0] = False
        kept, inner = optimizer.state_dict(), optimizer.optimizer
        optimizer.close()
        inner.zero_grad()
        optimizer = wrap(model, inner)
        optimizer.load_state_dict(kept)
        return train(model, optimizer, rank, range(2, 5))

    with_it, without = (
        agreed(on_ranks(2, MODEL, lambda r, m, f=fault: body(r, m, f), inject=inject)) for fault in (True, False)
    )
    assert with_it == without


def test_a_rank_that_skips_a_step_is_found_out() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        loss_of(model, rank, 2).backward()
        optimizer.synchronize()
        if rank != 1:  # rank 1 has an exception here, catches it, and goes on with the next batch
            with optimizer.skip_synchronize():
                optimizer.step()
        train(model, optimizer, rank, range(3, 5))

    found = on_ranks(3, MODEL, body, return_errors=True)
    assert all(isinstance(error, agmerge.MessageError) for error in found)
    assert "ranks disagree on step: 3 on ranks 0, 2; 2 on rank 1" in agreed([str(error) for error in found])
