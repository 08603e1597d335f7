# SPDX-License-Identifier: Apache-2.0
"""A :class:`GradientExchange` whose messages are under way, are of a part of the merge buffers, or have everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, same_bits
from support.gradient_exchange import SHAPES, SPARSE, connected, copied, drawn, stepped, table, updates_of
from torch import Tensor

from agmerge import testing
from agmerge.tensors.arena import Difference


@pytest.mark.parametrize("options", [{}, SPARSE, {**SPARSE, "exchange": "oktopk"}], ids=["none", "topk", "oktopk"])
def test_what_was_started_is_what_is_received(options: dict[str, Any]) -> None:
    """Whatever becomes of the tensors meanwhile; they are asked for once. But in the first step nothing leaves."""

    def body(rank: int) -> list[int]:
        exchange, twin, sent = connected(table(), **options), connected(table(), **options), []
        for step in range(4):
            tensors, asked = drawn(rank, step), []
            begun = len(testing.calls())
            exchange.start(lambda name, tensors=tensors, asked=asked: asked.append(name) or tensors[name])
            sent.append(len(testing.calls()) - begun)
            assert exchange.under_way == (step > 0)
            if step:
                assert sorted(asked) == sorted(SHAPES)
                for tensor in tensors.values():
                    tensor.fill_(torch.nan)
            updates = updates_of(exchange.finish(tensors.get))
            exchange.commit()
            assert not exchange.under_way
            expected = stepped(twin, drawn(rank, step))
            assert all(same_bits(updates[name], expected[name]) for name in SHAPES), step
            ours, theirs = exchange.agreed.current.residuals(), twin.agreed.current.residuals()
            assert ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
        return sent

    sent = agreed(testing.run(2, body))
    assert sent[0] == 0 and sent[1] == sent[2] == sent[3] > 0


def test_what_was_started_can_be_discarded_on_all_ranks() -> None:
    def body(rank: int) -> None:
        exchange, twin = connected(table(), **SPARSE), connected(table(), **SPARSE)
        stepped(exchange, drawn(rank, 0))
        stepped(twin, drawn(rank, 0))
        exchange.start(drawn(rank, 66).get)
        exchange.finish()
        exchange.discard()
        assert not exchange.under_way and exchange.agreed.steps == 1
        updates, expected = stepped(exchange, drawn(rank, 1)), stepped(twin, drawn(rank, 1))
        assert digest(updates.values()) == digest(expected.values())

    testing.run(2, body)


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_parts_that_take_turns_are_each_as_if_alone(options: dict[str, Any]) -> None:
    """Two halves in turn: each tensor's updates and residuals are those of a whole exchange at every second step."""

    def body(rank: int) -> None:
        exchange, twin = connected(table(), **options), connected(table(), **options)
        assert len(stepped(exchange, drawn(rank, 0))) == len(stepped(twin, drawn(rank, 0))) == 4
        for step in range(1, 4):
            tensors, seen = drawn(rank, step), {}
            for turn in (0, 1):
                combined = exchange.finish(tensors.get, due=lambda count, turn=turn: range(turn, count, 2))
                assert len(combined.updates) == 2
                seen |= updates_of(combined)
                exchange.commit()
            expected = stepped(twin, tensors)
            assert digest(seen[name] for name in SHAPES) == digest(expected[name] for name in SHAPES)
            ours, theirs = exchange.agreed.current.residuals(), twin.agreed.current.residuals()
            assert ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
        assert exchange.agreed.steps == 7 and twin.agreed.steps == 4

    testing.run(2, body)


def test_a_part_is_repeated_after_a_new_agreement() -> None:
    """With a table that changed: what is due is asked for again, of the merge buffers that there are then."""

    def body(rank: int) -> list[str]:
        tensors = table()
        exchange = connected(tensors, **SPARSE)
        stepped(exchange, drawn(rank, 0))
        before = copied(exchange.agreed.current.residuals())
        tensors.tensors["new"] = torch.zeros(1100)
        given, asked = {**drawn(rank, 1), "new": torch.full((1100,), rank + 1.0)}, []
        combined = exchange.finish(
            lambda name: asked.append(name) or given[name], due=lambda count: range(count - 2, count)
        )
        exchange.commit()
        names = list(combined.updates)
        assert "new" in names and asked[-2:] == names and len(names) == 2
        after = exchange.agreed.current.residuals()
        assert all(same_bits(before[name], after[name]) for name in before if name not in names)
        return names

    agreed(testing.run(2, body))


@pytest.mark.parametrize("options", [SPARSE, {"compression": "fp16"}], ids=["topk", "fp16"])
def test_everything_is_sent_as_it_is_where_it_is_to_be_whole(options: dict[str, Any]) -> None:
    """Tensors and residuals, which are zero then; afterwards rounds are as ever, with the plan that there was."""

    def body(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        exchange = connected(table(), **options)
        for step in range(3):
            stepped(exchange, drawn(rank, step))
        plan, there = (
            exchange.agreed.current.plan,
            {n: r + drawn(rank, 3)[n] for n, r in copied(exchange.agreed.current.residuals()).items()},
        )
        with exchange.sending_whole():
            whole = stepped(exchange, drawn(rank, 3))
        assert not any(residual.any() for residual in exchange.agreed.current.residuals().values())
        assert exchange.agreed.current.plan == plan and exchange.agreed.buffers.plan == plan
        stepped(exchange, drawn(rank, 4))
        assert any(residual.any() for residual in exchange.agreed.current.residuals().values())
        return there, {name: whole[name] for name in there}

    results = testing.run(2, body)
    for name in results[0][1]:
        mean = sum(there[name] for there, _ in results) / 2
        for _, whole in results:
            torch.testing.assert_close(whole[name], mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, SPARSE], ids=["none", "topk"])
def test_a_difference_is_exchanged_as_the_tensor_that_it_is(options: dict[str, object]) -> None:
    """To the bit, whether there is a residual or not, and asked for again where ranks have to agree anew."""

    def body(rank: int) -> None:
        exchange, twin = connected(table(), **options), connected(table(), **options)
        for step in range(3):
            ends, begins = drawn(rank, step), drawn(rank, step + 100)
            ways = {name: Difference(ends[name], begins[name]) for name in SHAPES}
            updates = updates_of(exchange.finish(ways.__getitem__))
            exchange.commit()
            expected = stepped(twin, {name: ways[name].tensor() for name in SHAPES})
            assert all(same_bits(updates[name], expected[name]) for name in SHAPES)

    testing.run(2, body)
