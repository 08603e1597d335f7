# SPDX-License-Identifier: Apache-2.0
"""Memory of deep gradient compression: momentum is applied before selection, so that none is lost."""

from __future__ import annotations

from torch import Tensor

from sparsifiers.compensation import Formula, Momentum, Rate, advance
from sparsifiers.memories import Memory

MOMENTUM = 0.9  # where neither the memory nor the optimizer has one


class DGCMemory(Memory):
    """Memory that applies momentum before selection, clears it where a coordinate was sent, and clips locally.

    Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression", ICLR 2018. Each tensor has a momentum u and a velocity
    v, which is the residual: u = m u + g, v = v + u (equation 7 and appendix D; nesterov: u = m (u + g), v = v + u +
    g). Selection reads v, and where a coordinate was sent u and v are cleared (masking, section 3.3). Dense tensors
    get the same momentum once, on the average.

    The wrapped optimizer must not apply momentum again: the core sees to it for SGD's, and its weight decay then has no
    momentum either. With masking=False and density 1 the training is that of SGD with momentum m.

    momentum: m in [0, 1); None: the optimizer's in each step, tensor by tensor, `nesterov` included, and 0.9 where it
        has none (in Nesterov's form, where m changes, the factor of the step before counts once more).
    nesterov: Nesterov's form of the momentum, where it is not the optimizer's.
    masking: clear the momentum of a coordinate that is sent.
    clipping: bound of the norm of a tensor's gradient summed over all W workers; each worker clips its own to
        clipping * W**-0.5 before it is accumulated (section 3.2); None: no clipping.
    """

    name = "dgc"
    has_residual = True
    has_momentum = True

    def __init__(
        self,
        momentum: float | None = None,
        nesterov: bool = False,
        masking: bool = True,
        clipping: float | None = None,
    ) -> None:
        if momentum is not None and not 0.0 <= momentum < 1.0:
            raise ValueError(f"memory 'dgc': momentum must be in [0, 1), got {momentum!r}")
        if clipping is not None and not 0.0 < clipping < float("inf"):
            raise ValueError(f"memory 'dgc': clipping must be a norm > 0 or None, got {clipping!r}")
        self.momentum = None if momentum is None else float(momentum)
        self.follows = momentum is None  # the optimizer's momentum applies, where it has one
        self.nesterov, self.masking = bool(nesterov), bool(masking)
        self.clipping = None if clipping is None else float(clipping)

    def options(self) -> dict[str, object]:
        return {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "masking": self.masking,
            "clipping": self.clipping,
        }

    def formula(self, rate: Rate | None = None) -> Formula:
        return Formula(1.0, self.rate_of(rate), self.masking, self.clipping)

    def rate_of(self, rate: Rate | None) -> Rate:
        """Return the momentum that is applied. `rate`: the optimizer's; None: it has none."""
        return Rate(MOMENTUM if self.momentum is None else self.momentum, self.nesterov) if rate is None else rate

    def for_dense_tensors(self, *, has_residual: bool) -> Memory:
        return _MomentumOfAverage(self, has_residual)


class _MomentumOfAverage(Memory):
    """Memory that applies the same momentum to dense tensors, once, on the average of all workers."""

    name = "dgc"
    has_momentum = averages = True

    def __init__(self, memory: DGCMemory, has_residual: bool) -> None:
        self._memory, self.has_residual = memory, has_residual

    def correct(self, update: Tensor, momentum: Momentum) -> None:
        if advance(update.to(momentum.after.dtype), momentum, self._memory.rate_of(momentum.rate)):
            update.add_(momentum.after)
        else:
            update.copy_(momentum.after)
