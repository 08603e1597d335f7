# SPDX-License-Identifier: Apache-2.0
"""Contracts of compressors: the base class of all, one by name of parameters, and `Sparsifier` with its `Selection`."""

from __future__ import annotations

import enum
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsifiers.name_patterns import compiled

# Arguments of sparsifiers, checked in one place before anything is computed. Errors say what was wrong, where (the
# sparsifier and the key of the vector) and what to do. `owner` and `key` only name that place; they are formatted when
# a check fails.

NUMEL_LIMIT = 2**31  # indices travel as int32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of vectors
PLAIN = frozenset({int})  # of sizes; a bool is an int, but not of this type


class Beside(Protocol):
    """Memory kept beside a vector: `gpu.Scratch` of kernels on a device, on the host `largest.Candidates`."""

    length: int  # elements of the vector


@dataclass(frozen=True)
class Request:
    """Checked arguments of ``select`` or ``capacity``, for the methods of a :class:`Sparsifier` of your own."""

    k: int  # indices that are wanted; 0 only for an empty vector
    key: str  # names the vector, and owns the state that belongs to it; "" in `capacity`
    step: int  # committed exchanges so far, equal on all ranks
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that the vector concatenates; (numel,) where not given
    # Kept beside the vector: on a device scratch of kernels, for a selection that may be made later; on the host
    # candidates noted when it was written. None: nothing, and the selection is made now.
    scratch: Beside | None = None


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
    scratch: Beside | None = None,
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


# One text for one configuration: ranks compare these texts to find out that their settings differ.


def canonical(name: str, options: Mapping[str, object]) -> str:
    """Return `name(option=value, ...)`, with the options in the order given: the same text in all processes.

    Values are None, bool, int, float, str or (nested) tuples of these; anything else is a TypeError, because
    the text of an arbitrary object may hold its address.
    """
    return f"{name}({', '.join(f'{option}={_text(name, option, value)}' for option, value in options.items())})"


def _text(name: str, option: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(name, option, part) for part in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, float):
        return float.__repr__(value)  # a numpy scalar is a float, and its own text names numpy
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    raise TypeError(
        f"{name}: option {option!r} is {value!r}, but options() must return plain values (None, bool, int, float, "
        "str, tuple), which are written in the same way on every rank"
    )


# Compressors, the one type that the code needs which plans, checks and saves a training. A sparsifier sends some of the
# elements of a vector, a cast or a quantiser sends all of them in fewer bits, a low-rank compressor sends two thin
# factors.


class Kind(enum.Enum):
    """How the gradient of a tensor is sent."""

    DENSE = "dense"  # every element, perhaps in fewer bits: an all-reduce
    SPARSE = "sparse"  # some elements and where they stand: an exchange of indices and values
    LOW_RANK = "low-rank"  # two thin factors of a matrix, each combined by an all-reduce
    QUANTIZED = "quantized"  # every element in few bits, block by block: shards are gathered, read and added up
    QUANTISED = "quantized"  # the old spelling of the same member
    CUSTOM = "custom"  # tensors that a script's own class makes of it: they are gathered, or added up

    @classmethod
    def _missing_(cls, value: object) -> Kind | None:
        """Return the member of a value in its old spelling: pickles have it."""
        return cls.QUANTIZED if value == "quantised" else None


class Compressor(ABC):
    """Base class of all compressors.

    A subclass sets ``name`` and ``kind``. The other methods have defaults for a compressor without options that sends
    all values and has no state. If yours has options, return them from ``options``. If it has state, write
    ``state_dict``, ``load_state_dict`` and ``retain``, and also ``snapshot`` if ``state_dict`` would wait for a device
    (docs/extend.md).
    """

    name: str  # the canonical name, as in compression=name
    kind: Kind  # decides the class of a tensor, and with it which exchange carries it
    memory: str = "none"  # name of the memory that it is meant to be used with; "none" drops the residual
    same_on_all_ranks: bool = False  # all ranks choose the same coordinates from (seed, key, step) alone: no vote
    density: float = 1.0  # elements sent / elements, in (0, 1]
    rank: int | tuple[tuple[str, int], ...] | None = None  # columns of factors, or by pattern; None: it sends none
    dtype: torch.dtype | None = None  # that dense tensors are cast to; None: they travel in their own
    has_kernels: bool = False  # where a device has kernels, they make its selections: it may be given a `Scratch`
    takes_candidates: bool = False  # on the host it sends the k largest exactly: it may be given `Candidates`
    candidates: tuple[str, ...] = ()  # names of those of which training takes one, the most exact first; (): no choice
    until_chosen: str = ""  # the one of these that is used before one is chosen
    most_workers: Mapping[str, int] = MappingProxyType({})  # by candidate: with how many workers it may be chosen

    @property
    def kinds(self) -> frozenset[Kind]:
        """Return its kind; several, where it compresses some tensors otherwise than others."""
        return frozenset((self.kind,))

    def of_tensor(self, name: str) -> Compressor:
        """Return the compressor of the tensor of this name: itself, or one of those that it consists of."""
        return self

    def part(self, kind: Kind) -> Compressor | None:
        """Return its compressor of a kind: itself, one of those that it consists of, or None."""
        return self if kind in self.kinds else None

    def replaced(self, part: Compressor) -> Compressor:
        """Return the same with `part` in the place of its compressor of that kind."""
        return part

    @property
    def unobserved(self) -> Compressor:
        """Return it without its observer, if it has one (`sparsifiers.proof`)."""
        return self

    def figures(self) -> dict[str, float]:
        """Return figures of its selections, by name. Empty if they are not observed."""
        return {}

    def name_patterns(self) -> Mapping[str, Sequence[re.Pattern[str]]]:
        """Return the patterns for full names of tensors that it was given, by option."""
        return {}

    def is_for(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of this dtype are compressed. Others travel uncompressed."""
        return True

    def shrinks(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this name and shape is sent with fewer elements or bits."""
        return True

    @property
    def selects(self) -> bool:
        """Return whether only some elements are sent of some tensors, which a sparsifier chooses."""
        return Kind.SPARSE in self.kinds

    @property
    def compresses(self) -> bool:
        """Return whether it sends less than all elements of some tensors, however many bits these have."""
        return self.kinds != {Kind.DENSE}

    def options(self) -> dict[str, object]:
        """Return the hyper-parameters, `density` aside, as plain values: the same ones make this compressor again."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """Return the state that a restart needs for the next steps to be the same. Empty if there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of `state_dict`. ValueError if it belongs to another kind of compressor."""
        if state:
            raise ValueError(f"{self} has no state, got {sorted(state)}. Load it into the compressor that saved it.")

    def retain(self, keys: Iterable[str]) -> None:
        """Forget the state of every key that is not in `keys`. Called after a re-plan."""
        return  # nothing is remembered

    def snapshot(self) -> Mapping[str, object]:
        """Return a copy of the state for `load_state_dict` in this process. Waits for no device."""
        return self.state_dict()

    def __repr__(self) -> str:
        return canonical(self.name, dict(sorted(self.options().items())))


class ByName(Compressor):
    """Compress different parameters with different compressors.

    The first pattern that matches the full parameter name decides. Parameters without a match get the last compressor.
    At most one compressor of each kind may compress. Use a compressor of ``Kind.DENSE`` to leave parameters
    uncompressed.

    Args:
        parts (list of pairs): Regular expressions and their compressors.

    Raises:
        ValueError: Without parts, with two compressors of one kind, or for an invalid pattern.
    """

    name = "by-name"

    def __init__(self, parts: Sequence[tuple[str, Compressor]]) -> None:
        """Check the parts, as the class says."""
        try:
            self._parts = tuple((compiled(pattern), part) for pattern, part in parts)
        except ValueError as error:
            raise ValueError(f"compression by pattern: {error}") from None
        by_kind: dict[Kind, Compressor] = {}
        for _, part in self._parts:
            if repr(by_kind.setdefault(part.kind, part)) != repr(part):
                raise ValueError(
                    f"compression by pattern: {by_kind[part.kind]!r} and {part!r} are of the same kind, "
                    f"{part.kind.value}. Use at most one of each kind."
                )
        if not by_kind.keys() - {Kind.DENSE}:
            raise ValueError("compression by pattern: expected at least one sparsifier or low-rank compressor")
        self._by_kind = by_kind
        sparse = by_kind.get(Kind.SPARSE)
        memories = [part.memory for kind, part in by_kind.items() if kind is not Kind.DENSE]
        self.memory = next((memory for memory in memories if memory != "residual"), "residual")
        self.same_on_all_ranks = sparse is not None and sparse.same_on_all_ranks
        self.density = 1.0 if sparse is None else sparse.density
        self.rank = by_kind[Kind.LOW_RANK].rank if Kind.LOW_RANK in by_kind else None

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(self._by_kind) - {Kind.DENSE}

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """Return the patterns, in the given order."""
        return tuple(pattern for pattern, _ in self._parts)

    def name_patterns(self) -> Mapping[str, Sequence[re.Pattern[str]]]:
        of_parts = [patterns for part in self._by_kind.values() for patterns in part.name_patterns().items()]
        return {**dict(of_parts), "compression": self.patterns}

    def of_tensor(self, name: str) -> Compressor:
        return next((part for pattern, part in self._parts if pattern.fullmatch(name)), self._parts[-1][1])

    def part(self, kind: Kind) -> Compressor | None:
        return self._by_kind.get(kind)

    def replaced(self, part: Compressor) -> ByName:
        """Return a copy with ``part`` as the compressor of its kind."""
        return ByName([(p.pattern, part if old.kind is part.kind else old) for p, old in self._parts])

    def options(self) -> dict[str, object]:
        return {"parts": tuple((pattern.pattern, repr(part)) for pattern, part in self._parts)}

    def state_dict(self) -> dict[str, object]:
        states = ((part.name, part.state_dict()) for part in self._by_kind.values())
        return {name: state for name, state in states if state}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        parts = {part.name: part for part in self._by_kind.values()}
        if unknown := sorted(state.keys() - parts.keys()):
            raise ValueError(f"{self}: has no part {', '.join(unknown)}")
        for name, part in parts.items():
            saved = state.get(name, {})
            assert isinstance(saved, Mapping)
            part.load_state_dict(saved)

    def retain(self, keys: Iterable[str]) -> None:
        kept = list(keys)
        for part in self._by_kind.values():
            part.retain(kept)

    def snapshot(self) -> Mapping[str, object]:
        return {part.name: part.snapshot() for part in self._by_kind.values()}

    def __repr__(self) -> str:
        return canonical(self.name, self.options())


# Sparsifiers.


@dataclass(frozen=True, eq=False)
class Selection:
    """Selected coordinates of a vector.

    It has ``capacity`` entries, of which the first ``count`` are used. The others are padding. Wrong dtypes or shapes
    raise ``ValueError``.
    """

    indices: Tensor  # int32[capacity]: first `count` unique places, ascending, then any in range, sent with value +0
    count: int | Tensor  # an int, or 0-dim int32 on the device of `indices`, so that selecting never waits for it
    values: Tensor | None = None  # [capacity]: the values there, and 0 in padding; None: not read

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int32 or self.indices.dim() != 1:
            raise ValueError(
                f"Selection: indices must be int32[capacity], got {self.indices.dtype} of shape "
                f"{tuple(self.indices.shape)}"
            )
        if isinstance(self.count, Tensor):
            if self.count.dtype != torch.int32 or self.count.dim() != 0 or self.count.device != self.indices.device:
                raise ValueError(
                    f"Selection: a tensor as count must be 0-dim, int32 and on {self.indices.device}, got "
                    f"{self.count.dtype} of shape {tuple(self.count.shape)} on {self.count.device}"
                )
        elif not 0 <= self.count <= self.indices.numel():
            raise ValueError(f"Selection: count must be in [0, {self.indices.numel()}], the capacity, got {self.count}")

    @property
    def capacity(self) -> int:
        """Return the number of entries, padding included."""
        return self.indices.numel()

    def padded(self, capacity: int) -> Selection:
        """Return this selection with at least ``capacity`` entries. The count does not change."""
        missing = max(capacity - self.capacity, 0)
        values = None if self.values is None else pad(self.values, (0, missing))
        return Selection(pad(self.indices, (0, missing)), self.count, values) if missing else self

    def trimmed(self) -> Tensor:
        """Return the selected indices without padding, as int64. If ``count`` is on a device, this waits for it."""
        return self.indices[: int(self.count)].long()


class Sparsifier(Compressor):
    """Base class of compressors that select coordinates of a vector.

    A subclass sets ``name`` and writes ``_select``, and ``_capacity`` if its messages are always smaller than k. For
    options and state see :class:`Compressor` (docs/extend.md). Arguments are checked in :meth:`select`, and arrive as a
    :class:`Request`. Its k already includes warm-up and the density of the tensor.

    Args:
        density (float): Fraction of the values to select if the caller passes no k. Default: 0.01.
    """

    kind = Kind.SPARSE
    memory = "residual"
    density: float  # selected / total elements, in (0, 1]; used where the caller gives no k

    def __init__(self, density: float = 0.01) -> None:
        self.density = check_density(density)

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
        """Select at most k coordinates of a vector. The vector does not change, and nothing waits for a device.

        Args:
            vector (torch.Tensor): One-dimensional, of any float dtype, stride and device.
            k (int): Number of coordinates, from 1 to ``numel``. Default: ``budget(density, numel)``.
            key (str): Name of the vector. State is kept for each key, and a new key starts without state.
            step (int): Number of exchanges so far, the same on all ranks.
            shapes (list): Shapes of the tensors that the vector consists of. Default: one 1-D tensor.
            scratch (gpu.Scratch or largest.Candidates): Memory of device kernels (if the sparsifier ``has_kernels``).
                The selection is then made when it is read, so do not change the vector before. On the host: candidates
                that were noted when the vector was written (if it ``takes_candidates``). They only save time.
                Default: None.

        Returns:
            A :class:`Selection`.

        Raises:
            ValueError: For an argument outside of this contract. Also ``TypeError``.
        """
        check_vector(self, vector, key)
        request = check_request(
            self, self.density, vector.numel(), k=k, key=key, step=step, shapes=shapes, scratch=scratch
        )
        if request.k == 0:
            return Selection(torch.empty(0, dtype=torch.int32, device=vector.device), 0)
        vector = vector.detach().resolve_neg()
        on_host = vector.device.type == "cpu"
        selection = self._select(vector, request) if on_host else self._select_on_device(vector, request)
        if getattr(selection, "capacity", request.k) < request.k:  # what is no Selection is refused where it is used
            return selection.padded(self._capacity(vector.numel(), request))
        return selection

    def capacity(
        self,
        numel: int,
        *,
        k: int | None = None,
        step: int = 0,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> int:
        """Return the number of entries of the message that :meth:`select` fills, for the same arguments.

        It depends only on these arguments, so all ranks know the size of a message beforehand.
        """
        request = check_request(self, self.density, numel, k=k, key="", step=step, shapes=shapes)
        return self._capacity(numel, request)

    @abstractmethod
    def _select(self, vector: Tensor, request: Request) -> Selection:
        """Select from a detached, non-empty vector in CPU memory: at most the entries that `_capacity` returns.

        A selection of fewer entries is padded to that many. At least 0.8 k are to be in use if k values are not 0.
        """

    def _select_on_device(self, vector: Tensor, request: Request) -> Selection:
        """Select as many entries from a vector that is not in CPU memory, without waiting for its device.

        The default is `_select`: right where that only calls torch, uses no shape that depends on values, and reads
        none on the host.
        """
        return self._select(vector, request)

    def _capacity(self, numel: int, request: Request) -> int:
        """Return the entries of the message: request.k unless the method has a reason to send fewer."""
        return request.k

    def __repr__(self) -> str:
        return canonical(self.name, {"density": self.density, **dict(sorted(self.options().items()))})
