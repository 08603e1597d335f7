"""Memories: rules that add the residual to the next gradient, or drop it.

A memory owns no storage. It writes the work slice that selection reads; the core then subtracts the sent
values, and the work slice is the next residual.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsifiers import kernel
from sparsifiers.canonical import canonical


class Rate(NamedTuple):
    """Momentum that an optimizer has for a tensor."""

    momentum: float  # the factor m
    nesterov: bool = False  # Nesterov's form is asked for


class Momentum(NamedTuple):
    """Momentum of a tensor, as of the last step and as of this one, each of the tensor's shape."""

    before: Tensor  # of the last step; only read
    after: Tensor  # of this step; written
    rate: Rate | None = None  # of the optimizer in this step, for a memory that follows it; None: the memory's own


class Memory(ABC):
    """Rule that makes the vector for selection out of a residual and a gradient.

    A subclass sets `name` and `has_residual` and writes `_compensate`, which may have the arguments `home` and `notes`
    of `compensate`, too. One with a momentum sets `has_momentum`, and writes `mask` and `for_dense_lane`: its momentum
    has the residual's shape and dtype, and `compensate` applies it where there is a residual, else `correct` does.
    """

    name: str  # the canonical name that it is registered under
    has_residual: bool  # the residual is kept; False: it is dropped
    has_momentum: bool = False  # it applies a momentum, in the place of the optimizer
    follows: bool = False  # it takes the momentum of an optimizer that has one, from `Momentum.rate`
    hands_back: bool = False  # the owner of the tensor keeps the residual, and is told what was sent
    _moves: ClassVar[bool] = False  # `_compensate` has the arguments `home` and `notes`

    def __init_subclass__(cls, **options: object) -> None:
        """Find out which arguments a subclass's `_compensate` takes."""
        super().__init_subclass__(**options)
        cls._moves = {"home", "notes"} <= inspect.signature(cls._compensate).parameters.keys()

    def compensate(
        self,
        work: Tensor,
        residual: Tensor | None,
        gradient: Tensor | None,
        momentum: Momentum | None = None,
        size: int = 1,
        home: Tensor | None = None,
        notes: kernel.Noting | None = None,
    ) -> bool | None:
        """Write `work` from one tensor's residual and gradient; neither of these is changed.

        All have the same shape and may have any strides; nothing of the tensor's size is allocated.

        residual: of the dtype of work, sharing no storage with it; None exactly if the memory keeps nothing.
        gradient: of the dtype of work or a narrower one; None: the tensor got no gradient in this step.
        momentum: None exactly if the memory has none that is applied here.
        size: the number of workers.
        home: like work; becomes the gradient, in the same pass where one does all of it.
        notes: take note of the largest of work in that pass, or forget their notes.

        Returns whether all of work is finite, if that is known without another pass over it, else None. ValueError for
        arguments that do not fit.
        """
        if torch.is_grad_enabled():  # a hook under create_graph=True sees gradients that require grad
            with torch.no_grad():
                return self.compensate(work, residual, gradient, momentum, size, home, notes)
        self._check(work, residual, gradient)
        if (self.has_momentum and not self.averages) is (momentum is None):
            wanted = "given" if self.has_momentum else "None: this memory has none"
            raise ValueError(f"{self}: momentum must be {wanted}")
        more = (home, notes) if self._moves else ()
        finite = self._compensate(work, residual, gradient, momentum, size, *more)
        if finite is None or not more:
            if home is not None and gradient is not None:
                home.copy_(gradient)
            if notes is not None:
                notes.forget()
        return finite

    @abstractmethod
    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int
    ) -> bool | None:
        """Write `work`; the arguments were checked. Return whether all of it is finite; None: not checked.

        One with the arguments `home` and `notes` of `compensate` has seen to both unless it returns None.
        """

    def mask(self, momentum: Tensor, indices: Tensor, sent: Tensor) -> None:
        """Clear the momentum, 1-D, at `indices` with a `sent` value that is not 0; an index may come again with 0."""
        return  # no momentum

    def for_dense_lane(self, *, has_residual: bool) -> Memory:
        """Return the memory of dense tensors beside those of this one; `has_residual`: something may be unsent."""
        return Residual() if has_residual else NoMemory()

    @property
    def averages(self) -> bool:
        """Return whether momentum is applied to combined updates, by `correct`, and not to gradients."""
        return self.has_momentum and not self.has_residual

    def correct(self, update: Tensor, momentum: Momentum) -> None:
        """Apply momentum to the combined `update` of dense tensors, in place."""
        raise NotImplementedError(f"{self} has no momentum for what is sent whole")

    def options(self) -> dict[str, object]:
        """Return the hyper-parameters as plain values: memory(name, **options()) is this memory again."""
        return {}

    def __repr__(self) -> str:
        return canonical(self.name, dict(sorted(self.options().items())))

    def _check(self, work: Tensor, residual: Tensor | None, gradient: Tensor | None) -> None:
        if self.has_residual is (residual is None):
            raise ValueError(
                f"{self}: residual must be {'a tensor' if self.has_residual else 'None: this memory drops the rest'}"
            )
        if residual is not None:
            if residual.shape != work.shape or residual.dtype != work.dtype:
                raise ValueError(f"{self}: residual is {_form(residual)}, but work is {_form(work)}; both must agree")
            if residual.data_ptr() == work.data_ptr() and work.numel() > 0:
                raise ValueError(f"{self}: residual and work share storage; the residual must survive a skipped step")
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"{self}: gradient has layout {gradient.layout}; make it dense first (sparse_as_dense=True)"
            )
        same = gradient.dtype == work.dtype or torch.promote_types(work.dtype, gradient.dtype) == work.dtype
        if not same or gradient.shape != work.shape:
            raise ValueError(
                f"{self}: gradient is {_form(gradient)}, but work is {_form(work)}; "
                f"shapes must be equal and work must hold every value of the gradient"
            )


class NoMemory(Memory):
    """Memory that drops the residual: work = gradient.

    With a sparsifier this is biased and usually diverges or stalls; it is for compressors that drop nothing,
    and for ablations.
    """

    name = "none"
    has_residual = False

    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int
    ) -> None:
        if gradient is None:
            work.zero_()
        else:
            work.copy_(gradient)


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

    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int,
        home: Tensor | None = None, notes: kernel.Noting | None = None,
    ) -> bool | None:  # fmt: skip
        assert residual is not None  # checked; narrows the type
        if gradient is None:
            work.copy_(residual)
        elif (finite := kernel.add(work, residual, gradient, home=home, noting=notes)) is not None:
            return finite
        elif gradient.dtype == work.dtype or work.device.type != "cpu":
            torch.add(residual, gradient, out=work)
        else:
            # On the CPU torch.add would first widen the gradient into a temporary. The bits are the same:
            # widening is exact and addition commutes.
            work.copy_(gradient).add_(residual)
        return None


class Decaying(Residual):
    """Memory of residuals that decay in every step: work = decay * residual + gradient.

    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, Algorithm 1: there the residual of
    the steps that workers make by themselves is multiplied by 0.95 before the next is added, and so takes the place of
    a momentum.
    """

    name = "decaying"

    def __init__(self, decay: float) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay must lie in (0, 1], not {decay!r}")
        self.decay = decay

    def options(self) -> dict[str, object]:
        return {"decay": self.decay}

    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int,
        home: Tensor | None = None, notes: kernel.Noting | None = None,
    ) -> bool | None:  # fmt: skip
        assert residual is not None  # checked; narrows the type
        if gradient is not None:
            finite = kernel.add(work, residual, gradient, self.decay, home, notes)
            if finite is not None:
                return finite
        torch.mul(residual, self.decay, out=work)
        if gradient is not None:
            work.add_(gradient)
        return None


class ResidualGTopK(Residual):
    """Memory of residuals in two stages: only values that were sent *and* selected globally leave the residual.

    Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification" (gTop-k), ICDCS 2019. The
    core subtracts from the residual the values that entered the update, with any exchange; so this is the rule of
    `residual`, under the name that scripts know.
    """

    name = "residualgtopk"


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
