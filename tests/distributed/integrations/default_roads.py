# SPDX-License-Identifier: Apache-2.0
"""What a script gets that names no compressor, on every road: ``torchrun ... default_roads.py FOLDER [SCENARIO ...]``.

Each scenario trains a few steps with the road's own loop, on two workers; ``mesh`` on four.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks import Scenarios, bits
from fsdp2_models import REPLICA, SHARD, locals_of, sharded, step_of
from support import loss_of, mlp, seeded, train
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.integrations import ddp

scenario = Scenarios()
STEPS = 2


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def told(compressed: Any, parameters: Any, **more: Any) -> dict[str, Any]:
    """What was chosen so far, among what, and this rank's parameters."""
    compressor, stats = compressed._reducer.exchange.agreed.config.compression.compressor, compressed.stats()
    return {
        "candidates": compressor.candidates,
        "until chosen": compressor.until_chosen,
        "quantiser": stats["quantiser"],
        "wire": sorted(stats["wire"]),
        "kept": stats["residual_norm"],
        "bits": bits(parameters),
        **more,
    }


@scenario
def wrapper(folder: Path) -> Any:
    """A DistributedOptimizer around AdamW."""
    model = seeded(mlp)
    optimizer = agmerge.DistributedOptimizer(adamw(model), model.named_parameters())
    train(model, optimizer, agmerge.rank(), range(STEPS))
    found = told(optimizer, model)
    optimizer.close()
    return found


@scenario
def hook(folder: Path) -> Any:
    """The same model and optimizer under DistributedDataParallel; and where nobody says which optimizer steps."""
    seen, said = {}, {}
    for name in ("with", "without"):
        net = seeded(mlp)
        model, inner = DistributedDataParallel(net), adamw(net)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            compressed = ddp.compress(model, **({"optimizer": inner} if name == "with" else {}))
        for step in range(STEPS):
            inner.zero_grad()
            loss_of(model, agmerge.rank(), step).backward()
            inner.step()
        seen[name] = told(compressed, net)
        said[name] = [[str(one.message), Path(one.filename).name] for one in heard]
        compressed.close()
    return {**seen, "said": said}


@scenario
def trainer(folder: Path) -> Any:
    """The Trainer of transformers, with its AdamW."""
    from trainer_scenarios import made

    from agmerge.integrations.transformers import compress

    theirs = made(folder, max_steps=STEPS)
    compression = compress(theirs)
    theirs.train()
    return told(compression.compressed, theirs.model)


@scenario
def accelerate(folder: Path) -> Any:
    """Accelerate, with AdamW."""
    from accelerate_scenarios import Training

    from agmerge.integrations.accelerate import compress

    theirs = Training(adamw=True)
    compressed = compress(theirs.accelerator, theirs.net)
    theirs.epoch(clip=0.05)
    return told(compressed, theirs.net)


@scenario
def lightning(folder: Path) -> Any:
    """Lightning's strategy, with AdamW."""
    from lightning_scenarios import Net, fitted

    from agmerge.integrations.lightning import CompressedDDPStrategy

    net = Net(adamw=True)
    theirs = fitted(net, CompressedDDPStrategy(), epochs=1)
    return told(theirs.strategy.compressed, net)


@scenario.if_named
def mesh(folder: Path) -> Any:
    """FSDP2: two replicas of two shards each, which replicas exchange; SGD, and the default always compressed."""
    made = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=(REPLICA, SHARD))
    seen = {}
    for name, options in {"default": {}, "sparse": {"exchange": "sparse"}}.items():
        model = sharded(made[SHARD])
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            model.named_parameters(),
            process_set=made[REPLICA],
            check_every=1,
            **options,
        )
        for step in range(STEPS):
            step_of(model, optimizer, step)
        own = bits(locals_of(model))
        stats = optimizer.stats()
        same = set(agmerge.allgather_object(own, process_set=made[REPLICA]))
        seen[name] = {
            "candidates": optimizer._reducer.exchange.agreed.config.compression.compressor.candidates,
            "quantiser": stats["quantiser"],
            "replicas": len(same),
            "moved": own != bits(locals_of(sharded(made[SHARD]))),
        }
        optimizer.close()
    return seen


def main() -> None:
    """Join the workers that torchrun has started, and run what is asked for."""
    dist.init_process_group("gloo")
    agmerge.init()
    scenario.main(Path(sys.argv[1]), *sys.argv[2:])


if __name__ == "__main__":
    main()
