"""Exchange gradients that somebody else gathers bucket by bucket, and write the updates where the gradients were.

The buckets are only where gradients lie. Merge buffers, messages and residuals are by parameter, as ever, so that they
stay what they are when the owner of the buckets arranges these anew.
"""

from __future__ import annotations

import torch

from agmerge.backends import status
from agmerge.engine.synchronizer import Synchronizer
from agmerge.errors import AGMergeError
from agmerge.options.config import Config
from agmerge.tensors.parameters import ParameterTable


class BucketReducer(Synchronizer):
    """Combine the gradients of one backward pass after the other: there is no ``step()`` to wait for.

    :meth:`hand_over` for each parameter, in the same order on every rank, then :meth:`combine`. From then on the update
    is the script's, which may clip it, add to it or drop it. ``members``: whose gradients lie in the buckets.
    """

    combines_gradients = True

    def __init__(self, members: ParameterTable, config: Config) -> None:
        super().__init__(members, members, config)
        self._gradients: dict[str, torch.Tensor] = {}  # that were handed over in this pass: views of buckets

    def _averaged_too(self) -> str:
        return ""  # whoever owns the buckets has left the average to this

    @torch.no_grad()
    def hand_over(self, parameter: torch.Tensor, gradient: torch.Tensor, *, used: bool = True) -> None:
        """Collective. Take the gradient of a parameter, and send the merge buffers that are complete now.

        ``gradient``: of the shape of ``parameter``, not to be changed before :meth:`combine`, which writes the update
        there. ``used``: whether this rank has one; without it ``gradient`` is zero.
        """
        if not self._gradients:
            status.current().enter("is in a backward pass", self.exchange.step)
        name = self.members.name_of(parameter)
        self._gradients[name] = gradient
        self.exchange.ready(name, self.scaling.divided(parameter, gradient) if used else None)

    @torch.no_grad()
    def combine(self) -> None:
        """Collective. Send what is left, receive, and write the updates where gradients were; the pass has ended.

        Raises :class:`agmerge.NonFiniteError` on every rank, as ``nonfinite=`` has it.
        """
        status.current().enter("combines gradients", self.exchange.step)
        combined = self.exchange.finish()
        self.flags_of_all = combined.flags
        with self.exchange.breaking():
            for name, update in combined.updates.items():
                if update is not None:
                    self.scaling.restore(self._gradients[name].copy_(update))
            if combined.skipped:
                self.exchange.discard()
            else:
                self.exchange.commit()
        self._end_pass()
        if not combined.skipped:
            self.end_exchange()

    def discard(self) -> None:
        """Forget the pass that has begun: nothing of it is kept."""
        super().discard()
        self._end_pass()

    def _end_pass(self) -> None:
        self._gradients = {}
        self.scaling.clear()

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: not in a backward pass."""
        if self._gradients:
            raise AGMergeError(f"{what} was called in a backward pass; call it after backward()")
