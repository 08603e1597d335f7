# SPDX-License-Identifier: Apache-2.0
"""``exchange="two-level"`` in whole steps: replicas, conservation by node, bytes between nodes, checkpoints."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from support import (
    AwkwardModel,
    Sent,
    agreed,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    wrap,
)
from support import train as plain
from support.awkward_training import backward, wrapped_awkward
from torch import Tensor

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.exchanges import routing
from agmerge.exchanges.node_shards import deal, shard_shape

MODEL, SMALL = seeded(AwkwardModel, 7), seeded(mlp, 3)
wrapped = functools.partial(wrapped_awkward, exchange="two-level")
GRIDS = [(2, 2), (2, 3), (3, 2), (1, 4), (4, 1), (1, 1)]  # nodes, places
OPTIONS = [{"sparsify": "ahead"}, {"compression": "bf16"}, {"wire": "int4"}, {"wire": "2bit"}, {"wire": "sign"}]

STEPS = 5  # of the largest grids


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(topology.VARIABLE, raising=False)


@pytest.mark.parametrize(
    "grid, options",
    [*((grid, {}) for grid in GRIDS), *(((3, 2), options) for options in OPTIONS), ((2, 2), {"dense_sum": "ordered"})],
    ids=str,
)
def test_replicas_are_equal_to_the_bit_after_every_step(
    grid: tuple[int, int], options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.VARIABLE, str(grid[1]))

    def body(rank: int, model: AwkwardModel) -> list[str]:
        optimizer = wrapped(model, **options)
        return plain(model, optimizer, rank, range(STEPS), backward)

    size = grid[0] * grid[1]
    assert len(set(agreed(on_ranks(size, MODEL, body, inject=testing.jitter(size, 2e-4))))) == STEPS


@pytest.mark.parametrize(
    "grid, options", [*((grid, {}) for grid in GRIDS), *(((2, 2), options) for options in OPTIONS)], ids=str
)
def test_what_a_node_sends_and_keeps_is_what_was_there(
    grid: tuple[int, int], options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = grid[1]
    monkeypatch.setenv(topology.VARIABLE, str(places))
    sent = Sent(monkeypatch)
    gradients: dict[tuple[int, str], Tensor] = {}

    def shard(rank: int, name: str, tensor: Tensor) -> Tensor:
        part = shard_shape(tensor.shape, places)
        rows = torch.zeros(places, int(torch.Size(part).numel()), dtype=tensor.dtype)
        deal(tensor, rows)
        return rows[rank % places].view(part)

    def body(rank: int, model: AwkwardModel) -> int:
        optimizer = wrapped(model, **options)
        checked, first = 0, rank // places * places
        old: dict[str, Tensor] = {}
        for step in range(STEPS):
            agmerge.barrier()
            sent.of.setdefault(rank, {}).clear()
            optimizer.zero_grad()
            backward(model, rank, step)
            for name, p in model.named_parameters():
                gradients.pop((rank, name), None)
                if p.grad is not None:
                    gradients[rank, name] = p.grad.clone()
            optimizer.synchronize()
            agmerge.barrier()
            for name, p in model.named_parameters():
                if name not in sent.of[rank] or p.grad is None:  # no rank ever had a gradient
                    continue
                same_place = range(rank % places, grid[0] * places, places)
                found = shard(rank, name, p.grad)
                parts = [sent.of[other][name].double() / (grid[0] * places) for other in same_place]
                expected, size_of = sum(parts), sum(part.abs() for part in parts)
                rough = 1e-2 if p.dtype in (torch.float16, torch.bfloat16) or options.get("compression") else 1e-6
                assert (found.double() - expected).abs().max() <= rough * size_of.max() + 1e-12, name
            with optimizer.skip_synchronize():
                optimizer.step()
            new = residuals(optimizer)
            for name, kept in new.items():
                shape = dict(model.named_parameters())[name].shape
                dtype = dict(model.named_parameters())[name].dtype
                node = [gradients.get((other, name)) for other in range(first, first + places)]
                before = old.get(name, torch.zeros_like(kept))
                whole = before
                if any(one is not None for one in node):
                    total = torch.zeros(shape, dtype=dtype)
                    for number, one in enumerate(node):
                        one = torch.zeros(shape, dtype=dtype) if one is None else one
                        total = one.clone() if number == 0 else total + one
                    whole = before + shard(rank, name, total).to(kept.dtype)
                assert kept.shape == shard_shape(shape, places)
                assert torch.equal(kept, whole - sent.of[rank][name]), f"step {step}, {name}"
                if options.get("wire") not in ("2bit", "sign"):  # where the difference may be rounded
                    assert torch.equal(kept + sent.of[rank][name], whole), f"step {step}, {name}"
                checked += int(kept.count_nonzero()) + int(sent.of[rank][name].count_nonzero())
            old = new
        return checked

    assert min(on_ranks(grid[0] * places, MODEL, body)) > 2_000 * STEPS / places


def run(
    grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch, steps: int = 6, **options: object
) -> tuple[list[str], list[Tensor]]:
    monkeypatch.setenv(topology.VARIABLE, str(grid[1]))

    def body(rank: int, model: torch.nn.Module) -> tuple[list[str], torch.nn.Module]:
        return plain(model, wrap(model, **options), rank, range(steps)), model

    found = on_ranks(grid[0] * grid[1], SMALL, body)
    return agreed([seen for seen, _ in found]), [p.detach() for p in found[0][1].parameters()]


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (3, 2), (2, 3)], ids=str)
def test_density_1_is_the_dense_exchange(grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"compression": "topk", "density": 1.0, "exchange": "two-level"}
    found, here = run(grid, monkeypatch, **options)
    dense, there = run(grid, monkeypatch, compression="none")
    if 1 in grid or grid == (1, 1):
        assert found == dense  # sums in the same order
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_one_rank_a_node_it_is_the_sparse_exchange(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"compression": "topk", "density": 0.1}
    assert (
        run((size, 1), monkeypatch, exchange="two-level", **options)[0]
        == run((size, 1), monkeypatch, exchange="sparse", **options)[0]
    )


def test_between_nodes_goes_what_one_worker_per_node_would_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, model: torch.nn.Module, exchange: str) -> tuple[int, int]:
        optimizer = wrap(model, compression="topk", density=0.1, exchange=exchange)
        plain(model, optimizer, rank, range(4))
        calls = [(name, length) for _, name, length in testing.calls() if name.startswith(("buffer", "updates"))]
        assert optimizer.stats()["bytes_sent"] == sum(length for _, length in calls)
        assert optimizer.stats()["bytes_dense"] == 4 * 4 * sum(p.numel() for p in model.parameters())
        between = sum(length for name, length in calls if not name.endswith("/node"))
        messages = sum(not name.endswith("/node") for name, _ in calls)
        return between, messages

    monkeypatch.setenv(topology.VARIABLE, "1")
    (flat, _) = agreed(on_ranks(2, SMALL, lambda rank, model: body(rank, model, "sparse")))
    for places in (1, 2, 4):
        monkeypatch.setenv(topology.VARIABLE, str(places))
        found = on_ranks(2 * places, SMALL, lambda rank, model: body(rank, model, "two-level"))
        node = sum(between for between, _ in found[:places])
        # A header for each of the node's messages, and shards padded to whole units.
        assert flat <= node + 4 * 64 and node <= flat + places * found[0][1] * (128 + 4 * 64 * 6)
        assert places == 1 or found[0][0] < 0.8 * flat


def test_what_rides_goes_by_the_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    monkeypatch.setattr(routing, "RIDE", 0)  # with two members an all-gather is no dearer than an all-reduce

    def body(rank: int, model: torch.nn.Module) -> set[str]:
        plain(model, wrap(model, compression="topk", exchange="two-level"), rank, range(2))
        return {name for _, name, _ in testing.calls() if name.startswith("buffer")}

    assert agreed(on_ranks(4, SMALL, body)) == {"buffer 0/node", "buffer 0"}


@pytest.mark.parametrize("grid", [(2, 2), (1, 3), (3, 1)], ids=str)
def test_one_rank_that_starts_anew_makes_all_repeat_the_step(
    grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(topology.VARIABLE, str(grid[1]))

    def body(rank: int, model: torch.nn.Module, disturb: bool) -> list[str]:
        optimizer = wrap(model, compression="topk", exchange="two-level", density=0.1)
        seen = plain(model, optimizer, rank, range(3))
        if disturb and rank == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        return seen + plain(model, optimizer, rank, range(3, 6))

    size = grid[0] * grid[1]
    runs = [agreed(on_ranks(size, SMALL, lambda r, m, d=disturb: body(r, m, d))) for disturb in (False, True)]
    assert runs[0] == runs[1]


def test_messages_between_nodes_leave_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "1")  # a node's sum is then there at once

    def body(rank: int, model: torch.nn.Module) -> tuple[list[str], list[str]]:
        small = merging.get("threshold", bytes=4096)
        optimizer = wrap(model, compression="topk", exchange="two-level", density=0.1, merging=small)
        plain(model, optimizer, rank, range(1))
        before = len(testing.calls())
        loss_of(model, rank, 1).backward()
        here = [name for _, name, _ in testing.calls()[before:]]
        optimizer.step()
        return here, [name for _, name, _ in testing.calls()[before:]]

    for hidden, all_of_them in on_ranks(2, SMALL, body):
        assert [name for name in hidden if "node" not in name] and hidden == all_of_them[: len(hidden)]
        assert [name for name in all_of_them[len(hidden) :] if not name.startswith("updates")] == []


def test_what_costs_are_probed_with_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"compression": "topk", "density": 0.1, "exchange": "two-level", "merging": "agmerge"}
    assert len(set(run((2, 2), monkeypatch, steps=13, **options)[0])) == 13


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", ["residual", "dgc", "none"])
def test_sixteen_bits_and_other_memories(half: torch.dtype, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")

    def body(rank: int, model: torch.nn.Module) -> list[str]:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = wrap(model, inner, compression="topk", density=0.1, exchange="two-level", memory=memory)
        return plain(model, optimizer, rank, range(5))

    start = copy.deepcopy(SMALL).to(half)
    assert len(set(agreed(on_ranks(4, start, body)))) == 5


def test_the_momentum_of_what_is_sent_whole_is_applied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything dense, the memory's momentum is the optimizer's."""
    monkeypatch.setenv(topology.VARIABLE, "2")

    def body(rank: int, model: torch.nn.Module) -> list[Tensor]:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        options = {"compression": "topk", "memory": "dgc", "dense": [".*"], "exchange": "two-level"}
        plain(model, wrap(model, inner, **options), rank, range(5))
        return [p.detach() for p in model.parameters()]

    def twin(rank: int, model: torch.nn.Module) -> list[Tensor]:
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        plain(model, wrap(model, inner, compression="none"), rank, range(5))
        return [p.detach() for p in model.parameters()]

    for a, b in zip(on_ranks(4, SMALL, body)[0], on_ranks(4, SMALL, twin)[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


# -- checkpoints --------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")

    def body(rank: int, model: torch.nn.Module) -> tuple[str, str]:
        options = {"compression": "topk", "density": 0.1, "exchange": "two-level"}
        optimizer = wrap(model, **options)
        plain(model, optimizer, rank, range(3))
        twin = copy.deepcopy(model)
        saved = copy.deepcopy(optimizer.state_dict())
        whole = {name: p.numel() for name, p in model.named_parameters()}
        assert all(-(-whole[name] // 2) == kept.numel() for name, kept in saved["agmerge"]["residuals"].items())
        went_on = plain(model, optimizer, rank, range(3, 6))[-1]
        again = wrap(twin, **options)
        again.load_state_dict(saved)
        return went_on, plain(twin, again, rank, range(3, 6))[-1]

    assert len(set(agreed(on_ranks(4, SMALL, body)))) == 1


@pytest.mark.parametrize("after", [("two-level", "1"), ("two-level", "4"), ("sparse", "2")], ids=str)
def test_shards_of_other_nodes_are_dropped_with_a_warning(
    after: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(rank: int, model: torch.nn.Module) -> dict[str, object]:
        optimizer = wrap(model, compression="topk", density=0.1, exchange="two-level")
        plain(model, optimizer, rank, range(3))
        return optimizer.state_dict()

    monkeypatch.setenv(topology.VARIABLE, "2")
    saved = on_ranks(4, SMALL, first)
    monkeypatch.setenv(topology.VARIABLE, after[1])

    def second(rank: int, model: torch.nn.Module) -> str:
        optimizer = wrap(model, compression="topk", density=0.1, exchange=after[0])
        optimizer.load_state_dict(saved[rank])
        assert not residuals(optimizer)
        return plain(model, optimizer, rank, range(3, 5))[-1]

    with pytest.warns(UserWarning, match="AGM402"):
        agreed(on_ranks(4, SMALL, second))


def test_an_optimizer_that_has_stepped_drops_shards_of_other_nodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows at once which part of a tensor is its own; one that has not learns it in its first step."""
    monkeypatch.setenv(topology.VARIABLE, "2")

    def body(rank: int, model: torch.nn.Module) -> str:
        options = {"compression": "topk", "density": 0.1}
        first = wrap(model, exchange="two-level", **options)
        plain(model, first, rank, range(2))
        twin = copy.deepcopy(model)
        second = wrap(twin, exchange="sparse", **options)
        plain(twin, second, rank, range(2))
        second.load_state_dict(first.state_dict())
        assert not residuals(second)
        return plain(twin, second, rank, range(2, 3))[-1]

    with pytest.warns(UserWarning, match="AGM402"):
        agreed(on_ranks(2, SMALL, body))


# -- what is refused ----------------------------------------------------------------------------------------


def test_nodes_of_different_sizes_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    body = lambda rank, model: wrap(model, compression="topk", exchange="two-level")  # noqa: E731
    errors = on_ranks(3, SMALL, body, return_errors=True)
    assert [type(error) for error in errors] == [ValueError] * 3 and len({str(error) for error in errors}) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"memory": sparsifiers.memory("dgc", clipping=1.0)}, ["clipping"]),
        ({"compression": "none", "merging": "dear"}, ["dear", "two-level"]),
        ({"density": "importance"}, ["importance"]),
    ],
)
def test_what_has_no_meaning_with_shards_is_refused(options: dict[str, object], words: list[str]) -> None:
    def body(rank: int, model: torch.nn.Module) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"compression": "topk", "exchange": "two-level", **options}
        if options.get("merging") == "dear":
            given["model"] = model
        agmerge.DistributedOptimizer(inner, model.named_parameters(), **given)

    (error,) = on_ranks(1, SMALL, body, return_errors=True)
    assert isinstance(error, ValueError) and all(word in str(error) for word in words)


def test_a_process_set_has_nodes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")

    def body(rank: int, model: torch.nn.Module) -> list[str]:
        own = [0, 1, 4, 5] if rank in (0, 1, 4, 5) else [2, 3]
        options = {"compression": "topk", "density": 0.1, "exchange": "two-level", "process_set": own}
        return plain(model, wrap(model, **options), rank, range(3))

    seen = on_ranks(6, SMALL, body)
    assert seen[0] == seen[1] == seen[4] == seen[5] != seen[2] == seen[3]


def test_bits_are_those_of_one_rank_with_the_nodes_gradients() -> None:
    """One node of one rank: nothing is rounded on the way."""

    def body(rank: int, model: torch.nn.Module, exchange: str) -> list[Tensor]:
        plain(model, wrap(model, compression="topk", density=0.1, exchange=exchange), rank, range(4))
        return [p.detach() for p in model.parameters()]

    (two,), (one,) = (on_ranks(1, SMALL, lambda r, m, e=e: body(r, m, e)) for e in ("two-level", "sparse"))
    assert all(same_bits(a, b) for a, b in zip(two, one, strict=True))
