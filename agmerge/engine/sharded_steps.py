# SPDX-License-Identifier: Apache-2.0
"""Detection of an optimizer that steps a shard of the parameters on each rank, and hands the results round."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from agmerge.backends import Backend
from agmerge.backends.handshake import gather_bytes
from agmerge.tensors.parameters import ParameterTable, is_dtensor, local_of, optimizers_of

# torch's, and those of nanochat and modded-nanogpt. A Muon may as well step everything on each rank: it is known by its
# arguments `rank` and `world_size`, and where it has none by its steps.
CLASSES = frozenset(
    ("ZeroRedundancyOptimizer", "DistAdam", "DistAdamW", "DistMuon", "DistMuonAdamW", "DistributedMuon")
)
LOOKS = 8  # first steps, in which every tensor that is compared should have moved
TENSORS, ELEMENTS = 64, 128  # compared tensors, and evenly spaced elements of each
LEAST = 8  # least number of elements with opposite gradients, all of which have to agree
ENOUGH = 64  # elements of a tensor, with which LEAST are likely in one step
MOVED = 16.0  # roundings of a parameter: shorter steps of opposite gradients may round to the same
LARGE = 1e-3  # of a tensor's largest gradient: smaller ones have no reliable sign
DIGEST = 16  # bytes
INSTEAD = (
    "Pass the plain optimizer that it uses, such as torch.optim.AdamW. If it does not average gradients itself, "
    "sync='gradients' also works."
)
KNOWN = (
    "{kind} steps a shard of the parameters on each rank and sends the result to the others. This is not supported "
    "with sync='updates', because each tensor would learn from the data of one rank only. {instead}"
)
SEEN = (
    "parameter {name!r} moved to the same values on ranks {one} and {other}, although their gradients have opposite "
    "signs: {kind} shares steps between ranks, or averages gradients. This is not supported with sync='updates', "
    "because each tensor would learn from the data of one rank only. {instead}"
)
Codes = npt.NDArray[np.uint8]


class ShardedSteps:
    """Check of the first steps of the optimizer of ``members``, before anything is exchanged.

    :meth:`begin` for a group of workers; then in each step :meth:`note`, the optimizer's own step, and :meth:`compare`.
    """

    def __init__(self, members: ParameterTable) -> None:
        self._members = members
        self._known = _known(members)  # the name of its class, if that is known to step shards; else empty
        self._begun = False
        self._looks = 0  # steps still to be compared
        self._watched: list[torch.Tensor] = []
        self._decided: list[bool] = []  # of each of these: known to be moved by the ranks themselves
        self._before: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # elements of each, and of its gradient

    def begin(self, *, together: bool) -> None:
        """Check the coming steps, once for a group. Raises ``ValueError`` for a known class.

        ``together``: all workers exchange with each other; else the optimizer may distribute parameters among other
        workers.
        """
        if self._begun:
            return
        if together and self._known:
            raise ValueError(KNOWN.format(kind=self._known, instead=INSTEAD))
        floating = [parameter for parameter in self._members.name_all() if parameter.is_floating_point()]
        # By this rank's shards: that of a large tensor may be empty.
        named = [parameter for parameter in floating if local_of(parameter).numel()]
        enough = [parameter for parameter in named if local_of(parameter).numel() >= ENOUGH]
        self._watched = (enough or named)[:: max(1, -(-len(enough or named) // TENSORS))]
        self._decided, self._before = [False] * len(self._watched), []
        self._begun, self._looks = True, LOOKS

    def forget(self) -> None:
        """Forget the group of workers."""
        self._begun = False
        self.stop()

    def stop(self) -> None:
        """Check no more steps, of this group of workers or another one."""
        self._looks, self._watched, self._before = 0, [], []

    def noting(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Return ``closure``, if there is one, followed by :meth:`note`: it makes the gradients of the step."""
        if closure is None or not self._looks:
            return closure

        def noted() -> Any:
            loss = closure()
            self.note()
            return loss

        return noted

    def note(self) -> None:
        """Sample parameters and gradients before the optimizer moves them."""
        if self._looks:
            self._before = [(_some(parameter), _some_gradient(parameter)) for parameter in self._watched]

    def compare(self, comm: Backend, timeout: float) -> None:
        """Collective. Compare, in the first steps, how parameters have moved since :meth:`note`; later do nothing.

        Raises ``ValueError``, the same on every rank, where they were distributed. ``timeout``: seconds.
        """
        if not self._looks:
            return
        self._looks -= 1
        own = np.zeros((TENSORS, ELEMENTS), dtype=np.uint8)
        for row, parameter, (before, gradient) in zip(own, self._watched, self._before, strict=False):
            if gradient is not None:
                row[: before.numel()] = codes_of(before, _some(parameter), gradient)
        names = [self._members.name_of(parameter) for parameter in self._watched]
        digest = hashlib.blake2b(repr(names).encode(), digest_size=DIGEST).digest()
        texts = gather_bytes(comm, digest + own.tobytes(), "updates/first steps", timeout)
        self._before = []
        if len({text[:DIGEST] for text in texts}) > 1:
            return  # the next agreement reports how models differ
        rows = [np.frombuffer(text[DIGEST:], dtype=np.uint8).reshape(own.shape) for text in texts]
        for one, codes in enumerate(rows):
            other = (one + 1) % len(rows)
            opposite, same = opposite_and_same(codes, rows[other])
            for i, name in enumerate(names):
                if LEAST <= opposite[i] == same[i]:
                    kind, ranks = type(self._members.optimizer).__name__, sorted((one, other))
                    text = SEEN.format(name=name, one=ranks[0], other=ranks[1], kind=kind, instead=INSTEAD)
                    raise ValueError(text)
                self._decided[i] |= bool(opposite[i] >= LEAST)
        if all(self._decided) or not self._looks:
            self.stop()


def codes_of(before: torch.Tensor, after: torch.Tensor, gradient: torch.Tensor) -> Codes:
    """Return a byte for each element: the sign of its gradient, and a hash of its bits after the step."""
    before, after, gradient = before.cpu(), after.cpu().contiguous(), gradient.cpu().double()
    then, eps = before.double(), torch.finfo(before.dtype).eps
    moved = (after.double() - then).abs() > MOVED * eps * then.abs()
    counts = moved & (gradient.abs() > LARGE * gradient.abs().max())
    bits = after.view(torch.uint8).numpy().reshape(after.numel(), -1).astype(np.int64)
    hashes = 1 + (bits @ (31 ** np.arange(bits.shape[1], dtype=np.int64))) % 127
    signs = (gradient < 0).numpy().astype(np.int64) << 7
    return np.asarray(np.where(counts.numpy(), signs | hashes, 0), dtype=np.uint8)


def opposite_and_same(one: Codes, other: Codes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return for each tensor how many elements have gradients of opposite signs, and how many of them the same bits."""
    opposite = (one > 0) & (other > 0) & ((one ^ other) >= 128)
    same = opposite & ((one ^ other) == 128)
    return opposite.sum(axis=1), same.sum(axis=1)


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


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of up to ELEMENTS elements of this rank's shard of a tensor, flat, evenly spaced."""
    flat = local_of(tensor).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].clone()


def _some_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the same elements of a parameter's gradient as :func:`_some`; None: none, or of sparse layout."""
    gradient = parameter.grad
    return None if gradient is None or gradient.layout != torch.strided else _some(gradient)
