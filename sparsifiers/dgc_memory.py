"""Memory of deep gradient compression: momentum is applied before selection, so that none is lost."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers import kernel, kernel_message
from sparsifiers.memories import Memory, Momentum, NoMemory, Rate, Residual

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
            raise ValueError(f"memory 'dgc': momentum must lie in [0, 1), but is {momentum!r}")
        if clipping is not None and not 0.0 < clipping < float("inf"):
            raise ValueError(f"memory 'dgc': clipping must be a norm > 0 or None, but is {clipping!r}")
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

    def _compensate(
        self, work: Tensor, residual: Tensor | None, gradient: Tensor | None, momentum: Momentum | None, size: int,
        home: Tensor | None = None, notes: kernel.Noting | None = None,
    ) -> bool | None:  # fmt: skip
        assert residual is not None and momentum is not None  # checked; narrows the type
        if gradient is not None and self.clipping is None:
            before, after, rate = momentum
            finite = kernel.momentum(work, residual, gradient, before, after, *self.rate_of(rate), home, notes)
            if finite is not None:
                return finite
        # `work` holds the gradient until the velocity overwrites it, so nothing of its size is allocated.
        if gradient is None:
            work.zero_()
        else:
            work.copy_(gradient)
        if self.clipping is not None:
            # Norms of independent gradients add up as squares: each of W workers may have W**-0.5 of the sum's. The
            # quotient is inf for a gradient of zeros, and NaN for one with a NaN: neither is clipped.
            norm = torch.linalg.vector_norm(work)
            work.mul_((self.clipping * size**-0.5 / norm).clamp_(max=1.0).nan_to_num_(nan=1.0))
        if self._advance(work, momentum):
            work.add_(momentum.after).add_(residual)
        else:
            torch.add(residual, momentum.after, out=work)
        return None

    def rate_of(self, rate: Rate | None) -> Rate:
        """Return the momentum that is applied. `rate`: the optimizer's; None: it has none."""
        return Rate(MOMENTUM if self.momentum is None else self.momentum, self.nesterov) if rate is None else rate

    def _advance(self, gradient: Tensor, momentum: Momentum) -> bool:
        """Write the momentum of this step to `momentum.after`; return whether it is in Nesterov's form."""
        factor, nesterov = self.rate_of(momentum.rate)
        if nesterov:
            torch.add(momentum.before, gradient, out=momentum.after).mul_(factor)
        else:
            torch.mul(momentum.before, factor, out=momentum.after).add_(gradient)
        return nesterov

    def mask(self, momentum: Tensor, indices: Tensor, sent: Tensor) -> None:
        if self.masking and not kernel_message.mask(momentum, indices, sent):
            # By product, not by fill: a padding entry has an index that may be a real one elsewhere, and sends 0.
            momentum.scatter_reduce_(0, indices.long(), (sent == 0).to(momentum.dtype), "prod")

    def for_dense_lane(self, *, has_residual: bool) -> Memory:
        return (_MomentumOfRounded if has_residual else _MomentumOfWhole)(self)


class _MomentumOfAverage(Memory):
    """Memory that applies the same momentum to dense tensors, once, on the average of all workers."""

    has_momentum = averages = True

    def __init__(self, memory: DGCMemory) -> None:
        self._memory = memory

    def correct(self, update: Tensor, momentum: Momentum) -> None:
        if self._memory._advance(update.to(momentum.after.dtype), momentum):
            update.add_(momentum.after)
        else:
            update.copy_(momentum.after)


class _MomentumOfWhole(_MomentumOfAverage, NoMemory):
    """The same without residual."""


class _MomentumOfRounded(_MomentumOfAverage, Residual):
    """The same with a residual."""
