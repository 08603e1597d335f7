# SPDX-License-Identifier: Apache-2.0
"""Contract of backends, the calls that each of them offers; and the check that no public function hides one.

All collectives are asynchronous: they return a :class:`Handle` at once, and the tensors handed in must stay alive and
unchanged until ``wait`` has returned. Every rank of a backend makes the same calls in the same order; ``name`` is the
same on all of them and tells in errors which call it was. Its text from `` (`` on is for errors alone and may differ
between ranks: :func:`matched` cuts it off.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
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


# Base of a backend around another one, for those that do something more where collectives start or end.


class DelegatingBackend(Backend):
    """Communicator that passes everything on to ``inner``.

    A subclass overrides :meth:`_pass_on` for what it does where a collective starts, and :meth:`_around` if
    communicators that are made from it do so, too.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner, self.name = inner, inner.name
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size

    def _pass_on(
        self, call: str, name: str, tensor: torch.Tensor | None, out: torch.Tensor | None = None, **more: Any
    ) -> Handle:
        """Collective. Start a collective on ``inner``.

        Args:
            call: the method of :class:`Backend`.
            tensor: what this rank gives, and gets the result in where ``out`` is None. A barrier has none.
            more: the other arguments of ``call``.
        """
        given = {key: value for key, value in (("out", out), ("tensor", tensor)) if value is not None}
        handle: Handle = getattr(self._inner, call)(**given, **more, name=name)
        return handle

    def _around(self, made: Backend, ranks: Sequence[int]) -> Backend:
        """Return the communicator to use in place of ``made``, which ``inner`` made over its own ``ranks``."""
        return made

    @property
    def stale(self) -> bool:
        return self._inner.stale

    @property
    def has_failed(self) -> bool:
        return self._inner.has_failed

    @property
    def through_host(self) -> bool:
        return self._inner.through_host

    def renewed(self) -> Backend:
        return self._inner.renewed()

    def summed_bytes(self, tensor: torch.Tensor) -> int:
        return self._inner.summed_bytes(tensor)

    def scatters_by_all_reduce(self, tensor: torch.Tensor) -> bool:
        return self._inner.scatters_by_all_reduce(tensor)

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        """Collective. See :meth:`Backend.all_reduce`."""
        return self._pass_on("all_reduce", name, tensor, op=op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.all_gather`."""
        return self._pass_on("all_gather", name, tensor, out)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        """Collective. See :meth:`Backend.all_to_all`."""
        return self._pass_on("all_to_all", name, tensor, out, out_splits=out_splits, splits=splits)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        """Collective. See :meth:`Backend.reduce_scatter`."""
        return self._pass_on("reduce_scatter", name, tensor, out)

    def broadcast(self, tensor: torch.Tensor, root: int, name: str) -> Handle:
        """Collective. See :meth:`Backend.broadcast`."""
        return self._pass_on("broadcast", name, tensor, root=root)

    def barrier(self, name: str) -> Handle:
        """Collective. See :meth:`Backend.barrier`."""
        return self._pass_on("barrier", name, None)

    def duplicate(self, label: str, timeout: float) -> Backend:
        """Collective. See :meth:`Backend.duplicate`."""
        return self._around(self._inner.duplicate(label, timeout), range(self.size))

    def subgroup(self, ranks: Sequence[int], label: str, timeout: float) -> Backend | None:
        """Collective. See :meth:`Backend.subgroup`."""
        made = self._inner.subgroup(ranks, label, timeout)
        return None if made is None else self._around(made, ranks)

    def over(self, process_set: Any) -> Backend | None:
        made = self._inner.over(process_set)
        return None if made is None else self._around(made, process_set.ranks)

    def drop(self) -> None:
        self._inner.drop()

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.close()


# Check that no function hides a collective: a rank that skips one makes all others wait for it. When a collective
# starts, the in-memory backend looks at the functions on the call stack: the docstring of each public one opens with
# "Collective.".

MARK = "Collective."
PACKAGE = Path(__file__).resolve().parents[1]
# Backends are collectives, and say so in their base class; testing runs the ranks.
EXEMPT = (str(PACKAGE / "backends"), str(PACKAGE / "testing.py"))
NESTED, HAS_DOCSTRING = 0x10, 0x4000000  # bits of co_flags; the second one from Python 3.14 on
# By id: hashing a code object reads all of it. They are kept alive, so that an id means one of them.
_fine: dict[int, CodeType] = {}


def require_marks(name: str, frame: FrameType | None) -> None:
    """Raise :class:`agmerge.AGMergeError` unless ``frame`` and all its callers are marked, as far as they must be.

    ``name``: of the collective that starts. ``frame``: of the function that starts it. Takes some microseconds, since
    every function is looked at once.
    """
    while frame is not None:
        code = frame.f_code
        if id(code) not in _fine:
            if _must_be_marked(frame) and not _inherited_docstring(frame).startswith(MARK):
                raise AGMergeError(
                    f"{name}: {code.co_name}() in {code.co_filename}, line {code.co_firstlineno}, starts a collective; "
                    f"let its docstring open with {MARK!r}"
                )
            _fine[id(code)] = code
        frame = frame.f_back


def docstring(code: CodeType) -> str | None:
    """Return the docstring of the function that ``code`` belongs to; None if it has none."""
    if sys.version_info >= (3, 14) and not code.co_flags & HAS_DOCSTRING:
        return None
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


def _must_be_marked(frame: FrameType) -> bool:
    """Return whether ``frame`` is of a public function or method of this library, outside of backends.

    Names with an underscore, functions in functions, lambdas and properties are details of their owners.
    """
    code = frame.f_code
    if code.co_name.startswith(("_", "<")) or code.co_flags & NESTED:
        return False
    if not code.co_filename.startswith(str(PACKAGE)) or code.co_filename.startswith(EXEMPT):
        return False
    return not any(isinstance(attribute, property) for attribute in _attributes(frame))


def _inherited_docstring(frame: FrameType) -> str:
    """Return the docstring of the function that ``frame`` runs, or of the method that it overrides; else empty."""
    texts = [docstring(frame.f_code), *(getattr(attribute, "__doc__", None) for attribute in _attributes(frame))]
    return next(filter(None, texts), "")


def _attributes(frame: FrameType) -> list[object]:
    """Return the attributes of the first argument's classes that have the function's name, subclass first."""
    name, first = frame.f_code.co_name, frame.f_code.co_varnames[: frame.f_code.co_argcount][:1]
    return [vars(kind)[name] for key in first for kind in type(frame.f_locals.get(key)).__mro__ if name in vars(kind)]
