# SPDX-License-Identifier: Apache-2.0
"""One collective of the module's own, from its arguments to its result and its gradient.

Each kind defines the facts that all ranks must state alike, the start of its messages, its results and the gradient.
Everything else is here: the checks of arguments, the agreement, the handle, the graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from agmerge.backends import Backend, Handle, timeouts
from agmerge.backends.handshake import Fact
from agmerge.errors import AGMergeError
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.runtime import process_sets
from agmerge.runtime.process_sets import Group, agree, group

# Arguments that scripts pass: ``ValueError`` and ``TypeError`` say what to pass instead.

OPS = "agmerge.Average, Sum, Min, Max or Product"


class Compressor(Protocol):
    """Cast for tensors that travel, as :class:`agmerge.Compression` or one of Horovod's."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that travels in place of ``tensor``, and a context."""

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """Return ``tensor`` in its old dtype, with the loss of the cast. ``context``: the one of ``compress``."""


def label(name: Any, call: str) -> str:
    """Return the name of a call in errors: the script's name for it, or its own."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{call}: name must be a string, got {name!r}")
    return name or call


def check_tensor(given: Any, call: str) -> None:
    """Raise unless ``given`` is a dense tensor."""
    if given is None:
        raise TypeError(
            f"{call}: the tensor is None (is it the gradient of a parameter that this rank did not use?). Pass a "
            "tensor on every rank, with zeros if the rank has no values."
        )
    if not isinstance(given, torch.Tensor):
        hint = "grouped_allreduce for lists, " if isinstance(given, (list, tuple)) else ""
        raise TypeError(
            f"{call}: expected a tensor, got {type(given).__name__}. Use {hint}torch.tensor() for numbers, and "
            "allgather_object or broadcast_object for other objects."
        )
    if given.layout is not torch.strided:
        raise ValueError(
            f"{call}: a tensor of layout {given.layout} is not supported. Pass tensor.to_dense(), or use "
            "sparse_allreduce_async."
        )


def check_list(given: Any, call: str) -> list[torch.Tensor]:
    """Return the tensors of a grouped call."""
    if isinstance(given, torch.Tensor) or not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(f"{call}: expected a list of tensors, got {type(given).__name__}")
    if not given:
        raise ValueError(f"{call}: the list of tensors is empty")
    for tensor in given:
        check_tensor(tensor, call)
    return list(given)


def check_overwritten(tensor: torch.Tensor, call: str) -> None:
    """Raise where writing over ``tensor`` would make its gradient wrong without a word."""
    if torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(
            f"{call}: the tensor requires a gradient, which a call in place does not support. Use "
            f"{call.replace('_async_', '_async').removesuffix('_')}, or pass tensor.detach()."
        )


def reduction(op: Any, average: Any, call: str) -> ReduceOp:
    """Return the reduction that ``op`` means, also where it is a constant of Horovod's, or ``average`` in its stead.

    Raises ``TypeError``, ``ValueError`` or, for Adasum, :class:`agmerge.AGMergeError`; ``call``: the name in errors.
    """
    if isinstance(average, ReduceOp) or isinstance(average, str):
        raise TypeError(f"{call}: average must be True or False, got {average!r}. Pass op= and name= by keyword.")
    if op is not None and average is not None:
        raise ValueError(f"{call}: The op parameter supersedes average. Please provide only one of them.")
    if op is None:
        return Sum if average is not None and not average else Average
    name = process_sets.horovod_reduction(op)
    if name is not None:
        op = ReduceOp(name)
    if not isinstance(op, ReduceOp):
        raise ValueError(f"{call}: op must be {OPS}, got {op!r}")
    if op is ReduceOp.ADASUM:
        raise AGMergeError(f"AGM303: {call}: op=Adasum is supported by Horovod only. Use {OPS}.")
    return op


def compressor(given: Any, call: str) -> Compressor:
    """Return ``given``, the ``compression=`` of a collective, or raise ``TypeError`` if it is no cast."""
    if hasattr(given, "compress") and hasattr(given, "decompress"):
        return given  # type: ignore[no-any-return]
    raise TypeError(f"{call}: compression must be agmerge.Compression.none, .fp16 or .bf16, got {given!r}")


def factor(given: Any, name: str, call: str) -> float:
    """Return ``prescale_factor`` or ``postscale_factor``, the one that ``name`` names, as a number."""
    try:
        return float(given)
    except (TypeError, ValueError):
        raise TypeError(f"{call}: {name} must be a number, got {given!r}") from None


# Tensors as bytes, so that any dtype travels on any backend.


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of ``tensor`` in C order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous ``tensor``, 1-D."""
    return tensor.detach().view(-1).view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its graph, contiguous: its own memory where that is so already, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous copy of ``tensor`` without its graph, perhaps of another dtype."""
    bare = tensor.detach().resolve_conj().resolve_neg()
    return bare.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)


def row_kind(tensor: torch.Tensor) -> str:
    """Return, for agreements where lengths may differ, the dtype and the kind of device where that is no CPU."""
    return f"{tensor.dtype}{_elsewhere(tensor)}"


EXPANDED = " expanded, so several elements share one memory location and cannot be written. Pass its clone()"


def expanded(tensor: torch.Tensor) -> str:
    """Return, for the facts of a call that writes to ``tensor``, why this rank cannot; "" if it can."""
    return EXPANDED if torch._debug_has_internal_overlap(tensor) == 1 else ""  # 1: yes; 2: perhaps, which torch allows


def described(tensor: torch.Tensor) -> str:
    """Return, for agreements, dtype and shape as ``float32[2, 3]``, and the kind of device where that is no CPU."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{_elsewhere(tensor)}"


def _elsewhere(tensor: torch.Tensor) -> str:
    """Return the kind of device where that is no CPU, as the end of a text; else empty."""
    return "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"


# The operation.


class Operation(ABC):
    """Collective over dense tensors, of one function of the module.

    ``call``: the function's name, of which the variant follows: ``grouped_`` takes and returns a list, a ``_`` at the
    end overwrites its tensors. ``given``: the script's tensor or list. ``name``: the script's, or None.
    ``process_set``: as the script gave it. ``where``: the group of the operation that this one is the gradient of, in
    place of a process set. Raises ``TypeError`` or ``ValueError`` for arguments without meaning.
    """

    kind: str  # the call that ranks agree on: "allreduce", ...

    def __init__(
        self, call: str, given: Any, name: Any, process_set: Any = None, *, where: Group | None = None
    ) -> None:
        self.single = not call.startswith("grouped_")  # the script gave one tensor, and gets one
        self.in_place = call.endswith("_")  # the results are the given tensors, so they have no gradient
        self.tensors = check_list([given] if self.single else given, label(name, call))
        if self.in_place:
            for tensor in self.tensors:
                check_overwritten(tensor, call)
        self.label, self.named = label(name, self.kind), name is not None
        self.group = where or group(process_set, self.label)

    @property
    def comm(self) -> Backend:
        """Return the communicator of the ranks that take part."""
        return self.group.comm

    @abstractmethod
    def facts(self) -> list[Fact]:
        """Return the facts that must be the same on all ranks, as (name, value) in a fixed order."""

    @abstractmethod
    def begin(self, message: str) -> list[Handle]:
        """Collective. Start every message and return their handles. The ranks have agreed.

        ``message``: its name; of several it is what their names begin with.
        """

    @abstractmethod
    def end(self) -> list[torch.Tensor]:
        """Return the results, when all messages are in."""

    @abstractmethod
    def backward(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the gradients of ``tensors``, from those of the results."""

    def release(self) -> None:
        """Drop the tensors of the script: all messages are in."""
        self.tensors = []

    def shaped(self, results: list[torch.Tensor]) -> Any:
        """Return ``results`` as the script gets them: one tensor, or a list."""
        return results[0] if self.single else results


class Pending:
    """Collective under way, for :func:`agmerge.poll` and :func:`agmerge.synchronize`.

    ``operation``: the collective, with its messages started. ``handles``: of the messages. ``inputs``: the tensors that
    the script gave, of which the results are functions.
    """

    def __init__(self, operation: Operation, handles: list[Handle], inputs: list[torch.Tensor]) -> None:
        self._operation, self._handles = operation, handles
        learns = torch.is_grad_enabled() and not operation.in_place
        self._inputs = inputs if learns and any(tensor.requires_grad for tensor in inputs) else []
        self._results: list[torch.Tensor] | None = None  # once the messages are in
        self._error: Exception | None = None  # or the error

    def __repr__(self) -> str:
        return f"<{self._operation.label}, {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Return whether :meth:`result` would return at once."""
        return self._results is not None or self._error is not None or all(handle.done() for handle in self._handles)

    def settle(self) -> None:
        """Collective. Wait for the messages, once; results or error are kept for :meth:`result`."""
        if self._results is not None or self._error is not None:
            return
        try:
            for handle in self._handles:
                handle.wait(timeouts.default())
            self._results = self._operation.end()
        except Exception as error:
            self._error = error
        self._handles = []
        self._operation.release()

    def result(self) -> Any:
        """Collective. Return the result, also when called again; raise the error of the collective."""
        self.settle()
        if self._error is not None:
            raise self._error
        assert self._results is not None
        if self._inputs:
            with torch.enable_grad():  # as it was when the call was made
                given = (self._operation, self._results, *self._inputs)
                self._results = list(_Differentiable.apply(*given))  # type: ignore[no-untyped-call]
            self._inputs = []
        return self._operation.shaped(self._results)


class _Differentiable(torch.autograd.Function):
    """Autograd function that makes results from other ranks functions of this rank's inputs."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, results: list[torch.Tensor], *inputs: torch.Tensor) -> Any:
        """Return ``results``, as functions of ``inputs``."""
        ctx.operation = operation
        ctx.mark_non_differentiable(
            *(result for result in results if not (result.is_floating_point() or result.is_complex()))
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Collective. Return the gradients of the inputs; none of the operation and its results."""
        return (None, None, *ctx.operation.backward(gradients))


@dataclass
class _Line:
    """Operations under way on one communicator, by the name of their messages, oldest first."""

    agreed: int = 0  # operations so far: the same number on every rank, also where some have joined
    pending: dict[str, Pending] = field(default_factory=dict)


_lines: WeakKeyDictionary[Backend, _Line] = WeakKeyDictionary()  # by communicator; entries go with it


def start(operation: Operation, *, waits: bool = False) -> Pending:
    """Collective. Agree, then start ``operation`` and return it, under way. Every rank has come here then.

    ``waits``: the caller asks for the result at once. Raises ``ValueError`` for a name that is under way, and
    :class:`agmerge.RankMismatchError` on every rank if ranks make different calls.
    """
    line = _lines.setdefault(operation.comm, _Line())
    _sweep(line)
    # Unnamed ones are numbered, since several may be under way; a caller that waits for each needs no numbers, and
    # messages with stable names are cheaper for Horovod.
    number = "" if operation.named or waits else f".{line.agreed}"
    message = f"{operation.label}{number}".replace(" (", " [")
    if message in line.pending:
        raise ValueError(
            f"{operation.label}: a collective of this name is already running, with the same name as another tensor. "
            "Call synchronize() first, or use different names."
        )
    facts = [("call", operation.kind), ("name", message), *operation.facts()]
    agree(operation.comm, operation.label, facts)
    count(operation.comm)
    inputs = operation.tensors
    for note in list(_notes):
        note(list(operation.group.ranks), inputs)
    pending = Pending(operation, operation.begin(message), inputs)
    if not waits:
        line.pending[message] = pending
    return pending


Note = Callable[[list[int], list[torch.Tensor]], None]  # of a call: ranks of the world that take part, and tensors
_notes: list[Note] = []  # of those that watch


def watch(note: Note) -> Callable[[], None]:
    """Call ``note`` for every call that starts; return a function that ends it."""
    _notes.append(note)
    return lambda: _notes.remove(note) if note in _notes else None


def count(comm: Backend) -> None:
    """Count an agreed operation, on the ranks that call it and on those that have joined."""
    _lines.setdefault(comm, _Line()).agreed += 1


def run(operation: Operation) -> torch.Tensor:
    """Collective. Return the result of ``operation``, which has one."""
    result: torch.Tensor = start(operation, waits=True).result()
    return result


def run_all(operation: Operation) -> list[torch.Tensor]:
    """Collective. Return the results of ``operation``, a grouped one or another that has several."""
    return list(start(operation, waits=True).result())


def _sweep(line: _Line) -> None:
    """Release operations that have ended, from the oldest on, also those with results that are never fetched."""
    for name, pending in list(line.pending.items()):
        if not pending.done():
            return
        pending.settle()
        del line.pending[name]


def poll(handle: Pending) -> bool:
    """Return whether :func:`synchronize` would return at once.

    Args:
        handle (Pending): Result of an ``..._async`` call.
    """
    return _checked(handle, "poll").done()


def synchronize(handle: Pending) -> Any:
    """Collective. Wait for an ``..._async`` call, and return what the call without ``_async`` would return.

    Args:
        handle (Pending): Result of the ``..._async`` call.

    Raises:
        agmerge.NoAnswer: After ``AGMERGE_TIMEOUT`` seconds (default: 300), or if a rank is lost.
    """
    return _checked(handle, "synchronize").result()


def _checked(handle: Any, call: str) -> Pending:
    """Return ``handle``, or raise ``TypeError`` if it is none."""
    if not isinstance(handle, Pending):
        raise TypeError(f"{call}: expected the result of an ..._async call, got {handle!r}")
    return handle
