# SPDX-License-Identifier: Apache-2.0
"""What a rank does between two steps, as the survivors of a lost worker hear of it.

Functions that survivors call again, all of them or none, are counted: one that has ended on any rank has ended for all.

The hand-over of workers that leave on purpose is one in two parts. First they give away what they have not sent, then
all ranks hear that this is over, and only then do they go: who went with the news alone would leave others that know
nothing of it. Where a worker is lost, and all that leave are still there, nothing has happened yet, and all begin
again; so it does not matter whether the lost one was to receive something. If one of those that leave is missing it may
have gone, so what has been given away is counted on where any rank knows that it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
