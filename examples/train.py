# SPDX-License-Identifier: Apache-2.0
"""Train a published experiment, MODEL-DATA, with workers that exchange compressed gradients, or updates.

python examples/data/small.py DIR                                          # small data of every kind, to try with
python -m torch.distributed.run --standalone --nproc_per_node=2 \\
    examples/train.py resnet20-cifar10 --data DIR --compression topk --density 0.01
horovodrun -np 2 python examples/train.py gpt2-wikitext2 --tiny --data DIR --sync updates
python examples/train.py --list                                            # the jobs; --dry-run: what one would do
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from launchers import launcher
from replicas import averaged_buffers, replicas_equal
from training import resume
from training.assemble import loop_of
from training.checkpoints import Checkpoints
from training.epochs import Ends, Training
from training.loop import Loop
from training.options import arguments
from training.published import check_workers
from training.show import listing, plans, table
from training.stopping import Stopping
from training.tracking import Silent, Tracker

import agmerge

# Of stats(), in the results.
KEPT = ("buffers", "bytes_sent", "bytes_dense", "link_bytes", "link_bytes_dense", "density", "residual_norm")
END = ("epoch", "step", "reason", "replicas_equal", "best", "train_seconds", "wall_seconds")  # the log's last line


def train(args: Namespace, stopping: Stopping) -> dict[str, Any]:
    """Collective. Train as the command line says; return what the run measured.

    Raises ``OSError``, ``TypeError`` or ``ValueError`` for data that are missing or broken, and for options that do
    not go together.
    """
    check_workers(args)
    loop, epochs = loop_of(args)
    checkpoints = Checkpoints(args.checkpoint_dir, args.portable) if args.checkpoint_dir else None
    state = resume.begin(loop, checkpoints, args.job, args.resume) if checkpoints else None
    name = args.run_name or (state or {}).get("run") or agmerge.broadcast_object(run_name(args))
    tracker = Tracker(args.log_dir / name, epochs) if agmerge.rank() == 0 else Silent()
    try:
        tracker.write("start", **start(args, name, loop))
        ends = Ends(epochs, args.max_steps, args.target, args.stop_at_target)
        training = Training(loop, ends, tracker, stopping, checkpoints, {"job": args.job, "run": name})
        training.run()
        results = finish(training, name)
        tracker.write("end", **{key: results[key] for key in END})
    finally:
        tracker.close()
        loop.optimizer.close()
    return results


def run_name(args: Namespace) -> str:
    """Return a name for the folder of a run."""
    size = f"{agmerge.size()}w-{time.strftime('%Y%m%d-%H%M%S')}"
    return f"{args.job}-{args.compression or 'default'}-{size}"


def start(args: Namespace, name: str, loop: Loop) -> dict[str, Any]:
    """Return the first line of the log: what is trained, and with what."""
    return {
        "time": time.time(),
        "job": args.job,
        "run": name,
        "settings": {flag: value for flag, value in vars(args).items() if value not in (None, False)},
        "optimizer": loop.optimizer.settings,
        "metric": loop.task.metric,
        "unit": loop.task.unit,
        "workers": agmerge.size(),
        "launcher": launcher(),
        "backend": agmerge.backend_name(),
        "versions": {"agmerge": agmerge.__version__, "torch": torch.__version__, "numpy": numpy.__version__},
        "parameters": sum(parameter.numel() for parameter in loop.task.model.parameters()),
        "step": loop.progress.step,
    }


def finish(training: Training, name: str) -> dict[str, Any]:
    """Collective. Compare the replicas; return the results."""
    loop = training.loop
    now, stats = loop.progress, loop.stats()
    loop.optimizer.flush()
    with averaged_buffers(loop.task.model), loop.optimizer.shared():
        same = replicas_equal(loop.task.model)
    return {
        "run": name,
        "workers": agmerge.size(),
        "backend": agmerge.backend_name(),
        "launcher": launcher(),
        "settings": loop.optimizer.settings,
        "notes": loop.task.notes(),
        "metrics": training.metrics,
        **training.metrics,
        **{key: stats[key] for key in KEPT},
        "seconds_per_step": statistics.median(loop.seconds) if loop.seconds else float("nan"),
        "epoch": now.epoch,
        "step": now.step,
        "reason": training.reason,
        "best": {loop.task.metric: now.best},
        "train_seconds": now.train_seconds,
        "wall_seconds": now.wall_seconds,
        "replicas_equal": same,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and show the results."""
    args = arguments(argv, Path(sys.argv[0]).name if argv is None else None)
    script = Path(__file__).name
    try:
        if args.list or args.dry_run:
            print(listing() if args.list else plans(args))
            return
        agmerge.init()
        stopping = Stopping()
        with stopping.listening():
            results = train(args, stopping)
    except (OSError, TypeError, ValueError) as error:  # data that are missing, options that do not go together
        raise SystemExit(f"{script}: {error}") from None
    if agmerge.rank() == 0:
        print(table(results))
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    agmerge.shutdown()
    if not results["replicas_equal"]:
        raise SystemExit("the workers' replicas differ; this is a bug in agmerge")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # a scaler may leave the first step out
    main()
