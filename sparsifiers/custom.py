# SPDX-License-Identifier: Apache-2.0
"""Compressors of a script's own class, of which the messages have a format of their own.

The class has the interface that benchmarks of compressors use (Xu et al., "GRACE", ICDCS 2021):
``compress(tensor, name) -> (tensors, ctx)`` and ``decompress(tensors, ctx) -> tensor``. A memory beside it has
``compensate(tensor, name)`` and ``update(tensor, name, compressor, tensors, ctx)``. No base class is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from sparsifiers.base import Compressor, Kind
from sparsifiers.object_state import ObjectState


class Custom(Compressor):
    """Compressor made of an object of a script's own, with its memory.

    Each rank compresses each of its gradients. The tensors travel, ``ctx`` stays on its rank. Then each rank
    decompresses the tensors of every rank, and combines the results.

    Args:
        compressor (object): With ``compress(tensor, name)``, which returns a list of tensors, of any dtypes and shapes,
            and a context, and ``decompress(tensors, ctx)``, which returns a tensor in the shape of the gradient.
            It may have ``aggregate(tensors)``, which combines what was decompressed of all ranks (default: the sum),
            and ``average`` (default: True), whether the result is divided by the number of ranks.
        memory (object): With ``compensate(tensor, name)``, which returns what is compressed, and ``update(tensor, name,
            compressor, tensors, ctx)``, which keeps what was not sent. None: nothing is kept.
        sums (bool): Add up the tensors of all ranks, position by position, then decompress once. They need the same
            shapes and dtypes on all ranks.

    Raises:
        TypeError: For an object without these methods.
    """

    kind = Kind.CUSTOM

    def __init__(self, compressor: Any, memory: Any = None, *, sums: bool = False) -> None:
        """Check the objects, as the class says."""
        self.name = type(compressor).__name__
        if not is_compressor(compressor):
            raise TypeError(f"{self.name}: expected an object with compress(tensor, name) and decompress(tensors, ctx)")
        if memory is not None and not is_memory(memory):
            raise TypeError(
                f"{type(memory).__name__}: expected a memory with compensate(tensor, name) and update(tensor, name, "
                "compressor, tensors, ctx)"
            )
        self._compressor, self._memory, self.sums = compressor, memory, bool(sums)
        self._states = {"compressor": ObjectState(compressor)}  # by part; without memory there is one
        if memory is not None:
            self._states["memory"] = ObjectState(memory)

    def options(self) -> dict[str, object]:
        """Return the name of the memory's class, and whether tensors are added up."""
        return {"memory": "none" if self._memory is None else type(self._memory).__name__, "sums": self.sums}

    @property
    def averages(self) -> bool:
        """Return whether results are divided by the number of ranks."""
        return bool(getattr(self._compressor, "average", True))

    def encode(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        """Return the tensors to send for a gradient, and the context for :meth:`decode`. Updates the memory.

        ``tensor``: in the parameter's shape; it is only read. ``name``: the parameter's. Raises ``TypeError``, with
        the class's name, for anything but tensors.
        """
        tensor = tensor.clone()  # for the objects to keep, or to write to
        if self._memory is not None:
            tensor = self._memory.compensate(tensor, name)
        result = self._compressor.compress(tensor, name)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"{self.name}.compress(): expected (tensors, ctx) for {name!r}, got {_kind_of(result)}")
        tensors, ctx = result
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if not isinstance(tensors, Sequence) or not all(isinstance(part, Tensor) for part in tensors):
            raise TypeError(f"{self.name}.compress(): expected a list of tensors for {name!r}, got {_kind_of(tensors)}")
        if self._memory is not None:
            self._memory.update(tensor, name, self._compressor, list(tensors), ctx)
        return [part.detach() for part in tensors], ctx

    def decode(self, tensors: Sequence[Tensor], ctx: Any, name: str, shape: Sequence[int]) -> Tensor:
        """Return the gradient that ``tensors`` stand for. ``ctx``: of this rank's :meth:`encode`.

        Raises ``ValueError``, with the class's name, unless it has the parameter's ``shape``.
        """
        made = self._compressor.decompress(list(tensors), ctx)
        if not isinstance(made, Tensor) or tuple(made.shape) != tuple(shape):
            got = f"shape {list(made.shape)}" if isinstance(made, Tensor) else _kind_of(made)
            raise ValueError(f"{self.name}.decompress(): expected shape {list(shape)} for {name!r}, got {got}")
        return made

    def aggregate(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return what the gradients of all ranks, in the order of ranks, combine to: by default their sum."""
        combine = getattr(self._compressor, "aggregate", None)
        if combine is not None:
            made: Tensor = combine(list(tensors))
            return made
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return total

    # -- state of both objects, by part ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the state of both objects, as :class:`ObjectState` has it: a copy."""
        return {part: saved for part, state in self._states.items() if (saved := state.copied())}

    def snapshot(self) -> Mapping[str, object]:
        """Return the state without copies of tensors that the objects do not write to.

        Waits for a device, to see which these are, in the first steps only.
        """
        return {part: state.snapshot() for part, state in self._states.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the state of :meth:`state_dict`. ``ValueError`` for state of an object that is not there."""
        if state.get("memory") and self._memory is None:
            raise ValueError(f"{self}: the checkpoint has state of a memory. Pass the memory with it.")
        for part, own in self._states.items():
            own.restore(cast("Mapping[str, Any]", state.get(part, {})))


def adapted(given: Any) -> Any:
    """Return a script's own compressor, or an object that holds one as ``compressor``, as :class:`Custom`.

    Such a holder has its memory as ``memory``. If the name of its class says "allreduce", tensors are added up.
    Anything else is returned as it is.
    """
    if is_compressor(given):
        return Custom(given)
    inner = getattr(given, "compressor", None)
    if inner is not None and is_compressor(inner):
        return Custom(inner, getattr(given, "memory", None), sums="allreduce" in type(given).__name__.lower())
    return given


def is_compressor(given: Any, *, bound: bool = True) -> bool:
    """Return whether an object has ``compress(tensor, name)`` and ``decompress(tensors, ctx)``.

    ``bound`` False: it is the class of such an object, of which the methods take the object, too.
    """
    return _has(given, bound, compress=2, decompress=2)


def is_memory(given: Any, *, bound: bool = True) -> bool:
    """Return whether an object has the methods of a memory, as :class:`Custom` says. ``bound``: as above."""
    return _has(given, bound, compensate=2, update=5)


def _has(given: Any, bound: bool, **methods: int) -> bool:
    """Return whether an object has these methods, which take so many arguments by position."""
    for name, count in methods.items():
        method = getattr(given, name, None)
        if not callable(method):
            return False
        try:
            inspect.signature(method).bind(*[None] * (count + (not bound)))
        except (TypeError, ValueError):
            return False
    return True


def _kind_of(value: object) -> str:
    """Return what a value is, in words."""
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in value) or 'nothing'}"
    return f"a {type(value).__name__}"
