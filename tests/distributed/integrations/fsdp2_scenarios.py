# SPDX-License-Identifier: Apache-2.0
"""What four workers do with FSDP2, run by torchrun: ``python fsdp2_scenarios.py FOLDER [SCENARIO ...]``.

Every rank writes what it saw as JSON. They are two replicas of two shards each: ranks 0 and 1 share the first one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]
import fsdp2_saving  # noqa: E402
from fsdp2_models import (  # noqa: E402
    REPLICA,
    SHARD,
    Twin,
    adamw,
    alone,
    apart,
    locals_of,
    loss_of,
    network,
    own_gradients,
    plain_sgd,
    same,
    sgd,
    sharded,
    step_of,
    wrapped,
)
from support import digest, seeded  # noqa: E402

import agmerge  # noqa: E402

STEPS = 6
Scenario = Callable[[DeviceMesh], Any]
SCENARIOS: dict[str, Scenario] = {}
LONG: dict[str, Scenario] = {}


def scenario(fn: Scenario) -> Scenario:
    """Run ``fn`` under its name on every rank."""
    SCENARIOS[fn.__name__] = fn
    return fn


def replicas_agree(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether all replicas hold the same bits of this rank's shards."""
    own = digest(locals_of(model))
    return len(set(agmerge.allgather_object(own, process_set=mesh[REPLICA]))) == 1


@scenario
def dense(mesh: DeviceMesh) -> dict[str, float]:
    """How far from data parallel on four, uneven and empty shards and all."""
    far = {}
    for name, inner in {"sgd": sgd, "adamw": adamw}.items():
        model = sharded(mesh[SHARD])
        optimizer = wrapped(model, mesh, inner, compression="none", exchange="auto")
        for step in range(STEPS):
            step_of(model, optimizer, step)
        far[name] = apart(model, alone(inner, STEPS))
        optimizer.close()
    return far


@scenario
def accumulated_and_clipped(mesh: DeviceMesh) -> dict[str, Any]:
    """Two passes a step, of which the first reduces nothing; then clipping by the norm of all shards."""
    model = sharded(mesh[SHARD])
    optimizer = wrapped(model, mesh, sgd, compression="none", check_every=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            loss_of(model, dist.get_rank(), 2 * step + number).backward()
        norm = optimizer.clip_grad_norm_(0.05)
        assert type(norm) is torch.Tensor and norm > 0.05
        optimizer.step()
    far = apart(model, alone(sgd, STEPS, passes=2, most=0.05))
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)  # too early: it was handed over
    refused = error_of(optimizer.step)
    optimizer.close()
    return {"far": far, "refused": refused}


@scenario
def passes_and_sums(mesh: DeviceMesh) -> dict[str, float]:
    """``backward_passes_per_step``, and sums over shards and replicas, as torchtitan has them."""
    model = sharded(mesh[SHARD])
    optimizer = wrapped(model, mesh, plain_sgd, compression="none", backward_passes_per_step=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(2):
            loss_of(model, dist.get_rank(), 2 * step + number).backward()
        optimizer.step()
    far = {"passes": apart(model, alone(plain_sgd, STEPS, passes=2))}
    optimizer.close()
    model = sharded(mesh[SHARD])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo has nothing else
    optimizer = wrapped(model, mesh, plain_sgd, compression="none", op=agmerge.Sum)
    for step in range(STEPS):
        step_of(model, optimizer, step)
    far["sums"] = apart(model, alone(plain_sgd, STEPS, scale=float(dist.get_world_size())))
    optimizer.close()
    return far


def as_twin(mesh: DeviceMesh, inner: Any, **options: Any) -> dict[str, Any]:
    """Whether the sharded model has, step by step, the bits of plain parameters that hold the same shards."""
    model = sharded(mesh[SHARD])
    seen = own_gradients(model)
    optimizer, twin = wrapped(model, mesh, inner, **options), Twin(model, mesh, inner, **options)
    equal = []
    for step in range(STEPS):
        seen.clear()
        step_of(model, optimizer, step)
        twin.step(dict(seen))
        equal.append(same(model, twin))
    left, others = (one.state_dict()["agmerge"] for one in (optimizer, twin.optimizer))
    kept = all(torch.equal(left["residuals"][name], others["residuals"][name]) for name in left["residuals"])
    found = {
        "equal": all(equal),
        "kept": kept and left["residuals"].keys() == others["residuals"].keys(),
        "replicas": replicas_agree(model, mesh),
        "density": optimizer.stats()["density"],
    }
    optimizer.close()
    twin.optimizer.close()
    return found


SPARSE: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk, sgd": (sgd, {"compression": "topk"}),
    "adtopk, adamw": (adamw, {"compression": "adtopk", "wire": "int8"}),
    "dgc": (sgd, {"compression": "dgc"}),
    "powersgd": (sgd, {"compression": "powersgd", "rank": 2}),
}
MORE: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp16": (sgd, {"compression": "fp16"}),
    "gaussiank": (adamw, {"compression": "gaussiank"}),
    "randomk": (sgd, {"compression": "randomk"}),
    "adtopk-row": (sgd, {"compression": "adtopk-row"}),
    "redsync": (sgd, {"compression": "redsync"}),
    "acpsgd": (sgd, {"compression": "acpsgd", "rank": 2}),
    "masked": (sgd, {"compression": "topk", "exchange": "masked"}),
    "oktopk": (sgd, {"compression": "topk", "exchange": "oktopk"}),
    "layerwise": (adamw, {"compression": "topk", "merging": "layerwise", "sparsify": "ahead"}),
    "ordered": (sgd, {"compression": "none", "dense_sum": "ordered"}),
    "importance": (sgd, {"compression": "topk", "density": "importance"}),
}


@scenario
def sparse(mesh: DeviceMesh) -> dict[str, Any]:
    """Selections of shards."""
    return {name: as_twin(mesh, inner, **options) for name, (inner, options) in SPARSE.items()}


def more_sparse(mesh: DeviceMesh) -> dict[str, Any]:
    """The long list of the same."""
    return {name: as_twin(mesh, inner, **options) for name, (inner, options) in MORE.items()}


LONG["more_sparse"] = more_sparse


def error_of(call: Callable[[], Any]) -> list[str]:
    """The kind and text of the error that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


@scenario
def refusals(mesh: DeviceMesh) -> dict[str, list[str]]:
    """Meshes and sets that would combine what does not belong together."""
    one, two = sharded(mesh[SHARD]), sharded(mesh)
    rank = dist.get_rank()
    diagonal = [0, 3] if rank in (0, 3) else [1, 2]
    names = one.named_parameters
    plain = nn.Parameter(torch.zeros(8, 8))
    mixed = plain_sgd([*one.parameters(), plain])
    found = {
        "no set": error_of(lambda: wrapped(one, mesh, process_set=None)),
        "another set": error_of(lambda: wrapped(one, mesh, process_set=diagonal)),
        "replicated": error_of(lambda: wrapped(two, mesh)),
        "two dimensions": error_of(lambda: wrapped(one, mesh, process_set=mesh)),
        "mixed": error_of(
            lambda: agmerge.DistributedOptimizer(mixed, [*names(), ("own", plain)], process_set=mesh[REPLICA])
        ),
        "dear": error_of(
            lambda: agmerge.DistributedOptimizer(
                sgd(one.parameters()), names(), "none", process_set=mesh[REPLICA], merging="dear", model=one
            )
        ),
        "two levels": error_of(lambda: wrapped(one, mesh, exchange="two-level")),
        "two levels of plain tensors": error_of(lambda: wrapped(seeded(network), mesh, exchange="two-level")),
        "skip": error_of(lambda: wrapped(one, mesh, nonfinite="skip")),
        "updates": error_of(lambda: wrapped(one, mesh, process_set=None, sync="updates", exchange="auto")),
        "broadcast": error_of(lambda: agmerge.broadcast_parameters(one.state_dict())),
    }
    optimizer = wrapped(one, mesh)  # parameters that were refused are free
    optimizer.close()
    return found


@scenario
def broadcasts(mesh: DeviceMesh) -> dict[str, Any]:
    """Replicas start from the first one; its optimizer has state, the other's has none yet."""
    replica = mesh[REPLICA].get_local_rank()
    model = sharded(mesh[SHARD], seed=replica)
    inner = adamw(model.parameters())
    if replica == 0:
        step_of(model, inner, 0)
    before = replicas_agree(model, mesh)
    agmerge.broadcast_parameters(model.state_dict(), process_set=mesh[REPLICA])
    agmerge.broadcast_optimizer_state(inner, process_set=mesh[REPLICA].get_group())
    after = [replicas_agree(model, mesh)]
    kinds = {type(value).__name__ for state in inner.state.values() for value in state.values()}
    inner.zero_grad()
    loss_of(model, dist.get_rank() % 2, 1).backward()  # both replicas have the same batches
    inner.step()
    after.append(replicas_agree(model, mesh))
    mean = agmerge.allreduce(torch.tensor([float(dist.get_rank())]), process_set=mesh[REPLICA])
    return {"before": before, "after": after, "kinds": sorted(kinds), "state": len(inner.state), "mean": float(mean)}


@scenario
def other_replicas_are_noticed(mesh: DeviceMesh) -> list[str]:
    """``check_every``, after one rank has changed its shard."""
    model = sharded(mesh[SHARD])
    optimizer = wrapped(model, mesh, check_every=2)
    step_of(model, optimizer, 0)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model[0].weight.to_local()[0] += 1.0
    error = error_of(lambda: step_of(model, optimizer, 1))
    optimizer.close()
    return error


@scenario
def mixed_precision(mesh: DeviceMesh) -> dict[str, Any]:
    """bfloat16 in forward and backward; parameters and what is exchanged are float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(mesh[SHARD], mp_policy=policy)
    optimizer = wrapped(model, mesh, adamw, compression="topk", density=0.1)
    for step in range(STEPS):
        step_of(model, optimizer, step)
    found = {"replicas": replicas_agree(model, mesh), "dtypes": sorted({str(p.dtype) for p in model.parameters()})}
    optimizer.close()
    return found


@scenario
def uneven(mesh: DeviceMesh) -> dict[str, Any]:
    """The second replica runs out of batches before the first."""
    model = sharded(mesh[SHARD])
    optimizer = wrapped(model, mesh, sgd, compression="topk")
    for step in range(STEPS - 2 * mesh[REPLICA].get_local_rank()):
        step_of(model, optimizer, step)
    last = optimizer.join()
    found = {"last": last, "steps": optimizer.stats()["steps"], "replicas": replicas_agree(model, mesh)}
    optimizer.close()
    return found


@scenario
def scaled(mesh: DeviceMesh) -> dict[str, Any]:
    """A GradScaler; in the second step one shard of one replica has a gradient that is infinite."""
    model = sharded(mesh[SHARD])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = 0

    def spoil(parameter: Any) -> None:
        if step == 1 and dist.get_rank() == 2:
            parameter.grad.to_local()[0] = torch.inf

    model[0].weight.register_post_accumulate_grad_hook(spoil)
    optimizer = wrapped(model, mesh, plain_sgd, compression="none", scaler=scaler)
    moved, scales = [], []
    for step in range(4):  # noqa: B007  the hook reads it
        before = locals_of(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dist.get_rank(), step)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, locals_of(model), strict=True)))
        scales.append(scaler.get_scale())
    found = {"moved": moved, "scales": scales, "replicas": replicas_agree(model, mesh)}
    optimizer.close()
    return found


def main(folder: Path, chosen: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=(REPLICA, SHARD))
    agmerge.init()
    short, long = {**SCENARIOS, **fsdp2_saving.scenarios(folder)}, {**LONG, **fsdp2_saving.long(folder)}
    for name in chosen or short:
        found = {**short, **long}[name](mesh)
        (folder / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(found))
    agmerge.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
