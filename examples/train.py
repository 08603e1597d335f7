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
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import numpy
import optimizers
import resume
import torch
from checkpoints import Checkpoints
from jobs.base import Job, Settings
from launchers import launcher
from loop import Loop, Way
from options import described, planned
from replicas import average_buffers, replicas_equal
from stopping import Stopping
from tracking import Silent, Tracker
from train_options import arguments, library_options, recipe_of
from training import Ends, Training

import agmerge

SHARES = ("accuracy", "top5", "f1", "exact")  # metrics that are parts of a whole


def train(args: Namespace, stopping: Stopping) -> dict[str, Any]:
    """Collective. Train as the command line says; return what the run measured.

    Raises ``OSError``, ``TypeError`` or ``ValueError`` for data that are missing or broken, and for options that do
    not go together.
    """
    job = jobs.get(args.job)
    recipe, device = recipe_of(job, args), device_of(args)
    torch.manual_seed(args.seed)
    task = job.make(settings_of(args, job, device))
    torch.manual_seed(args.seed * agmerge.size() + agmerge.rank() + 1)  # for dropout: another one on every worker
    passes, options = args.batches_per_allreduce, library_options(args, job, task.model)
    way = Way(
        passes, recipe.clip, args.amp, args.local_steps is not None or options.get("sync") == "updates", args.uneven
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    if scaler.is_enabled() and not way.updates:
        options["scaler"] = scaler
    plain = optimizers.plain(recipe, task.model, optimizers.rate(recipe, agmerge.size(), passes))
    optimizer = optimizers.wrapped(plain, task.model, options, args.local_steps, passes)
    steps = int(agmerge.allreduce(torch.tensor(task.passes(0) // passes), op=agmerge.Max))
    schedule = recipe.schedule.of(optimizer, max(1, steps), recipe.epochs, agmerge.size())
    loop = Loop(task, optimizer, schedule, way, scaler, device)
    if args.measure_selection:
        optimizer.measure_selection()

    checkpoints = Checkpoints(args.checkpoint_dir, args.portable) if args.checkpoint_dir else None
    state = resume.go_on(loop, checkpoints) if checkpoints and args.resume else None
    name = args.run or (state or {}).get("run") or agmerge.broadcast_object(run_name(args))
    if state and state["job"] != job.name:
        raise ValueError(f"--resume: {args.checkpoint_dir} has checkpoints of {state['job']}, not of {job.name}")
    tracker = Tracker(args.log_dir / name, recipe.epochs) if agmerge.rank() == 0 else Silent()
    try:
        tracker.write("start", **start(args, name, loop))
        ends = Ends(recipe.epochs, args.max_steps, args.target, args.stop_at_target)
        training = Training(loop, ends, tracker, stopping, checkpoints, {"job": job.name, "run": name})
        training.run()
        results = finish(training, name)
        tracker.write("end", **{key: results[key] for key in END})
    finally:
        tracker.close()
        optimizer.close()
    return results


def settings_of(args: Namespace, job: Job, device: torch.device) -> Settings:
    """Return what the task is made from."""
    return Settings(
        recipe_of(job, args),
        args.data,
        args.seed,
        args.tiny,
        args.weights,
        args.tokenizer,
        agmerge.rank(),
        agmerge.size(),
        args.uneven,
        args.readers,
        device,
    )


def device_of(args: Namespace) -> torch.device:
    """Return this worker's GPU, if there are any, or the CPU."""
    if args.no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", agmerge.local_rank())
    torch.cuda.set_device(device)
    return device


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


END = ("epoch", "step", "reason", "replicas_equal", "best", "train_seconds", "wall_seconds")


def finish(training: Training, name: str) -> dict[str, Any]:
    """Collective. Compare the replicas; return the results."""
    loop = training.loop
    now, stats = loop.progress, loop.stats()
    loop.optimizer.flush()
    average_buffers(loop.task.model)
    with loop.optimizer.shared():
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
        **{key: stats[key] for key in ("buffers", "bytes_sent", "bytes_dense", "density", "residual_norm")},
        "seconds_per_step": statistics.median(loop.seconds) if loop.seconds else float("nan"),
        "epoch": now.epoch,
        "step": now.step,
        "reason": training.reason,
        "best": {loop.task.metric: now.best},
        "train_seconds": now.train_seconds,
        "wall_seconds": now.wall_seconds,
        "replicas_equal": same,
    }


def table(results: dict[str, Any]) -> str:
    """Return the results, for people."""
    r = results
    sent, dense = r["bytes_sent"], r["bytes_dense"]
    rows = {
        "workers": f"{r['workers']} ({r['backend']} backend)",
        "compressor": described(r["settings"]),
        "plan": planned(r["settings"], r["buffers"]),
        **{
            f"test {name}": f"{value:.2%}" if name in SHARES else f"{value:.3f}" for name, value in r["metrics"].items()
        },
        **r["notes"],
        "elements sent": f"{r['density']:.2%} of all, small tensors included",
        "bytes sent": f"{sent / 1e6:.2f} MB per worker; dense {dense / 1e6:.2f} MB"
        + (f" ({dense / sent:.1f}x)" if sent else ""),
        "seconds per step": f"{r['seconds_per_step']:.4f} (median)",
        "replicas": "bitwise equal" if r["replicas_equal"] else "DIFFERENT",
    }
    if r["reason"] not in ("done", "max-steps"):
        rows["ended"] = f"by {r['reason']}, after {r['step']} steps"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def listing() -> str:
    """Return the jobs, a line each."""
    width = max(map(len, jobs.JOBS))
    return "\n".join(f"{name:<{width}}  {job.about}" for name, job in jobs.JOBS.items())


def plans(args: Namespace) -> str:
    """Return what would be trained, and how: nothing is read, and no memory is taken for the network."""
    job = jobs.get(args.job)
    with torch.device("meta"):
        model = job.network(tiny=args.tiny)
    tensors = [parameter.numel() for parameter in model.parameters()]
    options = library_options(args, job, model)
    options.pop("model", None)
    how = ", ".join(f"{key}={value!r}" for key, value in options.items())
    wrapper = f"LocalOptimizer(every={args.local_steps}, " if args.local_steps else "DistributedOptimizer("
    lines = [f"{job.name}: {job.about}", f"{sum(tensors):,} parameters in {len(tensors)} tensors"]
    recipe = vars(recipe_of(job, args)).items()
    return "\n".join([*lines, *(f"  {key} {value}" for key, value in recipe), f"agmerge.{wrapper}{how})"])


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and show the results."""
    args = arguments(argv)
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
