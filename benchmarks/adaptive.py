"""Simulate what workers of AdamW may exchange: gradients, or what their optimizers did. Loss at equal steps.

    python benchmarks/adaptive.py --seeds 0 1 2 3 4         # run what is missing
    python benchmarks/adaptive.py --contenders apply-5-sign dense --workers 4
    python benchmarks/adaptive.py --report                  # the table of what is there, nothing is run

The model, batches and recipe are those of the language model of ``parity.py``; nothing is retuned. Every finished run
is a line of ``--out``; what stands there is not run again. Runs are the same for the same seed, and calls with other
seeds may go on side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from adaptive_simulation import Contender, Recipe, Simulation  # noqa: E402
from intervals import interval  # noqa: E402
from parity_tasks import RECIPES, lm  # noqa: E402

CONTENDERS = {
    "dense": Contender(),
    "gradients-1-fp32": Contender(density=0.01),
    "hold-5-sign": Contender(way="hold", density=0.05, wire="sign"),
    "apply-1-fp32": Contender(way="apply", density=0.01),
    "apply-5-sign": Contender(way="apply", density=0.05, wire="sign"),
    "gradients-5-int4": Contender(density=0.05, wire="int4"),
    "hold-1-fp32": Contender(way="hold", density=0.01),
    "hold-10-sign": Contender(way="hold", density=0.1, wire="sign"),
    "apply-h8-int4": Contender(way="apply", wire="int4", every=8),
    "hold-all-fp32": Contender(way="hold"),
}

Record = dict[str, Any]


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="a simulation of exchanging gradients or updates of AdamW")
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="each has its own weights and batches")
    add("--workers", type=int, nargs="+", default=[2], help="the batch is that of all of them together")
    add("--steps", type=int, default=RECIPES["lm"].steps, help="of a run")
    add("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="NAME", help="in this order")
    add("--scope", choices=("tensor", "model"), default="tensor", help="the largest are sought in each, or in all")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="start nothing new after so long")
    add("--out", type=Path, default=Path("runs/adaptive.jsonl"), metavar="FILE", help="one line a finished run")
    add("--report", action="store_true", help="print the table of all that is in --out, and run nothing")
    return parser.parse_args(argv)


def read(file: Path) -> Iterator[Record]:
    """Yield the finished runs of contenders that are still what they were."""
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            record = json.loads(text)
        except json.JSONDecodeError:  # a line cut short when the program was stopped: it runs again
            continue
        name = record["case"]["name"]
        if name in CONTENDERS and record["contender"] == asdict(CONTENDERS[name]):
            yield record


def run(case: dict[str, Any]) -> Record:
    """Train one contender; the loss of the shared parameters and of the workers' mean, and how many fewer bytes."""
    torch.set_num_threads(1)
    contender, language = CONTENDERS[case["name"]], RECIPES["lm"]
    recipe = Recipe(case["steps"], language.lr["adamw"], language.decay["adamw"])
    start = time.perf_counter()
    task = lm(0, case["seed"], language.batch)
    simulation = Simulation(task, contender, recipe, case["workers"], case["scope"])
    for step in range(recipe.steps):
        simulation.step(step)
    mean = torch.stack([worker.parameters for worker in simulation.workers]).mean(0)
    sparse, total = simulation.layout.fewer_bytes(contender)
    result = {"loss": simulation.score(simulation.shared), "loss_of_mean": simulation.score(mean)}
    facts = {"bytes_of_large": sparse, "bytes_of_all": total, "seconds": time.perf_counter() - start}
    return {"case": case, "contender": asdict(contender), **result, **facts}


def tables(records: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a Markdown table for each number of workers, of steps and scope."""
    settings: dict[tuple[Any, ...], dict[str, dict[int, Record]]] = {}
    dense: dict[tuple[Any, ...], dict[int, Record]] = {}  # of any scope: nothing is selected
    for record in records:
        case = record["case"]
        if case["name"] == "dense":
            dense.setdefault((case["workers"], case["steps"]), {})[case["seed"]] = record
        runs = settings.setdefault((case["workers"], case["steps"], case["scope"]), {})
        runs.setdefault(case["name"], {})[case["seed"]] = record
    for (workers, steps, scope), runs in settings.items():
        yield f"W = {workers}, {steps} steps, the largest of each {scope}:\n"
        yield "| exchanged | loss | difference, % | 95 % interval | pairs, one by one | bytes, large | bytes, all |"
        yield "|---|---|---|---|---|---|---|"
        for name in CONTENDERS:
            if name in runs:
                yield row(name, runs[name], dense.get((workers, steps), {}))
        yield ""


def row(name: str, runs: dict[int, Record], dense: dict[int, Record]) -> str:
    """Return one line of a table, from the runs of a contender and of dense by seed: differences in % of dense's."""
    pairs = [100 * (runs[seed]["loss"] / dense[seed]["loss"] - 1) for seed in sorted(runs) if seed in dense]
    cells = [name, f"{statistics.fmean(run['loss'] for run in runs.values()):.4f}"]
    if pairs and name != "dense":
        mean, low, high = interval(pairs, statistics.fmean)
        cells += [f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}", ", ".join(f"{pair:+.2f}" for pair in pairs)]
    else:
        cells += ["", "", f"{len(runs)} runs"]
    first = next(iter(runs.values()))
    cells += [f"{first['bytes_of_large']:.0f}", f"{first['bytes_of_all']:.0f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run what is missing, or print what is there."""
    args = arguments()
    if args.report:
        print("\n".join(tables(list(read(args.out)))))
        return
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.budget
    for workers in args.workers:
        for seed in args.seeds:
            for name in args.contenders:
                case = {"name": name, "seed": seed, "workers": workers, "steps": args.steps, "scope": args.scope}
                if time.monotonic() >= deadline or any(record["case"] == case for record in read(args.out)):
                    continue
                record = run(case)
                with args.out.open("a", encoding="utf-8") as out:
                    out.write("\n" + json.dumps(record))  # a line cut short stays alone
                print(f"{case}: {record['loss']:.4f} in {record['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
