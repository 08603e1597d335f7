# SPDX-License-Identifier: Apache-2.0
"""Checks of a caller's arguments: they become tuples and read-only arrays, or an error that names the tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Elements = NDArray[np.int64]
Reals = NDArray[np.float64]


def tensor_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return `names` as a tuple of at least one distinct string, in the order given (readiness order).

    Raises TypeError where a name is no string, ValueError where there is none or one is repeated.
    """
    if isinstance(names, str):
        raise TypeError(f"names is the single string {names!r}: expected a sequence of tensor names")
    checked = tuple(names)
    first: dict[str, int] = {}
    for index, name in enumerate(checked):
        if not isinstance(name, str):
            raise TypeError(f"names[{index}] is {name!r}, not a string: expected one name per tensor")
        if name in first:
            raise ValueError(
                f"names[{index}] repeats names[{first[name]}] ({name!r}). Use a different name for each tensor."
            )
        first[name] = index
    if not checked:
        raise ValueError("names is empty: expected at least one tensor")
    return checked


def elements(what: str, values: ArrayLike, names: Sequence[str], least: int) -> Elements:
    """Return `values`, a count of elements per tensor, as a read-only int64 array of shape (len(names),).

    Raises TypeError for anything but numbers; ValueError for another length, a fraction, or a count
    below `least`.
    """
    given = _numbers(what, values, names)
    with np.errstate(invalid="ignore"):
        array = given.astype(np.int64)
    _refuse(given != array, what, given, names, "a count of elements must be whole and below 2**63")
    _refuse(array < least, what, given, names, f"it must be at least {least}")
    return _frozen(array)


def reals(what: str, values: ArrayLike, names: Sequence[str]) -> Reals:
    """Return `values`, a time or an energy per tensor, as a read-only float64 array of shape (len(names),).

    Raises TypeError for anything but numbers; ValueError for another length, a negative or a
    non-finite value.
    """
    array = _numbers(what, values, names).astype(np.float64)
    _refuse(~np.isfinite(array), what, array, names, "it must be finite. Measure it again")
    _refuse(array < 0, what, array, names, "it must not be negative. Measure it again, or clamp it to 0")
    return _frozen(array)


def whole(what: str, value: Any, least: int) -> int:
    """Return `value` as a Python int, which has the same text on every rank.

    Raises TypeError where it is no whole number (a bool or a float is none), ValueError below `least`.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}: expected a whole number, as an int") from None
    if number < least:
        raise ValueError(f"{what} is {number}: it must be at least {least}")
    return number


def flag(what: str, value: Any) -> bool:
    """Return `value` as a Python bool. Raises TypeError for anything but True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is {value!r}: expected True or False")
    return bool(value)


def seconds(what: str, value: Any, unit: str = " of seconds") -> float:
    """Return `value` as a Python float. TypeError where it is no number, ValueError if negative or not finite."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{what} is {value!r}: expected a number{unit}")
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{what} is {number}: it must be finite and not negative")
    return number + 0.0  # -0.0 would be another text for an equal value


def _numbers(what: str, values: ArrayLike, names: Sequence[str]) -> NDArray[Any]:
    """Return `values` as an array with one number per tensor. Raises as `elements` and `reals` do."""
    array = np.asarray(values)
    if array.shape != (len(names),):
        raise ValueError(
            f"{what} has shape {array.shape} for {len(names)} tensors: expected one number per tensor, in readiness "
            "order"
        )
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{what} holds {array.dtype} values: expected integers or floats")
    return array


def _refuse(bad: NDArray[np.bool_], what: str, given: NDArray[Any], names: Sequence[str], rule: str) -> None:
    """Raise ValueError, with the tensor's name, for the first of the values that is `bad`."""
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(f"{what}[{index}] of tensor {names[index]!r} is {given[index]}: {rule}")


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, made read-only."""
    array.setflags(write=False)
    return array
