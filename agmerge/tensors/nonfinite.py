"""Find gradients that are infinite or NaN, and remember whose they are.

A rank says in the messages of a step that it has found one, so nobody asks anybody. Messages of early merge buffers
may have left by then: :mod:`agmerge.step.nonfinite_verdict` waits for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from agmerge.tensors.layout import Slot

RAISE, SKIP = POLICIES = ("raise", "skip")


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether all elements are finite. Waits for a device. One pass, without a temporary of the tensor's size.

    A sum is half as dear as an exact look, and finite only if all of its summands are. It may overflow where they are.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    if not tensor.numel() or math.isfinite(tensor.sum(dtype=wide).item()):
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


class NonFiniteGuard:
    """Collect what this rank has found in one attempt at a step, for its messages to say."""

    def __init__(self) -> None:
        self.found = False  # the other ranks must hear of something that the host knows of
        self.watches_devices = False  # something was looked at on a device, see `device_flag`
        self._names: dict[str, None] = {}  # of parameters, found on the host
        self._later: list[tuple[str, torch.Tensor]] = []  # found on devices, which are not waited for: bool, 0-dim
        self._alarms: dict[torch.device, torch.Tensor] = {}  # by device: whether any of those is set

    def inspect(self, slot: Slot, tensor: torch.Tensor, finite: bool | None = None) -> bool:
        """Tell whether ``tensor`` is known to have an element that is not finite, and remember ``slot`` if so.

        ``finite``: what is known already; None: nothing. On a device it is not known before the messages are sent, see
        :meth:`device_flag`, so the answer there is False.
        """
        if tensor.device.type != "cpu":
            # The largest magnitude: exact, one pass, and no waiting. (On the CPU it is slow.)
            bad = ~torch.linalg.vector_norm(tensor, torch.inf).isfinite()
            self._later.append((slot.name, bad))
            self.watches_devices = True
            before = self._alarms.get(tensor.device)
            self._alarms[tensor.device] = bad if before is None else before | bad
            return False
        if finite is None:
            finite = is_finite(tensor)
        if not finite:
            self._names[slot.name] = None
            self.found = True
        return not finite

    def report(self, names: Iterable[str]) -> None:
        """Take what was found by others, on the host: ``names`` of parameters."""
        self._names.update(dict.fromkeys(names))
        self.found = self.found or bool(self._names)

    def peer_found(self) -> None:
        """Say it too: a rank for which this one speaks has found something."""
        self.found = True

    def device_flag(self, device: torch.device) -> torch.Tensor | None:
        """Return whether devices have found something, on ``device``: bool, 0-dim; None if none was looked at."""
        if not self._alarms:
            return None
        return torch.stack([alarm.to(device, non_blocking=True) for alarm in self._alarms.values()]).any()

    def parameters_found(self) -> list[str]:
        """Return the names of parameters whose gradients this rank found not to be finite. Waits for devices."""
        return [*self._names, *(name for name, bad in self._later if bad.item())]


def refuse(state: Mapping[tuple[str, str], Any]) -> None:
    """Raise ``ValueError`` for something in a checkpoint that is not finite. ``state``: by kind and parameter."""
    for (kind, name), tensor in state.items():
        if not is_finite(tensor):
            raise ValueError(
                f"the {kind} of parameter {name!r} in the checkpoint is infinite or NaN, and would break training: "
                "load an older checkpoint, or leave out its 'agmerge' section"
            )
