# SPDX-License-Identifier: Apache-2.0
"""What real workers do with agmerge.integrations.ddp: ``torchrun ddp_scenarios.py FOLDER [SCENARIO ...]``.

Every rank writes what it saw as JSON. Those that are long run only where they are named.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TESTS = Path(__file__).parents[2]  # which has folders of the library's names
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS.parent / "examples")]
from ddp_awkward import awkward, leaves_alone, unused  # noqa: E402
from ddp_decided import added_up, averaged, decided, repaired  # noqa: E402
from ddp_harms import harms  # noqa: E402
from ddp_pairs import CASES, MATRIX, pair, train  # noqa: E402
from ddp_refused import guarded, refused  # noqa: E402
from ddp_several import several  # noqa: E402
from ddp_updates import UPDATES, updates_pair, updates_refused, updates_resumed  # noqa: E402
from support import digest, loss_of, mlp, seeded, sgd, wrap  # noqa: E402

import agmerge  # noqa: E402
from agmerge.integrations import ddp  # noqa: E402

OPTIONS: dict[str, Any] = {"exchange": "sparse", "merging": "threshold", "compression": "topk"}
LONG = ("matrix", "halves", "updates_others")
UPDATES_SHORT = ("apply", "every, overlap", "outer", "unused", "scaled")  # of `make test`


def bits() -> dict[str, list[bool]]:
    """Under the hook and by the wrapper: whether parameters and residuals are equal to the bit, by case."""
    return {name: pair(**case) for name, case in CASES.items()}


def matrix() -> dict[str, list[bool]]:
    """The same of everything with everything."""
    return {str(case): pair(**case) for case in MATRIX}


def plain() -> dict[str, Any]:
    """``compression="none"`` and DistributedDataParallel without us: digests after some steps."""
    ours, theirs = (DistributedDataParallel(seeded(mlp)) for _ in range(2))
    compressed = ddp.compress(ours, compression="none", merging="single")
    train(ours, range(6))
    train(theirs, range(6))
    stats = compressed.stats()
    compressed.close()
    return {"ours": digest(ours), "theirs": digest(theirs), "steps": stats["steps"], "sent": stats["bytes_sent"]}


def rebuilt() -> dict[str, Any]:
    """Buckets before and after the first pass, and whether residuals went on by name: what is conserved."""
    net = seeded(mlp)
    model = DistributedDataParallel(net, bucket_cap_mb=0.005)
    compressed = ddp.compress(model, **OPTIONS, density=0.05)
    worst = conserved(net, model, compressed, 12)
    logged = model._get_ddp_logging_data()
    compressed.close()
    return {"worst": worst, "before": logged["bucket_sizes"], "after": logged["rebuilt_bucket_sizes"]}


def conserved(net: nn.Module, model: nn.Module, compressed: Any, steps: int) -> float:
    """The largest difference of what was applied, and the mean of gradients less what is kept."""
    twin = copy.deepcopy(net)  # parameters do not move, so that it has this rank's own gradients
    still = torch.optim.SGD(net.parameters(), lr=0.0)
    given = [torch.zeros_like(p, dtype=torch.float64) for p in net.parameters()]
    applied = [torch.zeros_like(total) for total in given]
    for step in range(steps):
        for module, forward, sums in ((twin, twin, given), (net, model, applied)):
            module.zero_grad()
            loss_of(forward, agmerge.rank(), step).backward()
            for total, p in zip(sums, module.parameters(), strict=True):
                total += p.grad.double()
        still.step()
    kept = compressed.state_dict()["agmerge"]["residuals"]
    worst = 0.0
    for (name, _), mine, done in zip(net.named_parameters(), given, applied, strict=True):
        rest = kept.get(name, torch.zeros_like(mine)).double()
        worst = max(worst, float((agmerge.allreduce(mine - rest) - done).abs().max()))
    assert any(float(residual.abs().max()) > 0 for residual in kept.values())
    return worst


def uneven() -> dict[str, Any]:
    """Rank 0 has batches for four steps, rank 1 for seven: by ``model.join()``, and by the wrapper's."""
    batches = range(4 if agmerge.rank() == 0 else 7)
    ours, theirs = seeded(mlp), seeded(mlp)
    model, inner = DistributedDataParallel(ours), sgd(ours)
    compressed = ddp.compress(model, **OPTIONS, check_every=1)
    with model.join():
        for step in batches:
            inner.zero_grad()
            loss_of(model, agmerge.rank(), step).backward()
            inner.step()
    optimizer = wrap(theirs, **{**OPTIONS, "merging": compressed.plan})
    for step in batches:
        optimizer.zero_grad()
        loss_of(theirs, agmerge.rank(), step).backward()
        optimizer.step()
    optimizer.join()
    said = ""
    try:
        with model.join(divide_by_initial_world_size=False):
            loss_of(model, agmerge.rank(), 0).backward()
    except agmerge.AGMergeError as error:
        said = str(error)
    found = {"ours": digest(ours), "theirs": digest(theirs), "steps": compressed.stats()["steps"], "said": said}
    compressed.close()
    optimizer.close()
    return found


def checkpoints() -> dict[str, Any]:
    """Eight steps, and four, a checkpoint, and four: the bits; and what rank 0 gathers of all ranks."""
    whole, halves = (DistributedDataParallel(seeded(mlp)) for _ in range(2))
    compressed = ddp.compress(whole, **OPTIONS)
    train(whole, range(8))
    first, inner = ddp.compress(halves, **OPTIONS), sgd(halves)
    train(halves, range(4), inner)
    own, gathered, state = copy.deepcopy(first.state_dict()), agmerge.gather_state(first), inner.state_dict()
    found = []
    for kept in (own, agmerge.broadcast_object(gathered)):
        model = DistributedDataParallel(copy.deepcopy(halves.module))
        again, inner = ddp.compress(model, **OPTIONS), sgd(model)
        inner.load_state_dict(copy.deepcopy(state))
        again.load_state_dict(kept)
        train(model, range(4, 8), inner)
        found.append(digest(model))
        again.close()
    for one in (compressed, first):
        one.close()
    return {"whole": digest(whole), "again": found, "keys": sorted(own), "gathered": gathered is not None}


def changes() -> dict[str, Any]:
    """Another compressor in the middle; and after ``close()`` whole averages, as DistributedDataParallel's own."""
    ours = DistributedDataParallel(seeded(mlp))
    compressed, inner = ddp.compress(ours, **OPTIONS), sgd(ours)
    train(ours, range(3), inner)
    kept = [compressed.stats()["residual_norm"]]
    compressed.set_compressor("topk", density=1.0)
    train(ours, range(3, 5), inner)
    kept.append(compressed.stats()["residual_norm"])
    report = compressed.merge_report()
    compressed.close()
    theirs = DistributedDataParallel(copy.deepcopy(ours.module))
    for model in (ours, theirs):
        model.zero_grad()
        loss_of(model, agmerge.rank(), 9).backward()
    same = digest([p.grad for p in ours.parameters()]) == digest([p.grad for p in theirs.parameters()])
    return {"kept": kept, "report": report.splitlines()[0], "closed": same}


def groups() -> dict[str, Any]:
    """A model that each rank averages with nobody, by a process group of its own: one worker, as without us."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    net, twin = seeded(mlp), seeded(mlp)
    model = DistributedDataParallel(net, process_group=own)
    compressed = ddp.compress(model, **OPTIONS, density=1.0)
    train(model, range(4))
    train(twin, range(4))
    steps = compressed.stats()["steps"]
    compressed.close()
    return {"equal": digest(net) == digest(twin), "steps": steps}


def halves() -> dict[str, Any]:
    """Two of four workers each average among themselves: as the wrapper with ``process_set``."""
    sets = [[0, 1], [2, 3]]
    made = [dist.new_group(ranks) for ranks in sets]
    half = dist.get_rank() // 2
    same = []
    for options in ({}, {"sync": "updates"}):
        ours, theirs = seeded(mlp), seeded(mlp)
        model, inner = DistributedDataParallel(ours, process_group=made[half]), sgd(ours)
        compressed = ddp.compress(model, optimizer=inner, **{**OPTIONS, **options})
        train(model, range(6), inner)
        optimizer = wrap(theirs, process_set=sets[half], **{**OPTIONS, **options})
        train(theirs, range(6), optimizer)
        compressed.consolidate()
        optimizer.consolidate()
        same.append(digest(ours) == digest(theirs))
        compressed.close()
        optimizer.close()
    return {"same": same, "digest": digest(ours)}


def compiled() -> list[bool]:
    """Under torch.compile, around DistributedDataParallel and inside: the bits of the wrapper, and plain names."""
    found = []
    theirs = seeded(mlp)
    optimizer = wrap(theirs, **OPTIONS)
    train(theirs, range(4), optimizer)
    for outside in (True, False):
        net = seeded(mlp)
        inside: Any = net if outside else torch.compile(net, backend="eager")
        model = DistributedDataParallel(inside)
        compressed = ddp.compress(torch.compile(model, backend="eager") if outside else model, **OPTIONS)
        train(model, range(4), sgd(net))
        found += [digest(net) == digest(theirs), set(compressed.plan.names) == set(optimizer.plan.names)]
        compressed.close()
    optimizer.close()
    return found


def copied() -> dict[str, Any]:
    """A copy of the model says that it is not compressed, and can be; and what was dropped is free."""
    model = DistributedDataParallel(seeded(mlp))
    compressed = ddp.compress(model, **OPTIONS)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        twin = copy.deepcopy(model)
    again = ddp.compress(twin, **OPTIONS)
    train(twin, range(2))
    steps = [one.stats()["steps"] for one in (compressed, again)]
    kept = [weakref.ref(one) for one in (model.module, compressed._reducer, twin.module, again._reducer)]
    del model, compressed, twin, again
    gc.collect()
    return {"said": [str(one.message) for one in said], "steps": steps, "free": [one() is None for one in kept]}


def unkept() -> list[bool]:
    """What ``compress()`` returns need not be kept: bits with it, and without."""
    found = []
    for options in ({"compression": "dgc"}, {"sync": "updates"}):
        digests = []
        for keeps in (True, False):
            net = seeded(mlp)
            model, inner = DistributedDataParallel(net), sgd(net)
            kept = [ddp.compress(model, optimizer=inner, **{**OPTIONS, **options})]
            if not keeps:
                kept.clear()
                gc.collect()
            train(model, range(4), inner)
            digests.append(digest(net))
        found.append(digests[0] == digests[1])
    return found


def infinite() -> dict[str, Any]:
    """What is said of a gradient that is not finite, on every rank, and what is kept then."""
    net = seeded(mlp)
    model = DistributedDataParallel(net, bucket_cap_mb=0.005)
    compressed = ddp.compress(model, **OPTIONS)
    train(model, range(3))
    before = digest(compressed.state_dict()["agmerge"]["residuals"].values())
    said = ""
    try:
        (loss_of(model, agmerge.rank(), 3) * (float("nan") if agmerge.rank() else 1.0)).backward()
    except agmerge.NonFiniteError as error:
        said = str(error)
    return {"said": said, "kept": digest(compressed.state_dict()["agmerge"]["residuals"].values()) == before}


def updates() -> dict[str, list[bool]]:
    """``sync="updates"``, under DistributedDataParallel and by the wrapper around the plain model."""
    return {name: updates_pair(UPDATES[name]) for name in UPDATES_SHORT}


def updates_others() -> dict[str, list[bool]]:
    """The same in the other ways."""
    return {name: updates_pair(options) for name, options in UPDATES.items() if name not in UPDATES_SHORT}


SCENARIOS: dict[str, Callable[[], Any]] = {
    fn.__name__: fn
    for fn in (
        bits,
        matrix,
        plain,
        rebuilt,
        unused,
        leaves_alone,
        awkward,
        uneven,
        checkpoints,
        changes,
        groups,
        halves,
        compiled,
        copied,
        unkept,
        updates,
        updates_others,
        updates_refused,
        updates_resumed,
        several,
        harms,
        refused,
        guarded,
        infinite,
        decided,
        added_up,
        repaired,
        averaged,
    )
}


def main(folder: Path, *names: str) -> None:
    """Run scenarios, all but the long ones unless some are named."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in names or [name for name in SCENARIOS if name not in LONG]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = SCENARIOS[name]()
        (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
