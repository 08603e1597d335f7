# SPDX-License-Identifier: Apache-2.0
"""Training that goes on from its own checkpoints: ``python restarting.py FOLDER STEP``; rank 1 dies before STEP."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent.parent)]  # tests/ has folders of these names
from support import mlp, seeded, sgd, train, wrap  # noqa: E402

import agmerge  # noqa: E402

STEPS, EVERY = 14, 3


def main(folder: Path, deadly: int) -> None:
    """Train, save every three steps, each rank its own file; at the first start there is none."""
    agmerge.init()
    rank = agmerge.rank()
    model = seeded(mlp)
    optimizer = wrap(model, sgd(model, weight_decay=0.1), compression="adtopk")
    agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
    files = {int(path.name.split(".")[1]): path for path in folder.glob(f"{rank}.*.pt")}
    # A worker may have been lost while it saved: take what all ranks have.
    start = min(int(one) for one in agmerge.allgather(torch.tensor([max(files, default=0)])))
    if start:
        saved = torch.load(files[start], weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    seen = []
    for step in range(start, STEPS):
        if step == deadly and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        seen += train(model, optimizer, rank, range(step, step + 1))
        if (step + 1) % EVERY == 0:
            part = folder / f"{rank}.{step + 1}.part"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
            part.rename(part.with_suffix(".pt"))
    (folder / f"seen.{rank}.json").write_text(json.dumps(seen))
    agmerge.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
