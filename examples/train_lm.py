"""Train a small GPT with AdamW on Python's standard library; workers exchange what their optimizers did, or gradients.

python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_lm.py              # sync="updates"
python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_lm.py --dense      # beside it
python -m torch.distributed.run --standalone --nproc_per_node=2 examples/train_lm.py --every 8 --density 1 --wire int4
horovodrun -np 2 python examples/train_lm.py         # or mpirun -np 2
python examples/train_lm.py                          # alone
"""

from __future__ import annotations

import argparse
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, VOCABULARY, corpus, unigram_loss, windows
from launchers import launcher
from options import add_options, add_update_options, described, given, planned
from replicas import replicas_equal
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import agmerge

Report = Callable[[int, float, float], None]
Wrapped = agmerge.DistributedOptimizer
CONTEXT = 64  # bytes that a prediction sees


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="agmerge on the source text of Python's standard library")
    add = parser.add_argument
    add("--steps", type=int, default=800)
    add("--batch-size", type=int, default=4, help=f"sequences of {CONTEXT} bytes per worker and step")
    add("--lr", type=float, default=3e-3, help="the highest one")
    add("--wd", type=float, default=1e-2, help="weight decay")
    add("--clip", type=float, default=1.0, help="the largest norm of gradients")
    add("--seed", type=int, default=0, help="of the weights and of the batches")
    add("--dense", action="store_true", help="exchange all of every gradient: --sync gradients --compression none")
    add_update_options(parser)
    add_options(parser)
    add("--report-every", type=int, default=100, metavar="STEPS")
    add("--stop", type=int, metavar="STEP", help="end there, as if something had happened; the rate is that of --steps")
    add("--save", type=Path, metavar="FOLDER", help="at the end: a file of each worker, and the model for all of them")
    add("--resume", type=Path, metavar="FOLDER", help="go on where --save has ended, with as many workers")
    add("--json", type=Path, metavar="FILE", help="write the results there, too")
    args = parser.parse_args(argv)
    if args.dense:
        if args.compression not in (None, "none"):
            parser.error(f"--dense and --compression {args.compression} contradict each other")
        args.sync, args.compression = "gradients", "none"
    return args


def wrapped(args: Namespace, model: nn.Module) -> Wrapped:
    """Collective. Return AdamW, distributed; all workers start from worker 0's parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wd)
    agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
    return agmerge.DistributedOptimizer(optimizer, model.named_parameters(), **given(args, model))


def clip_and_step(args: Namespace, model: nn.Module, optimizer: Wrapped) -> None:
    """Collective. Bound the norm of the gradients, then step."""
    if args.sync == "updates":  # they are this worker's own, as in a script without agmerge
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        return
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    with optimizer.skip_synchronize():
        optimizer.step()


def train(args: Namespace, model: GPT, optimizer: Wrapped, report: Report | None) -> dict[str, Any]:
    """Collective. Train ``model`` on this worker's part of each batch; return what the run measured."""
    text, held_out = corpus()
    schedule = OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.2, cycle_momentum=False)
    first = resume(args, model, optimizer, schedule) if args.resume else 0
    last = args.steps if args.stop is None else min(args.stop, args.steps)
    seconds, total, counted = 0.0, torch.zeros(()), 0
    loss = math.nan
    for step in range(first, last):
        start = time.perf_counter()
        source = torch.Generator().manual_seed(1_000_000 * args.seed + step)
        starts = torch.randint(len(text) - CONTEXT, (args.batch_size * agmerge.size(),), generator=source)
        optimizer.zero_grad()
        of_batch = model.loss(*windows(text, starts[agmerge.rank() :: agmerge.size()], CONTEXT))
        of_batch.backward()
        clip_and_step(args, model, optimizer)
        schedule.step()
        seconds += time.perf_counter() - start
        total, counted = total + of_batch.detach(), counted + 1
        if counted == args.report_every or step + 1 == last:
            loss = agmerge.allreduce(total / counted).item()
            total, counted = torch.zeros(()), 0
            score = validation_loss(model, optimizer, held_out)
            if report is not None:
                report(step + 1, loss, score)
    if args.save:
        save(args.save, model, optimizer, schedule, last)
    with optimizer.shared():
        same = replicas_equal(model)
    stats = optimizer.stats()
    return {
        "workers": agmerge.size(),
        "backend": agmerge.backend_name(),
        "settings": optimizer.settings,
        "buffers": stats["buffers"],
        "steps": last,
        "loss": loss,
        "validation_loss": validation_loss(model, optimizer, held_out),
        "unigram_loss": unigram_loss(text, held_out),
        "bytes_sent": stats["bytes_sent"],
        "bytes_dense": stats["bytes_dense"],
        "steps_per_second": (last - first) / seconds if seconds else math.nan,
        "replicas_equal": same,
    }


@torch.no_grad()
def validation_loss(model: GPT, optimizer: Wrapped, held_out: torch.Tensor) -> float:
    """Collective. Return the loss of the parameters that all workers share; each looks at its part of the text."""
    starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 256).long()[agmerge.rank() :: agmerge.size()]
    with optimizer.shared():  # with sync="updates" the model's own are ahead of these
        total = sum(model.loss(*windows(held_out, part, CONTEXT)) * len(part) for part in starts.split(32))
    return agmerge.allreduce(torch.as_tensor(total), op=agmerge.Sum).item() / 256


def save(folder: Path, model: nn.Module, optimizer: Wrapped, schedule: Any, step: int) -> None:
    """Collective. Write what this worker needs to go on, and the model that all share, from worker 0."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizer.flush()  # with --overlap messages are under way
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
    }
    torch.save(state, folder / f"worker{agmerge.rank()}.pt")
    if agmerge.rank() == 0:
        with optimizer.shared():
            torch.save(model.state_dict(), folder / "model.pt")


def resume(args: Namespace, model: nn.Module, optimizer: Wrapped, schedule: Any) -> int:
    """Collective. Load what :func:`save` wrote for this worker; return the step that comes next."""
    state = torch.load(args.resume / f"worker{agmerge.rank()}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["step"])


def show(step: int, loss: float, score: float) -> None:
    """Print a line of progress, on the one worker that does."""
    print(f"step {step:5}  loss {loss:.3f}  validation {score:.3f}", flush=True)


def table(results: dict[str, Any]) -> str:
    """Return the results, for people."""
    r = results
    sent, dense = r["bytes_sent"], r["bytes_dense"]
    rows = {
        "workers": f"{r['workers']} ({r['backend']} backend, {launcher()})",
        "exchanged": f"{r['settings']['sync']}: {described(r['settings'])}",
        "plan": planned(r["settings"], r["buffers"]),
        "validation loss": f"{r['validation_loss']:.3f} nats a byte",
        "of a unigram model": f"{r['unigram_loss']:.3f}; of one that guesses {math.log(VOCABULARY):.3f}",
        "bytes sent": f"{sent / 1e6:.2f} MB per worker; dense {dense / 1e6:.2f} MB"
        + (f" ({dense / sent:.1f}x)" if sent else ""),
        "steps per second": f"{r['steps_per_second']:.1f}",
        "shared parameters": "bitwise equal" if r["replicas_equal"] else "DIFFERENT",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def main() -> None:
    """Train, and show the results."""
    args = arguments()
    agmerge.init()
    torch.manual_seed(args.seed)
    first = agmerge.rank() == 0
    model = GPT(context=CONTEXT)
    try:
        optimizer = wrapped(args, model)
    except (TypeError, ValueError) as error:  # options that do not go together
        raise SystemExit(f"train_lm.py: {error}") from None
    results = train(args, model, optimizer, show if first else None)
    if first:
        print(table(results))
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    agmerge.shutdown()
    if not results["replicas_equal"]:
        raise SystemExit("what the workers share differs; this is a bug in agmerge")


if __name__ == "__main__":
    main()
