# SPDX-License-Identifier: Apache-2.0
"""Common base of compressors: a name, a kind, options, and state that survives a restart.

A sparsifier sends some of the elements of a vector, a cast sends all of them in fewer bits, a low-rank compressor
sends two thin factors. The code that plans, checks and saves a training needs this one type.
"""

from __future__ import annotations

import enum
import re
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence

import torch

from sparsifiers.canonical import canonical


class Kind(enum.Enum):
    """How the gradient of a tensor is sent."""

    DENSE = "dense"  # every element, perhaps in fewer bits: an all-reduce
    SPARSE = "sparse"  # some elements and where they stand: an exchange of indices and values
    LOW_RANK = "low-rank"  # two thin factors of a matrix, each combined by an all-reduce
    QUANTIZED = "quantized"  # every element in few bits, block by block: shards are gathered, read and added up
    QUANTISED = "quantized"  # the old spelling of the same member

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
        """Return it without its observer, if it has one (`sparsifiers.observed`)."""
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
