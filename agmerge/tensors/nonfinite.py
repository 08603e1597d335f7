"""Gradients that are infinite or NaN: how a rank finds them, and what it does with them.

A rank says in the messages of a step that it has found one, so nobody asks anybody. Messages of early merge buffers
may have left by then: :mod:`agmerge.step.nonfinite_verdict` waits for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agmerge.tensors.arena import Arena
from agmerge.tensors.layout import Lane, Segment, Slot
from sparsifiers import Selection

RAISE, SKIP, ALLOW = POLICIES = ("raise", "skip", "allow")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite; waits for a device. One pass, without a temporary of its size.

    A sum is half as dear as an exact look, and finite only if all of its summands are. It may overflow where they are.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    if not tensor.numel() or math.isfinite(tensor.sum(dtype=wide).item()):
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


class NonFiniteGuard:
    """What this rank has found in one attempt at a step. ``found`` and ``alarm`` are what its messages say."""

    def __init__(self, policy: str, *, forces: bool | None = None) -> None:
        self.forces = policy == ALLOW if forces is None else forces  # offers have to hold what is not finite
        self.policy, self.told = policy, False  # told: a rank for which this one speaks has found something
        self.names: dict[str, None] = {}  # of parameters, on the host
        self._slots: list[Slot] = []
        self._later: list[tuple[str, torch.Tensor]] = []  # on devices, which are not waited for: bool, 0-dim
        self._alarms: dict[torch.device, torch.Tensor] = {}

    @property
    def found(self) -> bool:
        """Whether the other ranks must hear of something that the host knows of."""
        return (self.told or bool(self.names)) and self.policy != ALLOW

    def alarm(self, device: torch.device) -> torch.Tensor | None:
        """What devices have found, on ``device``: bool, 0-dim; None if nothing was looked at there, or may pass."""
        alarms = [alarm.to(device, non_blocking=True) for alarm in self._alarms.values()]
        return torch.stack(alarms).any() if alarms and self.policy != ALLOW else None

    def look(self, slot: Slot, tensor: torch.Tensor, finite: bool | None = None) -> bool:
        """Whether ``tensor`` is known to have an element that is not finite. ``finite``: what is known already."""
        if tensor.device.type != "cpu":
            # The largest magnitude: exact, one pass, and no waiting. (On the CPU it is slow.)
            bad = ~torch.linalg.vector_norm(tensor, torch.inf).isfinite()
            self._later.append((slot.name, bad))
            before = self._alarms.get(tensor.device)
            self._alarms[tensor.device] = bad if before is None else before | bad
            return False
        if finite is None:
            finite = is_finite(tensor)
        if not finite:
            self.names[slot.name] = None
        return not finite

    def compensate(self, arena: Arena, slot: Slot, gradient: torch.Tensor | None) -> bool:
        """Write the tensor's part of ``work``; whether the gradient was taken, as far as the host knows.

        One that is not finite, or whose sum is not, is left out again: the attempt comes to nothing, and figures,
        sparsifiers and codecs have nothing to do with it. With the policy "allow" it is taken.
        """
        finite = arena.compensate(slot, gradient)
        if gradient is None or (self.policy == ALLOW and not arena.memory.keeps):
            return True
        if not self.look(slot, arena.work_of(slot), finite):
            return True
        if self.policy == ALLOW:
            self._slots.append(slot)
            return True
        arena.compensate(slot, None)
        return False

    def take(self, arena: Arena, taken: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        """:meth:`compensate` for gradients, on the host, of an arena that keeps nothing: one call, one look at all."""
        torch._foreach_copy_([arena.work_of(slot) for slot, _ in taken], [gradient for _, gradient in taken])
        start, stop = min(slot.offset for slot, _ in taken), max(slot.end for slot, _ in taken)
        # What lies between them is of the same merge buffer, and finite, or padding.
        if self.policy == ALLOW or is_finite(arena.work[start:stop]):
            return
        for slot, _ in taken:
            if self.look(slot, arena.work_of(slot)):
                arena.compensate(slot, None)

    # -- "allow" --------------------------------------------------------------------------------------------------

    def offered(self, segment: Segment, work: torch.Tensor, offer: Selection) -> Selection:
        """The offer, with what is not finite in it, as far as there is room."""
        if not self.forces:
            return offer
        here = {slot.index for slot in segment.slots}
        known = any(slot.index in here for slot in self._slots)
        return first_of_all(work, offer) if known or work.device.type != "cpu" else offer

    def clean(self, arenas: Mapping[Lane, Arena]) -> None:
        """All is committed: what is left and not finite is dropped, before it becomes a residual."""
        if self.policy != ALLOW:
            return
        for arena in arenas.values():
            # The momentum of an average is the same on all ranks, and so is what is dropped of it.
            if arena.work.device.type != "cpu" or (arena.memory.corrects and not arena.memory.keeps):
                arena.clean()
        for slot in self._slots:
            arenas[slot.lane].clean(slot)

    def where(self) -> list[str]:
        """The parameters whose gradients this rank found not to be finite. Waits for devices."""
        return [*self.names, *(name for name, bad in self._later if bad.item())]


def first_of_all(work: torch.Tensor, offer: Selection) -> Selection:
    """The offer's slots again, with what is not finite in ``work`` taken first; waits for no device."""
    slots = torch.arange(offer.indices.numel(), device=work.device)
    score = torch.zeros(work.numel(), dtype=torch.int32, device=work.device)
    score.index_add_(0, offer.indices, (slots < offer.count).to(torch.int32))  # padding adds nothing
    score.masked_fill_(~work.isfinite(), 2)
    best = score.topk(slots.numel(), sorted=True)
    count = (best.values > 0).sum(dtype=torch.int32)
    indices = best.indices.masked_fill(slots >= count, work.numel()).sort().values.clamp_(max=work.numel() - 1)
    return Selection(indices.to(torch.int32), count if work.device.type != "cpu" else int(count))


def refuse(state: Mapping[tuple[str, str], Any]) -> None:
    """``ValueError`` for something in a checkpoint that is not finite; ``state``: by kind and parameter."""
    for (kind, name), tensor in state.items():
        if not is_finite(tensor):
            raise ValueError(
                f"the {kind} of parameter {name!r} in the checkpoint is infinite or NaN, and would break training: "
                "load an older checkpoint, or leave out its 'agmerge' section"
            )
