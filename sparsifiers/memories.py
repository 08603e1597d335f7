# SPDX-License-Identifier: Apache-2.0
"""Memories: rules that add the residual to the next gradient, or drop it.

A memory owns no storage. It writes the work slice that selection reads; the core then subtracts the sent
values, and the work slice is the next residual.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from sparsifiers import kernel_message
from sparsifiers.canonical import canonical
from sparsifiers.compensation import (
    NOTHING,
    SUM,
    Alongside,
    Formula,
    Momentum,
    Rate,
    compensate,
)


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
        if self.formula().masks and not kernel_message.mask(momentum, indices, sent):
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
