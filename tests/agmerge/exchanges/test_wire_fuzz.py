# SPDX-License-Identifier: Apache-2.0
"""Damaged messages, thousands of them: every one an error that names the rank and the buffer, none a crash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.exchanges import CPU, Quiet, context, control_of, draw_offer, draw_work, get, put, segments_of

from agmerge import testing
from agmerge.backends.local import Call
from agmerge.errors import MessageError
from agmerge.exchanges import SegmentBuffers, SparseExchange
from agmerge.exchanges.message import Everything
from agmerge.exchanges.message.format import FIXED, MAGIC, OF_SECTION, Format, RoundHeader
from agmerge.tensors.layout import Segment, TensorClass
from sparsifiers import Kind

SIZE = 3
WIRES = ["auto", "fp16", "int8", "int4", "2bit", "sign"]
TENSORS = {
    "small": [(40, TensorClass(CPU, torch.float32, Kind.SPARSE)), (33, TensorClass(CPU, torch.float32, Kind.DENSE))],
    "everything": [
        (320, TensorClass(CPU, torch.float32, Kind.SPARSE)),
        (1_000, TensorClass(CPU, torch.float16, Kind.SPARSE)),
    ],
    "blocks": [
        (20_000, TensorClass(CPU, torch.float32, Kind.SPARSE)),
        (700, TensorClass(CPU, torch.bfloat16, Kind.SPARSE)),
    ],
}
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Damage = Callable[[Bytes, np.random.Generator], None]


def parts_of(kind: str) -> tuple[list[Segment], list[int | None], list[RoundHeader]]:
    segments = segments_of(TENSORS[kind])
    density = 1.0 if kind == "everything" else 0.05
    capacities = [math.ceil(density * s.length) if s.tensor_class.sparse else None for s in segments]
    return segments, capacities, [control_of(rank, segments) for rank in range(SIZE)]


def packed(kind: str, wire: str) -> tuple[Format, torch.Tensor, list[RoundHeader]]:
    """Sound messages of all ranks, uint8[W, size]."""
    segments, capacities, controls = parts_of(kind)
    layout = Format(segments, capacities, wire)
    rows = torch.zeros(SIZE, layout.size, dtype=torch.uint8)
    takes_all = [isinstance(section.index, Everything) for section in layout.sections]
    for rank, row in enumerate(rows):
        offers = [
            None if capacity is None else draw_offer(segment.length, capacity, 0 if full else 3 * rank + i, False)
            for i, (segment, capacity, full) in enumerate(zip(segments, capacities, takes_all, strict=True))
        ]
        layout.write_header(row, controls[rank], [0 if offer is None else offer.count for offer in offers])
        for i, (section, offer) in enumerate(zip(layout.sections, offers, strict=True)):
            work = draw_work(section.segment, 10 * rank + i, 1.0)
            if offer is None:
                layout.whole(row, section).copy_(work)
            else:
                values = work[offer.indices.long()]
                values[int(offer.count) :] = 0.0
                put(row, section, offer, values)
        layout.seal(row)
    return layout, rows, controls


def bit(data: Bytes, source: np.random.Generator) -> None:
    data[source.integers(len(data))] ^= np.uint8(1 << source.integers(8))


def bits(data: Bytes, source: np.random.Generator) -> None:
    for _ in range(int(source.integers(2, 20))):
        bit(data, source)


def truncated(data: Bytes, source: np.random.Generator) -> None:
    data[source.integers(len(data) - 4) :] = source.choice([0, 255])


def overwritten(data: Bytes, source: np.random.Generator) -> None:
    start = source.integers(len(data) - 1)
    stop = min(len(data), start + int(source.integers(1, 64)))
    data[start:stop] = source.integers(0, 256, stop - start)


def shifted(data: Bytes, source: np.random.Generator) -> None:
    data[:] = np.roll(data, source.integers(1, len(data)))


def foreign(data: Bytes, source: np.random.Generator) -> None:
    data[:] = source.integers(0, 256, len(data))
    if source.random() < 0.5:
        data[:4] = np.array([MAGIC], dtype="<i4").view(np.uint8)


def word(data: Bytes, source: np.random.Generator) -> None:
    """Some number of the header: counts, lengths, codecs, sizes."""
    words = data[: 4 * (len(FIXED) + 2 * len(OF_SECTION))].view("<i4")
    words[source.integers(len(words))] = source.choice([-1, 0, 1, 2**31 - 1, -(2**31), 7, 1000])


def swapped(data: Bytes, source: np.random.Generator) -> None:
    half = len(data) // 2
    data[:half], data[-half:] = data[-half:].copy(), data[:half].copy()


DAMAGES: list[Damage] = [bit, bits, truncated, overwritten, shifted, foreign, word, swapped]
each_kind = pytest.mark.parametrize("kind", TENSORS)
each_wire = pytest.mark.parametrize("wire", WIRES)
each_damage = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)


def read(layout: Format, rows: torch.Tensor, mine: RoundHeader, payload: bool) -> None:
    """All that a receiver does with messages before it adds; on a device there is no checksum of the payload."""
    layout.read_headers(rows, mine, "buffer 3")
    if payload:
        layout.check_payloads(rows, "buffer 3")
    counts = layout.counts(rows)
    for number, section in enumerate(layout.sections):
        for rank, row in enumerate(rows if section.capacity is not None else []):
            storage = section.segment.tensor_class.storage
            indices, values, good = get(row, section, counts[rank][number], storage)
            assert values.dtype == storage and len(values) == len(indices) == counts[rank][number]
            if not good:
                raise MessageError("AGM501: buffer 3: the indices of a rank")
            torch.zeros(section.segment.length, dtype=storage).index_add_(0, indices, values)


def looked_at(rows: torch.Tensor, layout: Format) -> torch.Tensor:
    """What the header's checksum covers, and itself."""
    place = FIXED.index("payload")
    words = rows[:, : 4 * layout.words].contiguous().view(torch.int32)
    return torch.cat([words[:, :place], words[:, place + 1 :]], dim=1)


@each_kind
@each_wire
@each_damage
@pytest.mark.parametrize("payload", [True, False], ids=["host", "device"])
def test_a_damaged_message_is_an_error(kind: str, wire: str, damage: Damage, payload: bool) -> None:
    layout, clean, controls = packed(kind, wire)
    read(layout, clean, controls[0], payload)
    source = np.random.default_rng(sum(map(ord, kind + wire + damage.__name__)))
    errors = tried = 0
    for _ in range(100):
        rows, odd = clean.clone(), int(source.integers(SIZE))
        damage(rows[odd].numpy(), source)
        if torch.equal(rows, clean):
            continue
        try:
            read(layout, rows, controls[0], payload)
        except MessageError as error:
            errors += 1
            assert re.match("AGM50[123]: buffer 3: ", str(error)) and ("rank" in str(error))
            if payload:
                assert f"rank {odd}" in str(error) or f"ranks [{odd}]" in str(error)
        else:
            # Without a checksum, other values and other indices in order cannot be told from the real ones.
            assert not payload and torch.equal(looked_at(rows, layout), looked_at(clean, layout))
        tried += 1
    assert tried > 30 and (errors == tried or not payload)


@each_kind
@each_damage
def test_in_a_group_all_ranks_raise_the_same_and_write_nothing(kind: str, damage: Damage) -> None:
    segments, capacities, _ = parts_of(kind)
    for seed in range(12):
        odd, source = seed % SIZE, np.random.default_rng(seed)
        before: dict[str, torch.Tensor] = {}

        def inject(call: Call, odd: int = odd, source: np.random.Generator = source, before: dict = before) -> None:
            if call.rank == odd and call.kind == "all_gather":
                before["sent"] = call.tensor.clone()
                damage(call.tensor.numpy(), source)
                before["damaged"] = call.tensor.clone()

        updates: list[list[torch.Tensor]] = [[]] * SIZE

        def body(rank: int, updates: list[list[torch.Tensor]] = updates) -> None:
            empty = [torch.full((segment.length,), torch.nan, dtype=segment.tensor_class.dtype) for segment in segments]
            loads = [
                SegmentBuffers(s, draw_work(s, rank, 1.0), update) for s, update in zip(segments, empty, strict=True)
            ]
            offers = [
                None if c is None else draw_offer(s.length, c, rank, False)
                for s, c in zip(segments, capacities, strict=True)
            ]
            updates[rank] = empty
            here = SparseExchange(context(Quiet()))
            pending = here.start("buffer 3", loads, offers, control_of(rank, segments))
            here.wait(pending)
            here.finish(pending)

        found = testing.run(SIZE, body, inject=inject, return_errors=True)
        if torch.equal(before["sent"], before["damaged"]):
            continue
        assert [type(error) for error in found] == [MessageError] * SIZE, found
        (text,) = {str(error) for error in found}
        assert re.match("AGM50[123]: buffer 3: ", text) and (f"rank {odd}" in text or f"ranks [{odd}]" in text)
        assert all(update.isnan().all() for mine in updates for update in mine)


def test_messages_of_another_length_are_an_error() -> None:
    layout, clean, controls = packed("small", "auto")
    for size in (0, 4, 4 * layout.words - 1, 4 * layout.words, layout.size - 1, layout.size + 1):
        rows = torch.zeros(SIZE, size, dtype=torch.uint8)
        rows[:, : layout.size] = clean[:, :size]
        with pytest.raises(MessageError, match=f"AGM502: buffer 3: .* {layout.size} bytes, .* got {size} bytes"):
            layout.read_headers(rows, controls[0], "buffer 3")
            layout.check_payloads(rows, "buffer 3")
