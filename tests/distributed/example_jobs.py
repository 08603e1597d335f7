# SPDX-License-Identifier: Apache-2.0
"""One launch trains the tiny form of every job: ``python example_jobs.py FOLDER``, with small data in ``FOLDER/data``.

Each job is compressed in another way. Some go on from a checkpoint, one has more batches on one worker, one is ended by
a signal to one of them. Every rank writes what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import train  # noqa: E402
from jobs import JOBS  # noqa: E402
from training.options import arguments  # noqa: E402
from training.stopping import Stopping  # noqa: E402

import agmerge  # noqa: E402

STEPS = 6
WAYS = (
    "--compression topk --density 0.01",
    "--compression dgc --memory residual --density 0.05 --clip 1",
    "--compression adtopk --amp bf16",
    "--compression powersgd --batches-per-allreduce 2",
    "--sync updates",
    "--compression none",
    "--local-steps 2",
    "--compression acpsgd",
)
RESUMED = {  # jobs that draw numbers as they train, or carry something from batch to batch
    "lstm-wikitext2": "--compression topk --density 0.05",
    "bert-base-squad": "--sync updates",
    "resnet20-cifar10": "--compression gaussiank --density 0.05",
}
KEPT = ("loss", "perplexity", "accuracy", "f1", "step", "reason", "replicas_equal", "bytes_sent", "residual_norm")


def trained(folder: Path, name: str, line: str, stopping: Stopping | None = None) -> dict[str, Any]:
    """Collective. What ``train.py`` measured, run as ``name``."""
    readers = int(line.startswith("resnet50-imagenet"))  # a process starts slowly: once is enough
    places = f"--data {folder / 'data'} --log-dir {folder / 'logs'} --run-name {name} --readers {readers}"
    args = arguments(f"{line} --tiny --merging threshold {places}".split())
    found = train.train(args, stopping or Stopping())
    return {key: found[key] for key in KEPT if key in found}


def resumed(folder: Path, job: str, way: str) -> dict[str, Any]:
    """Collective. A run in one piece, and one in two."""
    line, kept = f"{job} {way}", f"--checkpoint-dir {folder / 'kept' / job}"
    straight = trained(folder, f"{job}-straight", f"{line} --max-steps 6")
    trained(folder, f"{job}-halves", f"{line} --max-steps 3 {kept}")
    again = trained(folder, f"{job}-halves", f"{line} --max-steps 6 {kept} --resume")
    return {"straight": straight, "again": again}


def ended_by_a_signal(folder: Path) -> dict[str, Any]:
    """Collective. A run in which rank 1 gets a real SIGTERM before its first step."""
    stopping = Stopping()
    with stopping.listening():
        if agmerge.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        line = f"digits --compression topk --checkpoint-dir {folder / 'kept' / 'signal'}"
        return trained(folder, "signal", line, stopping)


def main(folder: Path) -> None:
    """Run everything, and write the results of this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    agmerge.init()
    found: dict[str, Any] = {}
    for job, way in zip(JOBS, cycle(WAYS), strict=False):
        found[job] = trained(folder, job, f"{job} {way} --max-steps {STEPS}")
    for job, way in RESUMED.items():
        found[f"{job}, resumed"] = resumed(folder, job, way)
    found["uneven"] = trained(
        folder, "uneven", "resnet20-cifar10 --uneven --batch-size 359 --epochs 1 --compression topk"
    )
    found["signal"] = ended_by_a_signal(folder)
    (folder / f"jobs.{agmerge.rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    agmerge.shutdown()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:  # said at once: the other rank may be waiting for this one
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
