# SPDX-License-Identifier: Apache-2.0
"""Low-rank factors: their mathematics, and the bases that ranks keep of them.

Bases are the same on all ranks, staged in a round, and kept by its commit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agmerge.backends import Backend
from agmerge.tensors.layout import Slot, TensorClass
from sparsifiers import LowRank, thin_factors

# Orthonormal rows, without a division by zero: by Gram-Schmidt, which is done twice and is then exact enough.
#
# A row that is zero, not finite, or dependent on those before it becomes a unit vector, less its projection on these
# rows: the one with the smallest projection, of equals the first; so no dimension is lost. The result does not depend
# on the rows' scale. Rows of float32 in CPU memory, of which all ranks must make the same, get the same bits on every
# processor, with the compiled loops (kernel_orthonormal.c) and without them: sums are of double precision and made in
# one order.

CLASSES = 16  # partial sums of a dot product, as in kernel_orthonormal.c
DEPENDENT = 8  # largest remainder of a dependent row, in units of its own rounding
Doubles = NDArray[np.float64]


def orthonormalize(factors: Sequence[torch.Tensor]) -> None:
    """Make the rows of each factor, (r, length) with r <= length, orthonormal, in place."""
    if thin_factors.orthonormalize(factors):
        return
    others: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for factor in factors:
        if factor.dtype == torch.float32 and factor.device.type == "cpu":
            if not thin_factors.orthonormalize([factor]):
                factor.copy_(torch.from_numpy(by_numpy(factor.numpy())))
        else:
            others.setdefault((factor.shape, factor.dtype, factor.device), []).append(factor)
    for alike in others.values():
        torch._foreach_copy_(alike, by_torch(torch.stack(alike)).unbind())


# -- numpy ------------------------------------------------------------------------------------------------------------


def by_numpy(factor: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the orthonormal rows that the compiled loops make of ``factor``, float32 (r, length), bit for bit."""
    basis = np.empty((0, factor.shape[1]))
    with np.errstate(all="ignore"):  # rows that are not finite are replaced
        for row in factor.astype(np.float64):
            before, vector = _dot(row, row), _project_out(row, basis)
            left = _dot(vector, vector)
            if not (left < np.inf and left > (DEPENDENT * np.finfo(np.float32).eps) ** 2 * before):
                covered = np.zeros_like(row)
                for other in basis:
                    covered += other * other
                vector = np.zeros_like(row)
                vector[covered.argmin()] = 1
                vector = _project_out(vector, basis)
                left = _dot(vector, vector)
            unit = (vector * (1 / np.sqrt(left))).astype(np.float32)
            basis = np.vstack([basis, unit])  # as it was rounded
    return basis.astype(np.float32)


def _project_out(vector: Doubles, basis: Doubles) -> Doubles:
    for _ in range(2):
        scales = [_dot(row, vector) for row in basis]
        for scale, row in zip(scales, basis, strict=True):
            vector = vector - scale * row
    return vector


def _dot(a: Doubles, b: Doubles) -> np.float64:
    # LANES partial sums, of which numpy adds each in order, and which are then added in halves.
    products = np.zeros(-(-len(a) // CLASSES) * CLASSES)
    np.multiply(a, b, out=products[: len(a)])
    classes = np.add.reduce(products.reshape(-1, CLASSES), axis=0) + 0.0  # a sum of -0 alone is 0
    while len(classes) > 1:
        classes = classes[: len(classes) // 2] + classes[len(classes) // 2 :]
    return np.float64(classes[0])


# -- torch ------------------------------------------------------------------------------------------------------------


def by_torch(factors: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows for each of ``factors`` (count, r, length), without waiting for their device."""
    count, r, length = factors.shape
    epsilon = torch.finfo(factors.dtype).eps
    rows = factors.to(torch.float64)
    largest = rows.abs().amax(-1, keepdim=True)  # squares of doubles over- and underflow
    rows = rows / torch.where(largest > 0, largest, torch.ones_like(largest))
    basis = torch.zeros_like(rows)
    for k in range(r):
        known = basis[:, :k]
        row = rows[:, k]
        vector = _without(row, known)
        left = vector.norm(dim=-1, keepdim=True)
        independent = (left > DEPENDENT * epsilon * row.norm(dim=-1, keepdim=True)) & (left < torch.inf)
        unit = torch.zeros_like(row).scatter_(-1, known.square().sum(1).argmin(-1, keepdim=True), 1.0)
        vector = torch.where(independent, vector, _without(unit, known))
        basis[:, k] = vector / vector.norm(dim=-1, keepdim=True)
    return basis.to(factors.dtype)


def _without(vectors: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    # vectors (count, length) less their projections on the rows known (count, k, length).
    column = vectors.unsqueeze(-1)
    for _ in range(2):
        column = column - known.transpose(1, 2) @ (known @ column)
    return column.squeeze(-1)


# Factors: the mathematics of PowerSGD (Vogels et al., 2019) and ACP-SGD (Zhang et al., 2023) on a page.
#
# A tensor of two or more dimensions is a matrix D, (n, m): its first dimension by all others. It is sent as two
# factors, left (r, n) and right (r, m), which stand for left^T right. A factor lies in memory row by row, each row a
# vector as long as a column, or a row, of the matrix. One of them is a basis, with orthonormal rows, that all ranks
# have in common; the other one is the projection of a rank's own matrix on it. All ranks compute :func:`product` and
# :func:`orthonormalize` of the same factors; the results have the same bits on every processor.

LEFT, RIGHT = "left", "right"
CACHED = 1 << 17  # elements that torch goes over again and again while they are in the caches


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (n, m) of a tensor of two or more dimensions: its first one, and the product of the others."""
    return shape[0], math.prod(shape[1:])


def rank_of(shape: Sequence[int], rank: int) -> int:
    """Return the rank of a tensor's factors: ``rank``, but no more than its matrix has rows or columns."""
    return min(rank, *matrix_shape(shape))


def initial_basis(seed: int, name: str, length: int, rank: int) -> torch.Tensor:
    """Return orthonormal rows, float32 (rank, length), that depend on ``seed``, ``name`` and these sizes alone."""
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    basis = torch.from_numpy(generator.random((rank, length)).astype(np.float32)).mul_(2).sub_(1)
    orthonormalize([basis])
    return basis


def project(matrix: torch.Tensor, side: str, basis: torch.Tensor, out: torch.Tensor) -> None:
    """Write the factor of ``matrix``, (n, m), for a basis of one side; it is of the other side.

    With a ``basis`` of the RIGHT, (r, m), it is ``basis matrix^T``, (r, n); with one of the LEFT ``basis matrix``.
    """
    if side == RIGHT and not thin_factors.project_on_right(matrix, basis, out):
        torch.mm(basis, matrix.t(), out=out)
    if side == LEFT and not thin_factors.project_on_left(matrix, basis, out):
        torch.mm(basis, matrix, out=out)


def add_and_project(
    matrix: torch.Tensor,
    residual: torch.Tensor,
    gradient: torch.Tensor,
    side: str,
    basis: torch.Tensor,
    out: torch.Tensor,
    *,
    off: bool = False,
    copy: torch.Tensor | None = None,
) -> bool | None:
    """Write ``matrix = residual + gradient`` and its factor, as :func:`project` does, in one pass over memory.

    Returns whether all of the sum is finite; None, with nothing done, where that takes two passes. ``off``: subtract
    the product of basis and factor in the same pass; with a basis of the RIGHT. ``copy``: a tensor of as many elements,
    to which the gradient is copied in that pass.
    """
    if side == LEFT:
        return thin_factors.add_and_project_on_left(matrix, residual, gradient, basis, out, copy)
    if off:
        return thin_factors.add_project_on_right_and_take_off(matrix, residual, gradient, basis, out, copy)
    return thin_factors.add_and_project_on_right(matrix, residual, gradient, basis, out, copy)


def empty_lanes(side: str, basis: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor | None:
    """Return which rows of a matrix, the sum of ``terms``, (n, m), are zero although its ``basis`` is not zero there.

    The product of the basis and any factor has noise in them. On the host: of most rows one element is read. Returns
    bool[n]; None if there are none. With a basis of the RIGHT these are columns: bool[m].
    """
    lanes = [term if side == LEFT else term.t() for term in terms]
    length, across = lanes[0].shape
    first = _added([lane[:, 0] for lane in lanes])
    if int(first.count_nonzero()) == length:
        return None
    left = ((first == 0) & basis.any(0)).nonzero().view(-1)  # rows of which nothing was read but zeros
    start, width = 1, 8
    while left.numel() and start < across:
        part = _added([lane[left, start : start + width] for lane in lanes])
        left = left[part.abs().amax(1) == 0]
        start, width = start + width, 2 * width
    if not left.numel():
        return None
    return torch.zeros(length, dtype=torch.bool).index_fill_(0, left, True)


def empty_lanes_on_device(
    sides: Sequence[str], bases: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return :func:`empty_lanes` of several matrices, one behind the other, without waiting for their device."""
    pairs = zip(sides, matrices, strict=True)
    in_use = _joined([(matrix if side == LEFT else matrix.t()).any(1) for side, matrix in pairs])
    alike = len({len(basis) for basis in bases}) == 1
    covered = _joined(bases, 1).any(0) if alike else _joined([basis.any(0) for basis in bases])
    return covered > in_use


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _added(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def take_off(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Subtract the product of two factors: ``matrix -= left^T right``, in place."""
    if not thin_factors.take_off(matrix, left, right):
        matrix.addmm_(left.t(), right, alpha=-1)


def product(left: torch.Tensor, right: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write ``out = scale * left^T right``, (n, m), on the host added up in one order, each product rounded by itself.

    Where a library chooses the order, as in a product of matrices, ranks on unlike processors drift apart. Devices do
    that: ranks have the same ones.
    """
    if out.device.type != "cpu":
        torch.mm(left.t(), right, out=out).mul_(scale)
    elif not thin_factors.product(left, right, scale, out):
        height = max(1, CACHED // right.shape[1])
        for columns, rows in zip(torch.split(left, height, dim=1), torch.split(out, height), strict=True):
            torch.mul(columns[0].unsqueeze(1), right[0], out=rows)
            for column, row in zip(columns[1:], right[1:], strict=True):
                rows += column.unsqueeze(1) * row
            rows *= scale


class Product(NamedTuple):
    """Product of two factors, left^T right, (n, m), which is not written out."""

    left: torch.Tensor  # (r, n)
    right: torch.Tensor  # (r, m)

    def take_off(self, work: torch.Tensor) -> None:
        """Subtract it from ``work``, 1-D in C order, in place; what lies behind it, padding, stays as it is."""
        n, m = self.left.shape[1], self.right.shape[1]
        take_off(work[: n * m].view(n, m), self.left, self.right)

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor of its own, (n, m)."""
        out = self.left.new_empty(self.left.shape[1], self.right.shape[1])
        product(self.left, self.right, 1.0, out)
        return out


# Bases, from step to step.

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
