"""``two-level``: an attempt at a step in which a node's shards are exchanged, and not the gradients of each rank."""

from __future__ import annotations

import torch

from agmerge.exchanges.message.format import Flag, RoundHeader
from agmerge.metrics.totals import Totals
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.round import Round
from agmerge.tensors.layout import Slot
from agmerge.tensors.nonfinite import ALLOW, NonFiniteGuard


class TwoLevelRound(Round):
    """A round with one stage before compensation.

    A merge buffer that is complete is added up inside the node; when that has arrived, each rank compensates its
    shards, selects from them and sends them to its fellows on the other nodes. That is looked for at every gradient
    that comes and, at last, waited for, in plan order on each of the two communicators. What is not overlapped: the
    updates of a node's shards are handed round once all of them are there.

    A rank with another membership makes its whole node dirty: its gradients are in the node's sums. One that has found
    what is not finite tells its node, and each rank of that the other nodes.
    """

    def __init__(self, session: MergeBuffers, step: int, stats: Totals, *, dirty: bool, flags: int = 0) -> None:
        super().__init__(session, step, stats, dirty=dirty, flags=flags)
        assert session.shards is not None
        self._shards = session.shards
        # What a node's sum makes of finite gradients its ranks cannot tell each other any more: it is sent, not kept.
        self._of_work = NonFiniteGuard(ALLOW, forces=session.config.nonfinite == ALLOW)
        self._summed: list[RoundHeader] = []  # by merge buffer: what this rank said when the node began to add it up

    def _take(self, slot: Slot, gradient: torch.Tensor | None) -> None:
        good = gradient is None or self.watch.policy == ALLOW or not self.watch.look(slot, gradient)
        self._shards.put(slot, gradient if good and not self.dirty else None)

    def _advance(self, slot: Slot) -> None:
        while (buffer := len(self._summed)) < len(self._missing) and self._missing[buffer] == 0:
            used = tuple(self._fed[slot.index] for slot in self._slots(buffer))
            control = self._control(buffer, used, self.session.layout.slots[0].lane.device)
            self.recorder.mark(buffer)
            self.stats.sent(self._shards.start(buffer, control), 0)
            self._summed.append(control)
        while len(self._pending) < len(self._summed) and self._shards.arrived(len(self._pending)):
            self._pass_on()

    def _drain(self) -> None:
        while len(self._pending) < len(self._summed):
            self._pass_on()

    def _pass_on(self) -> None:
        """The node's sum of the next merge buffer is there, or waited for: compensate, select, send."""
        buffer = len(self._pending)
        control = self._shards.wait(buffer, self._summed[buffer])
        self.dirty = self.dirty or bool(control.flags & Flag.REPLAN)
        self.flags |= control.flags & ~(Flag.REPLAN | Flag.NONFINITE)  # between nodes it says what its node says
        self.watch.told = self.watch.told or bool(control.flags & Flag.NONFINITE)
        for slot, used in zip(self._slots(buffer), control.used, strict=True):
            self._fed[slot.index] = used
            self._compensate(slot, self._shards.shard(slot) if used else None)
            self._select_alone(slot)
        self._send(buffer)

    def _slots(self, buffer: int) -> tuple[Slot, ...]:
        start, stop = self.session.plan.bounds[buffer]
        return self.session.layout.slots[start:stop]


def round_for(session: MergeBuffers, step: int, stats: Totals, *, dirty: bool, flags: int = 0) -> Round:
    """The attempt that the session's exchange asks for."""
    kind = Round if session.shards is None else TwoLevelRound
    return kind(session, step, stats, dirty=dirty, flags=flags)
