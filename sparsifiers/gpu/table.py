# SPDX-License-Identifier: Apache-2.0
"""Tensors of a slice, as a table, so that one launch takes them all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sparsifiers.gpu.sending import send

BLOCK = 2048  # elements of a task


class TensorTable:
    """Places of a merge buffer's tensors in its slice, cut into tasks of `BLOCK` elements.

    It is a constant of the plan; only the addresses of gradients change from step to step. Tables are
    sent to the device when a kernel first needs them.
    """

    def __init__(self, offsets: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Take where in the slice each tensor begins, and how many elements it has."""
        self.offsets, self.lengths, self._device = tuple(offsets), tuple(lengths), device
        self._are_offsets_aligned = all(offset % 16 == 0 for offset in self.offsets)
        # What `addresses` has returned last, and for which addresses: mostly they are those of the step before.
        self._addresses: tuple[list[int], tuple[Tensor, bool]] | None = None

    @cached_property
    def places(self) -> Tensor:
        """Return offset and length of each tensor: int32[tensors, 2]."""
        rows = list(zip(self.offsets, self.lengths, strict=True))
        return send(rows, torch.empty(len(rows), 2, dtype=torch.int32, device=self._device))

    @cached_property
    def tasks(self) -> Tensor:
        """Return a tensor and the first of its elements that the task takes: int32[tasks, 2]."""
        rows = [(i, start) for i, length in enumerate(self.lengths) for start in range(0, length, BLOCK)]
        return send(rows, torch.empty(len(rows), 2, dtype=torch.int32, device=self._device))

    def check(self, gradients: Sequence[Tensor | None]) -> torch.dtype:
        """Return the dtype of `gradients`; fp32 where there are none.

        ValueError unless they are one a tensor, of its length, contiguous, and all of one dtype of 16 or 32 bits.
        """
        if len(gradients) != len(self.lengths):
            raise ValueError(f"the table has {len(self.lengths)} tensors, got {len(gradients)} gradients")
        dtypes = set()
        for i, (gradient, length) in enumerate(zip(gradients, self.lengths, strict=True)):
            if gradient is not None:
                dtypes.add(gradient.dtype)
                if gradient.numel() != length or not gradient.is_contiguous():
                    raise ValueError(
                        f"gradient {i} has shape {tuple(gradient.shape)} and strides {gradient.stride()}, but the "
                        f"table requires {length} contiguous elements"
                    )
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
            raise ValueError(f"gradients of a table must have one dtype, fp32, fp16 or bf16, got {dtypes}")
        return dtypes.pop() if dtypes else torch.float32

    def addresses(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, bool]:
        """Return where the elements of `gradients` lie, 0 for none: int64[tensors].

        A copy is queued if they have changed since the last call. Also returns whether tensors start where 16 bytes
        do: all addresses are multiples of 16, and all offsets of 16 elements.
        """
        found = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        if self._addresses is None or self._addresses[0] != found:
            aligned = self._are_offsets_aligned and all(place % 16 == 0 for place in found)
            sent = send(found, torch.empty(len(found), dtype=torch.int64, device=self._device))
            self._addresses = found, (sent, aligned)
        return self._addresses[1]


class Momenta(NamedTuple):
    """Momentum of deep gradient compression, as slices like `work`."""

    before: Tensor  # fp32[n], of the last step
    after: Tensor  # fp32[n], written
    factor: float  # m, of all tensors of the table
    nesterov: bool = False
