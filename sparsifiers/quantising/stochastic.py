# SPDX-License-Identifier: Apache-2.0
"""Round to one of two neighbouring levels at random, so that the mean is right: QSGD and TernGrad."""

from __future__ import annotations

from torch import Tensor

from sparsifiers.quantising.draws import LEAST, MOST, Draws, as_scale, bounded, steps_of
from sparsifiers.quantising.eden import folded
from sparsifiers.quantising.linear import Integers

# By norm and bits, see `Quantiser.noise`. By the maximum, 2 bits are TernGrad's levels.
NOISE = {
    ("max", 2): 1.44,
    ("max", 4): 0.0322,
    ("max", 8): 9.8e-5,
    ("l2", 2): 11.9,
    ("l2", 4): 0.87,
    ("l2", 8): 0.00266,
}


class QSGD(Integers):
    """Quantiser to integers of 2, 4 or 8 bits, sign included, each rounded up or down at random: ``qsgd``.

    Alistarh, Grubic, Li, Tomioka and Vojnovic, "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NIPS 2017, arXiv 1610.02132, section 3.1, without the code of variable length: sizes have to be known
    before anything is sent. The paper divides by the l2 norm of a block in its proofs, and by its largest magnitude in
    its experiments, which is the default here: at 4 bits `noise` is 0.03 instead of 0.87.

    The mean over draws is right to 2**-17 of a level: a uniform number has 16 bits.
    """

    name = "qsgd"
    unbiased = True

    def __init__(self, bits: int = 4, norm: str = "max") -> None:
        """Check the options.

        bits: of a coordinate, with its sign: 2, 4 or 8, for 1, 7 or 127 levels above 0. norm: the highest
        level, a block's largest magnitude, "max", or its l2 norm, "l2".
        """
        if (norm, bits) not in NOISE:
            raise ValueError(f"{self.name}: bits={bits!r}, norm={norm!r}: expected 2, 4 or 8 bits, and 'max' or 'l2'")
        super().__init__(int(bits))
        self.norm = norm
        self.noise = NOISE[norm, bits]

    def options(self) -> dict[str, object]:
        return {"bits": self.width, "norm": self.norm}

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        highest = bounded(blocks)
        if self.norm == "l2":
            highest = _l2_norm(blocks, highest).clamp(max=MOST)
        scale = as_scale(highest / self.levels, up=True)
        steps = steps_of(blocks, scale)
        lower = steps.floor()
        # The middle of the 2**-16 that a uniform number stands for: rounding up as often as down has no bias.
        uniform = draws.uniform(len(blocks), blocks.shape[1], blocks.device).add_(2.0**-17)
        self._write(scale, lower.add_(steps.sub_(lower) > uniform), out)


class TernGrad(QSGD):
    """Quantiser to -1, 0 and 1, rounded at random, times a block's largest magnitude: ``terngrad``.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017, arXiv
    1705.07878, section 3. Their clipping to 2.5 standard deviations is left out: it is not unbiased.
    """

    name = "terngrad"

    def __init__(self) -> None:
        super().__init__(bits=2)

    def options(self) -> dict[str, object]:
        return {}


def _l2_norm(blocks: Tensor, largest: Tensor) -> Tensor:
    """Return the l2 norm of each of ``blocks``, (n, size): (n, 1). ``largest``, alike, is divided by before squaring.

    So squares neither vanish nor overflow.
    """
    unit = largest.clamp(min=LEAST)
    return folded((blocks / unit).square_()).sqrt_().unsqueeze(1).mul_(unit)
