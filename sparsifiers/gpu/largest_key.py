# SPDX-License-Identifier: Apache-2.0
"""Largest key that was written in a step, which tells whether all of it is finite."""

from __future__ import annotations

import torch
from torch import Tensor


class LargestKey:
    """Two places in turn: kernels of a step raise one to the largest key that they write, and clear the other.

    So no launch has to clear anything. All that is written in a step on one device may share them.
    """

    def __init__(self, device: torch.device) -> None:
        self._places = torch.split(torch.zeros(2, dtype=torch.int32, device=device), 1)
        self._magnitudes = [place.view(torch.float32)[0] for place in self._places]
        self._turn, self._is_raised = 0, False

    def begin(self) -> None:
        """Begin a step: its kernels raise the place that those of the step before have cleared."""
        if self._is_raised:
            self._turn, self._is_raised = 1 - self._turn, False

    def use(self) -> None:
        """Record that kernels of this step raise one place, and clear the other."""
        self._is_raised = True

    @property
    def now(self) -> Tensor:
        """Return the place that kernels of this step raise to their largest key: int32[1]."""
        return self._places[self._turn]

    @property
    def later(self) -> Tensor:
        """Return the place of the next step, which kernels of this one set to 0: int32[1]."""
        return self._places[1 - self._turn]

    @property
    def magnitude(self) -> Tensor:
        """Return the magnitude of this step's largest key: fp32, 0-dim, NaN if there was one; always the same view."""
        return self._magnitudes[self._turn]
