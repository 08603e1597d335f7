# SPDX-License-Identifier: Apache-2.0
"""The bytes of a message: nothing overlaps, everything comes back, and what does not belong is an error."""

from __future__ import annotations

import functools
import operator
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.exchanges import get, put

from agmerge.errors import MessageError
from agmerge.exchanges.message import VALUES, Everything
from agmerge.exchanges.message.format import FIXED, MAGIC, OF_SECTION, Format, RoundHeader
from agmerge.tensors.layout import Layout, Segment, TensorClass
from sparsifiers import Kind, Selection

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CLASSES = [TensorClass(CPU, dtype, kind) for dtype in DTYPES for kind in (Kind.SPARSE, Kind.DENSE)]
HEAD = len(FIXED)  # words before those of the sections
COUNT = HEAD + OF_SECTION.index("count")  # of the first section

tensors = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=2).map(tuple), st.sampled_from(CLASSES)), min_size=1, max_size=40
)


def segments_of(drawn: list[tuple[tuple[int, ...], TensorClass]]) -> list[Segment]:
    layout = Layout([(f"t{i}", shape, tensor_class) for i, (shape, tensor_class) in enumerate(drawn)])
    return layout.segments(0, len(drawn))


@st.composite
def formats(draw: st.DrawFn) -> Format:
    segments = segments_of(draw(tensors))
    return Format(
        segments,
        [draw(st.integers(0, segment.length)) if segment.tensor_class.sparse else None for segment in segments],
        draw(st.sampled_from(["auto", *VALUES])),
    )


def simple(tensor_count: int = 3, capacity: int = 4) -> Format:
    """One sparse section of ``capacity`` slots and a dense one that rides along."""
    sparse, dense = TensorClass(CPU, torch.float32, Kind.SPARSE), TensorClass(CPU, torch.float32, Kind.DENSE)
    drawn: list[tuple[tuple[int, ...], TensorClass]] = [((2,), sparse)] * (tensor_count - 1) + [((2,), dense)]
    return Format(segments_of(drawn), [capacity, None])


def control(rank: int = 0, tensors: int = 3) -> RoundHeader:
    return RoundHeader(step=7, plan=2**31 - 1, buffer=3, flags=0, used=tuple(i % 3 == rank for i in range(tensors)))


def messages(layout: Format, controls: list[RoundHeader], count: int = 2) -> torch.Tensor:
    rows = torch.zeros(len(controls), layout.size, dtype=torch.uint8)
    for row, one in zip(rows, controls, strict=True):
        layout.write_header(row, one, [count, 0])
    return rows


def words(message: torch.Tensor, layout: Format) -> torch.Tensor:
    return message[: 4 * layout.words].view(torch.int32)


@settings(deadline=None)
@given(formats())
def test_regions_are_disjoint_and_aligned(layout: Format) -> None:
    regions = [(0, 4 * layout.words)]
    for section in layout.sections:
        for part in (section.indices, section.values):
            assert part.start % 16 == 0
            regions.append((part.start, part.stop))
    for (_, stop), (start, _) in zip(regions, regions[1:], strict=False):
        assert stop <= start < stop + 16  # in order, and no more than alignment asks for
    assert layout.size % 16 == 0
    assert regions[-1][1] <= layout.size < regions[-1][1] + 16


@settings(deadline=None)
@given(formats())
def test_bytes_by_codec_are_all_of_them(layout: Format) -> None:
    found = layout.by_codec
    assert sum(found.values()) == layout.size
    assert 4 * layout.words <= found["header"] < 4 * layout.words + 16 * (2 * len(layout.sections) + 1)
    assert set(found) == {"header", *(section.name for section in layout.sections)}


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(formats(), st.integers(0, 1000))
def test_sections_share_no_byte_and_come_back(layout: Format, seed: int) -> None:
    """All sections are written before any is read."""
    source = torch.Generator().manual_seed(seed)
    message, told = torch.zeros(layout.size, dtype=torch.uint8), []
    header = torch.randint(0, 255, (4 * layout.words,), generator=source, dtype=torch.uint8)
    message[: 4 * layout.words] = header
    for section in layout.sections:
        length, storage = section.segment.length, section.segment.tensor_class.storage
        if section.capacity is None:
            whole = torch.randn(length, generator=source).to(section.segment.tensor_class.dtype)
            layout.whole(message, section).copy_(whole)
            told.append((None, whole))
            continue
        least = section.capacity if isinstance(section.index, Everything) else 0
        count = int(torch.randint(least, section.capacity + 1, (), generator=source))
        indices = torch.randint(0, length, (section.capacity,), generator=source, dtype=torch.int32)
        indices[:count] = torch.randperm(length, generator=source)[:count].sort().values
        values = torch.randn(section.capacity, generator=source).to(storage)
        values[count:] = 0.0
        sent = put(message, section, Selection(indices, count), values)
        told.append((indices[:count], sent[:count].to(storage, copy=True)))
    assert torch.equal(message[: 4 * layout.words], header)
    for section, (chosen, values) in zip(layout.sections, told, strict=True):
        if chosen is None:
            assert torch.equal(layout.whole(message, section), values)
        else:
            indices, found, good = get(message, section, len(chosen), section.segment.tensor_class.storage)
            assert good and torch.equal(indices, chosen) and torch.equal(found, values)


@settings(deadline=None)
@given(formats(), st.integers(1, 4), st.data())
def test_headers_come_back(layout: Format, size: int, data: st.DataObject) -> None:
    step, plan, buffer = (data.draw(st.integers(0, 2**31 - 1)) for _ in range(3))
    controls, rows = [], torch.zeros(size, layout.size, dtype=torch.uint8)
    for row in rows:
        used = tuple(data.draw(st.lists(st.booleans(), min_size=layout.tensors, max_size=layout.tensors)))
        controls.append(RoundHeader(step, plan, buffer, data.draw(st.integers(0, 2**31 - 1)), used))
        counts = [data.draw(st.integers(0, section.capacity or 0)) for section in layout.sections]
        layout.write_header(row, controls[-1], counts)
    arrived = layout.read_headers(rows, controls[0], "buffer 0")
    assert (arrived.step, arrived.plan, arrived.buffer) == (step, plan, buffer)
    assert arrived.flags == functools.reduce(operator.or_, (c.flags for c in controls))
    assert arrived.used == tuple(any(bits) for bits in zip(*(c.used for c in controls), strict=True))


@pytest.mark.parametrize("tensors", [1, 2, 30, 31, 32, 61, 62, 63, 93, 94, 100])
def test_each_used_bit_has_its_place(tensors: int) -> None:
    tensor_class = TensorClass(CPU, torch.float32, Kind.DENSE)
    layout = Format(segments_of([((1,), tensor_class)] * tensors), [None])
    for one in range(tensors):
        used = tuple(i == one for i in range(tensors))
        mine = RoundHeader(0, 0, 0, 0, used)
        rows = torch.zeros(1, layout.size, dtype=torch.uint8)
        layout.write_header(rows[0], mine, [0])
        assert layout.read_headers(rows, mine, "b").used == used


def test_no_tensors_at_all() -> None:
    layout, mine = Format([], []), RoundHeader(1, 2, 3, 4, ())
    rows = torch.zeros(2, layout.size, dtype=torch.uint8)
    for row in rows:
        layout.write_header(row, mine, [])
    assert layout.read_headers(rows, mine, "b") == mine


def test_a_count_on_the_device_is_written_like_a_number() -> None:
    layout = simple()
    by_number, by_tensor = (torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2))
    layout.write_header(by_number, control(), [3, 0])
    layout.write_header(by_tensor, control(), [torch.tensor(3, dtype=torch.int32), 0])
    assert torch.equal(by_number, by_tensor)
    assert [words(by_number, layout)[COUNT + i * len(OF_SECTION)].item() for i in range(2)] == [3, 0]
    rows = by_number[None]
    layout.read_headers(rows, control(), "b")
    assert layout.counts(rows) == [[3, 0]]


def refused(layout: Format, rows: torch.Tensor, controls: list[RoundHeader]) -> str:
    """The text of the error, which is the same whichever rank reads."""
    texts = set()
    for mine in controls:
        with pytest.raises(MessageError) as caught:
            layout.read_headers(rows, mine, "buffer 3")
        texts.add(str(caught.value))
    (text,) = texts
    assert re.match("AGM50[123]: buffer 3: ", text)
    return text


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_foreign_message_names_its_rank(odd: int) -> None:
    layout, controls = simple(), [control(rank) for rank in range(3)]
    rows = messages(layout, controls)
    words(rows[odd], layout)[0] = MAGIC + 1
    assert f"messages of ranks [{odd}] are not from agmerge" in refused(layout, rows, controls)
    rows[:] = 0
    assert "ranks [0, 1, 2]" in refused(layout, rows, controls)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_bit_of_a_header_is_looked_after(odd: int) -> None:
    layout, controls = simple(), [control(rank) for rank in range(3)]
    clean = messages(layout, controls)
    payload = range(32 * FIXED.index("payload"), 32 * FIXED.index("payload") + 32)
    for bit in set(range(32 * layout.words)) - set(payload):  # that one is looked at with the payload
        rows = clean.clone()
        rows[odd, bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageError, match=rf"(ranks \[{odd}\]|rank {odd})"):
            layout.read_headers(rows, controls[0], "b")


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_damaged_header_names_its_rank_and_no_other_cause(odd: int) -> None:
    layout, controls = simple(), [control(rank) for rank in range(3)]
    rows = messages(layout, controls)
    words(rows[odd], layout)[FIXED.index("step")] += 1
    assert f"messages of ranks [{odd}] were damaged in transit" in refused(layout, rows, controls)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("other", ["capacity", "length", "codecs", "tensors"])
def test_another_layout_is_named(other: str, odd: int) -> None:
    layout, controls = simple(), [control(rank) for rank in range(3)]
    wide = TensorClass(CPU, torch.float32, Kind.SPARSE)
    strange = {
        "capacity": simple(capacity=3),
        "length": Format(segments_of([((200,), wide), ((2,), TensorClass(CPU, torch.float32, Kind.DENSE))]), [4, None]),
        "codecs": Format([section.segment for section in layout.sections], [4, None], "fp16"),
        "tensors": simple(tensor_count=40),
    }[other]
    rows = torch.zeros(3, 4096, dtype=torch.uint8)
    for rank, row in enumerate(rows):
        here = strange if rank == odd else layout
        here.write_header(row, replace(controls[rank], used=(True,) * here.tensors), [2, 0])
    text = refused(layout, rows, controls)
    assert "messages of ranks do not match: ranks disagree on " in text and f"on rank {odd}" in text
    with pytest.raises(MessageError, match="AGM502"):
        layout.read_headers(rows[odd : odd + 1], controls[0], "b")


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("field", ["step", "plan", "buffer"])
def test_a_message_of_another_place_names_field_values_and_ranks(field: str, odd: int) -> None:
    layout, controls = simple(), [control(rank) for rank in range(3)]
    value = getattr(controls[odd], field)
    controls[odd] = replace(controls[odd], **{field: 1})
    text = refused(layout, messages(layout, controls), controls)
    assert f"ranks disagree on {field}: " in text
    assert f"1 on rank {odd}" in text
    assert f"{value} on ranks {', '.join(str(rank) for rank in range(3) if rank != odd)}" in text


def test_messages_that_agree_but_arrive_in_another_place() -> None:
    layout, controls = simple(), [control(rank) for rank in range(2)]
    rows = messages(layout, controls)
    with pytest.raises(MessageError, match=r"messages of step, plan, buffer \[8, .*, got \[7, .*, 3\]"):
        layout.read_headers(rows, replace(controls[0], step=8), "b")


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("section, count, fit", [(0, 5, 4), (0, -1, 4), (0, 2**31 - 1, 4), (1, 1, 0), (1, -1, 0)])
def test_a_count_out_of_range_names_the_rank(odd: int, section: int, count: int, fit: int) -> None:
    layout, controls = simple(), [control(rank) for rank in range(2)]
    rows = messages(layout, controls)
    layout.write_header(rows[odd], controls[odd], [count if i == section else 0 for i in range(2)])
    assert f"rank {odd} sent {count} elements, expected at most {fit}" in refused(layout, rows, controls)


def test_counts_up_to_the_capacity_pass() -> None:
    layout, controls = simple(), [control(rank) for rank in range(2)]
    for count in (0, 4):
        assert layout.read_headers(messages(layout, controls, count), controls[0], "b").used == (True, True, False)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_headers_that_are_merged_on_a_device_say_what_all_have_said(data: st.DataObject) -> None:
    """As on the host; and whoever does not belong with the others is named."""
    ranks, layout = data.draw(st.integers(1, 9)), simple(tensor_count=data.draw(st.integers(2, 70)))
    bits = st.tuples(*[st.booleans()] * layout.tensors)
    controls = [replace(control(), flags=data.draw(st.integers(0, 31)), used=data.draw(bits)) for _ in range(ranks)]
    rows = torch.zeros(ranks, layout.size, dtype=torch.uint8)
    for one, row in zip(controls, rows, strict=True):
        layout.write_header(row, one, [0, 0])
    words = layout.header_of(rows)
    words[:, FIXED.index("checksum")] = 0  # devices write none
    out, own = torch.zeros(layout.size, dtype=torch.uint8), data.draw(st.integers(0, ranks - 1))
    figures, said = torch.zeros(ranks, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    layout.merge_on_device(rows, figures, own, -5, (out, said))
    assert said.tolist() == [0, -5, 0, 0]
    found = layout.read_headers(out.unsqueeze(0), controls[own], "m", sealed=False)
    assert found == controls[own].merged(controls)

    wrong = data.draw(st.sampled_from([rank for rank in range(ranks) if rank != own] or [own]))
    place = data.draw(st.sampled_from([0, 1, 2, 3, 5, 6, HEAD, HEAD + 1, HEAD + 5]))
    words[wrong, place] ^= 1 << data.draw(st.integers(0, 30))
    layout.merge_on_device(rows, figures, own, -5, (out, said))
    assert said[0] == (0 if ranks == 1 else 1 + wrong)
