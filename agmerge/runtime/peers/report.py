# SPDX-License-Identifier: Apache-2.0
"""Find out which ranks are missing from a collective, by all ranks' answers. Pure functions of the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agmerge.runtime.peers.answers import Answer
from agmerge.runtime.peers.status_server import ENDED, PeerUnreachable

SHOWN = 8  # ranks that are described; more are only named
DIFFERENT = (
    "The ranks make different calls: {others}, this rank for {call}. Check for calls inside `if rank() == 0`, or "
    "calls that only some ranks make."
)
UNEVEN = "If ranks have different numbers of batches, call optimizer.join() on each rank after its last batch."
LATE = (
    "No rank is missing: the others timed out before this rank reached {call}. Check what delayed it, or set a longer "
    "timeout (timeout=, AGMERGE_TIMEOUT)."
)


@dataclass
class Report:
    """Ranks of a collective that does not end, each with a description of what it does."""

    missing: dict[int, str] = field(default_factory=dict)  # have not come as far
    waiting: dict[int, str] = field(default_factory=dict)  # wait for the same, or had to give up before
    elsewhere: dict[int, str] = field(default_factory=dict)  # of the missing: those that wait for another collective
    uneven: bool = False  # a rank came to the end of its script while this one is in a step
    late: bool = False  # all others had given up when this rank began to wait
    troubled: bool = False  # a rank has told a problem of its own process

    def text(
        self,
        call: str,
        unknown: Mapping[int, str],
        own_problem: str,
        listed: Callable[[Mapping[int, str]], str],
        own_trouble: Sequence[str] = (),
    ) -> str:
        """Return the report in a few sentences, with advice where there is any.

        ``call``: the collective that this rank waits for. ``unknown``: the ranks that could not be asked, and why.
        ``own_problem``: why others cannot ask this one; empty if they can. ``listed``: turns descriptions by rank into
        one line. ``own_trouble``: sentences about this process, which may be to blame.
        """
        groups = {"Missing": self.missing, "Not known": unknown, "Waiting too": self.waiting}
        parts = [f"{title}: {listed(group)}." for title, group in groups.items() if group]
        if own_problem:
            parts.append(f"Other ranks report about this rank: {own_problem}.")
        parts += own_trouble
        if self.elsewhere and not unknown and set(self.missing) <= set(self.elsewhere):
            parts.append(DIFFERENT.format(others=", ".join(list(self.elsewhere.values())[:SHOWN]), call=call))
        elif not (self.missing or unknown or own_problem or own_trouble or self.troubled):
            stuck = "No rank is missing: the network or the backend is stuck."
            parts.append(LATE.format(call=call) if self.late else stuck)
        return " ".join(parts + [UNEVEN] * self.uneven)


def report(own: Answer, answers: Mapping[int, Answer | PeerUnreachable], last_words: Mapping[int, Answer]) -> Report:
    """Return which ranks are missing from the collective that this rank waits for, and which are not.

    ``own``: this rank's account of itself. ``answers``: by rank, of those that were asked now. ``last_words``: by rank,
    its last message without a question: it counts for ranks that do not answer any more.
    """
    made, call, step = Report(), own.call, own.step
    known = []
    lost = False  # a rank is silent that has not said that it came to its end
    for rank, answer in answers.items():
        if isinstance(answer, PeerUnreachable):
            last = last_words.get(rank)
            lost = lost or last is None or not last.ended
            text = _description_of_silent(answer, last)
        else:
            last, text = answer, f"it {answer.words}, for {time.monotonic() - answer.since:.1f} s"
        text += f"; it {last.trouble}" if last is not None and last.trouble else ""
        # A rank that has given up, at any call, was not the first to be missing.
        arrived = last is not None and (last.given_up or (last.call, last.step) == (call, step))
        (made.waiting if arrived else made.missing)[rank] = text
        known.append(last)
        if last is not None:
            # A rank that had given up before it left had batches left.
            made.uneven = made.uneven or (last.ended and not last.given_up and None not in (last.step, step))
            made.troubled = made.troubled or bool(last.trouble)
            if last.step == step and _different(last.call, call):
                verb = "waited" if last.given_up else "waits"
                made.elsewhere[rank] = f"rank {rank} {verb} for {last.call}"
    # Where a rank was lost, the others may have called shutdown() in order to go on without it: no batches are uneven.
    made.uneven = made.uneven and not lost
    made.late = bool(known) and all(one is not None and one.given_up and one.since < own.since for one in known)
    return made


def listed(texts: Mapping[int, tuple[str, str]]) -> str:
    """Return one line of all ranks in ``texts``, of which each has a place and a description; many are only named."""
    shown = [f"rank {rank} ({place}): {text}" for rank, (place, text) in list(texts.items())[:SHOWN]]
    more = [str(rank) for rank in list(texts)[SHOWN:]]
    return "; ".join(shown + ([f"and ranks {', '.join(more)}"] if more else []))


def _description_of_silent(silence: PeerUnreachable, last: Answer | None) -> str:
    """Return the description of a rank that does not answer: its last words, and the meaning of its silence."""
    if last is None:
        return str(silence)
    if last.ended and str(silence) == ENDED:
        return f"it {last.words}"  # and its process has ended, which goes without saying
    return f"it {last.words}; {silence}"


def _different(theirs: str, ours: str) -> bool:
    """Return whether two calls of one step are different ones: its messages follow each other, each in its time."""
    return bool(theirs) and theirs != ours and not (_is_message(theirs) and _is_message(ours))


def _is_message(call: str) -> bool:
    """Return whether a collective is the message of a merge buffer."""
    return call.startswith("buffer ")
