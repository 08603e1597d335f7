# SPDX-License-Identifier: Apache-2.0
"""One attempt at a step: what leaves when, and what an attempt that is repeated or comes to nothing leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest
from support.gradient_exchange import SHAPES, SPARSE, connected, drawn, table
from torch import Tensor

from agmerge import testing
from agmerge.exchanges.dense import LARGE
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import Round
from sparsifiers.memories import Decaying, DGCMemory, Memory, Residual


def opened(rank: int, **options: object) -> MergeBuffers:
    """Return merge buffers after one step, with residuals. Slots: in the order of the table."""
    exchange = connected(table(), **options)
    for name, tensor in drawn(rank, 0).items():
        exchange.ready(name, tensor)
    exchange.finish()
    exchange.commit()
    assert exchange.agreed.buffers is not None
    return exchange.agreed.buffers


def attempt(buffers: MergeBuffers, step: int = 1, **options: Any) -> Round:
    return Round(buffers, step, Totals(), **{"dirty": False, **options})


def received(round_: Round, gradient_of: Callable[[str], Tensor | None]) -> tuple[bool, str]:
    """Receive with all tensors late; whether it holds, and the digest of all updates."""
    agreed_on = round_.receive(gradient_of)
    return agreed_on, digest(round_.buffers.flat.update(slot) for slot in round_.buffers.layout.slots)


def kept(buffers: MergeBuffers) -> str:
    return digest(buffers.flat.state().values())


def test_messages_leave_in_plan_order_as_soon_as_they_are_complete() -> None:
    def body(rank: int) -> list[int]:
        buffers, tensors = opened(rank), drawn(rank, 1)
        under_way, begun = attempt(buffers), len(testing.calls())
        sent = []
        for name in ("b", "a", "small", "c"):  # planned: a, b, c, small, one message each
            under_way.add(buffers.slot_of[name], tensors[name])
            sent.append(len(testing.calls()) - begun)
        assert under_way.receive(lambda name: None)
        assert len(testing.calls()) - begun == 4
        return sent

    assert agreed(testing.run(2, body)) == [0, 2, 2, 4]


def test_messages_that_nobody_receives_are_counted_and_let_go() -> None:
    """They refer to all flat memory, which must not outlive the attempt."""

    def body(rank: int) -> tuple[int, int]:
        buffers, tensors = opened(rank), drawn(rank, 1)
        given_up = attempt(buffers)
        for name in ("a", "b"):
            given_up.add(buffers.slot_of[name], tensors[name])
        assert len(given_up.totals.under_way) == 2
        sent = given_up.totals.bytes_sent
        given_up.undo()
        assert not given_up.totals.under_way
        return sent, given_up.totals.bytes_sent

    before, after = agreed(testing.run(2, body))
    assert before == after > 0


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_an_attempt_can_be_made_again_until_residuals_are_committed(options: dict[str, object]) -> None:
    def body(rank: int) -> tuple[str, str]:
        buffers = opened(rank, **options)
        before, tensors = kept(buffers), drawn(rank, 1)
        first, second = (received(attempt(buffers), tensors.get) for _ in range(2))
        assert first == second and first[0] and kept(buffers) == before
        buffers.flat.end_step()
        assert (kept(buffers) == before) == (not options)
        return first[1], before if not options else ""

    agreed(testing.run(2, body))


@pytest.mark.parametrize("options", [{}, SPARSE, {"merging": "single"}], ids=["none", "topk", "one buffer"])
@pytest.mark.parametrize("where", [0, 2])
def test_where_one_rank_is_dirty_no_rank_writes_anything(options: dict[str, object], where: int) -> None:
    """A rank whose tensors have changed asks for none of them; the others find their updates as they were."""

    def body(rank: int) -> tuple[bool, bool, bool]:
        buffers, tensors, asked = opened(rank, **options), drawn(rank, 1), []

        def late(name: str) -> Tensor:
            asked.append(name)
            return tensors[name]

        before = kept(buffers)
        holds = attempt(buffers, dirty=rank == where).receive(late)
        again = attempt(buffers).receive(tensors.get)
        return holds, kept(buffers) == before and bool(asked) == (rank != where), again

    assert agreed(testing.run(3, body)) == (False, True, True)


def test_flags_of_all_ranks_come_together() -> None:
    def body(rank: int) -> tuple[int, bool]:
        buffers = opened(rank)
        under_way = attempt(buffers, flags=(Flag.ACTIVE, Flag.JOINED, 0)[rank])
        return under_way.flags_of_all, under_way.receive(drawn(rank, 1).get), under_way.flags_of_all

    assert agreed(testing.run(3, body)) == (0, True, Flag.ACTIVE | Flag.JOINED)


def test_a_tensor_is_used_where_any_rank_has_it_and_has_an_update_where_something_is_left_over() -> None:
    def body(rank: int) -> tuple[list[bool], list[bool]]:
        buffers = opened(rank, **SPARSE)
        under_way = attempt(buffers)
        under_way.receive(lambda name: drawn(rank, 1)[name] if (rank, name) == (1, "c") else None)
        used = [under_way.used[buffers.slot_of[name].index] for name in SHAPES]
        return used, [under_way.has_update(buffers.slot_of[name]) for name in SHAPES]

    assert agreed(testing.run(2, body)) == ([False, False, True, False], [True] * 4)


def test_what_is_not_finite_is_known_to_all_and_left_out_of_residuals() -> None:
    def body(rank: int) -> tuple[bool, bool]:
        buffers, tensors = opened(rank, **SPARSE), drawn(rank, 1)
        before = kept(buffers)
        tensors["b"][5] = torch.nan if rank == 1 else 0.0
        under_way = attempt(buffers)
        assert under_way.receive(tensors.get) and under_way.guard.parameters_found() == ["b"] * (rank == 1)
        under_way.undo()
        return under_way.nonfinite, kept(buffers) == before

    assert agreed(testing.run(2, body)) == (True, True)


# -- a part of the merge buffers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
@pytest.mark.parametrize("due", [(1, 3), (0,), (2,), (0, 1, 2, 3)], ids=str)
def test_only_what_is_due_is_asked_for_sent_and_written(options: dict[str, object], due: tuple[int, ...]) -> None:
    """One merge buffer a tensor; of those that are due updates are those of a whole round, to the bit."""

    def body(rank: int) -> tuple[list[str], int]:
        buffers, twin, tensors = opened(rank, **options), opened(rank, **options), drawn(rank, 1)
        asked: list[str] = []

        def late(name: str) -> Tensor:
            asked.append(name)
            return tensors[name]

        begun = len(testing.calls())
        under_way = attempt(buffers, due=due)
        assert under_way.receive(late) and under_way.is_complete is False
        sent = len(testing.calls()) - begun
        attempt(twin).receive(tensors.get)
        names = [slot.name for slot in under_way.slots()]
        assert names == asked == [slot.name for slot in buffers.layout.slots if slot.index in due]
        others = [slot.name for slot in under_way.slots(due=False)]
        assert {*names, *others} == set(SHAPES) and not {*names} & {*others}
        for name in names:
            slot = buffers.slot_of[name]
            assert under_way.used[slot.index]
            assert digest([buffers.flat.update(slot)]) == digest([twin.flat.update(slot)])
        assert not any(under_way.used[buffers.slot_of[name].index] for name in others)
        return asked, sent

    _, sent = agreed(testing.run(2, body))
    assert sent == len(due)


@pytest.mark.parametrize("memory", [Residual(), Decaying(0.9), DGCMemory()], ids=lambda memory: memory.name)
def test_what_is_kept_of_what_is_not_due_stays_as_it_was(memory: Memory) -> None:
    """Also by a memory that changes it in every step in which there is no gradient."""

    def body(rank: int) -> None:
        buffers = opened(rank, memory=memory, **SPARSE)
        before = {key: tensor.clone() for key, tensor in buffers.flat.state().items()}
        under_way = attempt(buffers, due=(1,))
        under_way.receive(drawn(rank, 1).get)
        buffers.flat.end_step(under_way.slots(due=False))
        (moved,) = (slot.name for slot in under_way.slots())
        assert {name for (_, name) in before} == set(SHAPES)
        for (kind, name), tensor in buffers.flat.state().items():
            assert torch.equal(before[kind, name], tensor) == (name != moved), (kind, name)

    testing.run(2, body)


def test_messages_of_a_part_leave_in_plan_order_past_those_that_are_not_due() -> None:
    def body(rank: int) -> list[int]:
        buffers, tensors = opened(rank), drawn(rank, 1)
        under_way, begun, sent = attempt(buffers, due=(1, 3)), len(testing.calls()), []
        for name in ("small", "b"):  # planned: a, b, c, small
            under_way.add(buffers.slot_of[name], tensors[name])
            sent.append(len(testing.calls()) - begun)
        assert under_way.receive(lambda name: None) and len(testing.calls()) - begun == 2
        return sent

    assert agreed(testing.run(2, body)) == [0, 2]


def test_where_nothing_is_due_nobody_says_anything() -> None:
    def body(rank: int) -> None:
        buffers, begun = opened(rank, **SPARSE), len(testing.calls())
        before, under_way = kept(buffers), attempt(buffers, due=(), flags=Flag.ACTIVE)
        assert under_way.receive(lambda name: pytest.fail(name)) and under_way.flags_of_all == 0
        buffers.flat.end_step(under_way.slots(due=False))
        assert kept(buffers) == before and len(testing.calls()) == begun

    testing.run(2, body)


@pytest.mark.parametrize("due", [(1,), (0, 3)], ids=str)
def test_flags_and_what_is_not_finite_travel_with_a_part_too(due: tuple[int, ...]) -> None:
    """In its first message: a rank that is dirty, or has found something before it began, is heard by all."""

    def body(rank: int) -> tuple[bool, int, bool, bool]:
        buffers, tensors = opened(rank, **SPARSE), drawn(rank, 1)
        before = kept(buffers)
        dirty = attempt(buffers, due=due, dirty=rank == 1).receive(tensors.get)
        told = attempt(buffers, due=due, flags=Flag.JOINED if rank else Flag.ACTIVE)
        told.guard.report(["weight"] if rank else [])
        told.receive(tensors.get)
        assert kept(buffers) == before
        return dirty, told.flags_of_all & (Flag.JOINED | Flag.ACTIVE), told.nonfinite, told.is_complete

    assert agreed(testing.run(2, body)) == (False, Flag.JOINED | Flag.ACTIVE, True, False)


def test_all_of_a_round_can_be_sent_before_any_of_it_is_received() -> None:
    """What ``start`` does: tensors may change once they were taken."""

    def body(rank: int) -> None:
        buffers, twin, tensors = opened(rank), opened(rank), drawn(rank, 1)
        begun, under_way = len(testing.calls()), attempt(buffers)
        under_way.add_all(tensors.get)
        assert len(testing.calls()) - begun == 4
        _, expected = received(attempt(twin), drawn(rank, 1).get)
        for tensor in tensors.values():
            tensor.fill_(77.0)
        assert received(under_way, lambda name: pytest.fail(name)) == (True, expected)

    testing.run(2, body)


def test_a_dirty_rank_sends_nothing_of_its_own_and_keeps_what_lies_where_sums_are_written() -> None:
    """In place, which is how what is large is summed: its gradients may be views of the last updates."""

    def body(rank: int) -> bool:
        shapes = {"large": (LARGE,)}
        exchange = connected(table(shapes))
        exchange.ready("large", drawn(rank, 0, shapes)["large"])
        exchange.finish()
        exchange.commit()
        buffers = exchange.agreed.buffers
        assert buffers is not None
        update = buffers.flat.update(buffers.slot_of["large"])
        update.fill_(rank + 1.0)
        holds = attempt(buffers, dirty=rank == 0).receive(lambda name: torch.zeros(LARGE))
        if rank == 0:
            assert torch.equal(update, torch.ones(LARGE))
        return holds

    assert agreed(testing.run(2, body)) is False
