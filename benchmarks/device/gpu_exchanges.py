# SPDX-License-Identifier: Apache-2.0
"""Check 10 of ``benchmarks/gpu.py``: every exchange and compressor over NCCL, beside the same training on the CPU.

Gradients are known beforehand, so that a model rounds nothing otherwise here than there.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import agmerge
import merging
import sparsifiers
from agmerge.backends import topology
from device.gpu_bench import HOST, Bench, bits_of, join
from device.gpu_figures import Figure, must

STEPS, TIMEOUT = 4, 20.0  # steps of a training; seconds that a wait of it may take
SHAPES = [(640, 480), (480,), (480, 640), (640,), (1000, 300)]
SPARSE: dict[str, Any] = {"density": 0.01, "exchange": "sparse", "merging": merging.Plan((2, 3))}
DENSE: dict[str, Any] = {"compression": "none", "merging": merging.Plan((2, 3))}
IN_DDP: dict[str, dict[str, Any]] = {
    "DDP, the default": {},
    "DDP, topk": {"compression": "topk", "density": 0.01},
    "DDP, updates": {"sync": "updates"},
}
SELECTED = {"topk", "dgc"}  # a device selects what the host does, by rule; estimates may differ in their last bits
# Dense tensors by their own name: those that are small by rule the host rounds to `wire`, and a device does not.
SMALL = {"dense": lambda name, parameter: parameter.dim() < 2}


def trainings() -> dict[str, dict[str, Any]]:
    """Return the options of every training, by name."""
    found: dict[str, dict[str, Any]] = {"the default": {}, "the default, by layers": {"merging": "layerwise"}}
    found |= {name: {"compression": name, **SPARSE} for name in sparsifiers.names()}
    found |= {name: {"compression": name, "merging": SPARSE["merging"]} for name in sparsifiers.quantisers()}
    found |= {name: {**DENSE, "compression": name} for name in ("fp16", "bf16")}
    found |= {
        "dense, in rank order": {**DENSE, "dense_sum": "ordered"},
        "dense, summed by NCCL": DENSE,
        "dense, DeAR": {**DENSE, "merging": "dear"},
        "topk in int8": {"compression": "topk", **SPARSE, **SMALL, "wire": "int8"},
        "topk in fp16": {"compression": "topk", **SPARSE, **SMALL, "wire": "fp16"},
        "topk, Ok-Topk": {"compression": "topk", **SPARSE, "exchange": "oktopk", "dense_sum": "ordered"},
        "topk, masked": {"compression": "topk", **SPARSE, "exchange": "masked", "dense_sum": "ordered"},
        "topk, two levels": {"compression": "topk", **SPARSE, "exchange": "two-level", "dense_sum": "ordered"},
        "updates, eden": {"sync": "updates"},
        "updates, topk": {"sync": "updates", "compression": "topk", "density": 0.05},
        "powersgd": {"compression": "powersgd"},
        "acpsgd": {"compression": "acpsgd"},
    }
    return found


def has_the_hosts_bits(options: dict[str, Any]) -> bool:
    """Return whether the bits of the host are promised: sums in rank order of what has the same bits everywhere."""
    compression = options.get("compression", "eden")
    if compression in sparsifiers.names():
        return compression in SELECTED
    return compression in ("eden", "eden-4") or options.get("dense_sum") == "ordered"


class Given(nn.Module):
    """Parameters that begin as zeros, and a loss whose gradients are drawn by rank, step and parameter."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.given = nn.ParameterList(torch.zeros(shape, device=device) for shape in SHAPES)

    def forward(self, rank: int, step: int) -> Tensor:
        """Return the loss."""
        found = []
        for number, parameter in enumerate(self.given):
            source = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
            found.append((parameter * torch.randn(parameter.shape, generator=source).to(parameter.device)).sum())
        return torch.stack(found).sum()


def trained(device: torch.device, options: dict[str, Any]) -> list[str]:
    """Collective. Train some steps, and return what identifies the bits of the workers' parameters after each."""
    model = Given(device)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    more = {"model": model} if options.get("merging") == "dear" else {}
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), timeout=TIMEOUT, **options, **more)
    return seen_in_steps(model, optimizer, optimizer)


def trained_in_ddp(device: torch.device, options: dict[str, Any]) -> list[str]:
    """Collective. Do what :func:`trained` does, in DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(Given(device), device_ids=[device.index])
    inner = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)
    compressed = agmerge.integrations.ddp.compress(model, optimizer=inner, timeout=TIMEOUT, **options)
    return seen_in_steps(model, inner, compressed)


def seen_in_steps(model: nn.Module, optimizer: torch.optim.Optimizer, ours: Any) -> list[str]:
    """Collective. Make the steps of a training, close ``ours``, and return the bits that all workers share after each.

    ``ours``: the wrapped optimizer, or the result of ``compress()``.
    """
    seen = []
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(agmerge.rank(), step).backward()
            optimizer.step()
            with ours.shared():
                seen.append(bits_of(model))
    finally:
        ours.close()
    return seen


@contextmanager
def nodes(size: int) -> Iterator[None]:
    """Tell the exchange "two-level", inside, that half of the workers are on a node. ``size``: of the world."""
    os.environ[topology.VARIABLE] = str(max(1, size // 2))
    try:
        yield
    finally:
        os.environ.pop(topology.VARIABLE, None)


Train = Callable[[torch.device, dict[str, Any]], list[str]]


def outcome(train: Train, device: torch.device, options: dict[str, Any]) -> list[str]:
    """Collective. Return what a training does, or the error of it."""
    try:
        with warnings.catch_warnings(), nodes(agmerge.size()):
            warnings.simplefilter("ignore")
            return train(device, options)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0]]


def exchanges(bench: Bench) -> Iterator[Figure]:
    """Collective. Run check 10."""
    join(bench)
    for name, options in trainings().items():
        ours = agmerge.allgather_object(outcome(trained, bench.device, options))
        theirs = agmerge.allgather_object(outcome(trained, HOST, options))
        yield equal(name, ours)
        differs = [one != other for one, other in zip(ours[0], theirs[0], strict=False)]
        told = f"from step {differs.index(True)}" if True in differs else ""
        limit = 0 if has_the_hosts_bits(options) else None
        yield Figure(10, f"{name}: the host's bits", float(ours != theirs), "faults", limit, told)
    if bench.is_gpu:
        for name, options in IN_DDP.items():
            yield equal(name, agmerge.allgather_object(outcome(trained_in_ddp, bench.device, options)))


def equal(name: str, seen: list[list[str]]) -> Figure:
    """Judge what all ranks saw of a training: its end, and equal replicas after every step."""
    error = next((own[-1] for own in seen if len(own) < STEPS), "")
    right = not error and all(own == seen[0] for own in seen)
    return must(10, f"{name}: replicas are equal to the bit", right, error or "replicas differ")
