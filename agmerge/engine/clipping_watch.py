# SPDX-License-Identifier: Apache-2.0
"""Detection of a script that clips combined gradients where their norm is not the norm of a gradient.

With a memory that applies the momentum before selection ``p.grad`` is a velocity, and clipping it is an error. Where
few elements are sent, each the sum of several steps, it is worth a warning. All ranks see the same, so that nothing is
sent: :meth:`ClippingWatch.note` samples the updates when they are there, and :meth:`ClippingWatch.look` compares the
sample when the optimizer is about to step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from agmerge.engine.sampled_updates import Norms, Place, Sample, norms_of, places_in, sample_of
from agmerge.engine.scaled_down import NormBound, common_factor
from agmerge.engine.seen_steps import after_closure
from agmerge.errors import warn
from agmerge.exchanges.message.format import Flag
from agmerge.step.combined import Combined
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.step.merge_buffers import MergeBuffers

WHOLE = 0.9  # a dense gradient's norm, relative to the one seen, from which on no warning is given
VELOCITY = (
    "AGM125: Step {step}: the script clips to a norm of {bound:.4g} after memory={memory!r} applied momentum, so it "
    "clips a velocity, up to ten times a gradient. No parameter was stepped. Remove the clipping and pass "
    "memory=sparsifiers.memory({memory!r}, clipping=...), or keep it and use compression='eden' or memory='residual'."
)
SELECTED = (
    "AGM125: Step {step}: clipping to norm {bound:.4g} scaled down a gradient of norm {norm:.4g}. With "
    "{compressor}, p.grad holds values of up to {steps} steps. An uncompressed gradient's norm is between {low:.4g} "
    "and {norm:.4g}, so clipping is up to {times:.2g}x stronger. Raise the bound, or use compression='eden'."
)


class ClippingWatch:
    """Observer of the updates of one ``exchange``, until the optimizer steps with them.

    Not checked are DTensors, as a rank knows the norm of its shard alone, and steps in which a rank has joined.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self._config: Config | None = None  # for which `_matters` holds
        self._matters = False  # clipping would be an error, or is worth a warning
        self._bound = NormBound()
        self._refusal = ""  # the error text of every step from now on
        self._warned = False
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
        """Compare, once a step, the optimizer's gradients with the sample; raise or warn where they were clipped.

        Raises ``ValueError``, on every rank, where they are velocities. On a device that is a step late: nothing waits.
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
            self._bound, self._refusal, self._seen = NormBound(), "", None
        selects = compressor.selects and memory.has_residual
        warns = selects and not self._warned and comm is not None and comm.rank == 0
        self._config, self._matters = config, memory.has_momentum or warns

    def _judge(self, before: torch.Tensor, after: torch.Tensor, norms: Norms | None) -> None:
        """Evaluate one step. ``norms``: on a device those computed in that step; None: not computed."""
        self._seen = None
        factor = common_factor(before, after)
        if factor is None or not self._bound.asks(factor, before.dtype):
            return
        if norms is None and before.device.type != "cpu":
            self._is_scaled = True
            return
        norms = self._norms() if norms is None else norms
        norm = float(norms.norms.norm())
        if self._bound.binds(factor, norm, before.dtype):
            self._tell(factor, norm, norms)

    def _norms(self) -> Norms:
        assert self._buffers is not None
        return norms_of(self._buffers.flat.parameters)

    def _tell(self, factor: float, bound: float, seen: Norms) -> None:
        """Refuse or warn: gradients have been clipped to ``bound`` by ``factor``."""
        config, step = self._exchange.agreed.config, self._step
        if config.compression.memory.has_momentum:
            self._refusal = VELOCITY.format(step=step, bound=bound, memory=config.compression.memory.name)
            return
        # The energy of k of n elements is that of the gradient where steps have nothing in common, since nothing is
        # lost and variances add up; where they agree it is n / k times that, of k sums of n / k steps each.
        norm, squares = bound / factor, seen.norms.square()
        low = math.sqrt(float((squares * seen.counts / seen.sizes).sum())) / factor
        if low < WHOLE * norm:
            self._warned, self._matters = True, False
            share = float(seen.counts.sum() / seen.sizes.sum())
            figures = {"bound": bound, "norm": norm, "low": low, "times": norm / low}
            text = SELECTED.format(
                compressor=config.compression.compressor.name, step=step, steps=math.ceil(1 / share), **figures
            )
            warn(text, 0)  # where there can only be a warning, rank 0 alone looks
