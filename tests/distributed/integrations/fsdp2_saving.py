# SPDX-License-Identifier: Apache-2.0
"""Updates among replicas of shards, and checkpoints of all that they keep: the other scenarios of FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp2_models import (
    REPLICA,
    SHARD,
    adamw,
    apart,
    locals_of,
    loss_of,
    network,
    several,
    sgd,
    sharded,
    step_of,
    wrapped,
)
from support import digest, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import agmerge

HALF, STEPS = 4, 8
LOCAL: dict[str, Any] = {"sync": "updates", "exchange": "auto"}
CELLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk": (adamw, {"compression": "topk"}),
    "dgc": (sgd, {"compression": "dgc"}),
    "updates": (adamw, {"compression": "topk", **LOCAL}),
    "local steps, held": (adamw, {"compression": "topk", "carry": "hold", "every": 2, **LOCAL}),
    "several": (several, {"compression": "topk"}),
    "several, updates": (several, {"compression": "topk", **LOCAL}),
}
SHORT = ("dgc", "local steps, held", "several, updates")  # of `make test`


def everything(cell: str, model: nn.Module, optimizer: Any, path: Path | None) -> dict[str, Any]:
    """What torch.distributed.checkpoint keeps of a run."""
    parts: dict[str, Any] = {"residuals": agmerge.ResidualState(optimizer, path), "model": get_model_state_dict(model)}
    if "sync" not in CELLS[cell][1]:  # else each rank's own is in the residuals
        parts["optimizer"] = get_optimizer_state_dict(model, optimizer.optimizers)
    return parts


def save(mesh: DeviceMesh, cell: str, folder: Path) -> dict[str, Any]:
    """Train, save in the middle, go on; the digest of what this rank holds at the end, and what waited at the save."""
    inner, options = CELLS[cell]
    model = sharded(mesh[SHARD])
    optimizer = wrapped(model, mesh, inner, **options)
    for step in range(HALF):
        step_of(model, optimizer, step)
    dcp.save(everything(cell, model, optimizer, None), checkpoint_id=folder / cell)
    own = optimizer.state_dict()  # of this rank, as torch.save would have it
    before = waiting(optimizer, mesh)
    for step in range(HALF, STEPS):
        step_of(model, optimizer, step)
    optimizer.close()
    return {"end": digest(locals_of(model)), "waiting": before, "own": own}


def load(mesh: DeviceMesh, cell: str, folder: Path) -> dict[str, Any]:
    """Start from what was saved, in a model of other numbers and without a warning; go on."""
    inner, options = CELLS[cell]
    model = sharded(mesh[SHARD], seed=1)
    optimizer = wrapped(model, mesh, inner, **options)
    if "sync" not in options:  # where there is none yet, there is nothing to read into
        step_of(model, optimizer, 100)
    state = everything(cell, model, optimizer, folder / cell)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AGM40[12]")
        dcp.load({key: state[key] for key in state if key != "residuals"}, checkpoint_id=folder / cell)
        set_model_state_dict(model, state["model"])
        if "optimizer" in state:
            set_optimizer_state_dict(model, optimizer.optimizers, state["optimizer"])
        dcp.load({"residuals": state["residuals"]}, checkpoint_id=folder / cell)
    before = waiting(optimizer, mesh)
    for step in range(HALF, STEPS):
        step_of(model, optimizer, step)
    optimizer.close()
    return {"end": digest(locals_of(model)), "waiting": before}


def waiting(optimizer: Any, mesh: DeviceMesh) -> float:
    """The sum of all that replicas have not sent yet of this rank's shards, as an update."""
    own = sum(float(tensor.double().sum()) for tensor in optimizer._reducer.replica.unsent().values())
    return float(agmerge.allreduce(torch.tensor([own], dtype=torch.float64), process_set=mesh[REPLICA]))


def saved_and_resumed(mesh: DeviceMesh, folder: Path, cells: Iterable[str] = SHORT) -> dict[str, Any]:
    """Whether a run that was saved and resumed has the bits of the one that went on."""
    found = {}
    for cell in cells:
        went_on, resumed = save(mesh, cell, folder), load(mesh, cell, folder)
        found[cell] = {
            "equal": went_on["end"] == resumed["end"],
            "waiting": [went_on["waiting"], resumed["waiting"]],
        }
    return found


def by_others(mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Save what another launch will load, or load what one has saved: what waits for its turn in each."""
    saves = not (folder / "topk").exists()
    dist.barrier()  # all have looked
    return {cell: (save if saves else load)(mesh, cell, folder)["waiting"] for cell in CELLS}


def gathered(mesh: DeviceMesh) -> dict[str, Any]:
    """``gather_state`` among the replicas of a shard, and the file of a rank loaded by one that holds another shard."""
    model = sharded(mesh[SHARD])
    optimizer = wrapped(model, mesh, sgd, compression="topk")
    for step in range(HALF):
        step_of(model, optimizer, step)
    before = waiting(optimizer, mesh)
    together = agmerge.gather_state(optimizer)
    states = agmerge.allgather_object(optimizer.state_dict()["agmerge"])
    neighbours = {**optimizer.optimizer.state_dict(), "agmerge": states[dist.get_rank() ^ 1]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(neighbours)
    told = [str(one.message) for one in caught if "AGM402" in str(one.message)]
    dropped = waiting(optimizer, mesh)
    first = agmerge.broadcast_object(
        together["agmerge"] if together else None, dist.get_rank() % 2, "all", mesh[REPLICA]
    )
    optimizer.load_state_dict({**optimizer.optimizer.state_dict(), "agmerge": first})
    found = {
        "who": together is not None,
        "waiting": [before, dropped, waiting(optimizer, mesh)],
        "told": told,
    }
    optimizer.close()
    return found


def mean_of_replicas(steps: int, every: int) -> list[Tensor]:
    """The parameters after local steps of AdamW with the gradients of each replica, averaged after every so many."""
    count = dist.get_world_size() // 2
    models = [seeded(network) for _ in range(count)]
    inners = [adamw(model.parameters()) for model in models]
    for step in range(steps):
        for replica, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            for rank in (2 * replica, 2 * replica + 1):
                (loss_of(model, rank, step) / 2).backward()
            inner.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = sum(parameters) / count
                    for parameter in parameters:
                        parameter.copy_(mean)
    return [parameter.detach() for parameter in models[0].parameters()]


def updates(mesh: DeviceMesh) -> dict[str, Any]:
    """Each replica steps by itself; the whole way, and what is selected of it."""
    found: dict[str, Any] = {}
    model = sharded(mesh[SHARD])
    optimizer = agmerge.LocalOptimizer(
        adamw(model.parameters()), model.named_parameters(), 2, process_set=mesh[REPLICA], wire="fp32", check_every=1
    )
    for step in range(4):
        step_of(model, optimizer, step)
    found["whole"] = apart(model, mean_of_replicas(4, 2))
    optimizer.close()
    for carry in ("apply", "hold"):
        model = sharded(mesh[SHARD])
        options = {"compression": "topk", "carry": carry, "check_every": 1, **LOCAL}
        optimizer = wrapped(model, mesh, adamw, **options)
        for step in range(4):
            step_of(model, optimizer, step)
        with optimizer.shared():
            shared = digest(locals_of(model))
            loss = float(loss_of(model, 0, 0))  # FSDP gathers what is there now
        optimizer.consolidate()
        found[carry] = {
            "shared": alike(shared, mesh),
            "consolidated": alike(digest(locals_of(model)), mesh),
            "loss": loss,
        }
        optimizer.close()
    return found


def alike(own: str, mesh: DeviceMesh) -> bool:
    """Whether the replicas of this rank's shards have the same digest."""
    return len(set(agmerge.allgather_object(own, process_set=mesh[REPLICA]))) == 1


def scenarios(folder: Path) -> dict[str, Callable[[DeviceMesh], Any]]:
    """What every launch does, by name; checkpoints are in ``folder``."""
    return {
        "updates": updates,
        "gathered": gathered,
        "saved_and_resumed": lambda mesh: saved_and_resumed(mesh, folder),
    }


def long(folder: Path) -> dict[str, Callable[[DeviceMesh], Any]]:
    """What is done when it is asked for."""
    return {
        "by_others": lambda mesh: by_others(mesh, folder),
        "others_saved_and_resumed": lambda mesh: saved_and_resumed(mesh, folder, sorted(CELLS.keys() - SHORT)),
    }
