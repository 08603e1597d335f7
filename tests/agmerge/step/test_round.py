"""One attempt at a step: what leaves when, and what an attempt that is repeated or comes to nothing leaves behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gradient_exchange_harness import SHAPES, SPARSE, connected, drawn, table
from support import agreed, digest
from torch import Tensor

from agmerge import testing
from agmerge.exchanges.message.format import Flag
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import Round


def opened(rank: int, **options: object) -> MergeBuffers:
    """Return merge buffers after one step, with residuals. Slots: in the order of the table."""
    exchange = connected(table(), **options)
    for name, tensor in drawn(rank, 0).items():
        exchange.ready(name, tensor)
    exchange.finish()
    exchange.commit()
    assert exchange.buffers is not None
    return exchange.buffers


def attempt(buffers: MergeBuffers, step: int = 1, *, dirty: bool = False, flags: int = 0) -> Round:
    return Round(buffers, step, Totals(), dirty=dirty, flags=flags)


def received(round_: Round, gradient_of: Callable[[str], Tensor | None]) -> tuple[bool, str]:
    """Receive with all tensors late; whether it holds, and the digest of all updates."""
    agreed_on = round_.receive(gradient_of)
    return agreed_on, digest(round_.buffers.update(slot) for slot in round_.buffers.layout.slots)


def kept(buffers: MergeBuffers) -> str:
    return digest(buffers.state().values())


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


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_an_attempt_can_be_made_again_until_residuals_are_committed(options: dict[str, object]) -> None:
    def body(rank: int) -> tuple[str, str]:
        buffers = opened(rank, **options)
        before, tensors = kept(buffers), drawn(rank, 1)
        first, second = (received(attempt(buffers), tensors.get) for _ in range(2))
        assert first == second and first[0] and kept(buffers) == before
        buffers.commit_residuals()
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
