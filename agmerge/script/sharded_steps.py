# SPDX-License-Identifier: Apache-2.0
"""Refusal of an optimizer that steps a shard of the parameters on each rank, and hands the results round.

Some are known by their class. Others are seen by what their first steps exchange: the parameters, or the gradients.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from agmerge.backends import torch_calls
from agmerge.runtime.collectives import operation
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import ParameterTable, is_dtensor, local_of, optimizers_of

# torch's, and those of nanochat and modded-nanogpt. A Muon may as well step everything on each rank: it is known by its
# arguments `rank` and `world_size`, and if it has none by its steps.
CLASSES = frozenset(
    ("ZeroRedundancyOptimizer", "DistAdam", "DistAdamW", "DistMuon", "DistMuonAdamW", "DistributedMuon")
)
LOOKS = 5  # first steps: an optimizer that exchanges does so in each
SHARE = 0.5  # of all elements: so many in other tensors, such as stacked parameters, are the parameters
INSTEAD = (
    "Pass the plain optimizer that it uses, such as torch.optim.AdamW. If it does not average gradients itself, "
    "sync='gradients' also works."
)
KNOWN = (
    "{kind} steps a shard of the parameters on each rank and sends the result to the others. This is not supported "
    "with sync='updates', because each tensor would learn from the data of one rank only. {instead}"
)
SEEN = (
    "{kind} exchanges parameters or gradients in its own step ({elements} elements): it shares steps between ranks, or "
    "averages gradients. This is not supported with sync='updates', because each tensor would learn from the data of "
    "one rank only. {instead}"
)


class ShardedSteps:
    """Watch of the optimizer of ``members``, in its first steps, for exchanges among the ranks of ``exchange``.

    :meth:`begin` for a group of workers; then in each step :meth:`note`, the optimizer's own step, and :meth:`judge`.
    Calls of torch.distributed and of :mod:`agmerge` are seen, and not those of other libraries.
    """

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, exchange
        self._known = _known(members)  # the name of its class, if that is known to step shards; else empty
        self._looks = LOOKS
        self._thread = 0  # in which the optimizer steps now; 0: it does not
        self._elements = 0  # of parameters and gradients that its step has exchanged
        self._others = 0  # of other tensors
        self._ends: list[Callable[[], None]] = []  # of the watch; empty: it has not begun

    def begin(self, *, together: bool) -> None:
        """Begin to watch, once. Raises ``ValueError`` for a known class.

        ``together``: all workers exchange with each other; else the optimizer may distribute parameters among other
        workers.
        """
        if together and self._known:
            raise ValueError(KNOWN.format(kind=self._known, instead=INSTEAD))
        if self._looks and not self._ends:
            note = weakref.WeakMethod(self._note)
            noted = lambda ranks, tensors: None if (own := note()) is None else own(ranks, tensors)  # noqa: E731
            self._ends = [torch_calls.watch(noted, torch_calls.ALL), operation.watch(noted)]
            for end in self._ends:
                weakref.finalize(self, end)

    def noting(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Return ``closure``, if there is one, followed by :meth:`note`: it is the script's, and no step."""
        if closure is None or not self._looks:
            return closure

        def noted() -> Any:
            loss = closure()
            self.note()
            return loss

        return noted

    def note(self) -> None:
        """Record that the optimizer begins its own step."""
        self._thread, self._elements, self._others = threading.get_ident(), 0, 0

    def judge(self) -> None:
        """Raise ``ValueError`` if the step has exchanged parameters or gradients. All ranks see the same."""
        self._thread = 0
        if not self._looks:
            return
        self._looks -= 1
        total = sum(local_of(parameter).numel() for parameter in self._members.name_all())
        elements = self._elements + (self._others if self._others >= SHARE * total else 0)
        if elements:
            kind = type(self._members.optimizer).__name__
            raise ValueError(SEEN.format(kind=kind, elements=elements, instead=INSTEAD))
        if not self._looks:
            for end in self._ends:
                end()

    def _note(self, ranks: list[int], tensors: list[torch.Tensor]) -> None:
        """Count a collective among ``ranks``, of ``tensors``."""
        chosen = self._exchange.agreed.config.sync.process_set.members
        if self._thread != threading.get_ident() or len(set(ranks).intersection(chosen or ranks)) < 2:
            return  # the latter: of shards, or of parts of a model, not among those that have the same parameters
        parameters = self._members.name_all()
        given = [*parameters, *(parameter.grad for parameter in parameters if parameter.grad is not None)]
        places = {own.data_ptr() for own in map(local_of, given) if own.numel() > 1}
        elements = sum(tensor.numel() for tensor in tensors if tensor.data_ptr() in places)
        self._elements += elements
        if not elements:
            self._others += max((tensor.numel() for tensor in tensors), default=0)


def _known(members: ParameterTable) -> str:
    """Return the name of a class that steps shards of plain parameters among several ranks; empty: none is known."""
    if any(is_dtensor(parameter) for parameter in members.name_all()):
        return ""  # DTensors are sharded already, and the optimizer may distribute them among these ranks
    for optimizer in optimizers_of(members.optimizer):
        arguments = inspect.signature(type(optimizer).__init__).parameters
        named = any(kind.__name__ in CLASSES for kind in type(optimizer).__mro__)
        if (named or {"rank", "world_size"} <= arguments.keys()) and getattr(optimizer, "world_size", None) != 1:
            return type(optimizer).__name__
    return ""
