# SPDX-License-Identifier: Apache-2.0
"""Ordered partition of all tensors into merge buffers, as a value that can be agreed on and recorded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from merging import storage
from merging.checks import tensor_names, whole

_KIND = "merging.Plan"


@dataclass(frozen=True)
class Plan:
    """Partition of n tensors, in readiness order, into m merge buffers. Immutable, hashable, equal by value.

    counts: tensors per merge buffer, m integers of at least 1; they sum to n.
    dense: per merge buffer, whether it goes dense; m booleans, all False if left out.
    labels: per merge buffer, codec and exchange, opaque to planners; m strings, all "" if left out.
    names: the n tensor names in readiness order, so that a saved plan can be replayed against the same
        order; or None.
    parts: per merge buffer, in how many messages its selection travels, each selected while the one
        before is under way; m integers of at least 1, all 1 if left out. Dense tensors are not divided: a
        dense merge buffer has 1, and where nothing is selected there is one message in any case.

    Raises TypeError for an entry of the wrong type, ValueError for a wrong length, a merge buffer
    without tensors, a repeated name and a dense merge buffer in several parts.
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
        """Return (start, stop) per merge buffer: it holds the tensors start <= i < stop of the readiness order."""
        stops = tuple(accumulate(self.counts))
        return tuple(zip((0, *stops[:-1]), stops, strict=True))

    def check(self, n: int, names: Sequence[str] | None = None) -> None:
        """Raise ValueError unless this plan partitions n tensors, called `names` in readiness order.

        Names are compared if both sides have them; the error says where they differ first.
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
        """Return the plan as canonical JSON: equal plans give equal text, on every rank and machine.

        Parts are left out where all are 1: such a plan has the same text as in versions without parts.
        """
        body = asdict(self)
        if max(self.parts) == 1:
            del body["parts"]
        return storage.seal(_KIND, body)

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Return the plan that `dumps` wrote. ValueError for a text that is foreign, damaged or edited."""
        return storage.unseal(text, _KIND, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `dumps()` to `path`, atomically."""
        storage.write(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan saved at `path`. ValueError, with the path, for a foreign or damaged file."""
        return storage.read(path, _KIND, cls)

    def digest(self) -> str:
        """Return 16 hex digits of the SHA-256 of `dumps()`: equal for equal plans, in every process."""
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
