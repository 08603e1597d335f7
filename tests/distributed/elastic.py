"""Training under ``horovodrun --min-np``: workers may be lost, and may come. ``python elastic.py FOLDER``.

The worker on the host named in ``AGMERGE_TEST_VICTIM`` kills itself in its fifth step. Every worker that reaches the end
writes what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import digest, loss_of, mlp, residuals, seeded, sgd  # noqa: E402

import agmerge  # noqa: E402

STEPS, DEADLY = 12, 5


def main(folder: Path) -> None:
    """Train, and tell of every step: workers, and the norm of what is waiting to be sent."""
    hvd.init()
    host = os.environ["HOROVOD_HOSTNAME"]
    torch.set_num_threads(1)
    model = seeded(mlp)
    inner = sgd(model, lr=0.05, momentum=0.9, weight_decay=0.01)
    optimizer = agmerge.DistributedOptimizer(
        inner, model.named_parameters(), compression="topk", exchange="sparse", merging="threshold", check_every=1
    )
    seen: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        kept = {name: float(one.double().sum()) for name, one in residuals(optimizer).items()}
        seen.append(["begins", state.step, hvd.rank(), hvd.size(), kept])
        while state.step < STEPS:
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), state.step).backward()
            if host == os.environ.get("AGMERGE_TEST_VICTIM") and state.step == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            state.step += 1
            seen.append(["stepped", state.step, hvd.rank(), hvd.size(), digest(model)])
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    (folder / f"{host}.{hvd.local_rank()}.json").write_text(json.dumps([seen, digest(model)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
