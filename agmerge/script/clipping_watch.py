# SPDX-License-Identifier: Apache-2.0
"""Detection of a script that changes combined gradients, as clipping does, where they are not gradients.

With a memory that applies the momentum before selection ``p.grad`` is a velocity, and changing it is an error. If few
elements are sent, each the sum of several steps, scaling them down is worth a warning. All ranks see the same, so that
nothing is sent. :meth:`ClippingWatch.note` samples the updates when they are there. :meth:`ClippingWatch.look` asks for
the versions of the gradients when the optimizer is about to step, and compares the sample if they are others: versions
alone do not tell, because ``clip_grad_norm_`` writes whether its bound binds or not, and so does a ``GradScaler``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from agmerge.errors import warn
from agmerge.exchanges.message.format import Flag
from agmerge.script.seen_steps import after_closure
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.parameters import is_dtensor

# Samples of updates, to be compared with the gradients when the optimizer steps.

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
    return [place_of(*one) for one in candidates[:: max(1, len(candidates) // TENSORS)][:TENSORS]]


def place_of(name: str, parameter: torch.Tensor) -> Place:
    """Return the place of elements in the middle of a parameter."""
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
    """Return the norms of the gradients of ``parameters``; waits for no device. Reads each of them twice."""
    present = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for gradient in present if gradient.layout == torch.strided]
    device = gradients[0].device
    norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(gradients)]
    counts = [gradient.count_nonzero().to(device, torch.float64) for gradient in gradients]
    sizes = torch.tensor([gradient.numel() for gradient in gradients], dtype=torch.float64, device=device)
    return Norms(torch.stack(norms), torch.stack(counts), sizes.clamp_(min=1.0))


# What a script has made of a few elements: nothing but roundings, or all of them smaller by one factor.

LOOKS = 16  # most norms to compute, each of which reads all gradients
LEAST = 8  # elements that are not zero, below which no factor is derived
EXACT = 1e-12  # relative error of the factors computed here
SMALLEST = 1e-37  # about where processors may flush products to zero


def is_scaled(before: torch.Tensor, after: torch.Tensor, factor: float) -> bool:
    """Return whether each element of ``after`` is that of ``before`` times ``factor``, up to rounding.

    Both are flat, of one floating dtype and one device, for which this waits.
    """
    then, now, of_dtype = before.double(), after.double(), torch.finfo(before.dtype)
    # Three roundings: of the product, and of a loss scale that was put on and taken off.
    relative = 2 * max(of_dtype.eps, EXACT) * abs(factor)
    allowed = then.abs().mul_(relative).add_(max(of_dtype.tiny * of_dtype.eps, SMALLEST))
    return bool(((now - factor * then).abs() <= allowed).all())


def common_factor(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the factor by which each element of ``before`` has become that of ``after``, up to rounding.

    None: there is none, or too few elements are not zero to tell. Arguments are as in :func:`is_scaled`.
    """
    then, now = before.double(), after.double()
    if int(then.count_nonzero()) < LEAST:
        return None
    factor = float(then.dot(now)) / float(then.dot(then))
    return factor if is_scaled(before, after, factor) else None


# The watch.

WHOLE = 0.9  # a dense gradient's norm, relative to the one seen, from which on no warning is given
VELOCITY = (
    "AGM125: Step {step}: the script changed p.grad, by clipping for example. With memory={memory!r} it is a velocity, "
    "up to ten times a gradient. No parameter was stepped. To clip, pass memory=sparsifiers.memory({memory!r}, "
    "clipping=...). To scale, scale the loss. Or use compression='eden' or memory='residual'."
)
NOT_CLIPPED = (
    "AGM125: clip_grad_norm_() is not supported with memory={memory!r}, which makes p.grad a velocity, up to ten times "
    "a gradient. To clip, remove the call and pass memory=sparsifiers.memory({memory!r}, clipping=...). Or use "
    "compression='eden' or memory='residual'."
)
SELECTED = (
    "AGM125: Step {step}: the script scaled p.grad down from norm {norm:.4g} to {bound:.4g}. With {compressor}, it "
    "holds values of up to {steps} steps. An uncompressed gradient's norm is between {low:.4g} and {norm:.4g}, so "
    "clipping is up to {times:.2g}x stronger. Raise the bound, or use compression='eden'."
)


class ClippingWatch:
    """Observer of the updates of one ``exchange``, until the optimizer steps with them.

    Not checked are DTensors, as a rank knows the norm of its shard alone, and steps in which a rank has joined.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self._config: Config | None = None  # for which `_matters` holds
        self._matters = False  # clipping would be an error, or is worth a warning
        self._refusal = ""  # the error text of every step from now on
        self._looks = LOOKS  # norms still to be computed for the warning; 0: also if it was given
        self._buffers: MergeBuffers | None = None  # for which `_places` hold
        self._places: list[Place] = []
        self._sample: Sample | None = None  # of the step under way
        self._step = 0  # its number
        # On a device: samples of the step before, by now computed; whether the script writes to gradients, and
        # elements are worth a copy; and whether it scales them, and norms are worth computing.
        self._seen: tuple[torch.Tensor, torch.Tensor, Norms | None] | None = None
        self._is_changed = self._is_scaled = False

    def note(self, combined: Combined) -> None:
        """Sample the combined gradients, before the script changes them."""
        self._sample = None
        if self._exchange.agreed.config is not self._config:
            self._follow_config()
        if not self._matters or combined.skipped or combined.flags & Flag.JOINED or not combined.is_whole:
            return
        if self._seen is not None:
            self._judge(*self._seen)
        self._step = self._exchange.agreed.steps
        if combined.buffers is not self._buffers:
            self._buffers, self._places = combined.buffers, places_in(combined.buffers)
        self._sample = sample_of(combined, self._places, on_device=self._is_changed)

    @torch.no_grad()
    def look(self) -> None:
        """Compare, once a step, the optimizer's gradients with the sample; raise or warn if they were changed.

        Raises ``ValueError``, on every rank, if they are velocities. On a device that is a step late: nothing waits.
        """
        sample, self._sample = self._sample, None
        if sample is not None and sample.changed():
            self._is_changed = True
            before, after = sample.before, sample.now()
            if before is not None and after is not None:
                if after.device.type == "cpu":
                    self._judge(before, after, None)
                else:
                    self._seen = (before, after, self._norms() if self._is_scaled else None)
        if self._refusal:
            raise ValueError(self._refusal)

    def check_gradients(self) -> None:
        """Raise ``ValueError``, on every rank, where ``p.grad`` is to be clipped and will be a velocity."""
        memory = self._exchange.agreed.config.compression.memory
        if memory.has_momentum:
            raise ValueError(NOT_CLIPPED.format(memory=memory.name))

    def forget(self) -> None:
        """Leave this step out: this library changes the gradients, as the script has asked."""
        self._sample = None

    @contextmanager
    def looking(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Call :meth:`look` when ``optimizer`` steps inside the context, after all other hooks before its step."""
        if self._sample is None and not self._refusal:
            yield
            return
        handle = self.follow(optimizer)
        try:
            yield
        finally:
            handle.remove()

    def follow(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Call :meth:`look` at every step of ``optimizer``, after its closure, until the returned hook is removed."""
        reference = weakref.ref(self)

        def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            watch = reference()
            return None if watch is None else after_closure(watch.look, args, kwargs)

        return optimizer.register_step_pre_hook(before)

    def _follow_config(self) -> None:
        """Decide what clipping means with the present config; drop the findings of another compressor or memory."""
        config, comm = self._exchange.agreed.config, self._exchange.group.comm
        compressor, memory = config.compression.compressor, config.compression.memory
        before = None if self._config is None else self._config.compression
        if before is None or compressor is not before.compressor or memory is not before.memory:
            self._refusal, self._seen = "", None
        selects = compressor.selects and memory.has_residual
        warns = selects and self._looks > 0 and comm is not None and comm.rank == 0
        self._config, self._matters = config, memory.has_momentum or warns

    def _judge(self, before: torch.Tensor, after: torch.Tensor, norms: Norms | None) -> None:
        """Evaluate one step. ``norms``: on a device those computed in that step; None: not computed."""
        self._seen = None
        if is_scaled(before, after, 1.0):
            return
        memory = self._exchange.agreed.config.compression.memory
        if memory.has_momentum:
            self._refusal = VELOCITY.format(step=self._step, memory=memory.name)
            return
        factor = common_factor(before, after)
        if factor is None or not 0.0 < factor < 1.0:
            return
        if norms is None and before.device.type != "cpu":
            self._is_scaled = True
        else:
            self._warn(factor, self._norms() if norms is None else norms)

    def _norms(self) -> Norms:
        assert self._buffers is not None
        return norms_of(self._buffers.flat.parameters)

    def _warn(self, factor: float, seen: Norms) -> None:
        """Warn that gradients were scaled by ``factor``, to the norms ``seen``."""
        # The energy of k of n elements is that of the gradient if steps have nothing in common, since nothing is lost
        # and variances add up. If they agree it is n / k times that, of k sums of n / k steps each.
        bound, squares = float(seen.norms.norm()), seen.norms.square()
        norm = bound / factor
        low = math.sqrt(float((squares * seen.counts / seen.sizes).sum())) / factor
        self._looks = 0 if low < WHOLE * norm else self._looks - 1
        self._matters = self._looks > 0
        if low < WHOLE * norm:
            share = float(seen.counts.sum() / seen.sizes.sum())
            figures = {"bound": bound, "norm": norm, "low": low, "times": norm / low, "steps": math.ceil(1 / share)}
            compressor = self._exchange.agreed.config.compression.compressor.name
            warn(SELECTED.format(step=self._step, compressor=compressor, **figures), 0)  # rank 0 alone looks
