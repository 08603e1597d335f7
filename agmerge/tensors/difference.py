"""Hand over the difference of two tensors without computing it first: it is written where it is needed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsifiers import kernel
from sparsifiers.candidates import TensorNotes


class Difference(NamedTuple):
    """Stand for ``end - begin``, of one shape and device, in the dtype of ``end``, which holds every value of both."""

    end: torch.Tensor
    begin: torch.Tensor

    def write(self, out: torch.Tensor, notes: TensorNotes | None = None) -> bool | None:
        """Write it to ``out``, of the same shape and in the dtype of ``end``; tell whether all is finite, if known.

        ``notes``: of what is written, where one pass can; else they are forgotten.
        """
        finite = kernel.subtract(out, self.end, self.begin, notes)
        if finite is None:
            torch.sub(self.end, self.begin, out=out)
            if notes is not None:
                notes.forget()
        return finite

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor of its own, in the strides of ``end``."""
        return self.end - self.begin
