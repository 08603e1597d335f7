# SPDX-License-Identifier: Apache-2.0
"""Results of the collectives of a round that are the same on all ranks, kept for ranks that could not receive them.

A worker that dies leaves the others at different places: some have received a merge buffer, some have not. A rank that
has it gives it to the others (:func:`settle` below), which go on as if it had arrived: the same bits on all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from agmerge.backends import Backend, Handle
from agmerge.backends.base import DelegatingBackend, matched
from agmerge.backends.handshake import broadcast_bytes, gather_texts
from agmerge.errors import AGMergeError, NoAnswer, PeerLost

# Between two steps: what a rank does there, as the survivors of a lost worker hear of it.
#
# Functions that survivors call again, all of them or none, are counted: one that has ended on any rank has ended for
# all.
#
# The hand-over of workers that leave on purpose is one in two parts. First they give away what they have not sent, then
# all ranks hear that this is over, and only then do they go: who went with the news alone would leave others that know
# nothing of it. Where a worker is lost, and all that leave are still there, nothing has happened yet, and all begin
# again; so it does not matter whether the lost one was to receive something. If one of those that leave is missing it
# may have gone, so what has been given away is counted on where any rank knows that it was.


class Between(NamedTuple):
    """Message of one rank to the other survivors."""

    calls: int = 0  # functions that have ended
    goes: bool | None = None  # whether it is one of those that leave in the hand-over; None: it is in none
    attempt: int = 0  # at the hand-over
    is_given: bool = False  # this attempt's first part has ended


NOTHING = Between()


class Agreed(NamedTuple):
    """Outcome of the messages of all ranks, the same on all of them."""

    calls: int = 0  # functions that have ended, for all
    going: int | None = None  # ranks that leave in the hand-over; None: not all ranks are in it
    attempt: int = 0  # the last one at the hand-over
    is_given: bool = False  # its first part has ended on some rank


def agreed(said: Sequence[Between]) -> Agreed:
    """Return what follows from the messages of all ranks."""
    goes = [one.goes for one in said if one.goes is not None]
    last = max(one.attempt for one in said)
    return Agreed(
        calls=max(one.calls for one in said),
        going=sum(goes) if len(goes) == len(said) else None,
        attempt=last,
        is_given=any(one.is_given for one in said if one.attempt == last),
    )


class BetweenSteps:
    """This rank's functions between two steps, and the hand-over that it is in.

    A hand-over, for each attempt: :meth:`enter`, before anything is sent, :meth:`hears`, :meth:`gave`. Then
    :meth:`count`, after which workers go, and ``going`` says how many of the group; last :meth:`leave`.
    """

    def __init__(self) -> None:
        self._calls = 0  # functions that have ended
        self._goes: bool | None = None  # in the hand-over; None: it is in none
        self._attempt = self._leave = 0  # number of the attempt, and how many leave in it
        self._there = 0  # of these, in the group of now
        self._gone = 0  # of these, in changes of the group since take_gone()
        self._has_ended = False  # the hand-over: they go
        self.is_given = False  # what they have not sent
        self.all_are_in = False  # all survivors were in the hand-over, as they settled

    @property
    def told(self) -> Between:
        """Return what the survivors of a lost worker are told."""
        return Between(self._calls, self._goes, self._attempt, self.is_given)

    @property
    def going(self) -> int:
        """Return how many ranks of the group go, once the hand-over has ended."""
        return self._there if self._has_ended else 0

    def enter(self, *, goes: bool) -> None:
        """Begin an attempt at a hand-over. ``goes``: this rank leaves in it."""
        self._goes, self.is_given = goes, False

    def hears(self, leave: int) -> None:
        """Record how many ranks of the group leave."""
        self._leave = self._there = leave

    def gave(self) -> None:
        """Record that what those that leave have not sent has been given away."""
        self.is_given = True

    def leave(self) -> None:
        """End the hand-over, or give it up."""
        self._goes, self._attempt, self._leave, self._there = None, 0, 0, 0
        self._has_ended = self.is_given = False

    def count(self) -> None:
        """Count a function that has ended."""
        self._calls += 1
        self._has_ended = self._goes is not None

    def settle(self, outcome: Agreed) -> bool:
        """Record what ranks of a new group have agreed on; return whether the function under way has ended."""
        has_ended, before = outcome.calls > self._calls, self._there
        self._calls, self._there = outcome.calls, outcome.going or 0
        self.all_are_in = outcome.going is not None
        if self._goes is None:
            return has_ended
        self._has_ended |= has_ended
        if not self._has_ended:
            self.is_given = outcome.is_given and self._there < self._leave
            self._attempt = outcome.attempt + (not self.is_given)
        if self.is_given:
            self._gone += max(before - self._there, 0)
        return has_ended

    def take_gone(self) -> int:
        """Return how many ranks have gone since the last call, after they had handed over what they had not sent."""
        gone, self._gone = self._gone, 0
        return gone


# Kept results.

Results = Mapping[str, torch.Tensor]  # by name of the collective: uint8[bytes]


class KeptResults:
    """Results of the collectives of the round under way, and of the round before, by name: copies on the host.

    While results of another rank are :meth:`replayed <replay>`, collectives end at once, with these.
    """

    def __init__(self) -> None:
        self._now: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # memory for results of the round under way
        self._replayed: Results | None = None

    @property
    def is_replaying(self) -> bool:
        """Return whether collectives end with another rank's results, without a network."""
        return self._replayed is not None

    def of_round(self, *, before: bool) -> Results:
        """Return the results of the round under way, or of the one ``before``: views."""
        return self._before if before else self._now

    def conclude(self) -> None:
        """End the round under way: its results are those of the round before now."""
        self._now, self._before, self._spare = {}, self._now, self._before

    def replay(self, results: Results | None) -> None:
        """Let collectives end with ``results`` from now on; None: by themselves again."""
        self._replayed = results

    def keep(self, name: str, out: torch.Tensor) -> None:
        """Keep a copy of ``out``, the result of the collective ``name``."""
        copy, result = self._spare.pop(name, None), bytes_of(out)
        if copy is None or copy.numel() != result.numel():
            copy = torch.empty_like(result, device="cpu")
        self._now[name] = copy.copy_(result)

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write the replayed result of the collective ``name`` into ``out``, and keep it."""
        assert self._replayed is not None
        result = self._replayed.get(name)
        if result is None or result.numel() != out.nbytes:
            found = "nothing" if result is None else f"{result.numel()} bytes"
            raise AGMergeError(f"AGM214: {name}: expected {out.nbytes} bytes of a rank that is ahead, got {found}")
        bytes_of(out).copy_(result)
        self.keep(name, result)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8[bytes]: a view."""
    return tensor.view(-1).view(torch.uint8)


class KeptHandle(Handle):
    """Handle of a collective of which the result is kept once it is in place.

    ``inner``: the collective; None: it could not start, for ``error``, or was not started, for a replay. ``out``: its
    result, if that is the same on all ranks; None: it is this rank's own.
    """

    def __init__(
        self, name: str, inner: Handle | None, error: NoAnswer | None, out: torch.Tensor | None, kept: KeptResults
    ) -> None:
        super().__init__(name)
        self._inner, self._error, self._out, self._kept, self._has_ended = inner, error, out, kept, False

    def done(self) -> bool:
        return self._inner is not None and self._inner.done()

    def wait(self, timeout: float) -> None:
        """Return when the result is in place. See :meth:`Handle.wait`."""
        if not self._has_ended:
            self._wait(timeout)
            self._has_ended = True

    def _wait(self, timeout: float) -> None:
        if self._kept.is_replaying:
            if self._out is not None:
                self._kept.fill(self._name, self._out)
        elif self._inner is not None:
            self._inner.wait(timeout)
            if self._out is not None:
                self._kept.keep(self._name, self._inner.on_host(self._out))
        else:
            raise self._error or AGMergeError(
                f"AGM214: {self._name} was started while results were repeated, which has ended"
            )


class KeptBackend(DelegatingBackend):
    """Communicator of which the results that are the same on all ranks are kept in ``kept``.

    A collective that cannot start, since a rank is lost, ends with that error in its ``wait``: so whatever others may
    have received of a message, this rank has its own part of.
    """

    def __init__(self, inner: Backend, kept: KeptResults) -> None:
        super().__init__(inner)
        self._kept = kept

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. See :meth:`Backend.all_reduce`."""
        return self._started(lambda: self._inner.all_reduce(tensor, name, op), name, tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.all_gather`."""
        return self._started(lambda: self._inner.all_gather(out, tensor, name), name, out)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        """Collective. See :meth:`Backend.all_to_all`."""
        return self._started(lambda: self._inner.all_to_all(out, tensor, out_splits, splits, name), name, None)

    def _started(self, start: Callable[[], Handle], name: str, out: torch.Tensor | None) -> Handle:
        if self._kept.is_replaying:
            return KeptHandle(matched(name), None, None, out, self._kept)
        try:
            return KeptHandle(matched(name), start(), None, out, self._kept)
        except NoAnswer as error:
            return KeptHandle(matched(name), None, error, out, self._kept)


# Settling: survivors agree on where they are, and a rank that is ahead gives its results to the others.
#
# Of one group two ranks differ by one round at most, for a round needs a message of everybody. What anybody has
# received counts, with the contribution of the lost one; what none has comes to nothing, and is exchanged again. So it
# is with functions between two steps.


class Position(NamedTuple):
    """Place of a rank in its exchanges: positions are ordered."""

    rounds: int  # that have ended, committed or not
    buffers: int  # merge buffers of the next round that have been received, the first ones of its plan


NEW = Position(-1, 0)  # of a worker that has nothing yet
UNEXPECTED = (
    "AGM212: A worker failed while rank {ranks} was joining, so its state could not be transferred. Restart rank "
    "{ranks}."
)


@dataclass(frozen=True)
class Settled:
    """Outcome: where all ranks are to go on, and the results that this one may need to get there."""

    position: Position
    results: Results  # empty: all ranks are there
    donor: int  # the lowest rank that is there
    new: tuple[int, ...] = ()  # ranks that have nothing yet
    between: Agreed = Agreed()  # on functions between two steps


def settle(
    comm: Backend,
    own: Position,
    kept: KeptResults,
    timeout: float,
    *,
    gives: bool = False,
    between: Between = NOTHING,
) -> Settled:
    """Collective. Return the position from which all ranks of ``comm`` go on: that of the rank that is furthest.

    Args:

        comm: the members of a new group.
        own: this rank's position; ``NEW``: it has nothing yet, and needs the state of another.
        kept: this rank's results; those of the lowest rank that is ahead are broadcast, if any rank needs them.
        timeout: seconds, for each collective.
        gives: newcomers can have this rank's state, which is between two steps.
        between: what this rank does between two steps.

    Raises :class:`agmerge.PeerLost` on every rank where a newcomer is not expected: another worker was lost while it
    was let in.
    """
    said = gather_texts(comm, json.dumps([own, gives, between]).encode(), "positions of survivors", timeout)
    told = [(Position(*position), can_give, Between(*its)) for position, can_give, its in map(json.loads, said)]
    positions = [position for position, _, _ in told]
    old = [one for one in told if one[0] != NEW]
    new = tuple(rank for rank, position in enumerate(positions) if position == NEW)
    if new and not all(can_give for _, can_give, _ in old):
        raise PeerLost(UNEXPECTED.format(ranks=", ".join(map(str, new))), missing=new)
    target, last = (most([position for position, _, _ in old], default=NEW) for most in (max, min))
    donor, data = positions.index(target), b""
    results: Results = {}
    if target != last:
        if comm.rank == donor:
            data = packed(kept.of_round(before=last.rounds < target.rounds))
        results = unpacked(broadcast_bytes(comm, data, donor, "results for survivors", timeout))
    return Settled(target, results, donor, new, agreed([its for _, _, its in told]))


def packed(results: Results) -> bytes:
    """Return ``results`` as bytes, for :func:`unpacked`."""
    names = json.dumps([(name, result.numel()) for name, result in results.items()]).encode()
    return b"".join([len(names).to_bytes(8, "little"), names, *(one.numpy().tobytes() for one in results.values())])


def unpacked(data: bytes) -> Results:
    """Return the results of which :func:`packed` has made ``data``."""
    start = 8 + int.from_bytes(data[:8], "little")
    results, whole = {}, torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for name, length in json.loads(data[8:start]):
        results[name] = whole[start : start + length]
        start += length
    return results
