# SPDX-License-Identifier: Apache-2.0
"""Samples of updates, for comparison with the gradients when the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from agmerge.step.combined import Combined
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.dtensors import is_dtensor

TENSORS, ELEMENTS = 4, 4096  # compared tensors, elements of each: at a density of 1 % some hundred are not zero


@dataclass(frozen=True)
class Place:
    """Elements of a parameter that are compared: ``count`` of them from ``start`` on, flat."""

    name: str
    parameter: torch.Tensor
    size: int  # elements of the parameter
    start: int
    count: int

    def elements(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return these elements of an update or a gradient, a view; None where its layout differs."""
        if tensor is None or tensor.layout is not torch.strided or not tensor.is_contiguous():
            return None
        if tensor.numel() != self.size:
            return None
        # One operation: in every step, when nothing of this is in a cache, two take twice as long.
        return tensor.as_strided((self.count,), (1,), tensor.storage_offset() + self.start)


def places_in(buffers: MergeBuffers) -> list[Place]:
    """Choose the elements to compare: a slice from the middle of some tensors of one dtype, all over the model.

    None where a tensor is a DTensor, of which a rank has one shard.
    """
    named = list(zip(buffers.slot_of, buffers.flat.parameters, strict=True))
    if any(is_dtensor(parameter) for _, parameter in named):
        return []
    by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in named:
        if parameter.is_floating_point() and parameter.is_contiguous() and parameter.numel():
            by_kind.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    candidates = max(by_kind.values(), key=len, default=[])
    return [_place(*one) for one in candidates[:: max(1, len(candidates) // TENSORS)][:TENSORS]]


def _place(name: str, parameter: torch.Tensor) -> Place:
    size = parameter.numel()
    count = min(size, ELEMENTS)
    return Place(name, parameter, size, (size - count) // 2, count)


@dataclass(frozen=True)
class Sample:
    """Elements of combined gradients, and the tensors they were taken from, with their versions."""

    places: list[Place]
    before: torch.Tensor | None  # flat, all of them; None: not copied
    tensors: list[torch.Tensor]
    versions: list[int]

    def changed(self) -> bool:
        """Return whether a gradient has been written to since, or is another tensor."""
        gradients = [place.parameter.grad for place in self.places]
        seen = zip(gradients, self.tensors, self.versions, strict=True)
        return not all(gradient is tensor and tensor._version == version for gradient, tensor, version in seen)

    def now(self) -> torch.Tensor | None:
        """Return the same elements of the present gradients; None where one is gone, or its layout has changed."""
        parts = [place.elements(place.parameter.grad) for place in self.places]
        there = [part for part in parts if part is not None and part.dtype == self.tensors[0].dtype]
        return torch.cat(there) if len(there) == len(parts) else None


def sample_of(combined: Combined, places: Iterable[Place], *, on_device: bool) -> Sample | None:
    """Return elements of the updates at ``places``; None where no update has any.

    ``on_device``: copy elements on devices, too, which is one more operation in every step.
    """
    there = [(place, combined.updates[place.name]) for place in places]
    parts = [(place, update, place.elements(update)) for place, update in there]
    used = [(place, update, part) for place, update, part in parts if update is not None and part is not None]
    if not used:
        return None
    tensors = [update for _, update, _ in used]
    copies = on_device or tensors[0].device.type == "cpu"
    before = torch.cat([part for _, _, part in used]) if copies else None
    return Sample([place for place, _, _ in used], before, tensors, [tensor._version for tensor in tensors])


@dataclass(frozen=True)
class Norms:
    """Norms of n gradients, their numbers of elements that are not zero, and of all elements: each (n,) in float64."""

    norms: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor


def norms_of(parameters: Iterable[torch.Tensor]) -> Norms:
    """Return the norms of the gradients of ``parameters``; waits for no device. Reads each of them twice.

    They are computed as ``torch.nn.utils.clip_grad_norm_`` does, with the same rounding.
    """
    present = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in present if gradient.layout == torch.strided]
    device = gradients[0].device
    norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(gradients)]
    counts = [gradient.count_nonzero().to(device, torch.float64) for gradient in gradients]
    sizes = torch.tensor([gradient.numel() for gradient in gradients], dtype=torch.float64, device=device)
    return Norms(torch.stack(norms), torch.stack(counts), sizes.clamp_(min=1.0))
