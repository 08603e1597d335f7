# SPDX-License-Identifier: Apache-2.0
"""Gradients in few bits, for real workers and for ranks in memory alike: every quantiser, every plan, every road."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from exchange_scenarios import workers_a_node
from support import digest, seeded, sgd
from support.quantised import Net

import agmerge
import merging
from agmerge import testing

STEPS = 2
PLANS = ("threshold", "layerwise", "single")


class Muon(torch.optim.SGD):
    """By its name one that mixes elements."""


# What a script passes, and what gradients travel in before times have been measured.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "eden-1": ({"compression": "eden-1"}, "eden-1"),
    "eden-2": ({"compression": "eden"}, "eden-2"),
    "eden-4": ({"compression": "eden-4"}, "eden-4"),
    "int8": ({"compression": "int8"}, "int8"),
    "onebit": ({"compression": "signsgd"}, "onebit"),  # messages are gathered: rounding is fed back
    "a list": ({"compression": ["none", "int8"]}, "int8"),
    "default, sparse": ({"exchange": "sparse"}, "eden-4"),
    "default": ({}, "eden-4"),
    "default, mixing": ({"kind": Muon}, "int8"),
}


def wrapped(model: Net, plan: str = "threshold", kind: Any = None, **options: Any) -> Any:
    """SGD with momentum, or an optimizer of class ``kind``, with a plan that goes by sizes alone."""
    inner = sgd(model) if kind is None else kind(model.parameters(), lr=0.1)
    planner = merging.get(plan, bytes=20_000) if plan == "threshold" else plan
    options = {"merging": planner, "check_every": 1, **options}
    return agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)


def stepped(model: Net, optimizer: Any, passes: Iterable[Callable[[], object]]) -> list[str]:
    """A step after each of ``passes``: the digests of all updates and of all parameters, one after the other."""
    seen = []
    for backward in passes:
        optimizer.zero_grad()
        backward()
        optimizer.synchronize()
        seen.append(digest(p.grad for p in model.parameters() if p.grad is not None))
        with optimizer.skip_synchronize():
            optimizer.step()
        seen.append(digest(model))
    return seen


def losses(model: Net, steps: Iterable[int]) -> list[Callable[[], object]]:
    """A backward pass for each of ``steps``."""
    return [lambda step=step: model.loss(agmerge.rank(), step).backward() for step in steps]  # type: ignore[misc]


def by_way(model: Net, name: str, plan: str) -> dict[str, Any]:
    """Some steps, and what the totals say of them."""
    optimizer = wrapped(model, plan, **WAYS[name][0])
    seen, stats = stepped(model, optimizer, losses(model, range(STEPS))), optimizer.stats()
    optimizer.close()
    kept = ("steps", "compressor", "buffers", "bytes_sent", "wire", "bytes_dense", "elements_sent", "density")
    return {"seen": seen, **{what: stats[what] for what in kept}}


# -- roads ------------------------------------------------------------------------------------------------------------


def passes(model: Net) -> list[str]:
    """Two backward passes a step."""

    def both(step: int) -> None:
        for number in range(2):
            model.loss(agmerge.rank(), 2 * step + number).backward()

    optimizer = wrapped(model, compression="eden", backward_passes_per_step=2)
    seen = stepped(model, optimizer, [functools.partial(both, step) for step in range(STEPS)])
    optimizer.close()
    return seen


def no_sync(model: Net) -> list[str]:
    """The same by the script, which also clips what was combined."""
    optimizer, seen = wrapped(model, compression="eden"), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model.loss(agmerge.rank(), 2 * step).backward()
        model.loss(agmerge.rank(), 2 * step + 1).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        seen.append(digest(model))
    optimizer.close()
    return seen


def scaled(model: Net) -> list[str]:
    """A loss scale, and one overflow, on the last rank."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer, seen = wrapped(model, compression="eden", scaler=scaler), []
    for step in range(STEPS + 1):
        overflows = step == 1 and agmerge.rank() == agmerge.size() - 1
        optimizer.zero_grad()
        scaler.scale(model.loss(agmerge.rank(), step) * (torch.inf if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        seen += [digest(model), str(scaler.get_scale())]
    optimizer.close()
    return seen


def thawed(model: Net) -> list[str]:
    """A layer takes part in some steps alone: ranks agree anew, in the step."""
    optimizer, seen = wrapped(model, compression="eden"), []
    for step in range(4):
        model.down.requires_grad_(step in (1, 2))
        seen += stepped(model, optimizer, losses(model, [step]))
    optimizer.close()
    return seen


def swapped(model: Net) -> list[str]:
    """From a sparsifier, which has kept something, to few bits and back."""
    optimizer = wrapped(model, compression="topk", density=0.05, exchange="sparse", dense_sum="ordered")
    seen = stepped(model, optimizer, losses(model, range(2)))
    for number, name in enumerate(("eden-4", "topk", "onebit", "eden")):
        optimizer.set_compressor(name)
        seen += stepped(model, optimizer, losses(model, range(2 * number, 2 * number + 2)))
    optimizer.close()
    return seen


def joined(model: Net) -> list[Any]:
    """The last rank has two batches more than the others."""
    rank, size = agmerge.rank(), agmerge.size()
    optimizer = wrapped(model, compression="eden")
    stepped(model, optimizer, losses(model, range(2 + 2 * (rank == size - 1))))
    found = [optimizer.join(), digest(model), optimizer.stats()["steps"]]
    optimizer.close()
    return found


def sets(model: Net) -> list[str]:
    """The first and the last rank by themselves, and the others."""
    rank, size = agmerge.rank(), agmerge.size()
    ends = [0, size - 1] if size > 2 else [0]
    own = ends if rank in ends else [other for other in range(size) if other not in ends]
    optimizer = wrapped(model, compression="eden", process_set=own)
    seen = stepped(model, optimizer, losses(model, range(STEPS)))
    optimizer.close()
    return seen


def two_level(model: Net, **options: Any) -> list[str]:
    """Dense in a node, in few bits between nodes."""
    optimizer = wrapped(model, exchange="two-level", dense_sum="ordered", **options)
    seen = stepped(model, optimizer, losses(model, range(STEPS)))
    optimizer.close()
    return seen


ROADS: dict[str, Callable[[Net], list[Any]]] = {
    "passes": passes,
    "no_sync": no_sync,
    "scaled": scaled,
    "thawed": thawed,
    "swapped": swapped,
    "joined": joined,
    "process sets": sets,
}
LEVELS: dict[str, dict[str, Any]] = {
    "two-level, eden, two nodes": {"compression": "eden"},
    "two-level, default, two nodes": {},
    "two-level, this machine": {"compression": "eden"},
}


def _runs(size: int, plans: Sequence[str]) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Everything, by name: a function of a model, and its other arguments."""
    found: dict[str, Any] = {f"{n}, {p}": (by_way, (n, p), {}) for n in WAYS for p in plans}
    found |= {name: (road, (), {}) for name, road in ROADS.items()}
    levels = {name: o for name, o in LEVELS.items() if size % 2 == 0 or not name.endswith("two nodes")}
    return found | {name: (two_level, (), options) for name, options in levels.items()}


def quantised() -> dict[str, Any]:
    """All of it, one after another, on this rank."""
    found = {}
    for name, (run, given, options) in _runs(agmerge.size(), PLANS).items():
        with workers_a_node(name, agmerge.size()):
            found[name] = run(seeded(Net, 3), *given, **options)
    return found


@functools.cache
def in_memory(size: int) -> list[dict[str, Any]]:
    """The same on ``size`` ranks of an in-memory group, with the first of ``PLANS``: what each rank saw."""
    found: list[dict[str, Any]] = [{} for _ in range(size)]
    for name, (run, given, options) in _runs(size, PLANS[:1]).items():
        models = [copy.deepcopy(seeded(Net, 3)) for _ in range(size)]
        with workers_a_node(name, size):  # of the process, so set here for all ranks
            seen = testing.run(size, lambda rank, run=run, m=models, g=given, o=options: run(m[rank], *g, **o))
        for rank, result in enumerate(seen):
            found[rank][name] = json.loads(json.dumps(result))
    return found
