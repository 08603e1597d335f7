# SPDX-License-Identifier: Apache-2.0
"""Watch a sparsifier at work: make its selections, and keep figures of their quality."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from sparsifiers.arguments import Request
from sparsifiers.base import Selection, Sparsifier
from sparsifiers.candidates import Candidates
from sparsifiers.gpu import Scratch
from sparsifiers.proof import Proof


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
        scratch: Scratch | Candidates | None = None,
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
