# SPDX-License-Identifier: Apache-2.0
"""Find gradients that are infinite or NaN, and record the names of their parameters.

A rank announces one in the messages of the step, so that no extra collective is needed. Messages of early merge buffers
may have left by then: :mod:`agmerge.step.gradient_exchange` waits for all messages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from agmerge.tensors.layout import Slot

RAISE, SKIP, KEEP = POLICIES = ("raise", "skip", "keep")
FEW = 3  # numbers on a device that are compared one by one: more take two kernels


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. Waits for a device. One pass, without a temporary of the tensor's size.

    A sum takes half as long as an exact check, and is finite only if all elements are. It may overflow for finite ones,
    so an infinite sum is followed by the exact check.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    wide = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    if not tensor.numel() or math.isfinite(tensor.sum(dtype=wide).item()):
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


class NonFiniteGuard:
    """Findings of this rank in one attempt at a step, for its messages to announce.

    ``keeps``: infinities and NaN are combined as other numbers are, so none is found.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self.found = False  # the host knows of something that the messages must announce
        self.given_up = ""  # why this rank gives the step up; empty: it does not
        self._names: dict[str, None] = {}  # of parameters, found on the host
        self._on_devices: list[tuple[str, torch.Tensor]] = []  # names, and tensors with a result on the device
        # By device, and by `id`: the largest magnitudes there that no message has announced.
        self._largest: dict[torch.device, dict[int, torch.Tensor]] = {}
        self._told: list[torch.Tensor] = []  # those that messages have announced; another stream may still read them

    def inspect(self, slot: Slot, tensor: torch.Tensor, finite: bool | None = None) -> bool:
        """Return whether ``tensor`` is known to have an element that is not finite, and record ``slot`` if so.

        ``finite``: the result of an earlier check; None: not checked. On a device the result is not known before the
        messages are sent, see :meth:`finite_on`, so False is returned there.
        """
        if self._keeps:
            return False
        if tensor.device.type != "cpu":
            self.note(torch.linalg.vector_norm(tensor, torch.inf), [(slot.name, tensor)])  # exact; slow on the CPU
            return False
        if finite is None:
            finite = is_finite(tensor)
        if not finite:
            self._names[slot.name] = None
            self.found = True
        return not finite

    def note(self, largest: torch.Tensor, parts: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record a largest magnitude, or its square, 0-dim, computed on a device, without waiting for it.

        Several calls may pass the same one. ``parts``: names and tensors, which are checked one by one if the step
        comes to nothing, to name the parameters.
        """
        if self._keeps:
            return
        self._largest.setdefault(largest.device, {})[id(largest)] = largest
        self._on_devices += parts

    def report(self, names: Iterable[str]) -> None:
        """Record parameters, by name, in which something else has found infinities or NaN on the host."""
        self._names.update(dict.fromkeys(names))
        self.found = self.found or bool(self._names)

    def give_up(self, why: str) -> None:
        """Make the attempt come to nothing on all ranks, as an infinity does. ``why``: for the errors of the others."""
        self.given_up, self.found = why, True

    def peer_found(self) -> None:
        """Announce the finding of another rank, for which this rank speaks."""
        self.found = True

    def finite_on(self, device: torch.device) -> torch.Tensor | None:
        """Return whether all magnitudes recorded for ``device`` since the last call are finite: bool, 0-dim, there.

        None: none was recorded. One message of a round that announces it is enough.
        """
        largest = list(self._largest.pop(device, {}).values())
        self._told += largest
        if not largest:
            return None
        many = len(largest) > FEW
        top = torch.stack(largest).max() if many else functools.reduce(torch.maximum, largest)  # NaN if one is
        return top < torch.inf

    def parameters_found(self) -> list[str]:
        """Return the names of parameters in which this rank has found infinities or NaN. Waits for devices."""
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, tensor in self._on_devices:
            finite = torch.linalg.vector_norm(tensor, torch.inf).isfinite()
            by_device.setdefault(tensor.device, {})[name] = finite
        found = dict(self._names)
        for finite_by_name in by_device.values():
            results = torch.stack(list(finite_by_name.values())).tolist()
            found.update((name, None) for name, good in zip(finite_by_name, results, strict=True) if not good)
        return list(found)


def refuse(state: Mapping[tuple[str, str], Any]) -> None:
    """Raise ``ValueError`` for infinities or NaN in a checkpoint. ``state``: tensors by kind and parameter."""
    for (kind, name), tensor in state.items():
        if not is_finite(tensor):
            raise ValueError(
                f"the {kind} of parameter {name!r} in the checkpoint is infinite or NaN. Load an older checkpoint, or "
                "remove its 'agmerge' section."
            )
