"""Find gradients that are infinite or NaN, and remember whose they are.

A rank says in the messages of a step that it has found one, so nobody asks anybody. Messages of early merge buffers
may have left by then: :mod:`agmerge.step.nonfinite_verdict` waits for all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from agmerge.tensors.layout import Slot

RAISE, SKIP = POLICIES = ("raise", "skip")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. Waits for a device. One pass, without a temporary of the tensor's size.

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
        self.given_up = ""  # why this rank gives the step up; empty: it does not
        self._names: dict[str, None] = {}  # of parameters, found on the host
        self._on_devices: list[tuple[str, torch.Tensor]] = []  # names, and what was looked at without a result yet
        # By device, and by `id`: the largest magnitudes of what was looked at there, which no message has told of.
        self._largest: dict[torch.device, dict[int, torch.Tensor]] = {}
        self._told: list[torch.Tensor] = []  # those that messages have told of; another stream may still read them

    def inspect(self, slot: Slot, tensor: torch.Tensor, finite: bool | None = None) -> bool:
        """Return whether ``tensor`` is known to have an element that is not finite, and remember ``slot`` if so.

        ``finite``: what is known already; None: nothing. On a device it is not known before the messages are sent, see
        :meth:`finite_on`, so the answer there is False.
        """
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
        """Take the largest magnitude, 0-dim, of what was looked at on a device, which is not waited for.

        It may be the same one for several. ``parts``: names, and what is looked at again if the step comes to nothing,
        to say which of them it was.
        """
        self._largest.setdefault(largest.device, {})[id(largest)] = largest
        self._on_devices += parts

    def report(self, names: Iterable[str]) -> None:
        """Take what was found by others, on the host: ``names`` of parameters."""
        self._names.update(dict.fromkeys(names))
        self.found = self.found or bool(self._names)

    def give_up(self, why: str) -> None:
        """Let the attempt come to nothing on all ranks, as what is not finite does. ``why``: for their errors."""
        self.given_up, self.found = why, True

    def peer_found(self) -> None:
        """Say it too: a rank for which this one speaks has found something."""
        self.found = True

    def finite_on(self, device: torch.device) -> torch.Tensor | None:
        """Return whether all is finite that ``device`` was given since this was last asked: bool, 0-dim, there.

        None: it was given nothing. One message of a round that says so is enough.
        """
        largest = list(self._largest.pop(device, {}).values())
        self._told += largest
        if not largest:
            return None
        return functools.reduce(torch.maximum, largest) < torch.inf

    def parameters_found(self) -> list[str]:
        """Return the names of parameters whose gradients this rank found not to be finite. Waits for devices."""
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
    """Raise ``ValueError`` for something in a checkpoint that is not finite. ``state``: by kind and parameter."""
    for (kind, name), tensor in state.items():
        if not is_finite(tensor):
            raise ValueError(
                f"the {kind} of parameter {name!r} in the checkpoint is infinite or NaN, and would break training: "
                "load an older checkpoint, or leave out its 'agmerge' section"
            )
