# SPDX-License-Identifier: Apache-2.0
"""Results of the collectives of a round that are the same on all ranks, kept for ranks that could not receive them.

A worker that dies leaves the others at different places: some have received a merge buffer, some have not. A rank that
has it gives it to the others (:mod:`agmerge.step.settling`), which go on as if it had arrived: the same bits on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from agmerge.backends import Backend, Handle
from agmerge.backends.base import matched
from agmerge.backends.delegating import DelegatingBackend
from agmerge.errors import AGMergeError, NoAnswer

Results = Mapping[str, torch.Tensor]  # by name of the collective: uint8[bytes]


class KeptResults:
    """Results of the collectives of the round under way, and of the round before, by name: copies on the host.

    While results of another rank are :meth:`replayed <replay>`, collectives end at once, with these.
    """

    def __init__(self) -> None:
        self._now: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}  # memory for results of the round under way
        self._replayed: Results | None = None

    @property
    def is_replaying(self) -> bool:
        """Return whether collectives end with another rank's results, without a network."""
        return self._replayed is not None

    def of_round(self, *, before: bool) -> Results:
        """Return the results of the round under way, or of the one ``before``: views."""
        return self._before if before else self._now

    def conclude(self) -> None:
        """End the round under way: its results are those of the round before now."""
        self._now, self._before, self._spare = {}, self._now, self._before

    def replay(self, results: Results | None) -> None:
        """Let collectives end with ``results`` from now on; None: by themselves again."""
        self._replayed = results

    def keep(self, name: str, out: torch.Tensor) -> None:
        """Keep a copy of ``out``, the result of the collective ``name``."""
        copy, result = self._spare.pop(name, None), bytes_of(out)
        if copy is None or copy.numel() != result.numel():
            copy = torch.empty_like(result, device="cpu")
        self._now[name] = copy.copy_(result)

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write the replayed result of the collective ``name`` into ``out``, and keep it."""
        assert self._replayed is not None
        result = self._replayed.get(name)
        if result is None or result.numel() != out.nbytes:
            found = "nothing" if result is None else f"{result.numel()} bytes"
            raise AGMergeError(f"AGM214: {name}: expected {out.nbytes} bytes of a rank that is ahead, got {found}")
        bytes_of(out).copy_(result)
        self.keep(name, result)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8[bytes]: a view."""
    return tensor.view(-1).view(torch.uint8)


class KeptHandle(Handle):
    """Handle of a collective of which the result is kept once it is in place.

    ``inner``: the collective; None: it could not start, for ``error``, or was not started, for a replay. ``out``: its
    result, if that is the same on all ranks; None: it is this rank's own.
    """

    def __init__(
        self, name: str, inner: Handle | None, error: NoAnswer | None, out: torch.Tensor | None, kept: KeptResults
    ) -> None:
        super().__init__(name)
        self._inner, self._error, self._out, self._kept, self._has_ended = inner, error, out, kept, False

    def done(self) -> bool:
        return self._inner is not None and self._inner.done()

    def wait(self, timeout: float) -> None:
        """Return when the result is in place. See :meth:`Handle.wait`."""
        if not self._has_ended:
            self._wait(timeout)
            self._has_ended = True

    def _wait(self, timeout: float) -> None:
        if self._kept.is_replaying:
            if self._out is not None:
                self._kept.fill(self._name, self._out)
        elif self._inner is not None:
            self._inner.wait(timeout)
            if self._out is not None:
                self._kept.keep(self._name, self._inner.on_host(self._out))
        else:
            raise self._error or AGMergeError(
                f"AGM214: {self._name} was started while results were repeated, which has ended"
            )


class KeptBackend(DelegatingBackend):
    """Communicator of which the results that are the same on all ranks are kept in ``kept``.

    A collective that cannot start, since a rank is lost, ends with that error in its ``wait``: so whatever others may
    have received of a message, this rank has its own part of.
    """

    def __init__(self, inner: Backend, kept: KeptResults) -> None:
        super().__init__(inner)
        self._kept = kept

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. See :meth:`Backend.all_reduce`."""
        return self._started(lambda: self._inner.all_reduce(tensor, name, op), name, tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.all_gather`."""
        return self._started(lambda: self._inner.all_gather(out, tensor, name), name, out)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        """Collective. See :meth:`Backend.all_to_all`."""
        return self._started(lambda: self._inner.all_to_all(out, tensor, out_splits, splits, name), name, None)

    def _started(self, start: Callable[[], Handle], name: str, out: torch.Tensor | None) -> Handle:
        if self._kept.is_replaying:
            return KeptHandle(matched(name), None, None, out, self._kept)
        try:
            return KeptHandle(matched(name), start(), None, out, self._kept)
        except NoAnswer as error:
            return KeptHandle(matched(name), None, error, out, self._kept)
