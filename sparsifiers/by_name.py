# SPDX-License-Identifier: Apache-2.0
"""Compress some tensors by one compressor, and others by another: top-k for embeddings, low rank for matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from sparsifiers.canonical import canonical
from sparsifiers.compressor import Compressor, Kind
from sparsifiers.name_patterns import compiled


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
