# SPDX-License-Identifier: Apache-2.0
"""Which parameters a script has written between two steps, where ``sync="updates"`` moves them as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

ELEMENTS = 16  # sampled of each parameter


class ScriptWrites:
    """Record of the parameters as this library has left them: what differs later was written by the script.

    An ordinary write raises a tensor's version, and ``p.data = ...`` changes its address. A write to ``p.data`` does
    neither, so a few elements of each parameter are compared, too.
    """

    def __init__(self) -> None:
        self._left: _Left | None = None
        self._samples: list[_Sample] = []  # of the parameters at the addresses in `_left`

    def note(self, own: Mapping[str, torch.Tensor]) -> None:
        """Record the parameters as they are now."""
        names, before = list(own), self._left
        addresses = _addresses(own)
        if before is None or before.names != names or before.addresses != addresses:
            self._samples = _samples_of(own)
        self._left = _Left(names, addresses, _versions(own), [sample.now() for sample in self._samples])

    def found(self, own: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the parameters that were written since :meth:`note`. Waits for devices.

        If only samples show it, of a parameter with more elements than these, all names: samples of others may have
        missed it.
        """
        written, sampled = self._by_version(own), self.found_in_samples(own)
        if any(own[name].numel() > ELEMENTS for name in sampled - written):
            return list(own)
        return [name for name in own if name in written or name in sampled]

    def found_in_samples(self, own: Mapping[str, torch.Tensor], *, on_devices: bool = True) -> set[str]:
        """Return the names of the parameters with other sampled elements than at :meth:`note`.

        Waits for devices. Without ``on_devices`` it looks only for what their versions and addresses show.
        """
        left = self._left
        if left is None or left.names != list(own):
            return set()
        if not on_devices and any(each.is_cuda for each in left.elements) and not self._by_version(own):
            return set()
        moved = left.addresses != _addresses(own)
        samples = _samples_of(own) if moved else self._samples
        if [sample.names for sample in samples] != [sample.names for sample in self._samples]:
            return set(own)  # of another dtype, or on another device
        return {n for sample, then in zip(samples, left.elements, strict=True) for n in sample.changed(then)}

    def _by_version(self, own: Mapping[str, torch.Tensor]) -> set[str]:
        """Return the names of the parameters that have another version or address than at :meth:`note`."""
        left = self._left
        if left is None or left.names != list(own):
            return set()
        now = zip(own, _addresses(own), _versions(own), strict=True)
        return {
            name
            for (name, address, version), then in zip(now, zip(left.addresses, left.versions, strict=True), strict=True)
            if (address, version) != then
        }


@dataclass(frozen=True)
class _Left:
    """Parameters as this library has left them."""

    names: list[str]
    addresses: list[tuple[int, int]]
    versions: list[int]
    elements: list[torch.Tensor]  # of each sample


@dataclass(frozen=True)
class _Sample:
    """Views of a few elements of each of some parameters, which have one dtype and device."""

    names: Sequence[str]
    views: Sequence[torch.Tensor]

    def now(self) -> torch.Tensor:
        """Return a copy of the elements, flat."""
        return torch.cat(list(self.views))

    def changed(self, before: torch.Tensor) -> list[str]:
        """Return the names of the parameters with other bits than ``before``, an earlier result of :meth:`now`."""
        now = self.now()
        if now.numel() != before.numel():
            return list(self.names)
        differs = (now.view(torch.uint8) != before.view(torch.uint8)).view(now.numel(), -1).any(dim=1)
        if not differs.any():
            return []
        changed: list[str] = []
        begin = 0
        for name, view in zip(self.names, self.views, strict=True):
            if differs[begin : begin + view.numel()].any():
                changed.append(name)
            begin += view.numel()
        return changed


def _addresses(own: Mapping[str, torch.Tensor]) -> list[tuple[int, int]]:
    return [(id(parameter), parameter.data_ptr()) for parameter in own.values()]


def _versions(own: Mapping[str, torch.Tensor]) -> list[int]:
    return [parameter._version for parameter in own.values()]


def _samples_of(own: Mapping[str, torch.Tensor]) -> list[_Sample]:
    """Return the sampled elements of parameters, by dtype and device."""
    by_kind: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
    for name, parameter in own.items():
        if parameter.numel():
            by_kind.setdefault((parameter.dtype, parameter.device), {})[name] = _some(parameter.detach())
    return [_Sample(list(views), list(views.values())) for views in by_kind.values()]


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of some elements, flat: evenly spaced, or of one row where memory is not in C order."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[(0,) * (tensor.dim() - 1)]
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
