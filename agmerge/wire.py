"""The bytes of one sparse message: header | counts | used bits | sections, in one flat uint8 tensor.

All ranks' messages for a merge buffer have the same size, a pure function of the plan and the step, so one
all-gather carries everything and no sizes are negotiated. A sparse section is ``indices int32[capacity] |
values[capacity]``; a dense section is the segment itself. Everything starts on a 16-byte boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from agmerge.errors import MessageError
from agmerge.handshake import first_difference
from agmerge.layout import Segment

MAGIC = 0x41474D31  # "AGM1"
RELAYOUT = 1  # flag: this rank's membership, dtypes or devices have changed; discard this round and re-plan
_FIXED = ("magic", "step", "plan", "buffer", "flags")


@dataclass(frozen=True)
class Control:
    """What travels with every message beside gradients.

    ``plan``: fingerprint of the plan in use, 31 bits. ``used``: for each tensor of the message, in order,
    whether this rank (after merging: any rank) had a gradient for it in this step.
    """

    step: int
    plan: int
    buffer: int
    flags: int
    used: tuple[bool, ...]

    def merged(self, others: Sequence[Control]) -> Control:
        """Flags and used bits OR-ed over ranks."""
        flags = 0
        for other in others:
            flags |= other.flags
        used = tuple(any(bits) for bits in zip(*(other.used for other in others), strict=True))
        return replace(self, flags=flags, used=used)


@dataclass(frozen=True)
class Section:
    """Where one segment lies in the message, in bytes. ``capacity``: slots; None: all of it, dense."""

    segment: Segment
    capacity: int | None
    indices: slice
    values: slice


class Format:
    """The layout of one message: which bytes mean what."""

    def __init__(self, segments: Sequence[Segment], capacities: Sequence[int | None]) -> None:
        self.tensors = sum(len(segment.slots) for segment in segments)
        self.words = len(_FIXED) + len(segments) + -(-self.tensors // 31)
        end = _align(4 * self.words)
        sections = []
        for segment, capacity in zip(segments, capacities, strict=True):
            indices = slice(end, end + 4 * (capacity or 0))
            start = _align(indices.stop)
            count = segment.length if capacity is None else capacity
            values = slice(start, start + count * segment.lane.dtype.itemsize)
            end = _align(values.stop)
            sections.append(Section(segment, capacity, indices, values))
        self.sections, self.size = tuple(sections), end

    def write_header(self, message: torch.Tensor, control: Control, counts: Sequence[int | torch.Tensor]) -> None:
        """Put ``control`` and the counts of the sections in front. A count on a device is copied there."""
        known = [0 if isinstance(count, torch.Tensor) else count for count in counts]
        fixed = [MAGIC, control.step, control.plan, control.buffer, control.flags]
        words = torch.tensor([*fixed, *known, *_bits(control.used)], dtype=torch.int32)
        header = message[: 4 * self.words].view(torch.int32)
        header.copy_(words)
        for position, count in enumerate(counts, start=len(_FIXED)):
            if isinstance(count, torch.Tensor):
                header[position].copy_(count)

    def read_headers(self, messages: torch.Tensor, mine: Control, name: str) -> Control:
        """Check the headers of all ranks (``messages`` uint8[W, size]); what they say together.

        Raises :class:`agmerge.MessageError`, the same on every rank, if a message is not one of ours or
        belongs to another step, plan or buffer, or holds more than fits.
        """
        rows = messages[:, : 4 * self.words].contiguous().view(torch.int32).tolist()
        foreign = [rank for rank, row in enumerate(rows) if row[0] != MAGIC]
        if foreign:
            raise MessageError(f"{name}: what ranks {foreign} sent is no message of this library")
        said = [[(field, str(row[i])) for i, field in enumerate(_FIXED[1:-1], start=1)] for row in rows]
        if any(facts != said[0] for facts in said):
            raise MessageError(f"{name}: messages do not belong together: {first_difference(said)}")
        if rows[0][1:4] != [mine.step, mine.plan, mine.buffer]:
            raise MessageError(
                f"{name}: messages of step, plan, buffer {rows[0][1:4]} arrived in the place of "
                f"{[mine.step, mine.plan, mine.buffer]}"
            )
        first = len(_FIXED)
        for rank, row in enumerate(rows):
            for section, count in zip(self.sections, row[first : first + len(self.sections)], strict=True):
                if not 0 <= count <= (section.capacity or 0):
                    raise MessageError(
                        f"{name}: rank {rank} announces {count} elements where {section.capacity or 0} fit"
                    )
        bits = first + len(self.sections)
        return mine.merged([replace(mine, flags=row[4], used=_unbits(row[bits:], self.tensors)) for row in rows])

    def indices(self, message: torch.Tensor, section: Section) -> torch.Tensor:
        """int32[capacity] of one rank's message: a view."""
        return message[section.indices].view(torch.int32)

    def values(self, message: torch.Tensor, section: Section) -> torch.Tensor:
        """The section's values, in the gradient's dtype: a view."""
        return message[section.values].view(section.segment.lane.dtype)


def _align(position: int) -> int:
    return -(-position // 16) * 16


def _bits(flags: Sequence[bool]) -> list[int]:
    """31 flags a word, so that every word is a valid int32."""
    words = [0] * -(-len(flags) // 31)
    for i, flag in enumerate(flags):
        words[i // 31] |= int(flag) << (i % 31)
    return words


def _unbits(words: Sequence[int], count: int) -> tuple[bool, ...]:
    return tuple(bool(words[i // 31] >> (i % 31) & 1) for i in range(count))
