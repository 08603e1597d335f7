# SPDX-License-Identifier: Apache-2.0
"""Costs of sparsifying and exchanging, in seconds, as functions of a number of elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from merging.checks import Elements, Reals

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
