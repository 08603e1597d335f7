# SPDX-License-Identifier: Apache-2.0
"""All-reduce: every rank gets the sum, average, minimum, maximum or product of all ranks' tensors.

Reduce-scatter shares its base, :class:`Reduction`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from agmerge.backends import Handle
from agmerge.backends.handshake import Fact
from agmerge.errors import AGMergeError
from agmerge.ops import Average, Compression, ReduceOp, Sum
from agmerge.runtime.collectives import operation
from agmerge.runtime.collectives.operation import (
    Compressor,
    Operation,
    Pending,
    copied,
    described,
    expanded,
    run,
    run_all,
    start,
)
from agmerge.runtime.process_sets import Group

# Common base: numbers, an operation, factors before and after.

_INTEGERS = {torch.uint8: torch.int32, torch.int8: torch.int32, torch.int16: torch.int32}
TRAVELS = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)  # as they are
_COMPLEX = (torch.complex64, torch.complex128)


class Reduction(Operation):
    """Reduction of all ranks' numbers by ``op``, or ``average``.

    ``prescale``, ``postscale``: factors that the numbers get before, and the result after. ``compression``: the cast of
    messages. Other arguments: as those of :class:`Operation`. Raises ``ValueError`` for dtypes that cannot be combined.
    """

    def __init__(
        self,
        call: str,
        given: Any,
        average: Any,
        name: Any,
        op: Any,
        prescale: Any,
        postscale: Any,
        process_set: Any = None,
        compression: Any = Compression.none,
        *,
        where: Group | None = None,
    ) -> None:
        super().__init__(call, given, name, process_set, where=where)
        label = operation.label(name, call)
        self._cast = operation.compressor(compression, label)
        self.tensors, self._contexts = map(list, zip(*map(self._cast.compress, self.tensors), strict=True))
        self.op = operation.reduction(op, average, label)
        self.prescale = operation.factor(prescale, "prescale_factor", self.label)
        self.postscale = operation.factor(postscale, "postscale_factor", self.label)
        for tensor in self.tensors:
            self._check(tensor)

    def _check(self, tensor: torch.Tensor) -> None:
        """Raise ``ValueError`` unless ``op`` is defined for the dtype of ``tensor``."""
        adds = self.op in (Average, Sum)
        if tensor.dtype == torch.bool:
            what = "sum" if adds else self.op.value
            raise ValueError(f"{self.label}: {what} of a bool tensor is not supported. Convert it to integers.")
        if tensor.dtype not in (*_INTEGERS, *TRAVELS) and not (adds and tensor.dtype in _COMPLEX):
            raise ValueError(
                f"{self.label}: {self.op.value} of {tensor.dtype} is not supported. Convert the tensor first."
            )

    def facts(self) -> list[Fact]:
        """Return the operation, the factors, every tensor's dtype and shape."""
        several = len(self.tensors) > 1
        texts = [described(tensor) + (expanded(tensor) if self.in_place else "") for tensor in self.tensors]
        tensors = [(f"tensor {i}" if several else "tensor", text) for i, text in enumerate(texts)]
        factors = [("prescale_factor", str(self.prescale)), ("postscale_factor", str(self.postscale))]
        return [("op", self.op.value), *factors, *tensors]

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy that a backend can add, scaled."""
        return times(copied(tensor, _INTEGERS.get(tensor.dtype)), self.prescale)

    def finished(self, total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the result, of ``dtype``, from the backend's ``total``."""
        size = self.comm.size
        if self.op is not Average:
            return times(total, self.postscale).to(dtype)
        if not (total.is_floating_point() or total.is_complex()) and self.postscale == 1.0:
            return torch.div(total, size, rounding_mode="trunc").to(dtype)  # exact, as no detour would be
        return times(total, self.postscale * self.op.scale(size)).to(dtype)

    def shaped(self, results: list[torch.Tensor]) -> Any:
        """Return ``results`` as the script gets them, in the dtypes that it gave."""
        pairs = zip(results, self._contexts, strict=True)
        return super().shaped([self._cast.decompress(result, context) for result, context in pairs])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous ``tensor`` in one dimension, complex numbers as pairs."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale ``tensor`` in place and return it. Integers by way of fp64, cut towards zero."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).to(tensor.dtype))


# All-reduce.

NONE = Compression.none


class Allreduce(Reduction):
    """Operation of :func:`allreduce`."""

    kind = "allreduce"

    def begin(self, message: str) -> list[Handle]:
        """Collective. Start one message a tensor."""
        self._given = self.tensors if self.in_place else []
        self._dtypes = [tensor.dtype for tensor in self.tensors]
        self._totals = [self._sent(tensor) for tensor in self.tensors]
        op = Sum if self.op is Average else self.op
        return [
            self.comm.all_reduce(flat(total), f"{message}.{i}" if i else message, op.value)
            for i, total in enumerate(self._totals)
            if total.numel()
        ]

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that travels: the given one, scaled, where it may be overwritten, else a copy."""
        if self.in_place and tensor.dtype in TRAVELS and tensor.is_contiguous() and not tensor.is_neg():
            return times(tensor.detach(), self.prescale)
        return self.prepared(tensor)

    def end(self) -> list[torch.Tensor]:
        """Return new tensors, or the given ones, overwritten."""
        totals, self._totals = self._totals, []
        results = [self.finished(total, dtype) for total, dtype in zip(totals, self._dtypes, strict=True)]
        if not self.in_place:
            return results
        with torch.no_grad():
            for tensor, result in zip(self._given, results, strict=True):
                if result.data_ptr() != tensor.data_ptr():
                    tensor.copy_(result)
                else:
                    torch.autograd.graph.increment_version(tensor)
        return self._given

    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the same reduction of the gradients: of an average the average, of a sum the sum."""
        if self.op not in (Average, Sum):
            raise AGMergeError(f"AGM303: {self.label}: op={self.op.value} is not differentiable. Pass tensor.detach().")
        return reduced_gradients(self, gradients, self.op, self.prescale, self.postscale)


def reduced_gradients(
    operation: Operation, gradients: Sequence[torch.Tensor], op: ReduceOp, *factors: float
) -> list[torch.Tensor]:
    """Collective. Return the all-reduced ``gradients`` of the results of ``operation``. ``factors``: before, after."""
    before, after = factors or (1.0, 1.0)
    named, where = f"gradient of {operation.label}", operation.group
    return run_all(Allreduce("grouped_allreduce", gradients, None, named, op, before, after, where=where))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = NONE,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Collective. Average, or otherwise reduce, the tensors of all ranks. Return a new tensor.

    It is differentiable for averages and sums: gradients are averaged or summed in a collective of their own.

    Args:
        tensor (torch.Tensor): This rank's tensor. Shape and dtype must be the same on all ranks.
        average (bool): Horovod's older form of ``op``. Default: None.
        name (str): Name of the call in errors. Ranks compare it. Default: calls are matched by their order.
        compression (Compression): ``agmerge.Compression.fp16`` or ``bf16`` casts the messages. Default: no cast.
        op (ReduceOp): ``agmerge.Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. Default: ``Average``. An average
            of integers is rounded towards zero, as in Horovod.
        prescale_factor (float): Factor before the reduction. Default: 1.
        postscale_factor (float): Factor after the reduction. Default: 1.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Returns:
        A tensor of the same shape and dtype, equal on all ranks.

    Raises:
        agmerge.RankMismatchError: On all ranks, if their calls differ.
        ValueError: If the tensor cannot be reduced. Also ``TypeError``.
    """
    factors = prescale_factor, postscale_factor
    return run(Allreduce("allreduce", tensor, average, name, op, *factors, process_set, compression))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    """Collective. Reduce as :func:`allreduce`, in place. Return ``tensor``. It is not differentiable.

    The arguments are those of :func:`allreduce`, without ``compression``.
    """
    return run(Allreduce("allreduce_", tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`allreduce` on a copy of ``tensor``. Return a handle for :func:`synchronize`.

    The arguments are those of :func:`allreduce`, without ``compression``.
    """
    factors = prescale_factor, postscale_factor
    return start(Allreduce("allreduce_async", tensor, average, name, op, *factors, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`allreduce_`. Return a handle for :func:`synchronize`.

    Do not use ``tensor`` before that call. The arguments are those of :func:`allreduce`, without ``compression``.
    """
    factors = prescale_factor, postscale_factor
    return start(Allreduce("allreduce_async_", tensor, average, name, op, *factors, process_set))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = NONE,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Collective. Reduce several tensors as :func:`allreduce`, with one agreement for all. Return a list.

    Args:
        tensors (list of torch.Tensor): This rank's tensors.

    The other arguments are those of :func:`allreduce`.
    """
    factors = prescale_factor, postscale_factor
    return run_all(Allreduce("grouped_allreduce", tensors, average, name, op, *factors, process_set, compression))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[torch.Tensor]:
    """Collective. Reduce several tensors as :func:`grouped_allreduce`, in place. Return them. It is not
    differentiable."""
    factors = prescale_factor, postscale_factor
    return run_all(Allreduce("grouped_allreduce_", tensors, average, name, op, *factors, process_set))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`grouped_allreduce` on copies. Return a handle for :func:`synchronize`."""
    factors = prescale_factor, postscale_factor
    return start(Allreduce("grouped_allreduce_async", tensors, average, name, op, *factors, process_set))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Pending:
    """Collective. Start :func:`grouped_allreduce_`. Return a handle for :func:`synchronize`.

    Do not use the tensors before that call.
    """
    factors = prescale_factor, postscale_factor
    return start(Allreduce("grouped_allreduce_async_", tensors, average, name, op, *factors, process_set))
