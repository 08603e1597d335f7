# SPDX-License-Identifier: Apache-2.0
"""Lay out the bytes of one sparse message: header | sections, in one flat uint8 tensor.

All ranks' messages for a merge buffer have the same size, a pure function of the plan, the step and the value codec.
So one all-gather carries everything, and no sizes are negotiated. A sparse section is ``indices | values``, each in its
codec; a dense section is the segment itself. Everything starts on a 16-byte boundary and is little-endian.

The header is int32 words: :data:`FIXED`, then :data:`OF_SECTION` for each section, then used bits, 31 a word. ``words``
is how many these are, ``size`` the bytes of the message. ``checksum`` covers the header but for both checksums,
``payload`` what comes after it; a device computes neither. Exchanges that send something else leave the second out.
"""

from __future__ import annotations

import functools
import operator
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag

import torch

from agmerge.backends.handshake import Fact, first_difference
from agmerge.backends.streams import streams_of
from agmerge.errors import MessageError
from agmerge.exchanges.message import VALUES, Everything, IndexCodec, ValueCodec, smallest, value_codec
from agmerge.exchanges.message.indices import GRAIN
from agmerge.tensors.layout import Segment, aligned
from sparsifiers import gpu

MAGIC = 0x41474D32  # "AGM2": the last byte is the version of this format


class Flag(IntFlag):
    """Flags of a rank in every message of a round; those of all ranks are OR-ed."""

    REPLAN = 1  # this rank's parameters have changed: discard the round, and agree anew
    NONFINITE = 2  # this rank found an infinity or a NaN: the step comes to nothing
    JOINED = 4  # this rank has no batches left, and sends its residual
    NEWCOMER = 16  # this rank knows of workers that wait to be let in
    LEAVING = 32  # this rank leaves its elastic job after this round
    ACTIVE = 8  # this rank still has batches; join() ends in the first round in which no rank sets it
    FULL = 64  # in a message of factors: this rank has no row or column that is zero where its basis is not


FIXED = ("magic", "step", "plan", "buffer", "flags", "words", "size", "checksum", "payload")
OF_SECTION = ("codecs", "length", "capacity", "count")
_FLAGS, _WORDS, _SIZE, _CHECKSUM, _PAYLOAD = range(FIXED.index("flags"), len(FIXED))
_STEP, _FIRST, _EACH = FIXED.index("step"), len(FIXED), len(OF_SECTION)
_WHOLE = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class RoundHeader:
    """Header of every message: the place in training, flags, and the tensors with a gradient."""

    step: int  # committed exchanges so far
    plan: int  # fingerprint of the plan in use, 31 bits
    buffer: int  # number of the merge buffer
    flags: int  # of Flag
    used: tuple[bool, ...]  # by tensor of the message: this rank (after merging: any rank) had a gradient in this step
    # bool, 0-dim, on the device of the message: unless it is set, the message is to have Flag.NONFINITE, which the host
    # does not know yet. None: the host knows all.
    finite: torch.Tensor | None = field(default=None, compare=False)

    def merged(self, others: Sequence[RoundHeader]) -> RoundHeader:
        """Return this with the flags and the used bits of all ``others``, OR-ed."""
        flags = 0
        for other in others:
            flags |= other.flags
        used = tuple(any(bits) for bits in zip(*(other.used for other in others), strict=True))
        return replace(self, flags=flags, used=used)


def write_numbers(numbers: Sequence[float], out: torch.Tensor) -> None:
    """Write ``numbers`` into ``out``, 1-D; the host does not wait, if the streams of the device are known."""
    values = torch.tensor(numbers, dtype=out.dtype)
    streams = None if out.device.type == "cpu" else streams_of(out.device)
    if streams is None:
        out.copy_(values)
    else:  # torch reuses pinned memory only when the queued copies of it have ended
        out.copy_(streams.pinned(len(numbers), out.dtype).copy_(values), non_blocking=True)


@dataclass(frozen=True)
class Section:
    """Place of one segment in the message, and its codecs."""

    segment: Segment
    capacity: int | None  # entries, more than were asked for with Everything; None: dense, with no codecs
    indices: slice  # bytes of the message; empty where dense
    values: slice  # bytes of the message
    index: IndexCodec | None = None
    value: ValueCodec | None = None

    @property
    def codecs(self) -> int:
        """Return both codecs in one word of the header: value, index; where dense, the dtype in the byte above."""
        if self.index is None or self.value is None:
            return (1 + _WHOLE.index(self.segment.tensor_class.dtype)) << 16
        return self.value.identity << 8 | self.index.identity

    @property
    def index_words(self) -> slice:
        """Return the bytes of the message that the indices have, in whole words: the values begin behind them."""
        return slice(self.indices.start, aligned(self.indices.stop, 4))

    @property
    def name(self) -> str:
        """Return the names of the codecs, as statistics show them."""
        if self.index is None or self.value is None:
            return "plain"
        return f"{self.index.name if self.segment.tensor_class.sparse else 'dense'}/{self.value.name}"


class Format:
    """Layout of one message: the meaning of each byte.

    This is a pure function of the segments, of their capacities (entries; None: dense) and of ``wire``, the value
    codec, see :func:`agmerge.exchanges.message.value_codec`, and of ``whole``, the codec of dense segments (None: as
    they are): exchanges keep it from step to step.
    """

    segments: list[Segment]
    capacities: list[int | None]  # one a segment
    tensors: int  # of the message, one used bit each
    words: int  # int32, of the header
    size: int  # bytes of the message
    sections: tuple[Section, ...]  # one a segment
    # Bytes: "index codec/value codec", "plain" or "dense/value codec" for dense segments; all others are "header".
    by_codec: dict[str, int]

    def __init__(
        self,
        segments: Sequence[Segment],
        capacities: Sequence[int | None],
        wire: str = "auto",
        whole: str | None = None,
    ) -> None:
        self.segments, self.capacities = list(segments), list(capacities)
        self.tensors = sum(len(segment.slots) for segment in segments)
        self.words = _FIRST + _EACH * len(segments) + -(-self.tensors // 31)
        end = self._end = aligned(4 * self.words, GRAIN)  # bytes of the header
        sections = []
        for segment, capacity in zip(segments, capacities, strict=True):
            if capacity is None and whole is not None and not segment.tensor_class.dtype.is_complex:
                value = VALUES[whole]
                where = slice(end, end + value.size(segment.length))
                every = Everything(segment.length)
                sections.append(Section(segment, segment.length, slice(end, end), where, every, value))
            elif capacity is None:
                where = slice(end, end + segment.nbytes)
                sections.append(Section(segment, None, slice(end, end), where))
            else:
                index, value = section_codecs(segment.length, capacity, segment.tensor_class.dtype, wire)
                indices = slice(end, end + index.size)
                start = aligned(indices.stop, GRAIN)
                where = slice(start, start + value.size(index.capacity))
                sections.append(Section(segment, index.capacity, indices, where, index, value))
            end = aligned(where.stop, GRAIN)
        self.sections, self.size = tuple(sections), end
        self.by_codec = {"header": self.size}
        for section in self.sections:
            taken = section.values.stop - section.indices.start
            self.by_codec[section.name] = self.by_codec.get(section.name, 0) + taken
            self.by_codec["header"] -= taken
        # Words of each section in the header but for its count, and where the used bits begin.
        self._facts = [[part.codecs, part.segment.length, part.capacity or 0] for part in self.sections]
        self._used_from = _FIRST + _EACH * len(self.sections)

    # -- writing --------------------------------------------------------------------------------------------

    def write_header(
        self,
        message: torch.Tensor,
        control: RoundHeader,
        counts: Sequence[int | torch.Tensor],
        *,
        seal: bool = False,
        behind: Sequence[int] = (),
    ) -> None:
        """Put ``control`` and the counts of the sections in front of ``message``, uint8.

        A count on a device stays there. ``seal``: also put in the checksum of the bytes behind, which must be in place.
        ``behind``: int32 words that are written behind the header, on the next boundary.
        """
        words = [MAGIC, control.step, control.plan, control.buffer, control.flags, self.words, self.size, 0, 0]
        on_host = message.device.type == "cpu"
        for facts, count in zip(self._facts, counts, strict=True):
            words += facts
            words.append(0 if isinstance(count, torch.Tensor) and not on_host else int(count))
        words += _bits(control.used)
        if on_host:
            words[_CHECKSUM] = _header_sum(words)
        if control.finite is not None:
            words[_FLAGS] |= Flag.NONFINITE
        header = self.header_of(message)
        if behind:
            words += [*[0] * (self._end // 4 - self.words), *behind]
        write_numbers(words, message[: 4 * len(words)].view(torch.int32))
        if control.finite is not None:  # the flag is there, and taken off again
            header[_FLAGS].add_(control.finite, alpha=-int(Flag.NONFINITE))
        for place, count in enumerate(counts, start=1):
            if isinstance(count, torch.Tensor) and not on_host:
                header[_FIRST + _EACH * place - 1].copy_(count)
        if seal:
            self.seal(message)

    def seal(self, message: torch.Tensor) -> None:
        """Put in the checksum of the bytes behind the header; on a device there is none."""
        if message.device.type == "cpu":
            message[4 * _PAYLOAD : 4 * _PAYLOAD + 4].view(torch.int32).fill_(self._payload_sum(message))

    def _payload_sum(self, message: torch.Tensor) -> int:
        """Return the CRC-32 of the bytes behind the header of ``message``, uint8[size]."""
        return _signed(zlib.crc32(message[4 * self.words : self.size].numpy().data))

    def merge_on_device(
        self, messages: torch.Tensor, figures: torch.Tensor, own: int, key: int, out: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Write the merged header of ``messages`` in front of ``out``, uint8[size]: nothing waits, nothing is raised.

        ``messages``: uint8[W, size or more], on a device. ``figures``: int64[W, 4], of these, and the second of
        ``out``: see `sparsifiers.gpu.merge_heads`. A message that does not belong with number ``own`` is a fault; then
        the merged header is of no use.
        """
        message, said = out
        heads = self.header_of(messages), figures
        gpu.merge_heads(*heads, own, key, (self.header_of(message), said), free=_FLAGS, used=self._used_from)

    # -- reading --------------------------------------------------------------------------------------------

    def header_of(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the words of the header in front of ``messages``, uint8[..., size]: int32[..., words], a view."""
        return messages[..., : 4 * self.words].view(torch.int32)

    def counts_of(self, messages: torch.Tensor, section: int) -> torch.Tensor:
        """Return the count of a section that each rank announces in its header, unchecked: int32[W], a view."""
        return self.header_of(messages)[:, _FIRST + _EACH * (section + 1) - 1]

    def read_headers(
        self, messages: torch.Tensor, own: RoundHeader, name: str, *, sealed: bool | None = None
    ) -> RoundHeader:
        """Check the headers of all ranks, and return the merged header.

        ``messages``: uint8[W, ...], a message a rank, or the beginning of it. ``own``: this rank's header.
        ``sealed``: they have checksums, which a device does not write; None: if they are on the host.

        Raises :class:`agmerge.MessageError`, the same on every rank, if a message is not one of ours or damaged, is of
        another step, plan, buffer or layout, or holds more than fits.
        """
        self._check_length(messages.shape[1] >= 4 * self.words, messages, name)
        rows = messages[:, : 4 * self.words].contiguous().view(torch.int32).tolist()
        foreign = [rank for rank, row in enumerate(rows) if row[0] != MAGIC]
        if foreign:
            raise MessageError(
                f"AGM503: {name}: the messages of ranks {foreign} are not from agmerge, or from another version. "
                "Install the same version on every rank, and check whether another program sends to this group."
            )
        if messages.device.type == "cpu" if sealed is None else sealed:
            _refuse_damaged(name, [r for r, row in enumerate(rows) if self._damaged(row)])
        self._check_place(rows, own, name)
        for rank, row in enumerate(rows):
            for (*_, capacity), count in zip(self._facts, self._counts(row), strict=True):
                if not 0 <= count <= capacity:
                    raise MessageError(
                        f"AGM501: {name}: rank {rank} sent {count} elements, expected at most {capacity}"
                    )
        # Flags and used bits of all ranks together; other words of it mean nothing.
        words = [functools.reduce(operator.or_, column) for column in zip(*rows, strict=True)]
        return replace(own, flags=words[_FLAGS], used=_unbits(words[self._used_from :], self.tensors))

    def check_payloads(self, messages: torch.Tensor, name: str) -> None:
        """Raise :class:`agmerge.MessageError` for messages, uint8[W, size], that were sealed and have changed since."""
        self._check_length(messages.shape[1] == self.size, messages, name)
        if messages.device.type == "cpu":
            at = slice(4 * _PAYLOAD, 4 * _PAYLOAD + 4)
            announced = messages[:, at].contiguous().view(torch.int32).view(-1).tolist()
            sums = [self._payload_sum(message) for message in messages]
            pairs = enumerate(zip(announced, sums, strict=True))
            _refuse_damaged(name, [rank for rank, (written, read) in pairs if written != read])

    def _check_length(self, fits: bool, messages: torch.Tensor, name: str) -> None:
        """Raise :class:`agmerge.MessageError` unless ``fits``."""
        if not fits:
            raise MessageError(
                f"AGM502: {name}: expected messages of {self.size} bytes, headers of {4 * self.words}, got "
                f"{messages.shape[1]} bytes"
            )

    def counts(self, messages: torch.Tensor) -> list[list[int]]:
        """Return how many elements each rank sends, by rank and section; headers have been checked."""
        rows = messages[:, : 4 * self.words].contiguous().view(torch.int32).tolist()
        return [self._counts(row) for row in rows]

    def _counts(self, row: list[int]) -> list[int]:
        """Return the counts of all sections that a header, ``row``, announces."""
        return row[_FIRST + _EACH - 1 : self._used_from : _EACH]

    def _damaged(self, row: list[int]) -> bool:
        """Return whether the checksum of a header, ``row``, is wrong."""
        # The checksum of a longer or shorter header is another one; that it has no place here is found next.
        return row[_WORDS] == self.words and row[_CHECKSUM] != _header_sum(row)

    def _check_place(self, rows: Sequence[Sequence[int]], own: RoundHeader, name: str) -> None:
        """Raise :class:`agmerge.MessageError` unless all headers are those of this message."""
        expected = [own.step, own.plan, own.buffer, self.words, self.size]
        expected += [fact for facts in self._facts for fact in facts]
        theirs = [self._place(row) for row in rows]
        if all(place == expected for place in theirs):
            return
        named = [self._named(place) for place in theirs]
        if any(facts != named[0] for facts in named):
            raise MessageError(f"AGM502: {name}: messages of ranks do not match: {first_difference(named)}")
        if theirs[0][:3] != expected[:3]:
            raise MessageError(
                f"AGM502: {name}: expected messages of step, plan, buffer {expected[:3]}, got {theirs[0][:3]}"
            )
        (what, value), (_, right) = next(
            pair for pair in zip(named[0], self._named(expected), strict=True) if pair[0] != pair[1]
        )
        raise MessageError(f"AGM502: {name}: messages have another layout: {what} is {value}, expected {right}")

    def _place(self, row: Sequence[int]) -> list[int]:
        """Return the words of a header, ``row``, that are the same for all messages that belong together."""
        place = [*row[_STEP:_FLAGS], *row[_WORDS:_CHECKSUM]]
        for start in range(_FIRST, self._used_from, _EACH):
            place += row[start : start + _EACH - 1]
        return place

    def _named(self, place: Sequence[int]) -> list[Fact]:
        """Return these words with their names, as facts to compare between ranks."""
        names = [*FIXED[_STEP:_FLAGS], *FIXED[_WORDS:_CHECKSUM]]
        names += [f"{field} of section {i}" for i in range(len(self.sections)) for field in OF_SECTION[:-1]]
        return list(zip(names, map(str, place), strict=True))

    def whole(self, message: torch.Tensor, section: Section) -> torch.Tensor:
        """Return the elements of a dense section, in the gradient's dtype: a view of ``message``, uint8[..., size]."""
        return message[..., section.values].view(section.segment.tensor_class.dtype)


def section_codecs(length: int, capacity: int, dtype: torch.dtype, wire: str) -> tuple[IndexCodec, ValueCodec]:
    """Return the codecs of a section of ``length`` elements of ``dtype``, of which up to ``capacity`` are selected.

    ``wire`` as in `Format`. Where all values, with 0 for those not selected, take no more bytes than the selected ones
    and their indices, all are sent: always at density 1, if the value codec has a code for 0.
    """
    index, value = smallest(length, capacity), value_codec(wire, dtype)
    chosen = aligned(index.size, GRAIN) + aligned(value.size(capacity), GRAIN)
    if value.has_zero and aligned(value.size(length), GRAIN) <= chosen:
        return Everything(length), value
    return index, value


def slot_bytes(length: int, capacity: int, dtype: torch.dtype, wire: str) -> float:
    """Return the bytes of one element that may be selected, header and padding apart.

    The section has ``length`` elements of ``dtype``, and ``capacity``, which is not 0, may be selected; ``wire`` as in
    `Format`.
    """
    index, value = section_codecs(length, capacity, dtype, wire)
    return (index.size + value.size(index.capacity)) / capacity


def _refuse_damaged(name: str, ranks: list[int]) -> None:
    """Raise :class:`agmerge.MessageError` that names ``ranks``, of wrong checksums; nothing if there are none."""
    if ranks:
        raise MessageError(
            f"AGM501: {name}: the messages of ranks {ranks} were damaged in transit (wrong checksum) and were not "
            "used. Check the network, the memory and the drivers of their machines."
        )


def _header_sum(words: Sequence[int]) -> int:
    """Return the CRC-32 of a header, int32 words, without its checksums."""
    covered = [*words[:_CHECKSUM], *words[_PAYLOAD + 1 :]]
    return _signed(zlib.crc32(struct.pack(f"<{len(covered)}i", *covered)))


def _signed(checksum: int) -> int:
    """Return 32 bits as int32 has them."""
    return checksum - (checksum >> 31 << 32)


def _bits(flags: Sequence[bool]) -> list[int]:
    """Pack 31 flags a word, so that every word is a valid int32."""
    words = [0] * -(-len(flags) // 31)
    for i, flag in enumerate(flags):
        words[i // 31] |= int(flag) << (i % 31)
    return words


def _unbits(words: Sequence[int], count: int) -> tuple[bool, ...]:
    """Return the first ``count`` flags of such words."""
    return tuple([bool(words[i // 31] >> (i % 31) & 1) for i in range(count)])
