# SPDX-License-Identifier: Apache-2.0
"""Detection of a script that clips a worker's own gradient, where updates are exchanged.

Averaging removes noise, so that the averaged gradient has a smaller norm than the gradient of one worker. A bound that
is meant for the average then acts too often. A clipping is recognized without a pass over the gradients: a few elements
of one of them become smaller by one factor between ``backward()`` and ``step()``. Scripts scale gradients for other
reasons, too. Two clipped steps have the same norm by different factors, and only then is it computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from agmerge.errors import warn
from agmerge.script.clipping_watch import LOOKS, WHOLE, Place, common_factor, norms_of, place_of
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import ParameterTable, is_dtensor

SAME_NORM = 0.005  # relative difference of the norms of two clipped steps: gradients may have 16 bits
OTHER_FACTOR = 0.02  # least relative difference of their factors
CLIPPED = (
    "AGM126: The script clips the gradients of this worker to the norm {bound:.4g}. With sync='updates' they are "
    "noisier than the average over all workers, whose norm is about {share:.0%} of theirs. So this bound acts like one "
    "of {acts:.4g} for the average. Call optimizer.clip_grad_norm_({bound:.4g}) instead, which estimates the norm of "
    "the average."
)


class PlainClipping:
    """Observer of the gradients of ``members`` between backward passes and steps, on rank 0.

    It copies a few elements of the largest one after each backward pass, from the first step on in which the norm of
    the average is much smaller. It ends with its warning, or when it has found ``LOOKS`` changes of gradients.
    """

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, exchange
        self._looks = LOOKS  # changes of gradients still to be looked at
        self._place: Place | None = None  # of the elements that are compared
        self._hook: RemovableHandle | None = None
        self._sample: tuple[torch.Tensor, int, torch.Tensor] | None = None  # gradient, its version, copied elements
        self._before: tuple[float, float] | None = None  # factor and norm of the last step that was scaled down

    def forget(self) -> None:
        """Leave the gradients of this step out: this library clips them."""
        self._sample = None

    @torch.no_grad()
    def look(self, ratio: float) -> None:
        """Compare the gradients that a step is about to use with those of the backward pass; warn, once.

        ``ratio``: the norm of the averaged gradient, relative to that of this worker's own. On a device this waits
        where gradients have changed.
        """
        sample, self._sample = self._sample, None
        if sample is not None and self._looks:
            self._compare(ratio, *sample)
        comm = self._exchange.group.comm
        if self._hook is None and self._looks and ratio < WHOLE and comm is not None and comm.rank == 0:
            self._follow()

    def _follow(self) -> None:
        """Sample the largest gradient from now on."""
        fitting = [
            parameter
            for parameter in self._members.name_all()
            if parameter.requires_grad
            and parameter.is_leaf
            and parameter.is_floating_point()
            and parameter.is_contiguous()
            and not is_dtensor(parameter)
        ]
        if not fitting:
            self._looks = 0
            return
        largest: Any = max(fitting, key=torch.Tensor.numel)
        self._place = place_of(self._members.name_of(largest), largest)
        self._hook = largest.register_post_accumulate_grad_hook(_sampling(weakref.ref(self)))

    @torch.no_grad()
    def sample(self) -> None:
        """Copy some elements of the gradient that a backward pass has just accumulated."""
        assert self._place is not None
        gradient = self._place.parameter.grad
        elements = self._place.elements(gradient)
        if gradient is not None and elements is not None:
            self._sample = gradient, gradient._version, elements.clone()

    def _compare(self, ratio: float, gradient: torch.Tensor, version: int, before: torch.Tensor) -> None:
        assert self._place is not None
        now = self._place.parameter.grad
        after = self._place.elements(now)
        if now is None or after is None or after.dtype != before.dtype or after.device != before.device:
            return
        if now is gradient and now._version == version:
            return
        self._looks -= 1
        factor = common_factor(before, after)
        if factor is not None and 0.0 < factor < 1.0:
            norm = float(norms_of(self._members.name_all()).norms.norm())
            if self._before is not None and _are_clipped(self._before, (factor, norm)):
                self._looks = 0
                warn(CLIPPED.format(bound=norm, share=ratio, acts=norm * ratio), 0)  # rank 0 alone looks
            self._before = factor, norm
        if not self._looks:
            self.end()

    def end(self) -> None:
        """Stop looking at gradients."""
        self._looks, self._sample = 0, None
        if self._hook is not None:
            self._hook.remove()


def _are_clipped(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether two steps, each with its factor and its norm afterwards, were scaled to one norm."""
    (factor, norm), (its_factor, its_norm) = one, other
    return abs(norm - its_norm) <= SAME_NORM * norm and abs(factor - its_factor) > OTHER_FACTOR * factor


def _sampling(reference: weakref.ref[PlainClipping]) -> Callable[[torch.Tensor], None]:
    """Return the hook that samples a gradient; it keeps nothing alive."""

    def after(_: torch.Tensor) -> None:
        watch = reference()
        if watch is not None:
            watch.sample()

    return after
