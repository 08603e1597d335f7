# SPDX-License-Identifier: Apache-2.0
"""What real workers do; run by a launcher: ``python scenarios.py FOLDER [SCENARIO ...]``. Every rank writes what it saw
as JSON.

Many scenarios share one launch, because starting workers costs more than most of them.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import agmerge
import merging
from agmerge.planning import cost_probe

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parents[2] / "examples")]
from collective_scenarios import every_collective  # noqa: E402
from digits import DigitsCNN, load  # noqa: E402
from dropping import dropped  # noqa: E402
from exchange_scenarios import exchanges  # noqa: E402
from quantised_scenarios import quantised  # noqa: E402
from quantised_workers import chosen, damaged, order  # noqa: E402
from support import (  # noqa: E402
    AwkwardModel,
    awkward_batch,
    awkward_groups,
    batch,
    digest,
    loss_of,
    mlp,
    seeded,
    sgd,
    train,
    wrap,
)
from updates_scenarios import updates  # noqa: E402

Scenario = Callable[[], Any]
AWKWARD = 12  # steps
PLANNED = 18  # steps of a planner; the first ten are timed
SCENARIOS: dict[str, Scenario] = {}
# Those that run only where they are named: see test_quantised_workers.py.
NAMED: dict[str, Scenario] = {fn.__name__: fn for fn in (quantised, order, damaged, chosen)}


def scenario(fn: Scenario) -> Scenario:
    """Run ``fn`` under its name on every rank."""
    SCENARIOS[fn.__name__] = fn
    return fn


def wrapped(model: nn.Module, lr: float = 0.1, **options: Any) -> agmerge.DistributedOptimizer:
    """SGD with momentum and weight decay, wrapped."""
    return wrap(model, sgd(model, lr=lr, weight_decay=1e-3), **options)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[str]:
    """Plain steps on this rank's batches; the model's digest after each."""
    return train(model, optimizer, agmerge.rank(), steps)


@scenario
def awkward() -> dict[str, list[str]]:
    """Tied, unused, rank-dependent, alternating, frozen, late-unfrozen layers; mixed dtypes."""
    seen: dict[str, list[str]] = {}
    for compression in ("topk", "none", "fp16", "bf16", "powersgd", "acpsgd"):
        model = seeded(AwkwardModel, 7)
        inner = torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9)
        optimizer = agmerge.DistributedOptimizer(
            inner,
            model.named_parameters(),
            compression=compression,
            exchange="sparse",
            merging=merging.get("threshold", bytes=8192),
        )
        seen[compression] = []
        for step in range(AWKWARD):
            optimizer.zero_grad()
            if step == AWKWARD // 2:
                model.unfreeze()
            model.loss(awkward_batch(agmerge.rank(), step), agmerge.rank(), step).backward()
            optimizer.step()
            seen[compression].append(digest(model))
        optimizer.close()
    return seen


@scenario
def conservation() -> dict[str, float]:
    """Sum of updates against mean of gradients less final residuals, by all-reduce, 20 steps of top-k."""
    model = seeded(mlp, 3)
    optimizer = wrapped(model, lr=0.0)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    update = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, agmerge.rank(), step).backward()
        for sum_, p in zip(total, model.parameters(), strict=True):
            sum_ += p.grad.double()
        optimizer.synchronize()
        for sum_, p in zip(update, model.parameters(), strict=True):
            sum_ += p.grad.double()
        with optimizer.skip_synchronize():
            optimizer.step()
    residuals = optimizer.state_dict()["agmerge"]["residuals"]
    worst, moved = 0.0, 0.0
    for (name, p), mine, done in zip(model.named_parameters(), total, update, strict=True):
        kept = residuals.get(name, torch.zeros_like(p)).double()
        expected = agmerge.allreduce(mine - kept, name=f"expected/{name}")
        worst = max(worst, float((expected - done).abs().max()))
        moved = max(moved, float(kept.abs().max()))
    optimizer.close()
    return {"worst": worst, "kept": moved}


@scenario
def large_batch() -> float:
    """``none`` against one process that sees all batches: the largest difference of a parameter after 20 steps."""
    model = seeded(mlp, 4)
    single = copy.deepcopy(model)
    optimizer = wrapped(model, compression="none")
    twin = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    for step in range(20):
        steps_of(model, optimizer, range(step, step + 1))
        parts = [batch(rank, step) for rank in range(agmerge.size())]
        twin.zero_grad()
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        nn.functional.cross_entropy(single(x), y).backward()
        twin.step()
    optimizer.close()
    pairs = zip(model.parameters(), single.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@scenario
def density_one() -> dict[str, list[str]]:
    """Density 1 against ``none``, and an ordered sum against another plan."""
    seen = {}
    for name, options in {
        "none": {"compression": "none", "dense_sum": "ordered"},
        "none, layerwise": {"compression": "none", "dense_sum": "ordered", "merging": "layerwise"},
        "density 1": {"density": 1.0},
        "density 1, single": {"density": 1.0, "merging": "single"},
    }.items():
        model = seeded(mlp, 5)
        optimizer = wrapped(model, **options)
        seen[name] = steps_of(model, optimizer, range(10))
        optimizer.close()
    return seen


@scenario
def planners() -> dict[str, dict[str, Any]]:
    """Every planner on the digits, its plan made by real times after ten steps; dear with an exchange in halves."""
    x, y, _, _ = load()
    seen: dict[str, dict[str, Any]] = {}
    for name in merging.names():
        model = seeded(DigitsCNN, 21)
        options: dict[str, Any] = {"compression": "topk", "density": 0.05, "exchange": "sparse"}
        if name == "dear":
            options = {"compression": "none", "model": model}
        inner = sgd(model, lr=0.02)
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), merging=name, **options)
        digests, losses = [], []
        for step in range(PLANNED):
            start = 16 * (agmerge.size() * step + agmerge.rank())
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[start : start + 16]), y[start : start + 16])
            loss.backward()
            optimizer.step()
            optimizer.flush()
            digests.append(digest(model))
            losses.append(float(agmerge.allreduce(loss.detach())))
        assert optimizer.plan is not None
        seen[name] = {"digests": digests, "losses": losses, "plan": optimizer.plan.counts}
        optimizer.close()
    return seen


scenario(exchanges)
scenario(updates)
scenario(every_collective)
scenario(dropped)


@scenario
def plan_free() -> dict[str, list[str]]:
    """Sparsified ahead and added in rank order: what is trained under plans that differ."""
    seen = {}
    for name in ("layerwise", "single", "agmerge"):
        model = seeded(mlp, 22)
        options: dict[str, Any] = {"density": 0.1, "sparsify": "ahead", "dense_sum": "ordered"}
        optimizer = wrapped(model, merging=name, **options)
        seen[name] = steps_of(model, optimizer, range(14))
        optimizer.close()
    return seen


@scenario
def mismatches() -> dict[str, str]:
    """One rank differs in one thing at a time: what every rank is told."""
    odd = agmerge.rank() == agmerge.size() - 1
    plan = merging.Plan((6,)) if odd else merging.Plan((3, 3))
    cases: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "density": (mlp, {"density": 0.02 if odd else 0.01}),
        "compressor": (mlp, {"compression": "none" if odd else "topk"}),
        "memory": (mlp, {"memory": "none" if odd else "residual"}),
        "planner": (mlp, {"merging": "single" if odd else "threshold"}),
        "plan": (mlp, {"merging": plan}),
        "shape": (lambda: nn.Sequential(nn.Linear(40, 65 if odd else 64), nn.Tanh()), {}),
        "extra layer": (lambda: nn.Sequential(mlp(), nn.Linear(10, 10)) if odd else nn.Sequential(mlp()), {}),
    }
    told = {}
    for name, (build, options) in cases.items():
        try:
            wrapped(build(), **options)
            told[name] = "no error"
        except agmerge.RankMismatchError as error:
            told[name] = str(error)
    return told


@scenario
def resume() -> dict[str, Any]:
    """Finding 1: only rank 0 has a checkpoint; Horovod's order of broadcasts, weight decay on."""
    states = []
    for inner in (torch.optim.SGD, torch.optim.AdamW):
        model = seeded(mlp, 6)
        options = {"momentum": 0.9} if inner is torch.optim.SGD else {}
        optimizer = inner(model.parameters(), lr=0.1, weight_decay=0.1, **options)
        if agmerge.rank() == 0:
            loss_of(model, 9, 9).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters())
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        states.append([digest(model), *steps_of(model, optimizer, range(5))])
        optimizer.close()
    return {"sgd": states[0], "adamw": states[1]}


@scenario
def changes() -> list[str]:
    """Findings 5 and 6: add_param_group, unfreezing and a recast after wrapping; the sentinel looks at every step."""
    model = seeded(lambda: nn.ModuleDict({"a": mlp(), "b": nn.Linear(10, 200), "c": nn.Linear(200, 10)}), 8)
    model["c"].requires_grad_(False)
    inner = torch.optim.SGD([*model["a"].parameters(), *model["c"].parameters()], lr=0.1, momentum=0.9)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), check_every=1)
    seen = []
    for step in range(12):
        if step == 3:
            optimizer.add_param_group({"params": list(model["b"].parameters())})
        if step == 6:
            model["c"].requires_grad_(True)
        if step == 9:
            model.double()
        x, y = batch(agmerge.rank(), step)
        optimizer.zero_grad()
        out = model["c"](model["b"](model["a"](x.to(next(model.parameters()).dtype))))
        nn.functional.cross_entropy(out, y).backward()
        optimizer.step()
        seen.append(digest(model))
    optimizer.close()
    return seen


@scenario
def recipes() -> dict[str, list[str]]:
    """Clipping, accumulation, no_sync, two optimizers, closures, a scheduler."""
    seen: dict[str, list[str]] = {"clip": [], "two": [], "closure": []}
    first, second = seeded(mlp, 9), seeded(mlp, 10)
    one, two = wrapped(first), wrapped(second, backward_passes_per_step=2)
    schedule = torch.optim.lr_scheduler.StepLR(one, 4)
    for step in range(8):
        one.zero_grad()
        two.zero_grad()
        loss_of(first, agmerge.rank(), step).backward()
        loss_of(second, agmerge.rank(), step).backward()
        one.synchronize()
        torch.nn.utils.clip_grad_norm_(first.parameters(), 0.5)
        with one.skip_synchronize():
            one.step()
        schedule.step()
        if step % 2:
            loss_of(second, agmerge.rank(), step + 50).backward()
        two.step()
        seen["clip"].append(digest(first))
        seen["two"].append(digest(second))
    one.close()
    two.close()

    third = seeded(mlp, 11)
    three = wrapped(third)
    for step in range(5):
        three.zero_grad()
        with three.no_sync():
            loss_of(third, agmerge.rank(), step).backward()

        def closure(step: int = step) -> torch.Tensor:
            loss = loss_of(third, agmerge.rank(), step + 50)
            loss.backward()
            return loss

        three.step(closure)
        seen["closure"].append(digest(third))
    three.close()
    return seen


@scenario
def uneven() -> dict[str, list[Any]]:
    """Ranks join after 7 and 10 batches, sparse and dense: who was last, and the model then and after more steps."""
    seen = {}
    for compression in ("adtopk", "none", "powersgd", "acpsgd"):
        model = seeded(mlp, 14)
        optimizer = wrapped(model, compression=compression, check_every=1)
        steps_of(model, optimizer, range(7 if agmerge.rank() % 2 else 10))
        seen[compression] = [optimizer.join(), digest(model), *steps_of(model, optimizer, range(20, 22))]
        optimizer.close()
    return seen


@scenario
def some_ranks() -> dict[str, list[str]]:
    """Merge buffers that the script lists, and process sets: the last rank alone, then all, then in two halves."""
    size, last = agmerge.size(), agmerge.size() - 1
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    mine = next(half for half in halves if agmerge.rank() in half)
    seen: dict[str, list[str]] = {}
    for name, ranks in {"last": [last], "all": list(range(size)), "halves": mine}.items():
        model = seeded(mlp, 13)
        optimizer = wrapped(model, process_set=ranks, groups=[list(model[0].parameters())])
        seen[name] = steps_of(model, optimizer, range(3))
        optimizer.close()
    return seen


@scenario
def sentinel() -> str:
    """A parameter that one rank changes behind the optimizer's back is found by name, on every rank."""
    model = seeded(mlp, 12)
    optimizer = wrapped(model, check_every=2)
    steps_of(model, optimizer, range(2))
    if agmerge.rank() == 1:
        with torch.no_grad():
            model[2].weight[0, 0] += 1
    try:
        steps_of(model, optimizer, range(2, 4))
    except agmerge.DivergenceError as error:
        return str(error)
    return "no error"


@scenario
def collectives() -> dict[str, Any]:
    """The module's own calls."""
    rank, size = agmerge.rank(), agmerge.size()
    try:
        agmerge.allreduce(torch.ones(3 if rank else 4))
        mismatch = "no error"
    except agmerge.RankMismatchError as error:
        mismatch = str(error)
    return {
        "backend": agmerge.backend_name(),
        "rank": rank,
        "size": size,
        "local": [agmerge.local_rank(), agmerge.local_size()],
        "average": agmerge.allreduce(torch.tensor([float(rank)])).item(),
        "sum": agmerge.allreduce(torch.tensor([rank]), op=agmerge.Sum).item(),
        "gathered": agmerge.allgather(torch.arange(rank + 1)).tolist(),
        "broadcast": agmerge.broadcast(torch.tensor([rank]), root_rank=size - 1).item(),
        "object": agmerge.broadcast_object({"rank": rank}, root_rank=1),
        "mismatch": mismatch,
    }


def main(folder: Path, *names: str) -> None:
    """Run the scenarios of these names, all of ``SCENARIOS`` if there are none, and write what they returned."""
    torch.set_num_threads(1)
    cost_probe.SECONDS, cost_probe.SHARE = 0.1, 1e3  # plans need not be good ones, and soon
    agmerge.init()
    for name in names or SCENARIOS:
        found = (SCENARIOS | NAMED)[name]()
        (folder / f"{name}.{agmerge.rank()}.json").write_text(json.dumps(found))
        agmerge.barrier()
    agmerge.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
