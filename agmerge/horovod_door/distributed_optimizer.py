# SPDX-License-Identifier: Apache-2.0
"""``hvd.DistributedOptimizer``: agmerge's, with Horovod's arguments, defaults and tolerance."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch

import agmerge
from agmerge.horovod_door.compression import Compression, name_of
from agmerge.horovod_door.timeline import timed
from sparsifiers.custom import adapted

__all__ = ["DistributedOptimizer", "join"]

VARIABLE = "AGMERGE_COMPRESSION"  # a name that counts before the script's word
TRAVEL = "agmerge: horovod.torch is agmerge {version} here. Gradients travel as {what} as {who}.{more}\n"
NO_ADASUM = (
    "op=hvd.Adasum is not in agmerge. Pass op=hvd.Average, and scale the learning rate by hvd.size(), as for Horovod's "
    "own averages. For larger steps with less traffic, see docs/adaptive.md."
)
MORE = " `--compression default` sends up to 8 times less."


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = agmerge.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = agmerge.global_process_set,
) -> Any:
    """Collective. Return an optimizer that averages gradients over workers.

    The arguments are Horovod's, with its defaults. ``compression`` may be an object in GRACE's form, too. Gradients
    travel as they are, unless ``AGMERGE_COMPRESSION`` or ``compression`` says otherwise. As with Horovod, parameters
    that no rank has used get zeros, infinite gradients are applied, so that a ``GradScaler`` finds them, and replicas
    may differ (with a warning).
    """
    if op is agmerge.Adasum:
        raise ValueError(NO_ADASUM)
    word = os.environ.get(VARIABLE)
    name = {"default": "auto"}.get(word, word) if word else name_of(compression)
    given = adapted(compression)  # a class that also has names, or a communicator that holds one, becomes agmerge's
    is_own = name is None and not isinstance(compression, str) and given is compression
    said = str(name or getattr(given, "__name__", given))
    averaged = Averaged(
        optimizer,
        named_parameters,
        agmerge.grace(OwnForm(compression), sums=True) if is_own else name or given,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        sparse_as_dense and not isinstance(optimizer, torch.optim.SparseAdam),  # which steps with sparse ones alone
        process_set,
        dense=[] if is_own else None,
        nonfinite="keep" if name == "none" else None,
        unused="zero",
        diverged="warn",
    )
    _say(said, word)
    _averaged.add(averaged)
    return averaged


class Averaged(agmerge.DistributedOptimizer):
    """Optimizer with an attribute of Horovod's that scripts read."""

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by parameter."""
        members = self._reducer.members
        return {parameter: members.name_of(parameter) for parameter in members.name_all()}

    @property
    def is_connected(self) -> bool:
        """Whether it is connected to the present workers."""
        participation = self._reducer.participation
        return participation.exchange.group.world is not None and not participation.outdated

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Average the gradients and step the inner optimizer; the timeline has a row for it."""
        return timed("allreduce", "gradients", super().step)(closure)


_averaged: WeakSet[Averaged] = WeakSet()  # those that the script has


def join(device: int = -1) -> int:
    """Collective. Take part in the steps of the optimizer on other ranks, until all ranks have called this.

    Without an optimizer, or with several: in sums and averages over all ranks, with zeros on ``device``. Returns the
    rank that has come last.
    """
    own = [one for one in _averaged if one.is_connected]
    return own[0].join() if len(own) == 1 else agmerge.join(device)


class OwnForm:
    """Compressor of the script's own, in the form that agmerge takes: several tensors each, and a name.

    ``given``: has ``compress(tensor) -> (tensor, context)`` and ``decompress(tensor, context)``.
    """

    def __init__(self, given: Any) -> None:
        self._given = given

    def compress(self, tensor: torch.Tensor, name: str) -> tuple[list[torch.Tensor], Any]:
        """Return the tensor that is added up over ranks, and a context."""
        compressed, context = self._given.compress(tensor)
        return [compressed], context

    def decompress(self, tensors: list[torch.Tensor], context: Any) -> torch.Tensor:
        """Return the sum in the old shape and dtype."""
        decompressed: torch.Tensor = self._given.decompress(tensors[0], context)
        return decompressed


_said = ""  # the line that was written last; written by _say alone


def _say(name: str, word: str | None) -> None:
    """Write what gradients travel as, on rank 0, where that was not said yet. ``word``: the user's, if there is one."""
    global _said
    what = {"none": "they are, uncompressed,", "auto": "agmerge's default chooses,"}.get(name, f"{name!r},")
    who = f"{VARIABLE} says" if word else "the script says"
    line = TRAVEL.format(version=agmerge.__version__, what=what, who=who, more=MORE if name == "none" else "")
    if agmerge.rank() == 0 and line != _said:
        sys.stderr.write(line)
    _said = line
