# SPDX-License-Identifier: Apache-2.0
"""Check the arguments of sparsifiers, in one place.

Each check raises before anything is computed, and says what was wrong, where (the sparsifier and the key of the
vector) and what to do. `owner` and `key` only name that place; they are formatted when a check fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real

import torch
from torch import Tensor

from sparsifiers.candidates import Candidates
from sparsifiers.gpu import Scratch

NUMEL_LIMIT = 2**31  # indices travel as int32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of vectors
PLAIN = frozenset({int})  # of sizes; a bool is an int, but not of this type


@dataclass(frozen=True)
class Request:
    """Checked arguments of ``select`` or ``capacity``, for the methods of a :class:`Sparsifier` of your own."""

    k: int  # indices that are wanted; 0 only for an empty vector
    key: str  # names the vector, and owns the state that belongs to it; "" in `capacity`
    step: int  # committed exchanges so far, equal on all ranks
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that the vector concatenates; (numel,) where not given
    # Kept beside the vector: on a device scratch of kernels, for a selection that may be made later; on the host
    # candidates noted when it was written. None: nothing, and the selection is made now.
    scratch: Scratch | Candidates | None = None


def budget(density: float, numel: int) -> int:
    """Return how many values a density selects: ``max(1, ceil(density * numel))``.

    The product is rounded once, in float64, so all ranks get the same number.

    Args:
        density (float): Fraction, above 0 and at most 1.
        numel (int): Number of values, below 2**31. For 0 the result is 0.

    Raises:
        ValueError: For numbers outside these ranges. Also ``TypeError``, for anything but numbers.
    """
    density, numel = check_density(density), check_numel("budget", numel)
    return min(numel, max(1, math.ceil(density * numel)))


def check_density(density: float) -> float:
    """Return the density as a Python float. ValueError outside (0, 1], NaN included; TypeError for a non-number."""
    if isinstance(density, bool) or not isinstance(density, Real):
        raise TypeError(f"density must be a number in (0, 1], got {density!r}")
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density must be in (0, 1], got {density!r}. For 1 %, pass 0.01; for everything, 1.0.")
    return float(density)


def check_numel(owner: object, numel: int, key: str = "") -> int:
    """Return the element count as a Python int. ValueError outside [0, 2**31); TypeError for a non-integer."""
    numel = _integer(owner, key, "numel", numel)
    if not 0 <= numel < NUMEL_LIMIT:
        raise ValueError(f"{_where(owner, key)}: numel must be in [0, 2**31), got {numel}. Split the vector.")
    return numel


def check_vector(owner: object, vector: Tensor, key: str) -> None:
    """Raise ValueError or TypeError unless `vector` is a strided 1-D tensor of a dtype in DTYPES.

    Any stride and any device will do; no value is read.
    """
    if not isinstance(vector, Tensor):
        raise TypeError(f"{_where(owner, key)}: vector must be a torch.Tensor, got {type(vector).__name__}")
    if vector.layout is not torch.strided or vector.dim() != 1:
        raise ValueError(
            f"{_where(owner, key)}: vector must be 1-D and strided, got shape {tuple(vector.shape)} and layout "
            f"{vector.layout}. Pass tensor.reshape(-1), after tensor.to_dense() if it is sparse."
        )
    if vector.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"{_where(owner, key)}: vector must be one of {known}, got {vector.dtype}. Convert it.")


def check_request(
    owner: object,
    density: float,
    numel: int,
    *,
    k: int | None,
    key: str,
    step: int,
    shapes: Sequence[Sequence[int]] | None,
    scratch: Scratch | Candidates | None = None,
) -> Request:
    """Return the call as a Request, with k from the density where it is None.

    ValueError or TypeError for an argument outside the contract. Plain ints, which the core passes, are checked
    without a call: this runs for every selection. Only values of other types are converted, or refused.
    """
    if type(numel) is not int or not 0 <= numel < NUMEL_LIMIT:
        numel = check_numel(owner, numel, key)
    if k is None:
        k = budget(density, numel)
    elif type(k) is not int:
        k = _integer(owner, key, "k", k)
    least = 1 if numel else 0
    if not least <= k <= numel:
        raise ValueError(
            f"{_where(owner, key)}: k must be in [{least}, {numel}] for {numel} elements, got {k}. Use "
            "sparsifiers.budget(density, numel)."
        )
    if type(step) is not int:
        step = _integer(owner, key, "step", step)
    if step < 0:
        raise ValueError(f"{_where(owner, key)}: step must be >= 0, the number of committed exchanges, got {step}")
    parts = ((numel,),) if shapes is None else _shapes(owner, key, numel, shapes)
    if scratch is not None and scratch.length != numel:
        raise ValueError(f"{_where(owner, key)}: the scratch has {scratch.length} elements, but the vector has {numel}")
    return Request(k, key, step, parts, scratch)


def _shapes(owner: object, key: str, numel: int, shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes as tuples of ints. ValueError unless they hold `numel` elements in all."""
    parts = tuple(map(tuple, shapes))
    if not PLAIN.issuperset(map(type, chain.from_iterable(parts))):
        parts = tuple(tuple(_integer(owner, key, "a size in shapes", size) for size in shape) for shape in parts)
    covered = sum(map(math.prod, parts))
    if covered != numel:
        raise ValueError(
            f"{_where(owner, key)}: shapes have {covered} elements in {len(parts)} tensors, but the vector has "
            f"{numel}. Pass the shape of every tensor in the vector, in order."
        )
    return parts


def _integer(owner: object, key: str, name: str, value: int) -> int:
    if type(value) is int:  # nearly always; the look at Integral costs as much as twenty of these
        return value
    # A tensor is refused on purpose: reading one that lives on a device would synchronise.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{_where(owner, key)}: {name} must be an int, got {value!r}")
    return int(value)


def _where(owner: object, key: str) -> str:
    return f"{owner}, key {key!r}" if key else f"{owner}"
