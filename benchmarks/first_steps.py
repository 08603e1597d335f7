# SPDX-License-Identifier: Apache-2.0
"""Measure what the first steps cost beside later ones, until the plan is final: in time and in bytes, on a link.

    python benchmarks/first_steps.py                                   # two models, three rates, three turns
    python benchmarks/first_steps.py --models cnn --rates 200mbit --turns 5
    python benchmarks/first_steps.py --beside before=../older_checkout   # another tree's library takes turns with this
    python benchmarks/first_steps.py --report                          # only read what has been measured

Every run is a job of its own that has seen nothing: what is measured is what a user sees who starts a script. "floor"
trains alone and gathers eight bytes a step: what it shows is the machine's. Contenders take turns, in another order
each time. Printed is, as the median over turns: the mean of steps 2 to 36, their median and the slowest of them, each
over the median of the later steps (in the first step memory and connections are made); the step after which the plan
stayed; the bytes that left a worker until then which were no gradient's, in gradients' worth (headers of the network
are among them), and of these what probes handed over. A step is the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.network import LINKS, Machine, named, usable
from lab.worker_results import received_results, send_result

FIRST = 36  # steps that are looked at
LATER = 60  # steps that are not yet "later": trials and rechecks of all contenders are over
VARIANTS = ("agmerge", "DDP", "floor")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="the first steps beside later ones, on a slow network")
    parser.add_argument("--models", nargs="+", default=["gpt2", "cnn"], choices=("gpt2", "resnet50", "cnn"))
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit", "none"], help="as tc writes them, or none")
    parser.add_argument("--link", choices=LINKS, default="duplex", help="what has the rate, see network.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--beside", nargs="+", default=[], metavar="NAME=TREE", help="the default of another checkout")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=LATER + 40)
    parser.add_argument("--out", type=Path, default=Path("runs/first_steps.jsonl"), help="one line a run")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--worker", nargs=3, metavar=("VARIANT", "MODEL", "STEPS"), help=argparse.SUPPRESS)
    parser.add_argument("--tree", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(variant: str, model: str, steps: int, tree: str) -> None:
    """One rank: train, and tell the seconds of each step and what had left the interface after it.

    ``tree``: the checkout whose library it is; empty: this one.
    """
    import torch
    from speed import contenders

    if tree:
        sys.path.insert(0, tree)

    torch.set_num_threads(1)
    work = contenders.workload(model)
    optimizer: Any = contenders.optimizer_of("sgd", work.model.parameters())
    ours = variant not in ("DDP", "floor")
    if ours:
        import agmerge

        agmerge.init("torch")
        optimizer = agmerge.DistributedOptimizer(optimizer, work.model.named_parameters())
        _, one_step, _ = contenders.alone(work, optimizer)
    else:
        _, one_step, _ = (contenders.floor if variant == "floor" else contenders.ddp)(work, optimizer)
    counter = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    found: dict[str, Any] = {"seconds": [], "left": [int(counter.read_text())], "sent": [0], "state": [], "probed": 0}
    for _ in range(steps):
        begin = time.perf_counter()
        one_step()
        found["seconds"].append(time.perf_counter() - begin)
        found["left"].append(int(counter.read_text()))
        if ours:
            figures = optimizer.stats()
            found["sent"].append(figures["bytes_sent"])
            found["state"].append([figures.get("planning", ""), optimizer.plan.digest()])
            found["probed"] = max(found["probed"], figures.get("bytes_probed", 0))
    if ours:
        found["plan"] = optimizer.plan.dumps()
    numel = sum(parameter.numel() for parameter in work.model.parameters())
    send_result({**found, "gradient": 4 * numel})


def figures(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what one run comes to; times are over the median of later steps."""
    steps = [max(every) for every in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    later = statistics.median(steps[LATER:])
    first = [seconds / later for seconds in steps[1:FIRST]]
    slowest = max(range(len(first)), key=first.__getitem__)
    rank, final = ranks[0], 0
    for number in range(1, len(rank["state"])):
        final = number + 1 if rank["state"][number] != rank["state"][number - 1] else final
    beside = rank["left"][final] - rank["left"][0] - (rank["sent"][final] if final else 0)
    return {
        "later": later,
        "mean": statistics.fmean(first),
        "median": statistics.median(first),
        "slowest": first[slowest],
        "at": slowest + 2,
        "above": sum(ratio > 1.2 for ratio in first),
        "final": final,
        "beside": beside / rank["gradient"] if final else 0.0,
        "probed": rank["probed"] / rank["gradient"],
        "plan": rank.get("plan", ""),
        "extra": sum(steps[:LATER]) - LATER * later,
        "steps": steps,
        "did": {name: number + 1 for number, (name, _) in reversed([*enumerate(rank["state"])])},
    }


def measure(args: argparse.Namespace, model: str, rate: str) -> None:
    """Run every contender in turn, and write a line in the file for each run."""
    trees = dict(one.split("=", 1) for one in args.beside)
    link = Machine if rate == "none" and usable() else LINKS[args.link]
    order = [*args.variants, *trees]
    for turn in range(args.turns):
        random.Random(turn).shuffle(order)
        for name in order:
            line = [sys.executable, "-W", "ignore", __file__, "--worker", name, model, str(args.steps)]
            line += ["--tree", str(Path(trees[name]).resolve())] if name in trees else []
            with link(args.workers, None if rate == "none" else rate) as net:
                outputs = net.run(line, timeout=600)
            run = {"model": model, "rate": rate, "link": args.link, "name": name, "turn": turn}
            run |= figures([received_results(output)[0] for output in outputs])
            args.out.parent.mkdir(parents=True, exist_ok=True)
            with args.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(run) + "\n")


def table(runs: list[dict[str, Any]]) -> str:
    """Return a cell's contenders, medians over turns, in Markdown."""
    titles = ("", "later, ms", "mean / later", "median / later", "slowest / later", "above 1.2", "lost, s",
              "plan final after", "beside, gradients", "probed", "runs")  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in dict.fromkeys(run["name"] for run in runs):
        here = [run for run in runs if run["name"] == name]

        def of(what: str, here: list[dict[str, Any]] = here) -> float:
            return statistics.median(run[what] for run in here)

        lines.append(
            f"| {name} | {1e3 * of('later'):.1f} | {of('mean'):.2f} | {of('median'):.2f} | {of('slowest'):.2f} |"
            f" {of('above'):.0f} | {of('extra'):.2f} | {of('final'):.0f} | {of('beside'):.1f} |"
            f" {of('probed'):.2f} | {len(here)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table a cell."""
    args = arguments()
    if args.worker:
        worker(args.worker[0], args.worker[1], int(args.worker[2]), args.tree)
        return
    for model in args.models:
        for rate in args.rates:
            if not args.report:
                measure(args, model, rate)
            runs = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
            here = [run for run in runs if (run["model"], run["rate"], run["link"]) == (model, rate, args.link)]
            if here:
                print(f"\n{model}, {args.workers} workers, {named(rate, args.link)}\n\n{table(here)}", flush=True)


if __name__ == "__main__":
    main()
