# SPDX-License-Identifier: Apache-2.0
"""Detection of a script or an optimizer that averages gradients by torch.distributed, beside this library."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from agmerge.backends import torch_reductions
from agmerge.errors import warn
from agmerge.runtime import workers
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import ParameterTable, local_of

LOOKS = 5  # first steps: those that average gradients do so in each
SHARE = 0.5  # of all elements: so many in tensors of the script's own, such as flattened gradients, are the gradients
TWICE = (
    "AGM136: {who} averages gradients by torch.distributed ({elements} elements per step), and so does "
    "DistributedOptimizer. Gradients are exchanged twice, once uncompressed. {remedy}"
)
OF_OPTIMIZER = (
    "Delete the all_reduce or reduce_scatter in its step(), or wrap the plain optimizer that it uses, such as "
    "torch.optim.AdamW. All ranks then step with the gradients that agmerge averaged."
)
OF_SCRIPT = "Delete it, and the division by the number of workers, because step() does both."


class AveragedTwice:
    """Watch of the first steps of the optimizer of ``members`` for sums of gradients among the ranks of ``exchange``.

    In each step :meth:`stepping` before the optimizer's own step, and :meth:`judge` after it.
    """

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, exchange
        self._looks = LOOKS
        self._in_step = False  # of the optimizer
        self._summed = {False: 0, True: 0}  # elements of gradients in this step, by `_in_step`
        self._others = {False: 0, True: 0}  # elements of other tensors
        self._end: Callable[[], None] | None = None  # of the watch; None: it has not begun

    def begin(self) -> None:
        """Begin to watch, once there are workers."""
        if self._end is None and self._looks:
            note = weakref.WeakMethod(self._note)
            self._end = torch_reductions.watch(lambda ranks, tensors: _weakly(note, ranks, tensors))
            weakref.finalize(self, self._end)

    def stepping(self) -> None:
        """Record that the optimizer begins its own step."""
        self._in_step = True

    def judge(self) -> None:
        """Warn, once, where gradients were summed since the last call. All ranks call it after a step."""
        if not self._looks:
            return
        self._looks -= 1
        total = sum(local_of(parameter).numel() for parameter in self._members.name_all())
        for in_step in (True, False):
            elements, others = self._summed[in_step], self._others[in_step]
            elements += others if others >= SHARE * total else 0
            if elements:
                kind = type(self._members.optimizer).__name__
                who = f"the optimizer, {kind}," if in_step else "the script"
                remedy = OF_OPTIMIZER if in_step else OF_SCRIPT
                self._looks = 0
                warn(TWICE.format(who=who, elements=elements, remedy=remedy), workers.rank())
                break
        self._in_step, self._summed, self._others = False, {False: 0, True: 0}, {False: 0, True: 0}
        if not self._looks and self._end is not None:
            self._end()

    def _note(self, ranks: list[int], tensors: list[torch.Tensor]) -> None:
        """Count a sum of the script's among ``ranks``, in ``tensors``."""
        chosen = self._exchange.agreed.config.sync.process_set.members
        if len(set(ranks).intersection(chosen or ranks)) < 2:
            return  # of shards, or of parts of a model: not among those that have the same parameters
        gradients = [local_of(p.grad) for p in self._members.name_all() if p.grad is not None]
        places = {gradient.data_ptr() for gradient in gradients if gradient.numel() > 1}
        elements = sum(tensor.numel() for tensor in tensors if tensor.data_ptr() in places)
        self._summed[self._in_step] += elements
        if not elements:
            self._others[self._in_step] += max((tensor.numel() for tensor in tensors), default=0)


def _weakly(note: weakref.WeakMethod[Any], *given: object) -> None:
    """Call a method while its object lives."""
    living = note()
    if living is not None:
        living(*given)
