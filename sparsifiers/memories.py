# SPDX-License-Identifier: Apache-2.0
"""Memories: rules that add the residual to the next gradient, or drop it.

A memory owns no storage. It writes the work slice that selection reads; the core then subtracts the sent
values, and the work slice is the next residual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsifiers import native
from sparsifiers.base import canonical

# Error feedback as numbers, and the one function that computes it: in a compiled pass where it can, else by torch.


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
    notes: native.Noting | None = None  # of the largest elements of work

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
            finite = native.add(work, residual, gradient, formula.decay, *alongside)
        else:
            finite = native.momentum(work, residual, gradient, *momentum[:2], *formula.rate, *alongside)
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


# Memories.


class Memory:
    """Base class of error feedback: how a residual and a gradient become the vector to select from.

    A subclass sets ``name`` and ``has_residual``, and returns its rule from ``formula``. If a :class:`Formula` cannot
    express the rule, it writes ``_compensate`` instead, which is called for each tensor. A subclass with a momentum
    sets ``has_momentum``, and writes ``for_dense_lane``. The momentum has the shape and dtype of the residual.
    ``compensate`` applies it to tensors with a residual, ``correct`` to others.
    """

    name: str  # the canonical name that it is registered under
    has_residual: bool  # the residual is kept; False: it is dropped
    has_momentum: bool = False  # it applies a momentum, in the place of the optimizer
    follows: bool = False  # it takes the momentum of an optimizer that has one, from `Momentum.rate`
    hands_back: bool = False  # the owner of the tensor keeps the residual, and is told what was sent
    is_formula: ClassVar[bool] = True  # `formula` says all of it; False: a subclass computes something of it by itself

    def __init_subclass__(cls, **options: object) -> None:
        """Find out whether a subclass computes by itself."""
        super().__init_subclass__(**options)
        cls.is_formula = cls._compensate is Memory._compensate and cls.mask is Memory.mask

    def formula(self, rate: Rate | None = None) -> Formula:
        """Return what is computed. `rate`: of the optimizer's momentum for the tensor. None: it has none."""
        return SUM

    def one_formula(self, rates: Iterable[Rate | None]) -> Formula | None:
        """Return the formula of tensors with these rates; None: there are several, or a subclass computes by itself."""
        if not self.is_formula:
            return None
        formulas = {self.formula(rate) for rate in rates}
        return formulas.pop() if len(formulas) == 1 else None

    def compensate(
        self,
        work: Tensor,
        residual: Tensor | None,
        gradient: Tensor | None,
        momentum: Momentum | None = None,
        size: int = 1,
        alongside: Alongside = NOTHING,
    ) -> bool | None:
        """Write `work` from one tensor's residual and gradient. Neither of these is changed.

        All have the same shape and may have any strides. Nothing of the tensor's size is allocated.

        residual: of the dtype of work, sharing no storage with it; None exactly if the memory keeps nothing.
        gradient: of the dtype of work or a narrower one; None: the tensor got no gradient in this step.
        momentum: None exactly if the memory has none that is applied here.
        size: the number of workers.
        alongside: is done in the same pass where one does all of it.

        Returns whether all of work is finite, if that is known without another pass over it, else None. ValueError for
        arguments that do not fit.
        """
        if torch.is_grad_enabled():  # a hook under create_graph=True sees gradients that require grad
            with torch.no_grad():
                return self.compensate(work, residual, gradient, momentum, size, alongside)
        self._check(work, residual, gradient)
        if (self.has_momentum and not self.averages) is (momentum is None):
            wanted = "given" if self.has_momentum else "None: this memory has none"
            raise ValueError(f"{self}: momentum must be {wanted}")
        if self.is_formula:
            formula = self.formula(momentum and momentum.rate)
            return compensate(formula, work, residual, gradient, momentum, size, alongside)
        finite = self._compensate(work, residual, gradient, momentum, size)
        alongside.finish(gradient)
        return finite

    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int
    ) -> bool | None:
        """Write `work`; the arguments were checked. Return whether all of it is finite; None: not checked."""
        return compensate(self.formula(momentum and momentum.rate), work, residual, gradient, momentum, size)

    def mask(self, momentum: Tensor, indices: Tensor, sent: Tensor) -> None:
        """Clear the momentum, 1-D, at `indices` with a `sent` value that is not 0. An index may come again with 0."""
        if self.formula().masks and not native.mask(momentum, indices, sent):
            # By product, not by fill: a padding entry has an index that may be a real one elsewhere, and sends 0.
            momentum.scatter_reduce_(0, indices.long(), (sent == 0).to(momentum.dtype), "prod")

    def for_dense_tensors(self, *, has_residual: bool) -> Memory:
        """Return the memory of dense tensors beside those of this one; `has_residual`: something may be unsent."""
        return Residual() if has_residual else NoMemory()

    @property
    def averages(self) -> bool:
        """Return whether momentum is applied to combined updates, by `correct`, and not to gradients."""
        return self.has_momentum and not self.has_residual

    def correct(self, update: Tensor, momentum: Momentum) -> None:
        """Apply momentum to the combined `update` of dense tensors, in place."""
        raise NotImplementedError(f"{self} does not apply momentum to uncompressed gradients")

    def options(self) -> dict[str, object]:
        """Return the hyper-parameters as plain values: ``memory(name, **options())`` is this memory again."""
        return {}

    def __repr__(self) -> str:
        return canonical(self.name, dict(sorted(self.options().items())))

    def _check(self, work: Tensor, residual: Tensor | None, gradient: Tensor | None) -> None:
        if self.has_residual is (residual is None):
            raise ValueError(
                f"{self}: residual must be {'a tensor' if self.has_residual else 'None: this memory keeps none'}"
            )
        if residual is not None:
            if residual.shape != work.shape or residual.dtype != work.dtype:
                raise ValueError(
                    f"{self}: residual is {_form(residual)}, but work is {_form(work)}. They must be equal."
                )
            if residual.data_ptr() == work.data_ptr() and work.numel() > 0:
                raise ValueError(
                    f"{self}: residual and work must not share storage, because the residual must survive a skipped "
                    "step"
                )
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{self}: a gradient of layout {gradient.layout} is not supported. Make it dense first "
                "(sparse_as_dense=True)."
            )
        same = gradient.dtype == work.dtype or torch.promote_types(work.dtype, gradient.dtype) == work.dtype
        if not same or gradient.shape != work.shape:
            raise ValueError(
                f"{self}: gradient is {_form(gradient)}, but work is {_form(work)}. Shapes must be equal, and work "
                "must hold every value of the gradient."
            )


class NoMemory(Memory):
    """Memory that drops the residual: work = gradient.

    With a sparsifier this is biased and usually diverges or stalls; it is for compressors that drop nothing,
    and for ablations.
    """

    name = "none"
    has_residual = False


class HandBack(NoMemory):
    """Memory that leaves the residual to the owner of the tensor: work = gradient, which has all of it in every step.

    The core tells the owner what was sent. It is for step-ahead error feedback (Xu, Huo and Huang, "Step-Ahead Error
    Feedback for Distributed Training with Compressed Gradient", AAAI 2021). There a worker computes with the residual
    applied to its own parameters, so that these hold it.
    """

    name = "hand-back"
    hands_back = True


class Residual(Memory):
    """Memory that adds the next gradient to the residual: work = residual + gradient, which is error feedback.

    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, Algorithm 1, with the learning rate left to
    the optimizer: the gradient enters as it is, and the learning rate of the step that sends it applies.
    Nothing is weighted or decayed, so what was sent plus the residual is always the sum of all gradients.
    """

    name = "residual"
    has_residual = True


class Decaying(Residual):
    """Memory of residuals that decay in every step: work = decay * residual + gradient.

    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, Algorithm 1: there the residual of
    the steps that workers make by themselves is multiplied by 0.95 before the next is added, and so takes the place of
    a momentum.
    """

    name = "decaying"

    def __init__(self, decay: float) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must be in (0, 1], got {decay!r}")
        self.decay = decay

    def options(self) -> dict[str, object]:
        return {"decay": self.decay}

    def formula(self, rate: Rate | None = None) -> Formula:
        return Formula(self.decay)


class ResidualGTopK(Residual):
    """Memory of residuals in two stages: only values that were sent *and* selected globally leave the residual.

    Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification" (gTop-k), ICDCS 2019. The
    core subtracts from the residual the values that entered the update, with any exchange; so this is the rule of
    `residual`, under the name that scripts know.
    """

    name = "residualgtopk"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


# Memory of deep gradient compression: momentum is applied before selection, so that none is lost.

MOMENTUM = 0.9  # where neither the memory nor the optimizer has one


class DGCMemory(Memory):
    """Memory that applies momentum before selection, clears it where a coordinate was sent, and clips locally.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018. Each tensor has a momentum u and a velocity
    v, which is the residual: u = m u + g, v = v + u (equation 7 and appendix D; nesterov: u = m (u + g), v = v + u +
    g). Selection reads v, and where a coordinate was sent u and v are cleared (masking, section 3.3). Dense tensors
    get the same momentum once, on the average.

    The wrapped optimizer must not apply momentum again: the core sees to it for SGD's, and its weight decay then has no
    momentum either. With masking=False and density 1 the training is that of SGD with momentum m.

    momentum: m in [0, 1); None: the optimizer's in each step, tensor by tensor, `nesterov` included, and 0.9 where it
        has none (in Nesterov's form, where m changes, the factor of the step before counts once more).
    nesterov: Nesterov's form of the momentum, where it is not the optimizer's.
    masking: clear the momentum of a coordinate that is sent.
    clipping: bound of the norm of a tensor's gradient summed over all W workers; each worker clips its own to
        clipping * W**-0.5 before it is accumulated (section 3.2); None: no clipping.
    """

    name = "dgc"
    has_residual = True
    has_momentum = True

    def __init__(
        self,
        momentum: float | None = None,
        nesterov: bool = False,
        masking: bool = True,
        clipping: float | None = None,
    ) -> None:
        if momentum is not None and not 0.0 <= momentum < 1.0:
            raise ValueError(f"memory 'dgc': momentum must be in [0, 1), got {momentum!r}")
        if clipping is not None and not 0.0 < clipping < float("inf"):
            raise ValueError(f"memory 'dgc': clipping must be a norm > 0 or None, got {clipping!r}")
        self.momentum = None if momentum is None else float(momentum)
        self.follows = momentum is None  # the optimizer's momentum applies, where it has one
        self.nesterov, self.masking = bool(nesterov), bool(masking)
        self.clipping = None if clipping is None else float(clipping)

    def options(self) -> dict[str, object]:
        return {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "masking": self.masking,
            "clipping": self.clipping,
        }

    def formula(self, rate: Rate | None = None) -> Formula:
        return Formula(1.0, self.rate_of(rate), self.masking, self.clipping)

    def rate_of(self, rate: Rate | None) -> Rate:
        """Return the momentum that is applied. `rate`: the optimizer's; None: it has none."""
        return Rate(MOMENTUM if self.momentum is None else self.momentum, self.nesterov) if rate is None else rate

    def for_dense_tensors(self, *, has_residual: bool) -> Memory:
        return _MomentumOfAverage(self, has_residual)


class _MomentumOfAverage(Memory):
    """Memory that applies the same momentum to dense tensors, once, on the average of all workers."""

    name = "dgc"
    has_momentum = averages = True

    def __init__(self, memory: DGCMemory, has_residual: bool) -> None:
        self._memory, self.has_residual = memory, has_residual

    def correct(self, update: Tensor, momentum: Momentum) -> None:
        if advance(update.to(momentum.after.dtype), momentum, self._memory.rate_of(momentum.rate)):
            update.add_(momentum.after)
        else:
            update.copy_(momentum.after)
