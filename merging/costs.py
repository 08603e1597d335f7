# SPDX-License-Identifier: Apache-2.0
"""Costs of sparsifying and exchanging, in seconds, by the number of elements; and the profile of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from merging import storage
from merging.plan import Elements, Reals, elements, reals, tensor_names


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Profile:
    """Keep sizes and times of n tensors, in the order in which gradients become ready. Immutable.

    Args:
        names (list of str): n different names.
        numel (array): Values of each tensor, at least 1.
        backward (array): Seconds from the readiness of the tensor before to that of each tensor.
        forward (array): Seconds of the forward pass for each tensor. Default: None.
        work (array): Values that selection reads, 0 for tensors that are not selected from. Default: ``numel``.
        load (array): Values that are expected to be sent. Default: ``numel``.
        noise (array): Energy that selection leaves behind. Default: None.

    Raises:
        TypeError: For anything but names and numbers.
        ValueError: For wrong lengths, repeated names, empty tensors, and negative or infinite numbers. The text names
            the tensor.
    """

    names: tuple[str, ...]
    numel: Elements
    backward: Reals
    forward: Reals | None
    work: Elements
    load: Elements
    noise: Reals | None

    def __init__(
        self,
        names: Sequence[str],
        numel: ArrayLike,
        backward: ArrayLike,
        *,
        forward: ArrayLike | None = None,
        work: ArrayLike | None = None,
        load: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> None:
        names = tensor_names(names)
        checked = {
            "names": names,
            "numel": elements("numel", numel, names, least=1),
            "backward": reals("backward", backward, names),
            "forward": None if forward is None else reals("forward", forward, names),
            "work": elements("work", numel if work is None else work, names, least=0),
            "load": elements("load", numel if load is None else load, names, least=0),
            "noise": None if noise is None else reals("noise", noise, names),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Profile):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash((self.names, self.numel.tobytes()))

    def __repr__(self) -> str:
        return f"<Profile: {len(self)} tensors, {self.numel.sum()} elements, backward {self.backward.sum():.6g} s>"

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # Pickling and copying forget that an array is read-only.
        Profile.__init__(self, **state)

    def plain(self) -> dict[str, Any]:
        """Return the arguments that make an equal profile, as lists of numbers and strings."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, as JSON and atomically. ``read`` returns it, bitwise equal."""
        storage.write(path, storage.seal("merging.Profile", self.plain()))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Return the profile in a file. Raises ``ValueError``, with the path, if the file is damaged or of another
        kind.

        It is not called ``load``, because that is the number of values that are sent.
        """
        return storage.read(path, "merging.Profile", cls)


_PROBE: Elements = np.array([0, *(2**power for power in range(32))], dtype=np.int64)


@dataclass(frozen=True)
class Cost:
    """Check a cost function at every call.

    A number gives a float, an array an array of the same shape, which you must not write into. The function may return
    one number for an array if the cost is constant.

    Args:
        name (str): Name of the cost, for errors.
        function (callable): From numbers of elements to seconds.

    Raises:
        ValueError: At a call, for another shape, or a negative or infinite time.
    """

    name: str  # which of `Costs`, for errors
    function: Callable[[Any], Any]  # from element counts to seconds

    @overload
    def __call__(self, elements: float | np.integer[Any]) -> float: ...
    @overload
    def __call__(self, elements: Elements | Reals) -> Reals: ...
    def __call__(self, elements: float | np.integer[Any] | Elements | Reals) -> float | Reals:
        shape = np.shape(elements)
        seconds = np.asarray(self.function(elements), dtype=np.float64)
        if seconds.shape not in ((), shape):
            raise ValueError(
                f"costs.{self.name} returned shape {seconds.shape} for shape {shape}: it must work elementwise"
            )
        if not (np.isfinite(seconds) & (seconds >= 0)).all():
            raise ValueError(
                f"costs.{self.name} returned {_worst(seconds)} seconds: times must be finite and not negative. Clamp "
                "the fit."
            )
        return np.broadcast_to(seconds, shape) if shape else float(seconds)


@dataclass(frozen=True, init=False)
class Costs:
    """Describe what selection and messages cost, for planners and :func:`predict`.

    Every function maps a number of elements, or a NumPy array of them, to seconds, and never decreases. This is checked
    once, at powers of two up to 2**31.

    Args:
        sparsify (callable): Seconds to select from a vector: per tensor with ``"ahead"``, per merge buffer with
            ``"behind"``. It must be 0 for 0 elements.
        exchange (callable): Seconds to exchange a compressed message. Its value for 0 elements is the start-up, alpha.
        dense (callable): Seconds to exchange an uncompressed message. Default: None, if no merge buffer may be
            uncompressed.
        message (callable): Seconds for which encoding and sending a message keep the processor from the backward pass.
            An uncompressed merge buffer costs ``message(0)``. Default: None, no time.

    Raises:
        TypeError: If one is not a function.
        ValueError: If a function breaks these rules.
    """

    sparsify: Cost
    exchange: Cost
    dense: Cost | None
    message: Cost | None

    def __init__(
        self,
        sparsify: Callable[[Any], Any],
        exchange: Callable[[Any], Any],
        dense: Callable[[Any], Any] | None = None,
        *,
        message: Callable[[Any], Any] | None = None,
    ) -> None:
        object.__setattr__(self, "sparsify", _tried("sparsify", sparsify))
        object.__setattr__(self, "exchange", _tried("exchange", exchange))
        object.__setattr__(self, "dense", None if dense is None else _tried("dense", dense))
        object.__setattr__(self, "message", None if message is None else _tried("message", message))
        at_zero = self.sparsify(0)
        if at_zero != 0:
            raise ValueError(f"costs.sparsify(0) is {at_zero}, expected 0, because an exempt tensor has no selection")


def _tried(name: str, function: Callable[[Any], Any]) -> Cost:
    """Return `function` as a cost, tried at powers of two. Raises as `Costs` does."""
    if not callable(function):
        raise TypeError(f"costs.{name} is {function!r}: expected a function from element counts to seconds")
    if isinstance(function, Cost):
        function = function.function
    cost = Cost(name, function)
    try:
        seconds = cost(_PROBE)
    except Exception as error:
        raise ValueError(
            f"costs.{name} failed for an array of 0 to 2**31 elements, but it must work elementwise: {error}"
        ) from error
    falls = np.flatnonzero(np.diff(seconds) < 0)
    if falls.size:
        low, high = _PROBE[falls[0]], _PROBE[falls[0] + 1]
        raise ValueError(f"costs.{name} decreases from {low} to {high} elements, but the fit must be monotone")
    return cost


def _worst(seconds: Reals) -> float:
    """Return the first of `seconds` that is negative or not finite."""
    bad = seconds[~(np.isfinite(seconds) & (seconds >= 0))]
    return float(bad.flat[0])
