# SPDX-License-Identifier: Apache-2.0
"""Error feedback as numbers, and the one function that computes it: in a compiled pass where it can, else by torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsifiers import kernel


class Rate(NamedTuple):
    """Momentum settings of an optimizer for one tensor."""

    momentum: float  # the factor m
    nesterov: bool = False  # Nesterov's form is asked for


class Momentum(NamedTuple):
    """Momentum of one tensor, before and after this step."""

    before: Tensor  # of the last step; only read
    after: Tensor  # of this step; written
    rate: Rate | None = None  # of the optimizer in this step, for a memory that follows it; None: the memory's own


class Formula(NamedTuple):
    """Rule of a memory: work = decay * residual + gradient, without a residual the gradient alone.

    With a momentum u it is u = m u + gradient, work = residual + u; in Nesterov's form u = m (u + gradient), work =
    residual + gradient + u.
    """

    decay: float = 1.0  # 1 with a momentum
    rate: Rate | None = None  # of the momentum; None: there is none
    masks: bool = False  # the momentum is cleared where a coordinate was sent
    clipping: float | None = None  # bound of the norm of a tensor's gradient summed over all workers; None: no bound

    @property
    def has_kernel(self) -> bool:
        """True if `sparsifiers.gpu.compensate` computes it."""
        return self.decay == 1.0 and self.clipping is None


SUM = Formula()


class Alongside(NamedTuple):
    """What is done with a tensor in the pass that writes work, or after it."""

    copy: Tensor | None = None  # like work; becomes the gradient
    notes: kernel.Noting | None = None  # of the largest elements of work

    def finish(self, gradient: Tensor | None) -> None:
        """Copy the gradient, and forget the notes, after work was written otherwise than by a compiled pass."""
        if self.copy is not None and gradient is not None:
            self.copy.copy_(gradient)
        if self.notes is not None:
            self.notes.forget()


NOTHING = Alongside()


def compensate(
    formula: Formula,
    work: Tensor,
    residual: Tensor | None,
    gradient: Tensor | None,
    momentum: Momentum | None = None,
    size: int = 1,
    alongside: Alongside = NOTHING,
) -> bool | None:
    """Compute a formula, by a compiled loop or by torch with the same bits; nothing of a tensor's size is allocated.

    For the arguments and the result see `Memory.compensate`, which has checked them.
    """
    finite = None
    if gradient is not None and residual is not None and formula.clipping is None:
        if momentum is None or formula.rate is None:
            finite = kernel.add(work, residual, gradient, formula.decay, *alongside)
        else:
            finite = kernel.momentum(work, residual, gradient, *momentum[:2], *formula.rate, *alongside)
    if finite is None:
        if formula.rate is not None:
            assert residual is not None and momentum is not None  # checked; narrows the type
            _add_with_momentum(formula, formula.rate, work, residual, gradient, momentum, size)
        elif residual is not None:
            _add(work, residual, gradient, formula.decay)
        else:
            _copy(work, gradient)
        alongside.finish(gradient)
    return finite


def _add_with_momentum(
    formula: Formula, rate: Rate, work: Tensor, residual: Tensor, gradient: Tensor | None, momentum: Momentum, size: int
) -> None:
    _copy(work, gradient)  # the velocity overwrites it
    if formula.clipping is not None:
        # Norms of independent gradients add up as squares: each of W workers may have W**-0.5 of the sum's. The
        # quotient is inf for a gradient of zeros, and NaN for one with a NaN: neither is clipped.
        norm = torch.linalg.vector_norm(work)
        work.mul_((formula.clipping * size**-0.5 / norm).clamp_(max=1.0).nan_to_num_(nan=1.0))
    if advance(work, momentum, rate):
        work.add_(momentum.after).add_(residual)
    else:
        torch.add(residual, momentum.after, out=work)


def _add(work: Tensor, residual: Tensor, gradient: Tensor | None, decay: float) -> None:
    if decay != 1.0:
        torch.mul(residual, decay, out=work)
        if gradient is not None:
            work.add_(gradient)
    elif gradient is None:
        work.copy_(residual)
    elif gradient.dtype == work.dtype or work.device.type != "cpu":
        torch.add(residual, gradient, out=work)
    else:
        # On the CPU torch.add would first widen the gradient into a temporary. The bits are the same: widening is
        # exact and addition commutes.
        work.copy_(gradient).add_(residual)


def _copy(work: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        work.zero_()
    else:
        work.copy_(gradient)


def advance(gradient: Tensor, momentum: Momentum, rate: Rate) -> bool:
    """Write the momentum of this step to `momentum.after`; return whether it is in Nesterov's form."""
    factor, nesterov = rate
    if nesterov:
        torch.add(momentum.before, gradient, out=momentum.after).mul_(factor)
    else:
        torch.mul(momentum.before, factor, out=momentum.after).add_(gradient)
    return nesterov
