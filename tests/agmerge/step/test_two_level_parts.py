# SPDX-License-Identifier: Apache-2.0
"""Nodes and shards: who belongs together, and what each rank of a node owns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import same_bits

from agmerge import testing
from agmerge.backends import topology
from agmerge.backends.topology import arranged, form, grouped
from agmerge.errors import MessageError
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.node_shards import NodeShards, collect, deal, shard_shape
from agmerge.runtime import workers
from agmerge.tensors.arena import Arena
from agmerge.tensors.layout import Layout, TensorClass
from sparsifiers import Kind, memory

CPU = torch.device("cpu")
WAIT = 30.0


# -- nodes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts, local, expected",
    [
        ("aabb", [0, 1, 0, 1], [[0, 1], [2, 3]]),
        ("abab", [0, 0, 1, 1], [[0, 2], [1, 3]]),
        ("aaaa", [0, 1, 0, 1], [[0, 1], [2, 3]]),  # two launchers on one host
        ("aaaa", [0, 0, 1, 1], [[0, 2], [1, 3]]),
        ("abba", [0, 0, 1, 1], [[0, 3], [1, 2]]),
        ("aaa", [4, 5, 7], [[0, 1, 2]]),  # some of a machine's workers
        ("abc", [0, 0, 0], [[0], [1], [2]]),
    ],
)
def test_ranks_of_one_machine_are_a_node(hosts: str, local: list[int], expected: list[list[int]]) -> None:
    assert grouped(hosts, local) == expected
    assert arranged([(host, rank, "") for host, rank in zip(hosts, local, strict=True)]) == expected


def test_the_variable_makes_nodes_of_consecutive_ranks() -> None:
    assert arranged([("a", rank, "3") for rank in range(6)]) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "said, words",
    [
        ([("a", 0, ""), ("a", 1, ""), ("b", 0, "")], ["ranks 0, 1 on a", "ranks 2 on b", "as many workers"]),
        ([("a", rank, "2") for rank in range(3)], ["AGMERGE_LOCAL_SIZE=2", "ranks 0, 1", "exchange='sparse'"]),
        ([("a", 0, "2"), ("a", 1, "")], ["AGMERGE_LOCAL_SIZE differs", "'2'"]),
        ([("a", 0, "0")], ["AGMERGE_LOCAL_SIZE='0'", "at least 1"]),
        ([("a", 0, "two")], ["AGMERGE_LOCAL_SIZE='two'"]),
    ],
)
def test_nodes_that_cannot_be_are_refused(said: list[tuple[str, int, str]], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        arranged(said)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("places", [1, 2, 3, 6])
def test_communicators_inside_and_across(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, str(places))

    def body(rank: int) -> tuple[int, int, list[float], list[float]]:
        made = form(workers.world(), WAIT)
        seen = []
        for comm in (made.inside, made.across):
            out = torch.zeros(comm.size)
            comm.all_gather(out, torch.tensor([float(rank)]), "who").wait(WAIT)
            seen.append(out.tolist())
        for comm in made.communicators:
            comm.close()
        return made.place, made.places, *seen

    for rank, (place, size, inside, across) in enumerate(testing.run(6, body)):
        first = rank // places * places
        assert (place, size) == (rank % places, places)
        assert inside == list(range(first, first + places)) and across == list(range(rank % places, 6, places))


# -- shards -------------------------------------------------------------------------------------------------


@given(shape=st.lists(st.integers(1, 7), max_size=3), places=st.integers(1, 5), turned=st.booleans())
def test_what_is_dealt_out_comes_together_again(shape: list[int], places: int, turned: bool) -> None:
    tensor = torch.arange(1.0, math.prod(shape) + 1).reshape(shape)
    if turned and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1).contiguous().transpose(0, 1)  # not in C order
    part = shard_shape(shape, places)
    numel = math.prod(part)
    around = torch.full((places, numel + 7), torch.nan)
    rows = around[:, 3 : 3 + numel]  # as in a message: other things stand beside
    deal(tensor, rows)
    assert numel * places < tensor.numel() + places and rows.sum() == tensor.sum()
    assert around[:, :3].isnan().all() and around[:, 3 + numel :].isnan().all()
    if shape and shape[0] % places == 0:
        for place, row in enumerate(rows):
            assert torch.equal(row.view(part), tensor[place * part[0] : (place + 1) * part[0]])
    back = torch.full(shape, torch.nan)
    collect(rows, back)
    assert same_bits(back, tensor.contiguous())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("places", [1, 2, 3])
def test_a_node_adds_up_and_hands_round(
    places: int, dtype: torch.dtype, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.VARIABLE, str(places))
    shapes = [(6, 5), (7,), (), (4, 3)]
    classes = [
        TensorClass(CPU, dtype, Kind.SPARSE),
        TensorClass(CPU, dtype, Kind.DENSE),
        TensorClass(CPU, torch.float64, Kind.SPARSE),
        TensorClass(CPU, dtype, Kind.SPARSE),
    ]
    whole = Layout(
        [(f"t{i}", shape, tensor_class) for i, (shape, tensor_class) in enumerate(zip(shapes, classes, strict=True))]
    )
    parts = Layout([(slot.name, shard_shape(slot.shape, places), slot.tensor_class) for slot in whole.slots])

    def gradient(rank: int, index: int) -> torch.Tensor | None:
        source = torch.Generator().manual_seed(10 * rank + index)
        drawn = torch.randn(shapes[index], generator=source).to(classes[index].dtype) * 10**rank
        return None if index == 1 and rank % 2 else drawn

    def body(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[RoundHeader], int]:
        here = NodeShards(form(workers.world(), WAIT), whole, parts, WAIT, ordered=ordered)
        before = len(testing.calls())
        here.rebuild([(0, 1), (1, 4)])
        controls, size = [], 0
        for buffer, (start, stop) in enumerate([(0, 1), (1, 4)]):
            for slot in parts.slots[start:stop]:
                here.put(slot, gradient(rank, slot.index))
            used = tuple(gradient(rank, i) is not None for i in range(start, stop))
            control = RoundHeader(3, 9, buffer, 2 << rank, used)
            size += here.start(buffer, control)
            controls.append(here.wait(buffer, control))
        arenas = {
            tensor_class: Arena(tensor_class, length, [], memory("residual"))
            for tensor_class, length in parts.lengths.items()
        }
        mine = [here.shard(slot).clone() for slot in parts.slots]
        for slot, shard in zip(parts.slots, mine, strict=True):
            arenas[slot.tensor_class].update[slot.offset : slot.offset + slot.numel] = 2 * shard.flatten()
        size += here.gather(arenas)
        assert size == sum(length for _, _, length in testing.calls()[before:])
        return mine, [here.of(here.whole.slots[i]).clone() for i in range(4)], controls, size

    seen = testing.run(2 * places, body)  # two nodes
    for rank, (_, updates, controls, _) in enumerate(seen):
        node = range(rank // places * places, (rank // places + 1) * places)
        for index, update in enumerate(updates):
            grads = [gradient(one, index) for one in node]
            storage = torch.float32 if ordered and classes[index].dtype == torch.bfloat16 else classes[index].dtype
            total = torch.zeros(shapes[index], dtype=storage)
            for number, one in enumerate(grads):
                one = torch.zeros(shapes[index], dtype=storage) if one is None else one.to(storage)
                total = one if number == 0 else total + one
            assert same_bits(update, total.to(classes[index].dtype) * 2)
        flags = sum(2 << one for one in node)
        assert [control.flags for control in controls] == [flags, flags]
        assert controls[0].used == (True,)
        assert controls[1].used == (any(one % 2 == 0 for one in node), True, True)


def test_ranks_of_a_node_at_different_places_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    layout = Layout([("t", (4,), TensorClass(CPU, torch.float32, Kind.SPARSE))])
    parts = Layout([("t", (2,), TensorClass(CPU, torch.float32, Kind.SPARSE))])

    def body(rank: int) -> None:
        here = NodeShards(form(workers.world(), WAIT), layout, parts, WAIT, ordered=False)
        here.rebuild([(0, 1)])
        here.put(parts.slots[0], torch.ones(4))
        control = RoundHeader(3 + rank, 9, 0, 0, (True,))
        here.start(0, control)
        here.wait(0, control)

    errors = testing.run(2, body, return_errors=True)
    assert [type(error) for error in errors] == [MessageError] * 2
