# SPDX-License-Identifier: Apache-2.0
"""Training under an elastic Horovod: a worker is lost, another one comes. ``python elastic.py FOLDER``.

The worker on the host named in ``AGMERGE_TEST_VICTIM`` kills itself in its fifth step. Four steps later rank 0 lets the
launcher find one more host. Every worker that reaches the end writes what it saw of one parameter, step by step.
``AGMERGE_TEST_SYNC``: "gradients" or "updates".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent.parent)]  # tests/ has folders of these names
from support import digest, loss_of, mlp, seeded, sgd  # noqa: E402

import agmerge  # noqa: E402

DEADLY, GROWS, AFTER = 5, 9, 4
NAME = "0.weight"


def total(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.double().sum())


def main(folder: Path) -> None:
    """Train until a newcomer has been there for some steps."""
    hvd.init()
    host = os.environ["HOROVOD_HOSTNAME"]
    torch.set_num_threads(1)
    model = seeded(mlp)
    watched = dict(model.named_parameters())[NAME]
    inner = sgd(model, lr=0.05, momentum=0.9, weight_decay=0.01)
    sync = os.environ["AGMERGE_TEST_SYNC"]
    optimizer = agmerge.DistributedOptimizer(
        inner,
        model.named_parameters(),
        compression="topk",
        exchange="sparse",
        merging="threshold",
        check_every=1,
        sync=sync,
    )

    def shared() -> Any:
        return model if sync == "gradients" else list(optimizer._reducer.replica.shared.base.values())

    def unsent() -> torch.Tensor | None:
        return optimizer._reducer.replica.unsent().get(NAME)

    seen: list[dict[str, Any]] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left:
            kept, waiting = optimizer.state_dict()["agmerge"], unsent()
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), state.step).backward()
            gradient = total(watched.grad)
            if host == os.environ.get("AGMERGE_TEST_VICTIM") and state.step == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            seen.append(
                {
                    "step": state.step,
                    "size": hvd.size(),
                    "kept": [total(waiting), kept["size"]],
                    "gradient": gradient,
                    "update": total(watched.grad),
                    "left": total(unsent()),
                    "digest": digest(shared()),
                }
            )
            state.step += 1
            if state.step > GROWS:
                state.left -= hvd.size() == 3
                time.sleep(0.05)  # until the launcher has found it
            if state.step == GROWS and hvd.rank() == 0:
                (folder / "grown").touch()
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, left=AFTER))
    (folder / f"{host}.{hvd.local_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
