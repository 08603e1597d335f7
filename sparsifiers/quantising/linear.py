# SPDX-License-Identifier: Apache-2.0
"""Round to the nearest of evenly spaced levels, the largest of which is a block's largest magnitude: int8 and int4.

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", arXiv 2306.10209, where
gradients have 4 bits (qgZ); ByteGrad of Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations",
VLDB 2022, has 8.
"""

from __future__ import annotations

from torch import Tensor

from sparsifiers.kernel_quantising import INT4, INT8
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.integers import Integers
from sparsifiers.quantising.scales import as_scale, bounded, steps_of


class Linear(Integers):
    """Quantiser to integers of 8 or 4 bits, rounded to nearest, of which the largest is 127 or 7.

    No coordinate is read farther from its value than half a step, nor farther than 0 is. That is not unbiased: the
    same vector is read with the same error each time, and values of less than half a step are never read. At 8 bits the
    error is 5e-5 of a block's energy, so no feedback is asked for; where 4 bits stall a training, use `eden-4`.

    Applied to the values that it has read itself it writes the same bytes again.
    """

    unbiased = False

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        scale = as_scale(bounded(blocks) / self.levels)
        self._write(scale, steps_of(blocks, scale).round_(), out)  # halves go to the even integer


class Int8(Linear):
    """Quantiser to integers of 8 bits: ``int8``."""

    name = "int8"
    noise = 4.9e-5

    def __init__(self) -> None:
        super().__init__(width=8)

    def loops(self) -> int:
        return INT8


class Int4(Linear):
    """Quantiser to integers of 4 bits: ``int4``."""

    name = "int4"
    noise = 0.016

    def __init__(self) -> None:
        super().__init__(width=4)

    def loops(self) -> int:
        return INT4
