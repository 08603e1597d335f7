# SPDX-License-Identifier: Apache-2.0
"""Which blocks an owner adds up: a pure function, whatever the tensors are."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from agmerge.exchanges.quantised.layout import RUN, cut_blocks, cut_plain, fragment_of, whole_pieces
from agmerge.tensors.layout import ALIGNMENT, Layout, TensorClass
from sparsifiers import Kind
from sparsifiers.quantising.base import block_size, blocks_in

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40), st.sampled_from([1, 7, 64, 96, 128, 192, 256, 320, 768])),
        st.tuples(st.integers(1, 3000)),
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=6,
)


def layout_of(shapes: list[tuple[int, ...]], kind: Kind = Kind.QUANTISED) -> Layout:
    tensor_class = TensorClass(torch.device("cpu"), torch.float32, kind)
    return Layout([(f"t{i}", shape, tensor_class) for i, shape in enumerate(shapes)])


@given(SHAPES, st.integers(1, 9))
def test_every_block_has_one_owner_and_shards_are_of_one_size(shapes: list[tuple[int, ...]], shards: int) -> None:
    slots = layout_of(shapes).slots
    pieces = cut_blocks(whole_pieces(slots), shards)
    assert len(pieces) == shards
    for slot in slots:
        size = block_size(slot.shape)
        own = [piece for shard in pieces for piece in shard if piece.slot is slot]
        assert [block for one in own for block in range(one.first, one.first + one.blocks)] == list(
            range(blocks_in(slot.numel, size))
        )
        covered = [place for one in own for place in range(one.elements.start, one.elements.stop)]
        assert covered == list(range(slot.numel)) and {one.size for one in own} == {size}
    widths = [sum(piece.blocks * piece.size for piece in shard) for shard in pieces]
    total = sum(widths)
    assert all(width < math.ceil(total / shards) + 256 for width in widths)  # a block more than its share at most


@given(SHAPES, st.integers(1, 9))
def test_plain_values_have_one_owner_each(shapes: list[tuple[int, ...]], shards: int) -> None:
    layout = layout_of(shapes, Kind.DENSE)
    segments = layout.segments(0, len(shapes))
    runs = [run for shard in cut_plain(segments, shards) for run in shard]
    for segment in segments:
        places = [place for run in runs if run.segment is segment for place in range(run.start, run.stop)]
        assert places == list(range(segment.length))
    assert all(run.start % ALIGNMENT == 0 for run in runs)


@given(SHAPES, st.integers(1, 4), st.integers(1, 5))
def test_every_block_is_in_one_fragment_and_has_one_owner(
    shapes: list[tuple[int, ...]], fragments: int, shards: int
) -> None:
    slots = layout_of(shapes).slots
    cut = [cut_blocks(fragment_of(slots, fragments, number), shards) for number in range(fragments)]
    for slot in slots:
        own = [piece for row in cut for shard in row for piece in shard if piece.slot is slot]
        covered = sorted(place for one in own for place in range(one.elements.start, one.elements.stop))
        assert covered == list(range(slot.numel))
        assert sorted(block for one in own for block in range(one.first, one.first + one.blocks)) == list(
            range(blocks_in(slot.numel, block_size(slot.shape)))
        )


def test_fragments_are_equally_long_and_share_large_tensors() -> None:
    slots = layout_of([(512, 1536), (4000, 512), (512, 512), (64, 64)]).slots
    total = sum(slot.numel for slot in slots)
    for fragments in (2, 3, 8):
        rows = [fragment_of(slots, fragments, number) for number in range(fragments)]
        for row in rows:
            assert abs(sum(piece.blocks * piece.size for piece in row) - total / fragments) <= RUN
            assert {piece.slot.name for piece in row} >= {"t0", "t1"}
