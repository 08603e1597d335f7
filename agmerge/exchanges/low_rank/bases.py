# SPDX-License-Identifier: Apache-2.0
"""Bases of low-rank tensors: the same on all ranks, staged in a round, and kept by its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import torch

from agmerge.backends import Backend
from agmerge.exchanges.low_rank.factors import LEFT, RIGHT, initial_basis, matrix_shape, rank_of
from agmerge.tensors.layout import Slot, TensorClass
from sparsifiers import LowRank

# Names of bases among the states that are kept from step to step, by side.
KINDS = {LEFT: "left basis", RIGHT: "right basis"}


@dataclass(frozen=True)
class Basis:
    """Orthonormal rows; they span the space on which a matrix is projected."""

    side: str  # LEFT: rows are as long as a column of the matrix; RIGHT: as long as one of its rows
    rows: torch.Tensor  # (r, length), in the dtype of the work; never written again

    @property
    def other_side(self) -> str:
        """Return the side of the factor that a projection gives."""
        return LEFT if self.side == RIGHT else RIGHT


class Bases:
    """Bases of the tensors ``slots``, one each: a step starts from the factors of the last one.

    A round stages its new bases; :meth:`commit` keeps them, :meth:`forget` drops them. A tensor without a kept basis
    has one that is drawn from the compressor's seed and its name. The sides of an alternating compressor are dealt out
    so that a step sends about as many left as right factors: then all steps are about equally long.
    """

    def __init__(self, compressor: LowRank, slots: Iterable[Slot]) -> None:
        self.compressor = compressor
        self._slots = tuple(slots)
        self._kept: dict[str, Basis] = {}  # by name
        self._staged: dict[str, Basis | None] = {}  # None: to be dropped
        self._drawn: dict[str, Basis] = {}  # of tensors of which nothing is kept yet
        self._left_first = _left_first(self._slots, self.rank_of) if compressor.alternates else set()

    def rank_of(self, slot: Slot) -> int:
        """Return the rows of the tensor's factors."""
        return rank_of(slot.shape, self.compressor.rank_of(slot.name))

    def of(self, slot: Slot) -> Basis:
        """Return the tensor's basis as of the last step."""
        basis = self._kept.get(slot.name) or self._drawn.get(slot.name)
        if basis is None:
            _, m = matrix_shape(slot.shape)
            rows = initial_basis(self.compressor.seed, slot.name, m, self.rank_of(slot))
            basis = self._drawn[slot.name] = Basis(RIGHT, rows.to(slot.tensor_class.device, slot.tensor_class.storage))
        return basis

    def elements(self, slot: Slot) -> int:
        """Return how many elements of factors a step sends of the tensor, on an average."""
        both = self.rank_of(slot) * sum(matrix_shape(slot.shape))
        return -(-both // 2) if self.compressor.alternates else both

    def sends_both(self, slot: Slot) -> bool:
        """Return whether a step sends both factors of the tensor, the second one projected on the first."""
        return not self.compressor.alternates or slot.name not in self._kept

    def keeps_first(self, slot: Slot) -> bool:
        """Return whether the first factor makes the next basis, after a step with both; else the second one does."""
        return slot.name in self._left_first

    def stage(self, slot: Slot, basis: Basis) -> None:
        """Remember the tensor's basis from the next commit on; until then its rows may still be written."""
        self._staged[slot.name] = basis

    def drop(self, slot: Slot) -> None:
        """Return to the drawn basis from the next commit on: the matrix is zero in the space of the kept one.

        From a basis that is zero wherever the matrix is not, no later step would find its elements.
        """
        self._staged[slot.name] = None

    def commit(self) -> None:
        """Keep what was staged: the step counts."""
        for name, basis in self._staged.items():
            if basis is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = basis
                self._drawn.pop(name, None)
        self._staged.clear()

    def forget(self) -> None:
        """Drop what was staged: the round comes to nothing."""
        self._staged.clear()

    # -- bases in checkpoints -------------------------------------------------------------------------------------

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the bases that are kept, by kind and name: views."""
        return {(KINDS[basis.side], name): basis.rows for name, basis in self._kept.items()}

    def restore(self, carried: MutableMapping[tuple[str, str], torch.Tensor]) -> None:
        """Take the bases of these tensors out of ``carried``, by kind and name; those of another shape are dropped."""
        for slot in self._slots:
            for side, length in zip((LEFT, RIGHT), matrix_shape(slot.shape), strict=True):
                rows = carried.pop((KINDS[side], slot.name), None)
                if rows is not None and tuple(rows.shape) == (self.rank_of(slot), length):
                    self._kept[slot.name] = Basis(
                        side, rows.to(slot.tensor_class.device, slot.tensor_class.storage, copy=True)
                    )

    def share(self, comm: Backend, timeout: float) -> None:
        """Collective. Broadcast rank 0's bases to all ranks: the others may not have loaded them."""
        sides = torch.zeros(len(self._slots), dtype=torch.int64)
        for number, slot in enumerate(self._slots):
            if slot.name in self._kept:
                sides[number] = 1 + (LEFT, RIGHT).index(self._kept[slot.name].side)
        comm.broadcast(sides, 0, "sides of bases").wait(timeout)
        own, self._kept = self._kept, {}
        warm: dict[TensorClass, list[tuple[Slot, int]]] = {}  # by class: tensors of which rank 0 has a basis, its side
        for slot, code in zip(self._slots, sides.tolist(), strict=True):
            if code:
                warm.setdefault(slot.tensor_class, []).append((slot, code - 1))
        for number, (tensor_class, members) in enumerate(warm.items()):  # one message each
            shapes = [(self.rank_of(slot), matrix_shape(slot.shape)[side]) for slot, side in members]
            flat = torch.empty(
                sum(r * length for r, length in shapes), dtype=tensor_class.storage, device=tensor_class.device
            )
            pieces = torch.split(flat, [r * length for r, length in shapes])
            parts = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            if comm.rank == 0:
                for part, (slot, _) in zip(parts, members, strict=True):
                    part.copy_(own[slot.name].rows)
            comm.broadcast(flat, 0, f"bases {number}").wait(timeout)
            for part, (slot, side) in zip(parts, members, strict=True):
                self._kept[slot.name] = Basis((LEFT, RIGHT)[side], part)


def _left_first(slots: Sequence[Slot], rank: Callable[[Slot], int]) -> set[str]:
    """Return the names of tensors that lead with their left factors; the others lead with the right ones.

    The leading factors have then about as many elements as those that follow: tensors are taken by the difference of
    their two factors, largest first, and each one leads with the factor that evens out the sum so far.
    """
    more = {slot.name: rank(slot) * (shape[0] - shape[1]) for slot in slots for shape in [matrix_shape(slot.shape)]}
    names, surplus = set(), 0  # elements by which the factors that lead are longer so far
    for name in sorted(more, key=lambda name: (-abs(more[name]), name)):
        leads = more[name]
        if abs(surplus - leads) < abs(surplus + leads):
            names.add(name)
            leads = -leads
        surplus += leads
    return names
