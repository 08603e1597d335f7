# SPDX-License-Identifier: Apache-2.0
"""Say how each library trains one step, for ``step_time.py`` and ``converge.py``. A process is a worker.

    python -m speed.contenders CONTENDER MODEL      # started by them, once per worker

A peer that is not installed from a package index is a Python file of the user's with a function
``prepare(model, optimizer) -> step``, where ``step(loss)`` trains one step and ``loss()`` computes the loss of a batch.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

MOMENTUM = 0.9
RANK = 4  # of all that send factors
FOR_EVER = datetime.timedelta(days=1)  # a frozen job must not time out
Step = Callable[[], None]
Figures = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Contender:
    """Say how one way to train is prepared."""

    kind: str  # a function of this module
    options: tuple[tuple[str, Any], ...] = ()
    horovod: str = ""  # what connects Horovod's workers, if it is Horovod that does: gloo, mpi
    warm: int = 3  # steps before it is measured
    optimizer: str = "sgd"  # of OPTIMIZERS
    every: int = 1  # steps that are timed as one: from one exchange to the next


def ours(warm: int = 45, horovod: str = "", **options: Any) -> Contender:
    """This library, measured and planned before it is timed."""
    options["backend"] = "horovod" if horovod else "torch"
    return Contender("agmerge", tuple(options.items()), horovod, warm)


CONTENDERS: dict[str, Contender] = {
    "no exchange": Contender("alone"),
    "floor": Contender("floor"),
    "passes alone": Contender("passes", (("density", 0.01),)),
    "agmerge": ours(warm=60),
    "agmerge eden-1": ours(compression="eden-1"),
    "agmerge eden-2": ours(compression="eden-2"),
    "agmerge eden-4": ours(compression="eden-4"),
    "agmerge int8": ours(compression="int8"),
    "agmerge dgc": ours(compression="dgc", exchange="sparse"),
    "agmerge topk": ours(compression="topk", exchange="sparse"),
    "agmerge topk fp16": ours(compression="topk", exchange="sparse", wire="fp16"),
    "agmerge dgc int8": ours(compression="dgc", exchange="sparse", wire="int8"),
    "agmerge topk on Horovod": ours(compression="topk", exchange="sparse", horovod="gloo"),
    "agmerge topk on Horovod, MPI": ours(compression="topk", exchange="sparse", horovod="mpi"),
    "agmerge fastest": ours(warm=75, compression="topk", exchange="fastest"),
    "agmerge powersgd": ours(compression="powersgd", rank=RANK, exchange="sparse"),
    "agmerge acpsgd": ours(compression="acpsgd", rank=RANK, exchange="sparse"),
    "agmerge updates": ours(exchange="sparse", sync="updates"),
    "agmerge updates-1": ours(compression="eden-1", every=2, fragments=2, exchange="sparse", sync="updates"),
    "agmerge updates, signs": ours(compression="topk", exchange="sparse", sync="updates"),
    "agmerge dense": ours(compression="none", merging="threshold", warm=4),
    "Horovod": Contender("horovod", horovod="gloo"),
    "Horovod fp16": Contender("horovod", (("fp16", True),), horovod="gloo"),
    "DDP": Contender("ddp"),
    "DDP bf16": Contender("ddp", (("bf16", True),)),
    "DDP PowerSGD": Contender("ddp", (("rank", RANK),), warm=6),
}


PLANNERS = ("layerwise", "single", "threshold", "mgwfbp", "omgs", "fgbuff", "agtf", "agmerge")
SPARSIFIERS = ("topk", "dgc", "adtopk", "gaussiank", "redsync", "sidco-gp", "threshold", "randomk")
# For converge.py: every planner at topk, every sparsifier at agmerge.
PLANNED = {f"topk, {name}": ours(compression="topk", exchange="sparse", merging=name) for name in PLANNERS}
SELECTED = {f"{name}, agmerge": ours(compression=name, exchange="sparse") for name in SPARSIFIERS}
# Before tensors are merged, or of the whole merge buffer: benchmarks/notebook/measurements.md.
ORDERED = {f"topk, {mode}": ours(compression="topk", exchange="sparse", sparsify=mode) for mode in ("ahead", "behind")}
# Formats by measured times.
CHOSEN = {
    **{f"agmerge {name}, auto": ours(warm=60, compression=name, rank=RANK) for name in ("powersgd", "acpsgd")},
    "updates, auto": replace(ours(warm=150, sync="updates"), optimizer="adamw"),
}
# For converge.py: training with AdamW.
ADAPTIVE = {
    f"{name}, AdamW": replace(one, optimizer="adamw")
    for name, one in {
        "no exchange": CONTENDERS["no exchange"],
        "floor": CONTENDERS["floor"],
        "Horovod": CONTENDERS["Horovod"],
        "DDP": CONTENDERS["DDP"],
        "DDP PowerSGD": CONTENDERS["DDP PowerSGD"],
        "eden-2": CONTENDERS["agmerge eden-2"],
        "eden-4": CONTENDERS["agmerge eden-4"],
        "gradients": CONTENDERS["agmerge topk"],
        "powersgd": CONTENDERS["agmerge powersgd"],
        "acpsgd": CONTENDERS["agmerge acpsgd"],
        "updates": CONTENDERS["agmerge updates"],
        "updates-1": CONTENDERS["agmerge updates-1"],
        "signs": CONTENDERS["agmerge updates, signs"],
        "LocalOptimizer": replace(
            ours(exchange="sparse", sync="updates", every=8, density=1.0, wire="int4", compression="topk"), every=8
        ),
    }.items()
}
KNOWN = {**CONTENDERS, **PLANNED, **SELECTED, **ORDERED, **CHOSEN, **ADAPTIVE}
OPTIMIZERS = ("sgd", "adamw")


def optimizer_of(kind: str, parameters: Any, rate: float = 1e-3) -> Any:
    """Return one of OPTIMIZERS, as a script would make it."""
    import torch

    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM)


def workload(model: str) -> Any:
    """A model with its batch for one worker, the same weights on all."""
    import models
    import torch

    torch.manual_seed(0)
    if model == "lm":
        from accuracy.parity_tasks import lm

        x, y = (torch.randint(128, (4, 64)) for _ in range(2))
        return models.Workload(models.NextToken(lm(0, 0, 8).model), x, y, "sequences")
    work = models.build(model, {"gpt2": 2, "resnet50": 4, "cnn": 32}[model], 64)
    if model == "gpt2":
        work.x, work.y = work.x[:, :64].contiguous(), work.y[:, :64].contiguous()
    return work


def _nothing() -> Mapping[str, Any]:
    return {}


def _torch_group() -> tuple[int, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=FOR_EVER)
    return dist.get_rank(), dist.get_world_size()


def alone(work: Any, optimizer: Any) -> tuple[int, Step, Figures]:
    """Every worker trains by itself."""

    def step() -> None:
        optimizer.zero_grad()
        work.loss().backward()
        optimizer.step()

    return int(os.environ["RANK"]), step, _nothing


def floor(work: Any, optimizer: Any, then: Step = lambda: None) -> tuple[int, Step, Figures]:
    """Train alone, and gather eight bytes between backward and update: what waiting for each other costs.

    ``then``: is called after that.
    """
    import torch
    import torch.distributed as dist

    rank, size = _torch_group()
    mine, all_of_them = torch.zeros(8, dtype=torch.uint8), torch.zeros(8 * size, dtype=torch.uint8)

    def step() -> None:
        optimizer.zero_grad()
        work.loss().backward()
        dist.all_gather_into_tensor(all_of_them, mine)
        then()
        optimizer.step()

    return rank, step, _nothing


def passes(work: Any, optimizer: Any, *, density: float) -> tuple[int, Step, Figures]:
    """Do what the floor does, and the two passes of error feedback over memory: residual + gradient, and the update.

    What is selected is known already, and nothing is sent: no sparsification adds less to the floor. ``RuntimeError``
    where the compiled loops do not make the second pass.
    """
    import torch

    from agmerge.tensors.arena import zeros
    from sparsifiers import native

    parameters = list(work.model.parameters())
    length = sum(parameter.numel() for parameter in parameters)
    residual, kept, update = (zeros(length, torch.float32, torch.device("cpu")) for _ in range(3))
    sizes = [parameter.numel() for parameter in parameters]
    indices = torch.arange(0, length, round(1 / density), dtype=torch.int32)
    parts = [(indices, torch.zeros(len(indices)))] * 2  # of two workers

    def views(flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.view_as(p) for part, p in zip(flat.split(sizes), parameters, strict=True)]

    slabs, homes = [views(residual), views(kept)], views(update)

    def hook(number: int, parameter: torch.Tensor) -> None:
        before, after = (slab[number] for slab in slabs)
        if native.add(after, before, parameter.grad, copy=homes[number]) is None:  # a small one
            torch.add(before, parameter.grad, out=after)
            homes[number].copy_(parameter.grad)
        parameter.grad = homes[number]

    for number, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(functools.partial(hook, number))

    def then() -> None:
        if not native.write_sum(update, parts, 0.5):
            raise RuntimeError("the compiled loops were not built, or torch has several threads")
        slabs.reverse()

    return floor(work, optimizer, then)


def agmerge(work: Any, optimizer: Any, backend: str = "torch", **options: Any) -> tuple[int, Step, Figures]:
    """This library."""
    import agmerge as library
    from agmerge.exchanges.routing import OWN, send_mode

    library.init(backend)
    named = list(work.model.named_parameters())
    wrapped = library.DistributedOptimizer(optimizer, named, timeout=86400.0, **options)

    def step() -> None:
        wrapped.zero_grad()
        work.loss().backward()
        wrapped.step()

    def figures() -> Mapping[str, Any]:
        plan, told = wrapped.plan, wrapped.stats()
        dense = sum(plan.dense) if options.get("compression") != "none" else len(plan.counts)
        mode = send_mode(plan)
        wire = options.get("wire", mode.codec).replace(OWN, "fp32") if mode.quantiser == OWN else mode.quantiser
        seconds = told["exposed_seconds"] / told["steps"]
        return {"buffers": len(plan.counts), "dense": dense, "exposed": seconds, "wire": wire}

    return library.rank(), step, figures


def horovod(work: Any, optimizer: Any, *, fp16: bool = False) -> tuple[int, Step, Figures]:
    """Horovod's own optimizer, as its documentation has it."""
    import horovod.torch as hvd

    hvd.init()
    cast = hvd.Compression.fp16 if fp16 else hvd.Compression.none
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=work.model.named_parameters(), compression=cast)

    def step() -> None:
        wrapped.zero_grad()
        work.loss().backward()
        wrapped.step()

    return hvd.rank(), step, _nothing


def powered(model: Any, *, rank: int = 0, bf16: bool = False) -> Any:
    """Collective. Return ``model`` in DistributedDataParallel; ``rank`` not 0: with PowerSGD's hook, in one bucket.

    ``bf16``: with its hook that casts.
    """
    import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    more = {"bucket_cap_mb": 10_000} if rank else {}  # of several, the hook's callbacks race on Gloo
    parallel = DistributedDataParallel(model, **more)
    if rank:
        state = power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        parallel.register_comm_hook(state, power.powerSGD_hook)
    if bf16:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel


def ddp(work: Any, optimizer: Any, *, rank: int = 0, bf16: bool = False) -> tuple[int, Step, Figures]:
    """PyTorch's DistributedDataParallel; ``rank`` not 0: with its PowerSGD hook; ``bf16``: with the one that casts."""
    here, _ = _torch_group()
    work.model = powered(work.model, rank=rank, bf16=bf16)
    return here, alone(work, optimizer)[1], _nothing


def peer(work: Any, optimizer: Any, *, file: str) -> tuple[int, Step, Figures]:
    """What a file of the user's does."""
    import horovod.torch as hvd

    hvd.init()
    spec = importlib.util.spec_from_file_location("peer", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    train = module.prepare(work.model, optimizer)
    return hvd.rank(), lambda: train(work.loss), _nothing


def main(name: str, model: str) -> None:
    """Warm up, then step when told to."""
    import warnings

    import torch
    from lab import interleaved, rendezvous

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = KNOWN.get(name) or Contender("peer", (("file", name),), horovod="gloo")
    if chosen.horovod == "gloo":
        os.environ.update(rendezvous.own(os.environ))
    work = workload(model)
    optimizer = optimizer_of(chosen.optimizer, work.model.parameters())
    rank, one_step, figures = globals()[chosen.kind](work, optimizer, **dict(chosen.options))

    def step() -> None:
        for _ in range(chosen.every):
            one_step()

    for _ in range(chosen.warm):
        step()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        interleaved.serve(step, figures, rank)
    os._exit(0)  # the others of this job may be frozen


if __name__ == "__main__":
    main(*sys.argv[1:])
