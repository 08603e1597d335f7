# SPDX-License-Identifier: Apache-2.0
"""`link_bytes` of every exchange, against what each collective must move, counted by rank in the backend."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import agmerge
from agmerge import testing
from agmerge.backends import Handle, topology
from agmerge.backends.local import LocalBackend
from agmerge.exchanges.dense import LARGE

STEPS = 3
SHAPES = {"wide": (40, 64), "bias": (13,), "deep": (9, 256), "odd": (11, 7)}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())
OF_ROUNDS = ("buffer ", "updates ", "figures")  # how the names of their collectives begin: others are of agreements

CASES: dict[str, dict[str, Any]] = {
    "dense": {"compression": "none"},
    "dense, in rank order": {"compression": "none", "dense_sum": "ordered"},
    "16 bits": {"compression": "fp16"},
    "sparse": {"compression": "topk", "density": 0.1, "exchange": "sparse"},
    "sparse, whole ones apart": {"compression": "topk", "density": 0.1, "dense_sum": "ordered"},
    "oktopk": {"compression": "topk", "density": 0.1, "exchange": "oktopk"},
    "masked": {"compression": "topk", "density": 0.1, "exchange": "masked"},
    "masked, in 8 bits": {"compression": "topk", "density": 0.1, "exchange": "masked", "wire": "int8"},
    "masked, drawn": {"compression": "randomk", "density": 0.1, "exchange": "masked"},
    "two factors": {"compression": "powersgd"},
    "one factor": {"compression": "acpsgd", "dense_sum": "ordered"},
    "2 bits": {"compression": "eden"},
    "8 bits": {"compression": "int8"},
    "1 bit, gathered": {"compression": "onebit"},
    "updates": {"compression": "topk", "density": 0.1, "sync": "updates"},
    "local steps": {"compression": "none", "sync": "updates", "every": 2},
    "nodes, sparse": {"compression": "topk", "density": 0.1, "exchange": "two-level"},
    "nodes, 2 bits": {"compression": "eden", "exchange": "two-level"},
    "nodes, in rank order": {"compression": "topk", "density": 0.1, "exchange": "two-level", "dense_sum": "ordered"},
}


class Moved:
    """Bytes that each rank sends to others, collective by collective."""

    def __init__(self, workers: int) -> None:
        self.sent = [0.0] * workers
        self.slack = [0.0] * workers  # what a ring may move more or less of pieces that are not all alike
        self._lock = threading.Lock()

    def add(self, comm: LocalBackend, name: str, sent: float, slack: float = 0.0) -> None:
        if name.startswith(OF_ROUNDS):
            with self._lock:
                self.sent[comm.ranks[comm.rank]] += sent
                self.slack[comm.ranks[comm.rank]] += slack


def counted(workers: int, monkeypatch: pytest.MonkeyPatch) -> Moved:
    """Have the in-memory backend count, by what arrives: not by the formulas that are tested."""
    moved = Moved(workers)
    plain = {name: getattr(LocalBackend, name) for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter")}

    def pieces(comm: LocalBackend, tensor: torch.Tensor) -> list[int]:
        return [part.nbytes for part in torch.tensor_split(tensor.reshape(-1), comm.size)]

    def all_reduce(comm: LocalBackend, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        parts = pieces(comm, tensor)  # rank r keeps adding up part r + 1, and is then handed all others
        sent = sum(parts) - parts[(comm.rank + 1) % comm.size] + sum(parts) - parts[(comm.rank + 2) % comm.size]
        moved.add(comm, name, sent if comm.size > 1 else 0, 2 * tensor.element_size() + 1)
        return plain["all_reduce"](comm, tensor, name, op)

    def all_gather(comm: LocalBackend, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        moved.add(comm, name, out.nbytes - tensor.nbytes)
        return plain["all_gather"](comm, out, tensor, name)

    def all_to_all(
        comm: LocalBackend,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        parts = torch.split(tensor, list(splits))
        moved.add(comm, name, sum(part.nbytes for rank, part in enumerate(parts) if rank != comm.rank))
        return plain["all_to_all"](comm, out, tensor, out_splits, splits, name)

    def reduce_scatter(comm: LocalBackend, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        moved.add(comm, name, tensor.nbytes - out.nbytes)
        return plain["reduce_scatter"](comm, out, tensor, name)

    for name, method in (
        ("all_reduce", all_reduce),
        ("all_gather", all_gather),
        ("all_to_all", all_to_all),
        ("reduce_scatter", reduce_scatter),
    ):
        monkeypatch.setattr(LocalBackend, name, method)
    return moved


def trained(workers: int, steps: int = STEPS, shapes: Any = SHAPES, **options: Any) -> list[dict[str, Any]]:
    def body(rank: int) -> dict[str, Any]:
        source = torch.Generator().manual_seed(rank)
        named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
        inner = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
        optimizer = agmerge.DistributedOptimizer(inner, named, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            for _, parameter in named:
                (parameter * torch.randn(parameter.shape, generator=source)).sum().backward()
            optimizer.step()
        return optimizer.stats()

    return testing.run(workers, body)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_each_exchange_counts_what_its_collectives_move(
    case: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CASES[case]
    if options.get("exchange") == "two-level":
        monkeypatch.setenv(topology.VARIABLE, "2" if workers % 2 == 0 else "1")
    moved = counted(workers, monkeypatch)
    stats = trained(workers, merging="layerwise", **options)
    for rank, figures in enumerate(stats):
        assert abs(figures["link_bytes"] - moved.sent[rank]) <= moved.slack[rank]
        steps = figures["steps"]
        dense = 2 * (workers - 1) * 4 * NUMEL / workers
        assert steps * dense <= figures["link_bytes_dense"] < steps * (dense + 1)
        assert (figures["link_bytes"] > 0) is (workers > 1)


def test_large_tensors_are_summed_where_they_lie_and_counted() -> None:
    shapes = {"large": (LARGE + 3,), "small": (5,)}
    for workers in (1, 2, 3):
        for figures in trained(workers, shapes=shapes, compression="none"):
            assert figures["link_bytes"] >= figures["link_bytes_dense"]
            assert figures["link_bytes"] <= figures["link_bytes_dense"] * 1.01


def test_probes_and_agreements_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = counted(2, monkeypatch)
    shapes = {f"tensor {number}": (64, 64) for number in range(6)}
    for rank, figures in enumerate(trained(2, steps=16, shapes=shapes, compression="topk", density=0.01)):
        assert figures["bytes_probed"] > 0
        assert abs(figures["link_bytes"] - moved.sent[rank]) <= moved.slack[rank]


def test_gathers_and_rings_compare_at_any_number_of_workers() -> None:
    """What is handed over does not grow with the workers, and what a gather moves does."""
    few, many = (trained(workers, compression="topk", density=0.1)[0] for workers in (2, 5))
    assert many["bytes_sent"] == few["bytes_sent"] and many["link_bytes"] == 4 * few["link_bytes"]


def test_dear_counts_both_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = counted(3, monkeypatch)

    def body(rank: int) -> dict[str, Any]:
        source = torch.Generator().manual_seed(rank)
        model = torch.nn.Linear(30, 20)
        for parameter in model.parameters():
            parameter.data.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(
            inner, model.named_parameters(), compression="none", merging="dear", model=model
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 30, generator=source)).square().mean().backward()
            optimizer.step()
        optimizer.flush()
        return optimizer.stats()

    for rank, figures in enumerate(testing.run(3, body)):
        assert abs(figures["link_bytes"] - moved.sent[rank]) <= moved.slack[rank]
        assert figures["link_bytes"] > figures["link_bytes_dense"]
