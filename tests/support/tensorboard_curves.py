# SPDX-License-Identifier: Apache-2.0
"""Read back the curves that examples have written for TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

Points = list[tuple[int, float]]


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of events: each has its length before it, and checksums around it."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def scalars(folder: Path) -> dict[str, Points]:
    """Return what lies below ``folder``, by tag: steps and values, in the order in which they were written."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, Points] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for record in records(path):
            event = Event.FromString(record)
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
