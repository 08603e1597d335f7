# SPDX-License-Identifier: Apache-2.0
"""Dense and sparse exchanges over several steps, and their errors: the same one on every rank."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from support.exchanges import (
    CPU,
    Quiet,
    context,
    control_of,
    dense,
    draw_offer,
    draw_work,
    exchange,
    same,
    segments_of,
    sparse,
)

from agmerge import testing
from agmerge.backends.local import Call
from agmerge.errors import MessageError
from agmerge.exchanges import SegmentBuffers, SparseExchange
from agmerge.exchanges.message.format import Format
from agmerge.ops import Average
from agmerge.tensors.layout import TensorClass
from sparsifiers import Kind, Selection


@pytest.mark.parametrize("kind", ["dense", "ordered", "fp16", "sparse"])
def test_buffers_are_reused_and_leak_nothing(kind: str) -> None:
    segments = segments_of(
        [(40, TensorClass(CPU, torch.float32, Kind.SPARSE)), (33, TensorClass(CPU, torch.float32, Kind.DENSE))]
    )
    segments = segments if kind == "sparse" else segments[:1]
    capacities = [20, 5, 0, 3, 20, 20]
    make = {
        "dense": dense(Average),
        "ordered": dense(Average, ordered=True),
        "fp16": dense(Average, cast=torch.float16, predivide=3.0),
        "sparse": sparse(Average),
    }[kind]

    def steps(rank: int, keep: bool) -> tuple[list[list[torch.Tensor]], list[int]]:
        updates, places, here = [], [], make(Quiet())
        for step, capacity in enumerate(capacities):
            here = here if keep else make(Quiet())
            loads = [
                SegmentBuffers(s, draw_work(s, 10 * step + rank, 10.0**-step), torch.full((s.length,), torch.nan))
                for s in segments
            ]
            offers = [
                draw_offer(64, capacity, 10 * step + rank, False) if s.tensor_class.sparse else None for s in segments
            ]
            pending = here.start("buffer 3", loads, offers, control_of(rank, segments, step))
            here.wait(pending)
            here.finish(pending)
            updates.append([load.update for load in loads])
            places.append(pending.message.data_ptr())
        return updates, places

    for (kept, places), (fresh, _) in testing.run(3, lambda rank: (steps(rank, True), steps(rank, False))):
        assert len(set(places)) == 1  # the first message was the longest
        for a, b in zip(kept, fresh, strict=True):
            assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["dense", "ordered", "fp16", "sparse"])
@pytest.mark.parametrize("field", ["step", "buffer"])
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_at_different_places_are_the_same_error_on_every_rank(kind: str, field: str, odd: int) -> None:
    (segment,) = segments_of([(40, TensorClass(CPU, torch.float32, Kind.SPARSE))])
    make = {
        "dense": dense(Average),
        "ordered": dense(Average, ordered=True),
        "fp16": dense(Average, cast=torch.float16),
        "sparse": sparse(Average),
    }[kind]

    def body(rank: int) -> None:
        control = control_of(rank, [segment])
        if rank == odd:
            control = replace(control, **{field: getattr(control, field) - 1})
        load = SegmentBuffers(segment, torch.ones(segment.length), torch.full((segment.length,), torch.nan))
        here = make(Quiet())
        pending = here.start("buffer 3", [load], [draw_offer(64, 9, rank, False)], control)
        try:
            here.wait(pending)
        finally:
            assert load.update.isnan().all()

    errors = testing.run(3, body, return_errors=True)
    assert [type(error) for error in errors] == [MessageError] * 3
    (text,) = {str(error) for error in errors}
    assert "buffer 3" in text and "AGM502" in text
    if kind == "sparse":
        assert f"on rank {odd}" in text and f"disagree on {field}" in text
    else:
        assert ("[6, 7]" in text) is (field == "step")


def test_a_buffer_is_as_long_as_it_is_asked_for_and_the_same_while_it_is_long_enough() -> None:
    def body(rank: int) -> None:
        here = sparse(Average)(Quiet())
        short = here.keep(("some",), 4, torch.uint8, CPU)
        longer = here.keep(("some",), 8, torch.uint8, CPU)
        assert (len(short), len(longer)) == (4, 8)
        assert here.keep(("some",), 4, torch.uint8, CPU).data_ptr() == longer.data_ptr()

    testing.run(1, body)


def test_a_value_that_changes_on_its_way_names_the_rank_that_sent_it() -> None:
    (segment,) = segments_of([(64, TensorClass(CPU, torch.float32, Kind.SPARSE))])

    def flip(call: Call) -> None:
        if call.rank == 1:
            call.tensor.view(-1)[-20] ^= 4  # behind the indices

    def body(rank: int) -> None:
        here, work = sparse(Average)(Quiet()), draw_work(segment, rank, 1.0)
        load = SegmentBuffers(segment, work, torch.zeros(segment.length))
        offer = Selection(torch.arange(20, dtype=torch.int32), 20)
        here.wait(here.start("buffer 3", [load], [offer], control_of(rank, [segment])))

    errors = testing.run(3, body, inject=flip, return_errors=True)
    assert all(isinstance(error, MessageError) for error in errors), errors
    assert all(re.search(r"ranks? \[?1\]? .*damaged", str(error)) for error in errors), errors


@pytest.mark.parametrize("wrong", [-1, -(2**31), 64, 2**31 - 1])
@pytest.mark.parametrize("odd", [0, 2])
def test_an_index_out_of_range_names_the_rank_that_sent_it(wrong: int, odd: int) -> None:
    """Also one that its sender believes in, and has made a checksum of; nothing is written then."""
    (segment,) = segments_of([(40, TensorClass(CPU, torch.float32, Kind.SPARSE))])
    layout = Format([segment], [1])
    assert layout.sections[0].index is not None and layout.sections[0].index.name == "int32"

    def damage(call: Call) -> None:
        if call.rank == odd and call.kind == "all_gather":
            call.tensor[layout.sections[0].indices].view(torch.int32).fill_(wrong)
            layout.seal(call.tensor)

    def body(rank: int) -> None:
        load = SegmentBuffers(segment, torch.ones(segment.length), torch.zeros(segment.length))
        here = SparseExchange(context(Quiet()))
        offer = Selection(torch.zeros(1, dtype=torch.int32), 1)
        pending = here.start("buffer 3", [load], [offer], control_of(rank, [segment]))
        here.wait(pending)
        try:
            here.finish(pending)
        finally:
            assert load.update.count_nonzero() == 0

    errors = testing.run(3, body, return_errors=True, inject=damage)
    assert [type(error) for error in errors] == [MessageError] * 3
    (text,) = {str(error) for error in errors}
    assert text.startswith(f"AGM501: buffer 3: the indices of rank {odd} are not ascending within 0 to 63")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_large_segment_is_summed_where_it_lies(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside it, in the message of the control numbers, travels what is small."""
    monkeypatch.setattr("agmerge.exchanges.dense.LARGE", 1000)
    segments = segments_of(
        [(1500, TensorClass(CPU, torch.float32, Kind.SPARSE)), (40, TensorClass(CPU, torch.float32, Kind.DENSE))]
    )

    def work(rank: int, index: int) -> torch.Tensor:
        return draw_work(segments[index], 10 * rank + index, 1.0)

    seen = exchange(size, dense(Average), segments, work)
    for index in range(2):
        total = sum((work(rank, index).double() for rank in range(size)), torch.zeros(segments[index].length))
        bound = sum((work(rank, index).double().abs() for rank in range(size)), torch.zeros(()))
        assert ((seen[0].update[index].double() - total / size).abs() <= 1e-6 * bound).all()
