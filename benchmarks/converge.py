# SPDX-License-Identifier: Apache-2.0
"""Time to a loss, which is what users pay for: one curve of loss by step and one step time for each way to train.

    python benchmarks/converge.py                        # curves, step times on a slow link, the table; resumable
    python benchmarks/converge.py --report --picture docs/pictures
    python benchmarks/converge.py --optimizer adamw --model lm --steps 800 --rates 200mbit --link shared

The model is the GPT-2 of step_time.py, the data the source text of Python's standard library in 8192 byte pairs, the
last tenth held out (``--model lm``: the small GPT of parity.py, by characters); SGD with momentum or AdamW, a one-cycle
rate, two workers, the same batches for all. The target is the validation loss of dense after ``--steps`` steps times
1.02; a curve goes on until it is there, for ``--most`` times as many steps at most. A curve does not depend on the
network, so it is measured once per sparsifier, or way to train with AdamW, on no slow link, and the step times of
``step_time.py`` turn steps into seconds. Planners share the curve of ``topk``: a plan decides which elements compete
for a place, not how many are sent. With ``sync="updates"`` the loss is that of the parameters that workers share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

import step_time
from lab.network import LINKS, named
from lab.worker_results import received_results, send_result
from speed.contenders import ADAPTIVE, KNOWN, OPTIMIZERS, PLANNED, SELECTED, optimizer_of, powered

LENGTH, VOCABULARY = 64, 8192
BATCH = {"gpt2": 4, "lm": 8}  # sequences a step, of all workers together
RATE = {("gpt2", "sgd"): 0.1, ("gpt2", "adamw"): 1e-3, ("lm", "sgd"): 0.1, ("lm", "adamw"): 3e-3}
POINTS, NEAR = 20, 1.02  # of a curve, within --steps; of dense's loss
DENSE = ("Horovod", "Horovod fp16", "agmerge dense", "DDP")
ALONE = "no exchange"
CURVES = {
    "sgd": ("dense", *(name.split(",")[0] for name in SELECTED)),
    "adamw": ("dense", *(name.split(",")[0] for name in ADAPTIVE if name.split(",")[0] not in (*DENSE, ALONE))),
}
TIMED = {"sgd": tuple(dict.fromkeys((*DENSE, *PLANNED, *SELECTED))), "adamw": tuple(ADAPTIVE)}


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="seconds and bytes to a validation loss")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--most", type=float, default=1.3, help="times those steps, for what is slower to learn")
    parser.add_argument("--stretch", type=float, default=1.0, help="the rate's cycle by so much, for all but dense")
    parser.add_argument("--rates", nargs="*", default=["200mbit", "1gbit"])
    parser.add_argument("--link", choices=LINKS, default="duplex", help="what has the rate, see network.py")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--model", choices=BATCH, default="gpt2")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; another one wants another --out")
    parser.add_argument("--curves", nargs="+", help="without it all that belong to the optimizer")
    parser.add_argument("--timed", nargs="+", help="contenders whose steps are timed; without it all")
    parser.add_argument("--out", type=Path, help="a folder; without it runs/converge, and one for each other task")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--picture", type=Path, metavar="FOLDER")
    parser.add_argument("--worker", metavar="COMPRESSION", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(line)
    plain = (args.model, args.optimizer) == ("gpt2", "sgd")
    args.out = args.out or Path("runs/converge" if plain else f"runs/converge-{args.model}-{args.optimizer}")
    args.curves = args.curves or list(CURVES[args.optimizer])
    args.timed = args.timed or list(TIMED[args.optimizer])
    return args


def tokens(folder: Path) -> Any:
    """The corpus in byte pairs that were learned from its first nine tenths; kept in ``folder``."""
    import numpy as np
    import torch
    from accuracy.parity_tasks import corpus
    from tokenizers import ByteLevelBPETokenizer

    file = folder / f"tokens{VOCABULARY}.npy"
    if not file.exists():
        text = bytes(corpus(6_000_000).to(torch.uint8).tolist()).decode("ascii")
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text[: len(text) * 9 // 10]], vocab_size=VOCABULARY, show_progress=False)
        ids = [tokenizer.encode(part).ids for part in text.splitlines(keepends=True)]
        np.save(file, np.array([one for part in ids for one in part], dtype=np.int32))
    return torch.from_numpy(np.load(file)).long()


def data_and_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the corpus as numbers, and a model that is the same on all ranks, without dropout."""
    import models
    import torch
    from accuracy.parity_tasks import corpus, lm

    torch.manual_seed(args.seed)
    if args.model == "lm":
        return corpus(), models.NextToken(lm(0, args.seed, BATCH["lm"]).model)
    model = models.build("gpt2", 2).model
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return tokens(args.out), model


def wrapped(args: argparse.Namespace, model: Any) -> tuple[Any, Any]:
    """Collective. Return what computes the outputs, and the optimizer, for the curve ``args.worker``.

    Curves of SGD are called after sparsifiers, those of AdamW after contenders.
    """
    import agmerge

    inner = optimizer_of(args.optimizer, model.parameters(), RATE[args.model, args.optimizer])
    options: dict[str, Any] = {"compression": args.worker, "exchange": "sparse"}
    if args.worker == "dense":
        options = {"compression": "none"}
    elif args.optimizer == "adamw":
        contender = ADAPTIVE[f"{args.worker}, AdamW"]
        options = {name: value for name, value in contender.options if name != "backend"}
        if contender.kind == "ddp":
            return powered(model, **options), inner
    return model, agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)


def worker(args: argparse.Namespace) -> None:
    """Train one rank of one curve, and tell it."""
    import torch
    from torch.optim.lr_scheduler import OneCycleLR

    import agmerge

    agmerge.init("torch")
    torch.set_num_threads(1)
    text, model = data_and_model(args)
    cut = len(text) * 9 // 10
    model, optimizer = wrapped(args, model)
    every, rate = max(1, args.steps // POINTS), RATE[args.model, args.optimizer]
    cycle = args.steps if args.worker == "dense" else int(args.steps * args.stretch)
    total = args.steps if args.worker == "dense" else max(cycle, int(args.steps * args.most))
    # What takes longer follows the same rate at the same step, then the last one; unless its cycle is longer.
    schedule = OneCycleLR(optimizer, rate, cycle, pct_start=0.2, cycle_momentum=False, final_div_factor=10.0)
    window, curve = torch.arange(LENGTH + 1), []
    held_out = text[torch.linspace(cut, len(text) - LENGTH - 1, 64).long()[:, None] + window]
    shared = getattr(optimizer, "shared", contextlib.nullcontext)  # what DDP trains is

    def loss(rows: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, 1:])

    for step in range(total + 1):
        if step % every == 0:
            with torch.no_grad(), shared():
                curve.append((step, statistics.fmean(loss(rows).item() for rows in held_out.split(16))))
            if step >= args.steps and curve[-1][1] <= args.target:
                break  # the same on all ranks: what they share is
        generator = torch.Generator().manual_seed(1_000_000 * args.seed + step)
        starts = torch.randint(cut - LENGTH, (BATCH[args.model],), generator=generator)
        optimizer.zero_grad()
        loss(text[starts[agmerge.rank() :: agmerge.size(), None] + window]).backward()
        optimizer.step()
        if step < cycle - 1:
            schedule.step()
    if agmerge.rank() == 0:
        stats = optimizer.stats() if hasattr(optimizer, "stats") else {"bytes_sent": 0, "steps": 1}
        sent = stats["bytes_sent"] / stats["steps"]
        send_result({"curve": curve, "bytes": sent, "workers": agmerge.size()})
    agmerge.shutdown()


def curves(args: argparse.Namespace) -> dict[str, Any]:
    """The curves that are missing are measured; all that there are."""
    from lab.network import Loopback

    args.out.mkdir(parents=True, exist_ok=True)
    if args.model == "gpt2" and not args.report:
        tokens(args.out)
    file = args.out / "curves.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in args.curves:
        key = f"{name}, {args.steps} steps"
        if key not in known and not args.report:
            start = time.time()
            with Loopback(2) as network:
                command = [sys.executable, "-W", "ignore", __file__, "--worker", name, "--out", str(args.out.resolve())]
                command += ["--steps", str(args.steps), "--most", str(args.most), "--stretch", str(args.stretch)]
                command += ["--model", args.model, "--optimizer", args.optimizer, "--seed", str(args.seed)]
                dense = known.get(f"dense, {args.steps} steps")
                if dense:
                    command += ["--target", str(NEAR * dense["curve"][-1][1])]
                output = network.run(command, timeout=7200)[0]
            known[key] = received_results(output)[0]
            file.write_text(json.dumps(known), encoding="utf-8")
            print(f"{key}: {known[key]['curve'][-1][1]:.3f} after {time.time() - start:.0f} s", flush=True)
    return {key.split(",")[0]: value for key, value in known.items() if key.endswith(f" {args.steps} steps")}


def timed(args: argparse.Namespace) -> dict[str, Any]:
    """The step times that are missing are measured; all that there are, by link (in words) and contender."""
    from lab.interleaved import Stage

    file = args.out / "times.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known = {key if "," in key else named(key, "shared"): here for key, here in known.items()}  # before links had names
    more = argparse.Namespace(blocks=args.blocks, steps=3, seconds=10.0, width=1.0, against="")
    for rate in args.rates if not args.report else []:
        here = known.setdefault(named(rate, args.link), {})
        missing = [name for name in args.timed if name not in here]
        for group in step_time.groups(missing, 2) if missing else ():
            with LINKS[args.link](2, rate) as network, Stage(network) as stage:
                found = step_time.measure(stage, group, args.model, {}, more)
            floor = statistics.median(found[step_time.FLOOR]["seconds"])
            here |= {name: {**one, "floor": floor} for name, one in found.items()}
            file.write_text(json.dumps(known), encoding="utf-8")
    return known


def each(here: dict[str, Any], name: str) -> float:
    """Seconds a step. Groups of contenders see a machine that is not always as fast: they are told by their floors."""
    steps = KNOWN[name].every if name in KNOWN else 1
    took, floor = statistics.median(here[name]["seconds"]) / steps, here[name].get("floor")
    if floor is None or took > step_time.NEAR * floor:
        return took  # the network's time, which does not depend on that
    return took / floor * statistics.median(one["floor"] for one in here.values() if "floor" in one)


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps to ``target``, between the points of a curve; None: not within it."""
    for (before, higher), (after, lower) in zip(curve, curve[1:], strict=False):
        if lower <= target:
            return before + (after - before) * (higher - target) / max(higher - lower, 1e-12)
    return None


def curve_of(name: str) -> str:
    """The curve that a contender follows."""
    first = name.split(",")[0]
    return "dense" if first in DENSE else first


def table(found: dict[str, Any], times: dict[str, Any], link: str) -> str:
    """Seconds and bytes to the target, for every contender on a link."""
    dense = found["dense"]["curve"]
    target = NEAR * dense[-1][1]
    lines = [
        f"**{link}**: {dense[0][1]:.2f} nats a token at first, dense ends at {dense[-1][1]:.2f}, target {target:.2f}",
        "",
        "| | steps | s a step | seconds | against Horovod | MB a worker |",
        "|---|---|---|---|---|---|",
    ]

    def seconds(name: str) -> float | None:
        steps = reached(found[curve_of(name)]["curve"], target)
        return None if steps is None else steps * each(times[link], name)

    names = [name for some in TIMED.values() for name in some if times[link].get(name, {}).get("seconds")]
    base = next((seconds(name) for name in names if name.split(",")[0] == "Horovod"), None)
    for name in names:
        if curve_of(name) == ALONE:
            lines.append(f"| {name} | - | {each(times[link], name):.3f} | - | - | - |")
        if curve_of(name) not in found:
            continue
        steps, took = reached(found[curve_of(name)]["curve"], target), seconds(name)
        one = each(times[link], name)
        if steps is None or took is None:
            last = found[curve_of(name)]["curve"][-1]
            lines.append(f"| {name} | more than {last[0]} ({last[1]:.2f}) | {one:.3f} | - | - | - |")
            continue
        sent = steps * statistics.median(times[link][name]["bytes"]) / KNOWN[name].every / 1e6
        gain = f"{base / took:.1f}x" if base else "-"
        lines.append(f"| {name} | {steps:.0f} | {one:.3f} | {took:.0f} | {gain} | {sent:.0f} |")
    return "\n".join([*lines, ""])


def picture(found: dict[str, Any], times: dict[str, Any], folder: Path) -> None:
    """Loss against seconds, a panel for each link."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(times), figsize=(6 * len(times), 4), squeeze=False)
    shown = ("Horovod", "Horovod fp16", *SELECTED, *ADAPTIVE)
    for panel, (link, here) in zip(axes[0], times.items(), strict=True):
        for name in shown:
            if name in here and here[name]["seconds"] and curve_of(name) in found:
                points, took = found[curve_of(name)]["curve"], each(here, name)
                panel.semilogx([max(step, 1) * took for step, _ in points], [loss for _, loss in points], label=name)
        panel.set_title(link)
        panel.set_xlabel("seconds")
    axes[0][0].set_ylabel("validation loss, nats a token")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "converge.svg")


def summary(args: argparse.Namespace) -> str:
    """All tables, of what is measured now where it is missing; draws the picture."""
    found, times = curves(args), timed(args)
    if args.picture:
        picture(found, times, args.picture)
    return "\n".join(table(found, times, link) for link in times)


def main() -> None:
    """Measure what is missing, then report."""
    args = arguments()
    if args.worker:
        worker(args)
        os._exit(0)
    print(summary(args))


if __name__ == "__main__":
    main()
