# SPDX-License-Identifier: Apache-2.0
"""A long training with everything in it that it must survive: ``python soak.py FOLDER STEPS``.

Every rank writes what it saw as JSON: digests of its parameters and residuals as it went, and what its process held
(memory, threads, open files) after a quarter of the way and later.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent.parent)]  # tests/ has folders of these names
from support import Parts, digest, seeded, sgd  # noqa: E402
from support.random_program import LOW_RANK, Player, Train, drawn  # noqa: E402

import agmerge  # noqa: E402

SEED = 11
RANKS = 2
EVERY = 50  # steps between two looks
COMPRESSORS = ("topk", "adtopk", "randomk", "redsync", "none", *LOW_RANK)
OPTIONS = {
    "compression": "adtopk",
    "density": 0.05,
    "exchange": "sparse",
    "merging": "threshold",
    "nonfinite": "skip",
    "check_every": 25,
    "timeout": 60.0,
}


def clip(gradients: list[Tensor]) -> None:
    """By the norm of all together, as scripts do."""
    parameters = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)


def soak(rank: int, model: nn.Module, steps: int) -> Iterator[dict[str, Any]]:
    """Play ``steps`` steps of the program of :data:`SEED`; after every :data:`EVERY`, what this rank has."""
    player = Player(model, rank, lambda m: sgd(m, lr=0.02), dict(OPTIONS), clip)
    done = 0
    for event in drawn(SEED, RANKS, COMPRESSORS):
        player.play(event)
        if not isinstance(event, Train):
            continue
        done += 1
        if done % EVERY == 0 or done == steps:
            kept = player.residuals()
            momenta = [state["momentum_buffer"] for state in player.optimizer.state.values() if state]
            yield {
                "parameters": digest(model),
                "momenta": digest([tensor for tensor in momenta if tensor is not None]),
                "residuals": digest(kept[name] for name in sorted(kept)),
                "waiting": sum(bool(tensor.any()) for tensor in kept.values()),
                "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
                "bytes": player.optimizer.stats()["bytes_sent"],
                "plan": player.optimizer.plan.digest()
                if player.optimizer._reducer.exchange.agreed.current.plan
                else "",
            }
        if done == steps:
            player.optimizer.close()
            return


def held() -> dict[str, int]:
    """What this process holds: bytes of memory, threads, open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main(folder: Path, steps: int) -> None:
    agmerge.init()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of what no rank has had a gradient for
    seen, holds = [], []
    for one in islice(soak(agmerge.rank(), seeded(Parts), steps), None):
        seen.append(one)
        holds.append(held())
    (folder / f"soak.{agmerge.rank()}.json").write_text(json.dumps({"seen": seen, "held": holds}))
    agmerge.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
