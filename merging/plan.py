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
