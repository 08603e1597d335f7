# SPDX-License-Identifier: Apache-2.0
"""Common base of all-reduce and reduce-scatter: numbers, an operation, factors before and after."""

from __future__ import annotations

from typing import Any

import torch

from agmerge.backends.handshake import Fact
from agmerge.ops import Average, Compression, Sum
from agmerge.runtime.collectives import arguments
from agmerge.runtime.collectives.operation import Operation
from agmerge.runtime.collectives.raw import copied, described, expanded
from agmerge.runtime.process_sets import Group

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
        label = arguments.label(name, call)
        self._cast = arguments.compressor(compression, label)
        self.tensors, self._contexts = map(list, zip(*map(self._cast.compress, self.tensors), strict=True))
        self.op = arguments.reduction(op, average, label)
        self.prescale = arguments.factor(prescale, "prescale_factor", self.label)
        self.postscale = arguments.factor(postscale, "postscale_factor", self.label)
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
