"""Difference of two tensors that is written where it is needed, without a temporary."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsifiers import kernel


class Difference(NamedTuple):
    """``end - begin``, of one shape and device, in the dtype of ``end``, which represents every value of both."""

    end: torch.Tensor
    begin: torch.Tensor

    def write(self, out: torch.Tensor, notes: kernel.Noting | None = None) -> bool | None:
        """Write the difference to ``out``, of the shape and dtype of ``end``; return whether all is finite, if known.

        ``notes``: record the largest written elements where one pass can do both; else they are forgotten.
        """
        finite = kernel.subtract(out, self.end, self.begin, notes)
        if finite is None:
            torch.sub(self.end, self.begin, out=out)
            if notes is not None:
                notes.forget()
        return finite

    def tensor(self) -> torch.Tensor:
        """Return the difference as a new tensor, in the strides of ``end``."""
        return self.end - self.begin
