# SPDX-License-Identifier: Apache-2.0
"""Contract of backends: the calls that each of them offers.

All collectives are asynchronous: they return a :class:`Handle` at once, and the tensors handed in must
stay alive and unchanged until ``wait`` has returned. Every rank of a backend makes the same calls in
the same order; ``name`` is the same on all of them and tells in errors which call it was. Its text from
`` (`` on is for errors alone and may differ between ranks: :func:`matched` cuts it off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agmerge.backends import status
from agmerge.errors import AGMergeError

Gather = Callable[[bytes, str], list[bytes]]  # (text, name of the call) -> every rank's text
# (rank, gather, environment) -> this rank's address if ranks are spread over several machines, else None
Listen = Callable[[int, Gather, Mapping[str, str]], "str | None"]

# Operation of an all-reduce on two tensors, for backends that combine them by themselves.
OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def matched(name: str) -> str:
    """Return the beginning of a call's name that is the same on all ranks."""
    return name.partition(" (")[0]


@dataclass(frozen=True)
class Chosen:
    """Ranks of the world over which a communicator is made."""

    ranks: tuple[int, ...] = ()  # of the world; empty: all, or see `horovod`
    horovod: Any = None  # one of Horovod's process sets, which takes the place of ranks; None: there is none

    @property
    def members(self) -> list[int]:
        """Return ranks of the world, in the order of their ranks here; empty: all."""
        return list(self.ranks if self.horovod is None else self.horovod.ranks)


class Handle(ABC):
    """Collective under way, to be waited for.

    ``name``: the collective's, for errors. ``ranks``: of the world, those that take part; empty: all.
    """

    def __init__(self, name: str, ranks: Sequence[int] = ()) -> None:
        self._name, self._ranks = name, ranks

    @abstractmethod
    def done(self) -> bool:
        """Return whether ``wait`` would return at once."""

    def on_host(self, out: torch.Tensor) -> torch.Tensor:
        """Return the result, once it is in place, in the host's memory if it came through that; else ``out``, itself.

        ``out``: the tensor that the collective was given for its result. What is returned is not to be changed.
        """
        return out

    def wait(self, timeout: float) -> None:
        """Return when the result is in place. Needs no call on other ranks.

        ``timeout`` is in seconds. Raises :class:`agmerge.CollectiveTimeout` when it has passed and
        :class:`agmerge.PeerLost` when another rank is known to have left. Both errors tell what is known of the others.
        """
        with status.waiting_for(self._name, self._ranks):
            self._wait(timeout)

    def wait_on_stream(self, timeout: float) -> None:
        """Make the current stream of the result's device wait for it, in place of the host.

        The caller enforces the deadline where the host waits at last. Here, and wherever the result is on the host or
        the backend has no streams, the host waits: see :meth:`wait`.
        """
        self.wait(timeout)

    @abstractmethod
    def _wait(self, timeout: float) -> None:
        """Wait for the result, for ``wait``, with errors that tell what this backend knows."""


class Backend(ABC):
    """Communicator of ``size`` ranks, which call the same collectives in the same order."""

    name: str  # of the backend, such as "torch"
    rank: int  # this one's number here, 0 to size - 1
    size: int  # ranks that take part
    local_rank: int  # this one's number among the workers on its machine
    local_size: int  # workers on its machine

    @property
    def stale(self) -> bool:
        """Return whether another library has replaced the group, as an elastic Horovod does."""
        return False

    @property
    def has_failed(self) -> bool:
        """Return whether a collective of an elastic group has raised here, since a rank is lost: so will all others."""
        return False

    @property
    def through_host(self) -> bool:
        """Return whether it moves tensors of the CPU alone, so that those on devices are to be copied (staging)."""
        return False

    def summed_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of ``tensor`` as it travels where it is summed: a backend may widen what it cannot add."""
        return tensor.nbytes

    def scatters_by_all_reduce(self, tensor: torch.Tensor) -> bool:
        """Return whether ``reduce_scatter`` moves as much of ``tensor`` as ``all_reduce``: twice what is needed."""
        return False

    def renewed(self) -> Backend:
        """Return the communicator of all workers as they are now. Not collective."""
        return self

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. Combine ``tensor`` (any shape, contiguous) over all ranks, in place.

        ``op``: ``"sum"``, or ``"min"``, ``"max"`` and ``"product"`` of tensors that are not complex.
        """

    @abstractmethod
    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. Fill ``out`` (1-D, ``size * n``) with every rank's ``tensor`` (1-D, ``n``), rank by rank."""

    @abstractmethod
    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        """Collective. Send piece r of ``tensor`` to rank r; the piece from rank r becomes piece r of ``out``.

        Both are 1-D. ``splits[r]`` and ``out_splits[r]`` are lengths in elements; they may differ between ranks. The
        length that a rank sends to another is the one that the other expects.
        """

    @abstractmethod
    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. Sum ``tensor`` (1-D, ``size * n``) over all ranks; rank r gets piece r in ``out`` (1-D)."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        """Collective. Overwrite ``tensor`` (contiguous) with the one of rank ``root``, in place."""

    @abstractmethod
    def barrier(self, name: str) -> Handle:
        """Collective. Wait for all ranks: the handle is done when every rank has made this call."""

    @abstractmethod
    def duplicate(self, label: str, timeout: float) -> Backend:
        """Collective. Return a communicator of its own over the same ranks.

        ``label``: for errors. ``timeout``: seconds, for each call that making it needs.
        """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> Backend | None:
        """Collective. Return a communicator over ``ranks``, numbered in the order given; None on the other ranks.

        All ranks of this one make the call, with the same ``ranks``, which are its own numbers. ``label``: for errors.
        ``timeout``: seconds, for each call that making it needs.
        """

    def over(self, process_set: Any) -> Backend | None:
        """Return a communicator over one of Horovod's process sets; None on ranks outside of it. Not collective.

        Raises :class:`agmerge.AGMergeError` on a backend that is not Horovod's.
        """
        raise AGMergeError(
            f"AGM305: process_set={process_set} belongs to Horovod, but agmerge uses the backend {self.name!r}. Pass "
            "a list of ranks."
        )

    def drop(self) -> None:  # noqa: B027  most hold nothing that can be given back by one rank alone
        """Release this communicator's resources, soon. Not collective, allowed at any moment, once or more often.

        Collectives under way may still end. Resources with a collective release are kept to the end.
        """

    def abort(self) -> None:  # noqa: B027  only NCCL leaves something that waits for ever
        """End what is under way here, without the other ranks: one of them is lost. Not collective, allowed twice.

        Else the device would wait for it in front of all that the script does after the error, such as a checkpoint.
        """

    @abstractmethod
    def close(self) -> None:
        """Release this communicator's resources. It cannot be used afterwards."""
