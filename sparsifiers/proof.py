# SPDX-License-Identifier: Apache-2.0
"""Measured quality of selections: the residual that they leave, and the rows of a vector that they reach.

ADTopk (HPDC'24) argues with these figures, and its `proofs/` measure them. Convergence with error feedback rests on a
contraction, ||a - C(a)||^2 <= (1 - k/n) ||a||^2 (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS
2018): topk keeps to it at every step, randomk and rows that take turns on average. Ours: coverage and waiting in
training, and the contraction of the vector itself (the reference compares with a reshaped one, and finds no residual).
This is a measuring tool: it reads a device's values and waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparsifiers.base import Beside, Request, Selection, Sparsifier
from sparsifiers.rows import matrices

BLOCK = 1 << 18  # elements that are copied to float64 together, 2 MB
Shapes = Sequence[Sequence[int]]


def contraction(vector: Tensor, selection: Selection) -> Tensor:
    """Return ||a - C(a)||^2 / ||a||^2 in [0, 1]: the fraction of a vector's energy that stays in the residual.

    vector: a, floats [n] of any stride, not changed. The result is float64, 0-dim and on its device; 0 if a is 0.

    Both sums are taken in float64 over copies of BLOCK elements. The residual is summed as such: as the difference of
    ||a||^2 and the sent energy it would be all rounding errors where nearly everything is sent. NaN gives NaN.
    """
    n, chosen = vector.numel(), selection.trimmed()
    bounds = torch.searchsorted(chosen, torch.arange(0, n + BLOCK, BLOCK, device=chosen.device)).tolist()
    total = left = torch.zeros((), dtype=torch.float64, device=vector.device)
    for start, (low, high) in zip(range(0, n, BLOCK), pairwise(bounds), strict=True):
        block = vector.detach()[start : start + BLOCK].to(torch.float64, copy=True)
        total = total + block.dot(block)
        left = left + block.index_fill_(0, chosen[low:high] - start, 0.0).dot(block)
    return torch.where(total == 0, total, left / total)


def row_numbers(indices: Tensor, shapes: Shapes) -> Tensor:
    """Return the row of each index, int64[m] for integers [m], counted through all tensors; -1 where there is none.

    indices lie in the vector that `shapes` make up. Tensors of fewer than two dimensions, as is padding, have no rows.
    """
    table, rows = [], 0
    for matrix in matrices(shapes):
        # The row is place // across % around, be it a row of the C-order matrix or a column.
        across = 1 if matrix.columns else matrix.length
        table.append((matrix.offset, across, matrix.rows, rows if matrix.structured else -1))
        rows += matrix.rows if matrix.structured else 0
    facts = torch.tensor(table, dtype=torch.int64, device=indices.device).view(-1, 4).t().contiguous()
    offset, across, around, first = facts[:, torch.searchsorted(facts[0], indices.long(), right=True) - 1]
    numbers: Tensor = first + (indices - offset) // across % around
    return numbers


def rows_reached(selection: Selection, shapes: Shapes) -> Tensor:
    """Return for each row whether it sends anything: bool[rows], on the device of the indices."""
    rows = sum(matrix.rows for matrix in matrices(shapes) if matrix.structured)
    reached = torch.zeros(rows + 1, dtype=torch.bool, device=selection.indices.device)
    reached[row_numbers(selection.trimmed(), shapes)] = True  # those of no row, -1, meet in the last place
    return reached[:-1]


class Proof:
    """Statistics of the selections of a run, in nine bytes per row. Not for several threads at once."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; for after a re-plan, too: keys that are no more would keep their rows in the figures."""
        self._rows: dict[str, tuple[Shapes, Tensor, Tensor]] = {}  # shapes; per row: steps of silence, ever sent
        self._observations = 0  # steps, summed over vectors
        self._sending = self._turns = 0  # rows that sent, and that could have, summed over observations
        self._wait = 0  # most steps of silence of a row
        self._left = self._most = 0.0  # sum and maximum of the contraction

    def observe(self, key: str, vector: Tensor, selection: Selection, shapes: Shapes) -> None:
        """Add one step of the vector `key`. Waits for its device.

        vector: floats [n] before sent values are subtracted. shapes: of the tensors that it concatenates; where those
        of a key have changed, its rows start over. ValueError if they do not make up n elements.
        """
        parts = tuple(map(tuple, shapes))
        if (covered := sum(map(math.prod, parts))) != vector.numel():
            raise ValueError(f"Proof: shapes of {key!r} hold {covered} elements, but the vector has {vector.numel()}")
        left, sending = float(contraction(vector, selection)), rows_reached(selection, parts).cpu()
        known, silent, sent = self._rows.get(key, (None, sending, sending))
        if known != parts:
            silent, sent = torch.zeros(len(sending), dtype=torch.int64), torch.zeros_like(sending)
            self._rows[key] = parts, silent, sent
        sent |= sending
        silent.add_(1).masked_fill_(sending, 0)
        self._observations += 1
        self._left += left
        self._most = left if left > self._most or math.isnan(left) else self._most
        self._sending += int(sending.sum())
        self._turns += len(sending)
        self._wait = max(self._wait, int(silent.max())) if len(silent) else self._wait

    def figures(self) -> dict[str, float]:
        """Return the figures so far.

        observations: steps, summed over vectors.
        contraction_mean, contraction_max: over these; 0 before the first.
        rows: of all vectors.
        row_coverage: fraction of them that sends in a step, on average; 1 without rows.
        rows_reached: fraction of them that has sent since the start; 1 without rows.
        longest_wait: the most steps that a row went without sending, one after the other, those before its first time
            and after its last included.
        """
        rows = sum(len(sent) for _, _, sent in self._rows.values())
        reached = sum(int(sent.sum()) for _, _, sent in self._rows.values())
        return {
            "observations": self._observations,
            "contraction_mean": self._left / max(1, self._observations),
            "contraction_max": self._most,
            "rows": rows,
            "row_coverage": self._sending / self._turns if self._turns else 1.0,
            "rows_reached": reached / rows if rows else 1.0,
            "longest_wait": self._wait,
        }


class Observed(Sparsifier):
    """Sparsifier that makes the selections of another one, and observes each of them.

    It has the name, text, options, capacity and state of `wrapped`, and makes the same selections; so one rank alone
    may observe, and an observed training goes on as one that is not. Each selection is followed by a pass or two over
    the vector, which wait for its device: remove it again where times are measured.
    """

    wrapped: Sparsifier  # makes the selections, and owns the state

    def __init__(self, sparsifier: Sparsifier) -> None:
        super().__init__(sparsifier.density)
        self.wrapped = sparsifier
        self.name, self.kind, self.memory = sparsifier.name, sparsifier.kind, sparsifier.memory
        self.same_on_all_ranks = sparsifier.same_on_all_ranks
        self._proof = Proof()

    @property
    def unobserved(self) -> Sparsifier:
        """Return `wrapped`."""
        return self.wrapped

    def figures(self) -> dict[str, float]:
        """Return the figures since the last `reset`; for the keys see `Proof.figures`."""
        return self._proof.figures()

    def reset(self) -> None:
        """Forget all observations."""
        self._proof.reset()

    def select(
        self,
        vector: Tensor,
        *,
        k: int | None = None,
        key: str = "",
        step: int = 0,
        shapes: Sequence[Sequence[int]] | None = None,
        scratch: Beside | None = None,
    ) -> Selection:
        """Return the selection of `wrapped` from the same arguments, after observing it. Waits for the device."""
        selection = self.wrapped.select(vector, k=k, key=key, step=step, shapes=shapes, scratch=scratch)
        self._proof.observe(key, vector, selection, [vector.shape] if shapes is None else shapes)
        return selection

    def _select(self, vector: Tensor, request: Request) -> Selection:
        return self.wrapped._select(vector, request)

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        return self.wrapped._select_on_device(vector, request)

    def _capacity(self, numel: int, request: Request) -> int:
        return self.wrapped._capacity(numel, request)

    def options(self) -> dict[str, object]:
        """Return the options of `wrapped`: its name and these make one that is not observed."""
        return self.wrapped.options()

    def state_dict(self) -> dict[str, object]:
        """Return the state of `wrapped`; observations are not saved."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of `wrapped`, whether or not it was observed when that was saved."""
        self.wrapped.load_state_dict(state)

    def snapshot(self) -> Mapping[str, object]:
        """Return a copy of the state of `wrapped`."""
        return self.wrapped.snapshot()

    def retain(self, keys: Iterable[str]) -> None:
        """Forget the state of other keys, and all that was observed: it was of vectors that are no more."""
        self.wrapped.retain(keys)
        self.reset()

    def __repr__(self) -> str:
        return repr(self.wrapped)
