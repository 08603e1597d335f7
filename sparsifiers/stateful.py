# SPDX-License-Identifier: Apache-2.0
"""State that belongs to a vector: by key, and forgotten where the key comes back with another length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sparsifiers.base import Sparsifier


class Keyed(Sparsifier):
    """Sparsifier that keeps a few numbers per key; a subclass calls `_recall` and `_keep`.

    The numbers are Python's, or 0-dim tensors where reading them would wait for a device. All state belongs to the
    instance.
    """

    def __init__(self, density: float = 0.01) -> None:
        super().__init__(density)
        self._kept: dict[str, tuple[Any, ...]] = {}  # by key: numel of the vector, then the numbers

    def _recall(self, key: str, numel: int) -> tuple[Any, ...] | None:
        """Return the numbers that `_keep` was given last for this key; None if there are none, or of another length."""
        kept = self._kept.get(key)
        return kept[1:] if kept is not None and kept[0] == numel else None

    def _keep(self, key: str, numel: int, *numbers: int | float | Tensor) -> None:
        """Remember the numbers for a vector of this key and length."""
        self._kept[key] = (numel, *numbers)

    def state_dict(self) -> dict[str, object]:
        """Return {name: {key: (numel, *numbers)}} in plain numbers. Waits for a device that holds some."""
        plain = {
            key: tuple(part.item() if isinstance(part, Tensor) else part for part in kept)
            for key, kept in self._kept.items()
        }
        return {self.name: plain}

    def snapshot(self) -> Mapping[str, object]:
        """Return {name: {key: (numel, *numbers)}} with tensors as they are; the numbers themselves never change."""
        return {self.name: dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of `state_dict`; an empty mapping is a cold start."""
        kept = state.get(self.name, {})
        if set(state) - {self.name} or not isinstance(kept, Mapping):
            raise ValueError(f"{self}: expected the state {{{self.name!r}: ...}}, got {sorted(state)}")
        self._kept = {key: tuple(numbers) for key, numbers in kept.items()}

    def retain(self, keys: Iterable[str]) -> None:
        """Forget the state of every key that is not in `keys`."""
        wanted = set(keys)
        self._kept = {key: kept for key, kept in self._kept.items() if key in wanted}
