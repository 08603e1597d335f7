# SPDX-License-Identifier: Apache-2.0
"""Ordered partition of all tensors into merge buffers, as a value that can be agreed on and recorded.

The checks of arguments stand before it, for all of the package.
"""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from merging import storage

# Arguments of callers: they become tuples and read-only arrays, or an error that names the tensor.

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


# The plan.

_KIND = "merging.Plan"


@dataclass(frozen=True)
class Plan:
    """Assign n tensors, in the order in which gradients become ready, to m merge buffers. Immutable and hashable.

    Args:
        counts (tuple of int): Number of tensors in each merge buffer, at least 1.
        dense (tuple of bool): For each merge buffer, whether it is sent uncompressed. Default: no.
        labels (tuple of str): For each merge buffer, how it is sent, such as ``"wire=int8"``. Planners do not
            read them. Default: empty.
        names (tuple of str): Names of the n tensors, in order. A saved plan with names is checked against the model.
            Default: None.
        parts (tuple of int): For each merge buffer, the number of messages that its selection is sent in. The next part
            is selected while the one before is sent. Uncompressed merge buffers have 1 part. Default: 1.

    Raises:
        TypeError: If an entry has the wrong type.
        ValueError: For a wrong length, an empty merge buffer, a repeated name, or an uncompressed merge buffer in
            parts.
    """

    counts: tuple[int, ...]
    dense: tuple[bool, ...] = ()
    labels: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = tuple(whole(f"counts[{i}]", count, least=1) for i, count in enumerate(self.counts))
        if not counts:
            raise ValueError("counts is empty: a plan has at least one merge buffer")
        m, n = len(counts), sum(counts)
        dense = _flags(self.dense) or (False,) * m
        labels = _texts(self.labels) or ("",) * m
        names = None if self.names is None else tensor_names(self.names)
        parts = tuple(whole(f"parts[{i}]", part, least=1) for i, part in enumerate(self.parts)) or (1,) * m
        lengths = (("dense", dense, m), ("labels", labels, m), ("names", names, n), ("parts", parts, m))
        for what, given, wanted in lengths:
            if given is not None and len(given) != wanted:
                raise ValueError(
                    f"{what} has {len(given)} entries, but the plan has {m} merge buffers of {n} tensors. Pass "
                    f"{wanted}."
                )
        for i, (flag, part) in enumerate(zip(dense, parts, strict=True)):
            if flag and part > 1:
                raise ValueError(f"merge buffer {i} is dense and has {part} parts, but a dense one must have 1 part")
        object.__setattr__(self, "counts", counts)
        for what, value, _ in lengths:
            object.__setattr__(self, what, value)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Return a pair (start, stop) per merge buffer: it has the tensors from start to stop - 1."""
        stops = tuple(accumulate(self.counts))
        return tuple(zip((0, *stops[:-1]), stops, strict=True))

    def check(self, n: int, names: Sequence[str] | None = None) -> None:
        """Check that this plan fits a model. Names are compared if both sides have them.

        Args:
            n (int): Number of tensors.
            names (list of str): Their names, in the order in which gradients become ready. Default: None.

        Raises:
            ValueError: If the plan does not fit. The text has the first difference.
        """
        total = sum(self.counts)
        if total != n or (names is not None and len(names) != n):
            raise ValueError(
                f"the plan covers {total} tensors, but the model has {n if names is None else len(names)}. Create a "
                "plan for this model."
            )
        if names is None or self.names is None:
            return
        for i, (planned, actual) in enumerate(zip(self.names, names, strict=True)):
            if planned != actual:
                raise ValueError(
                    f"tensor {i} in readiness order is {planned!r} in the plan and {actual!r} in the model. Create a "
                    "plan for this order."
                )

    def dumps(self) -> str:
        """Return the plan as JSON. Equal plans give equal text, on every rank and machine.

        ``parts`` is left out if all are 1, so such a plan has the same text as in older versions.
        """
        body = asdict(self)
        if max(self.parts) == 1:
            del body["parts"]
        return storage.seal(_KIND, body)

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Return the plan of a text from ``dumps``. Raises ``ValueError`` if the text is damaged or edited."""
        return storage.unseal(text, _KIND, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically. ``merging=path`` uses it."""
        storage.write(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a file. Raises ``ValueError``, with the path, if the file is damaged or not a plan."""
        return storage.read(path, _KIND, cls)

    def digest(self) -> str:
        """Return 16 hexadecimal digits, which are equal for equal plans, in every process."""
        return hashlib.sha256(self.dumps().encode("ascii")).hexdigest()[:16]


def _flags(dense: Sequence[bool]) -> tuple[bool, ...]:
    """Return the flags as booleans. Raises TypeError for anything but True, False, 1 and 0."""
    for i, flag in enumerate(dense):
        if flag not in (False, True):
            raise TypeError(f"dense[{i}] is {flag!r}: expected True or False")
    return tuple(bool(flag) for flag in dense)


def _texts(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels as a tuple. Raises TypeError for anything but strings, and for a single string."""
    if isinstance(labels, str):
        raise TypeError(f"labels is the single string {labels!r}: expected one string per merge buffer")
    for i, label in enumerate(labels):
        if not isinstance(label, str):
            raise TypeError(f"labels[{i}] is {label!r}: expected a string")
    return tuple(labels)
