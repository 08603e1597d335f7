# SPDX-License-Identifier: Apache-2.0
"""What an exchange keeps: through discarded steps, from one agreement to the next, and elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import agreed, digest, same_bits
from support.gradient_exchange import SHAPES, SPARSE, Table, connected, copied, drawn, stepped, table
from torch import Tensor

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.step.agreed_state import CarriedState


@dataclass
class Change:
    """What one rank saw of a step after ``change``, in which it had no tensors of its own."""

    before: dict[str, Tensor]  # residuals
    after: dict[str, Tensor]
    anew: bool  # ranks have agreed anew
    names: list[str]  # of what takes part

    def sent_of_residual(self, name: str) -> bool:
        """Tell whether a top-k of the residual has left it: elements are kept or sent as they are."""
        before, sent = self.before[name], self.before[name] - self.after[name]
        whole = torch.equal(sent[sent != 0], before[sent != 0])
        return whole and int(sent.count_nonzero()) == sparsifiers.budget(0.05, before.numel())


def changing(change: Callable[[int, Table], None]) -> Callable[[int], Change]:
    """Return what a rank does: three steps, ``change(rank, its table)``, and a step of the residuals alone."""

    def body(rank: int) -> Change:
        there = table()
        exchange = connected(there, **SPARSE)
        for step in range(3):
            stepped(exchange, drawn(rank, step))
        before, buffers = copied(exchange.agreed.current.residuals()), exchange.agreed.buffers
        change(rank, there)
        stepped(exchange, dict.fromkeys(there.tensors))
        assert exchange.agreed.buffers is not None
        names = [slot.name for slot in exchange.agreed.buffers.layout.slots]
        return Change(
            before, copied(exchange.agreed.current.residuals()), exchange.agreed.buffers is not buffers, names
        )

    return body


@pytest.mark.parametrize("frozen", [True, False])
def test_after_a_change_of_the_table_all_agree_anew_and_residuals_move_by_name(frozen: bool) -> None:
    def change(rank: int, there: Table) -> None:
        kept = {name: tensor for name, tensor in reversed(there.tensors.items()) if name != "b"}
        there.tensors, there.frozen = {"new": torch.zeros(40, 40), **kept}, {"b"} if frozen else set()

    seen = testing.run(2, changing(change))
    assert set(agreed([rank.names for rank in seen])) == {"new", "a", "c", "small"}
    for rank in seen:
        assert ("b" in rank.after) is frozen  # the state of what is in no group any more is dropped
        assert not frozen or same_bits(rank.after["b"], rank.before["b"])
        assert rank.anew and not rank.after["new"].any()
        assert all(rank.sent_of_residual(name) for name in ("a", "c", "small"))


@pytest.mark.parametrize("where", [None, 0, 2])
def test_a_change_that_one_rank_sees_makes_all_of_them_agree_anew(where: int | None) -> None:
    """Another tensor of the same name and shape: on the other ranks everything is as it was."""

    def change(rank: int, there: Table) -> None:
        if rank == where:
            there.tensors["a"] = there.tensors["a"].clone()

    for seen in testing.run(3, changing(change)):
        assert seen.anew == (where is not None)
        assert all(seen.sent_of_residual(name) for name in SHAPES)


def test_a_change_that_only_one_rank_makes_is_the_same_error_on_all() -> None:
    def change(rank: int, there: Table) -> None:
        if rank == 1:
            del there.tensors["b"]

    errors = testing.run(3, changing(change), return_errors=True)
    assert {type(error) for error in errors} == {agmerge.RankMismatchError}
    assert "b float32[1030]" in agreed([str(error) for error in errors])


@pytest.mark.parametrize("others", [0, 2])
def test_what_is_kept_can_be_taken_elsewhere(others: int) -> None:
    """By an exchange in another group, which may have made other steps: those to come are the same to the bit."""

    def through(rank: int) -> tuple[Any, list[str]]:
        exchange = connected(table(), compression="adtopk", density=0.05, merging="threshold")
        for step in range(3):
            stepped(exchange, drawn(rank, step))
        kept = (
            exchange.agreed.current.copied().tensors,
            exchange.agreed.steps,
            exchange.agreed.current.plan,
            exchange.agreed.config.compression.compressor.state_dict(),
        )
        return kept, [digest(stepped(exchange, drawn(rank, step)).values()) for step in range(3, 6)]

    uninterrupted = testing.run(2, through)

    def again(rank: int) -> list[str]:
        exchange = connected(table(), compression="adtopk", density=0.05, merging="threshold")
        for step in range(others):
            stepped(exchange, drawn(rank, 70 + step))
        state, steps, plan, remembered = uninterrupted[rank][0]
        exchange.agreed.config.compression.compressor.load_state_dict(remembered)
        exchange.restore(CarriedState(state, plan), steps, None)
        assert exchange.agreed.steps == 3 and exchange.agreed.current.plan == plan
        assert {key: digest([tensor]) for key, tensor in exchange.agreed.current.tensors.items()} == {
            key: digest([tensor]) for key, tensor in state.items()
        }
        return [digest(stepped(exchange, drawn(rank, step)).values()) for step in range(3, 6)]

    assert testing.run(2, again) == [digests for _, digests in uninterrupted]
