# SPDX-License-Identifier: Apache-2.0
"""Difference of two tensors that is written where it is needed, without a temporary."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsifiers import kernel


class Difference(NamedTuple):
    """``minuend - subtrahend``, of one shape and device, in the first one's dtype, which has every value of both."""

    minuend: torch.Tensor
    subtrahend: torch.Tensor

    def write(self, out: torch.Tensor, notes: kernel.Noting | None = None) -> bool | None:
        """Write the difference to ``out``, of the minuend's shape and dtype; return whether all is finite, if known.

        ``notes``: record the largest written elements where one pass can do both; else they are forgotten.
        """
        finite = kernel.subtract(out, self.minuend, self.subtrahend, notes)
        if finite is None:
            torch.sub(self.minuend, self.subtrahend, out=out)
            if notes is not None:
                notes.forget()
        return finite

    def tensor(self) -> torch.Tensor:
        """Return the difference as a new tensor, in the strides of the minuend."""
        return self.minuend - self.subtrahend


def as_tensor(gradient: torch.Tensor | Difference | None) -> torch.Tensor | None:
    """Return a gradient as a tensor: a new one of a difference; None stays None."""
    return gradient.tensor() if isinstance(gradient, Difference) else gradient
