"""Say which tensors a slice consists of, so that one launch takes them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 2048  # elements of a task


@dataclass(frozen=True)
class TensorTable:
    """Place the tensors of a merge buffer in its slice, and cut them into tasks of `BLOCK` elements.

    It is a constant of the plan; only the addresses of gradients change from step to step.
    """

    offsets: tuple[int, ...]  # of each tensor's first element in the slice
    lengths: tuple[int, ...]  # elements of each tensor
    places: Tensor  # int32[tensors, 2]: both of these, on the device
    tasks: Tensor  # int32[tasks, 2]: a tensor, and the first of its elements that the task takes; on the device
    addresses: Tensor  # int64[tensors]: of the gradients of this step, 0 for none; on the device

    @classmethod
    def of(cls, offsets: Sequence[int], lengths: Sequence[int], device: torch.device) -> TensorTable:
        """Return the table of tensors at `offsets` with `lengths` elements. Waits for a device."""
        tasks = [(i, start) for i, length in enumerate(lengths) for start in range(0, length, BLOCK)]
        return cls(
            tuple(offsets),
            tuple(lengths),
            torch.tensor(list(zip(offsets, lengths, strict=True)), dtype=torch.int32, device=device).view(-1, 2),
            torch.tensor(tasks, dtype=torch.int32, device=device).view(-1, 2),
            torch.zeros(len(lengths), dtype=torch.int64, device=device),
        )

    def check(self, gradients: Sequence[Tensor | None]) -> torch.dtype:
        """Return the dtype of `gradients`; fp32 where there are none.

        ValueError unless they are one a tensor, of its length, contiguous, and all of one dtype of 16 or 32 bits.
        """
        if len(gradients) != len(self.lengths):
            raise ValueError(f"the table has {len(self.lengths)} tensors, but {len(gradients)} gradients were given")
        dtypes = set()
        for i, (gradient, length) in enumerate(zip(gradients, self.lengths, strict=True)):
            if gradient is not None:
                dtypes.add(gradient.dtype)
                if gradient.numel() != length or not gradient.is_contiguous():
                    raise ValueError(
                        f"gradient {i} has shape {tuple(gradient.shape)} and strides {gradient.stride()}; the table "
                        f"wants {length} elements, contiguous"
                    )
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float16, torch.bfloat16}:
            raise ValueError(f"gradients of a table must be of one dtype, fp32, fp16 or bf16, not of {dtypes}")
        return dtypes.pop() if dtypes else torch.float32

    def send_addresses(self, gradients: Sequence[Tensor | None], staging: Tensor) -> bool:
        """Queue a copy of the addresses of `gradients` to the device; tell whether tensors start where 16 bytes do.

        That is so if all addresses are multiples of 16, and all offsets of 16 elements.

        staging: int64[tensors] in pinned memory, which must stay as it is until the copy has been made.
        """
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        staging.copy_(torch.tensor(addresses, dtype=torch.int64))
        self.addresses.copy_(staging, non_blocking=True)
        return all(place % 16 == 0 for place in (*addresses, *self.offsets))


class Momenta(NamedTuple):
    """Hold the momentum of deep gradient compression, as slices like `work`."""

    before: Tensor  # fp32[n], of the last step
    after: Tensor  # fp32[n], written
    factor: float  # m, of all tensors of the table
    nesterov: bool = False
