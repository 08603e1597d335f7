# SPDX-License-Identifier: Apache-2.0
"""Which collectives the quantised all-reduce makes, and when: no hook waits, and no merge buffer holds up another."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.exchanges import Quiet
from support.gradient_exchange import Table, config_of, connected, stepped
from torch import Tensor

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.exchanges import ExchangeContext, Ranks, SegmentBuffers
from agmerge.exchanges.base import InFlight
from agmerge.exchanges.dense import LARGE
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.quantised.two_phase import TwoPhaseExchange
from agmerge.exchanges.routing import group_into_messages
from agmerge.runtime import process_sets, workers
from agmerge.tensors.layout import Layout, TensorClass
from sparsifiers import Kind

SHAPES = {"first": (40,), "second": (9, 256), "third": (17, 128), "fourth": (30,), "fifth": (8, 64, 3, 3)}
QUANTISED = ("second", "third", "fifth")


def drawn(rank: int, step: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def made(**options: Any) -> Any:
    table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    return connected(table, **{"compression": "eden", "merging": "layerwise", **options})


def sums() -> list[str]:
    """The second phases that this rank has begun."""
    return [name for _, name, _ in testing.calls() if name.endswith("/sum")]


@pytest.mark.parametrize("size", [3, 4])
def test_what_is_small_is_added_up_by_owners_in_rank_order_whatever_it_is_merged_with(size: int) -> None:
    """From three ranks on an all-reduce of its own would give other bits on most backends."""

    def body(rank: int) -> list[tuple[str, str]]:
        exchange = made()
        stepped(exchange, drawn(rank, 0))
        return [(kind, name) for kind, name, _ in testing.calls() if name.startswith("buffer")]

    calls = testing.run(size, body)[0]
    assert {kind for kind, _ in calls} == {"all_to_all", "all_gather"}
    assert len([name for _, name in calls if name.endswith("/sum")]) == len(SHAPES)


def tensor_class(kind: Kind, dtype: torch.dtype = torch.float32) -> TensorClass:
    return TensorClass(torch.device("cpu"), dtype, kind)


def test_only_large_tensors_are_summed_where_they_lie() -> None:
    """How many there are in a merge buffer does not matter: a plan would change bits."""
    whole = [("many", LARGE // 2), ("more", LARGE // 2), ("others", LARGE // 2)]
    layout = Layout([(name, (numel,), tensor_class(Kind.DENSE)) for name, numel in whole])
    assert len(group_into_messages(layout.segments(0, 3), 4, [Kind.QUANTISED])) == 1
    layout = Layout(
        [("few", (64, 64), tensor_class(Kind.QUANTISED)), ("large", (LARGE,), tensor_class(Kind.DENSE, torch.float64))]
    )
    assert len(group_into_messages(layout.segments(0, 2), 4, [Kind.QUANTISED])) == 2


def test_no_hook_waits_for_a_rank_that_is_late() -> None:
    """Where one did, this would not end."""
    through = threading.Semaphore(0)

    def body(rank: int) -> list[str]:
        exchange = made()
        stepped(exchange, drawn(rank, 0))
        before = len(sums())
        if rank == 2:
            for _ in range(2):
                assert through.acquire(timeout=60)
        for name, tensor in drawn(rank, 1).items():
            exchange.ready(name, tensor)
        begun = sums()[before:]
        through.release()
        exchange.finish()
        exchange.commit()
        return begun

    early, other, _ = testing.run(3, body)
    assert early == other == []  # no first phase can have ended without rank 2


def test_second_phases_do_not_wait_for_what_other_exchanges_carry() -> None:
    """What is small is with another one here, whose end is not known before it is waited for; it comes first."""

    def body(rank: int) -> int:
        exchange = made(dense_sum="ordered")
        stepped(exchange, drawn(rank, 0))
        before = len(sums())
        for name, tensor in drawn(rank, 1).items():
            exchange.ready(name, tensor)
            agmerge.barrier()
        begun = len(sums()) - before
        exchange.finish()
        exchange.commit()
        return begun

    assert min(testing.run(3, body)) >= len(QUANTISED) - 1


# -- two levels -------------------------------------------------------------------------------------------------------


def test_shards_of_a_tensor_have_random_words_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of one half of a matrix would be those of the other half, were the halves alike."""
    monkeypatch.setenv(topology.VARIABLE, "2")

    def body(rank: int) -> Tensor:
        exchange = connected(Table({"alike": torch.zeros(8, 256)}), compression="eden", exchange="two-level")
        half = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))
        update = stepped(exchange, {"alike": torch.cat([half, half])})["alike"]
        assert update is not None
        return update

    updates = testing.run(4, body)
    assert all(torch.equal(update, updates[0]) for update in updates)
    halves = updates[0].split(4)
    torch.testing.assert_close(halves[0].norm(), halves[1].norm(), rtol=0.2, atol=0.0)
    assert not any(torch.equal(one, other) for one, other in zip(*halves, strict=True))


# -- what came to nothing ---------------------------------------------------------------------------------------------


class NoAnswerAtAll:
    """Handle of a collective that has failed on every rank."""

    def wait(self, timeout: float) -> None:
        raise RuntimeError("failed")

    def done(self) -> bool:
        return True


def started(exchange: TwoPhaseExchange, rank: int) -> InFlight:
    """Send one tensor as a message of its own."""
    (segment,) = Layout([("alike", (4, 256), tensor_class(Kind.QUANTISED))]).segments(0, 1)
    work = torch.randn(segment.length, generator=torch.Generator().manual_seed(rank))
    load = SegmentBuffers(segment, work, torch.zeros(segment.length))
    return exchange.start("buffer 0", [load], [None], RoundHeader(0, 7, 0, 0, (True,)))


def two_phases() -> TwoPhaseExchange:
    """Collective. Return an exchange of this rank's own, with two communicators."""
    everyone = config_of(compression="eden").sync.process_set
    comm, second = process_sets.communicators(workers.world(), everyone, 30.0, wants_second=True)
    ranks, quantiser = Ranks(comm, 30.0, second=second), sparsifiers.quantiser("eden")
    return TwoPhaseExchange(ExchangeContext(ranks, agmerge.Average, Quiet(), quantiser=quantiser))


def test_a_message_that_starts_again_has_its_earlier_second_phase_behind_it() -> None:
    """It writes to the memory that the second phase reads."""

    def body(rank: int) -> list[str]:
        exchange, before = two_phases(), len(testing.calls())
        started(exchange, rank)
        again = started(exchange, rank)
        exchange.wait(again)
        return [name for _, name, _ in testing.calls()[before:]]

    assert testing.run(3, body) == [["buffer 0", "buffer 0/sum", "buffer 0", "buffer 0/sum"]] * 3


def test_an_attempt_that_has_failed_has_no_second_phases() -> None:
    """Other ranks would not make these calls."""

    def body(rank: int) -> int:
        exchange, before = two_phases(), len(testing.calls())
        failed = started(exchange, rank)
        failed.handle.wait(30.0)
        failed.handle = NoAnswerAtAll()  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="failed"):
            exchange.wait(failed)
        exchange.wait(started(exchange, rank))
        return sum(name.endswith("/sum") for _, name, _ in testing.calls()[before:])

    assert testing.run(3, body) == [1, 1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_with_other_random_words_is_found(size: int) -> None:
    """What it has sent would be read by the wrong signs."""

    def body(rank: int) -> None:
        exchange = made()
        stepped(exchange, drawn(rank, 0))
        if rank == 1:
            for used in {message.exchange for messages in exchange.agreed.buffers.messages for message in messages}:
                keyed = used._key
                used._key = lambda *arguments, keyed=keyed: keyed(*arguments) ^ 1
        stepped(exchange, drawn(rank, 1))

    errors = testing.run(size, body, return_errors=True)
    assert all(isinstance(error, agmerge.MessageError) for error in errors), errors
