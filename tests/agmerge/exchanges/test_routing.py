# SPDX-License-Identifier: Apache-2.0
"""Which segments share a message: pure, and every tensor in exactly one of them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mlp, on_ranks, random_plan, seeded, train, wrap
from torch import nn

import merging
from agmerge.exchanges.routing import RIDE, group_into_messages, message_name, segments
from agmerge.tensors.layout import Layout, Segment, TensorClass
from sparsifiers import Kind

DEVICES = [torch.device("cpu"), torch.device("meta")]
CLASSES = [
    TensorClass(device, dtype, kind, density)
    for device in DEVICES
    for dtype in (torch.float32, torch.bfloat16)
    for kind, density in ((Kind.SPARSE, None), (Kind.SPARSE, 0.25), (Kind.DENSE, None))
]

lengths = st.one_of(st.integers(1, 100), st.sampled_from([RIDE // 8, RIDE]))
layouts = st.lists(st.tuples(lengths, st.sampled_from(CLASSES)), min_size=1, max_size=10).map(
    lambda drawn: Layout([(f"t{i}", (numel,), tensor_class) for i, (numel, tensor_class) in enumerate(drawn)])
)


def cut(layout: Layout, seed: int, ahead: bool) -> list[list[Segment]]:
    """The segments of every merge buffer of a random plan."""
    bounds = random_plan(seed, len(layout.slots)).bounds
    return [segments(layout, start, stop, ahead) for start, stop in bounds]


def indices(parts: list[Segment]) -> list[int]:
    return [slot.index for part in parts for slot in part.slots]


@settings(deadline=None)
@given(layouts, st.integers(0, 1000), st.booleans())
def test_every_tensor_is_in_one_segment_of_its_class_and_in_order(layout: Layout, seed: int, ahead: bool) -> None:
    buffers = cut(layout, seed, ahead)
    assert sorted(index for buffer in buffers for index in indices(buffer)) == list(range(len(layout.slots)))
    for buffer in buffers:
        for part in buffer:
            assert {slot.tensor_class for slot in part.slots} == {part.tensor_class}
            assert indices([part]) == sorted(indices([part]))
            assert all(a.end == b.offset for a, b in pairwise(part.slots))  # one slice of the tensor class
    for tensor_class in layout.lengths:
        here = [part for buffer in buffers for part in buffer if part.tensor_class == tensor_class]
        assert [part.stop for part in here] == [*(part.start for part in here[1:]), layout.lengths[tensor_class]]


@settings(deadline=None)
@given(layouts, st.integers(0, 1000))
def test_ahead_every_sparse_tensor_is_alone_and_nothing_else_differs(layout: Layout, seed: int) -> None:
    for ahead, behind in zip(cut(layout, seed, True), cut(layout, seed, False), strict=True):
        assert all(len(part.slots) == 1 for part in ahead if part.tensor_class.sparse)
        assert [part for part in ahead if not part.tensor_class.sparse] == [
            part for part in behind if not part.tensor_class.sparse
        ]
        classes = [part.tensor_class for part in behind]
        assert len(classes) == len(set(classes))  # behind, one segment a tensor class
        assert [indices([part for part in ahead if part.tensor_class == tensor_class]) for tensor_class in classes] == [
            indices([part]) for part in behind
        ]


@settings(deadline=None)
@given(layouts, st.integers(2, 9), st.booleans(), st.booleans())
def test_messages_are_a_partition_and_keep_to_one_device(layout: Layout, size: int, ahead: bool, ride: bool) -> None:
    parts = segments(layout, 0, len(layout.slots), ahead)
    messages = group_into_messages(parts, size, (Kind.SPARSE,) if ride else ())
    assert sorted(indices([part for message in messages for part in message])) == list(range(len(layout.slots)))
    for message in messages:
        assert len({part.tensor_class.device for part in message}) == 1
        sparse = [part.tensor_class.sparse for part in message]
        assert sparse == sorted(sparse, reverse=True)  # sparse ones first, dense ones ride behind
        assert any(sparse) or len(message) == 1  # an all-reduce takes one segment
    carrying = [message[0].tensor_class.device for message in messages if message[0].tensor_class.sparse]
    assert len(carrying) == len(set(carrying))  # sparse segments of a device share one message


@settings(deadline=None)
@given(layouts, st.integers(1, 9), st.booleans())
def test_without_a_ride_dense_segments_go_by_themselves(layout: Layout, size: int, ahead: bool) -> None:
    for message in group_into_messages(segments(layout, 0, len(layout.slots), ahead), size, ()):
        assert all(part.tensor_class.sparse for part in message) or len(message) == 1


@pytest.mark.parametrize("size", [2, 3, 8])
def test_dense_segments_ride_up_to_a_bound_that_two_ranks_do_not_have(size: int) -> None:
    extra = (size - 1) * (1 - 2 / size)  # bytes received more than by an all-reduce, per byte of message
    most = round(RIDE / extra / 4) // 32 * 32 if extra else 10 * RIDE
    cpu = DEVICES[0]
    for numel, together in ((most - 32, True), (most + 32, size == 2)):
        classes = [TensorClass(cpu, torch.float32, Kind.SPARSE), TensorClass(cpu, torch.float32, Kind.DENSE)]
        layout = Layout([("a", (64,), classes[0]), ("b", (numel,), classes[1])])
        messages = group_into_messages(segments(layout, 0, 2, False), size)
        assert [len(message) for message in messages] == ([2] if together else [1, 1])
        assert len(group_into_messages(segments(layout, 1, 2, False), size)) == 1  # nothing to ride with


@settings(deadline=None)
@given(layouts, st.lists(st.integers(0, 1000), min_size=2, max_size=6))
def test_a_key_tells_which_tensors_whatever_the_plan(layout: Layout, seeds: list[int]) -> None:
    whose: dict[str, list[int]] = {}
    for seed in seeds:
        for ahead in (False, True):
            parts = [part for buffer in cut(layout, seed, ahead) for part in buffer]
            keys = [part.key for part in parts]
            assert len(set(keys)) == len(keys)
            for one, part in zip(keys, parts, strict=True):
                assert whose.setdefault(one, indices([part])) == indices([part])
    assert len({tuple(tensors) for tensors in whose.values()}) == len(whose)


def test_a_message_is_named_after_its_merge_buffer() -> None:
    names = [message_name(buffer, number) for buffer in range(30) for number in range(30)]
    assert len(set(names)) == 900 and max(map(len, names)) < 30
    assert names[0] == "buffer 0" and message_name(3, 2) == "buffer 3.2"


def test_ahead_the_owners_of_state_are_the_same_under_every_plan() -> None:
    def body(rank: int, model: nn.Module, plan: merging.Plan, sparsify: str) -> set[str]:
        optimizer = wrap(model, merging=plan, sparsify=sparsify, dense=[], dense_sum="ordered")
        train(model, optimizer, rank, range(1))
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None
        return session.keys()

    model = seeded(mlp)
    plans = [merging.Plan((6,)), merging.Plan((1,) * 6), *(random_plan(seed, 6) for seed in range(3))]
    ahead = [on_ranks(1, model, partial(body, plan=plan, sparsify="ahead"))[0] for plan in plans]
    behind = [on_ranks(1, model, partial(body, plan=plan, sparsify="behind"))[0] for plan in plans]
    assert all(keys == ahead[0] for keys in ahead) and len(ahead[0]) == 6
    assert behind[0] != behind[1] == ahead[0]
