# SPDX-License-Identifier: Apache-2.0
"""Does compression cost accuracy at equal steps? Paired training runs, each compressor against a dense exchange.

    python benchmarks/parity.py --list                    # the cases, and how long they will take
    python benchmarks/parity.py --jobs 2 --report         # run what is missing, then write tables and pictures
    python benchmarks/parity.py --budget 600              # start nothing new after ten minutes; go on later

Every finished run is a line of ``--out``; what stands there is not run again, unless its recipe has changed. The
workers of a run are threads of one in-memory group, in lock-step; runs share the cores as ``--jobs`` processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch

# isort: split

from accuracy import parity_defaults, parity_low_rank, parity_report, parity_tasks, parity_updates, parity_wires
from accuracy.parity_tasks import FOLDS, Case

import sparsifiers

CORE = ("topk", "dgc", "adtopk", "sidco-gp")
SECONDS = {"digits": 2.6, "lm": 29.0}  # of one core, for a worker; until there are results to estimate from
CASES = ("sparsifiers", "updates", "lowrank", "wires", "defaults", "longer")
WIDEST = {"digits": 1.0, "lm": 2.0}  # points and percent; a wider interval at density 0.01 gets more seeds

Records = dict[Case, dict[str, Any]]


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="training parity: compressors against a dense exchange, in pairs")
    add = parser.add_argument
    add(
        "--cases",
        choices=CASES,
        default="sparsifiers",
        help="updates: sync='updates'; lowrank: factors; wires: bits; defaults, longer: see parity_defaults.py",
    )
    add("--jobs", type=int, default=2, help="runs at the same time")
    add("--seeds", type=int, default=3, help="repetitions; each has its own weights and batches, and folds")
    add("--max-seeds", type=int, default=6, help="where an interval at density 0.01 is too wide")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS", help="start nothing new after so long")
    add("--only", default="", metavar="TEXT", help="cases whose line in --list contains all these words")
    add("--steps", type=int, help="instead of the recipe's; such results count for the same --steps only")
    add("--out", type=Path, default=Path("runs/parity.jsonl"), metavar="FILE", help="one line a finished run")
    add("--list", action="store_true", help="show the cases and an estimate, run nothing")
    add("--report", action="store_true", help="afterwards, write the page and its pictures")
    add("--notebook", type=Path, default=Path("benchmarks/notebook"), metavar="FOLDER", help="of parity.md")
    add("--pictures", type=Path, default=Path("docs/pictures"), metavar="FOLDER", help="of parity-*.png")
    return parser.parse_args(argv)


def compressed(base: Case, name: str, density: float = 0.01) -> Case:
    """``base`` with a compressor, and with the memory that belongs to it: DGC's own corrects the momentum of SGD."""
    memory = "dgc" if name == "dgc" and base.optimizer == "sgd" else "residual"
    return replace(base, compressor=name, density=density, memory=memory)


def stages(count: int) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield cases of fold 0 and seed 0, and the seeds to run them with, the most important ones first."""
    seeds = range(count)
    few = range(max(1, count - 1))  # where no narrow interval is asked for
    digits, adam = Case(task="digits"), Case(task="digits", optimizer="adamw")
    lm, four = Case(task="lm", optimizer="adamw"), Case(task="digits", workers=4)
    names = sparsifiers.names()
    yield [digits, *(compressed(digits, name) for name in names)], seeds
    yield [lm, *(compressed(lm, name) for name in CORE)], seeds
    remedies = [replace(compressed(lm, "topk"), remedy=remedy) for remedy in parity_tasks.REMEDIES[1:]]
    yield [compressed(lm, "topk", 0.001), *remedies], seeds
    tenth = compressed(lm, "topk", 0.1)
    yield [tenth, replace(tenth, remedy="update")], few
    yield [replace(compressed(digits, "topk", 0.001), memory="none")], few
    yield [compressed(digits, name, 0.001) for name in names], few
    yield [adam, *(compressed(adam, name) for name in CORE)], seeds
    yield [four, *(compressed(four, name) for name in CORE)], seeds
    sgd = Case(task="lm", optimizer="sgd")
    yield [sgd, compressed(sgd, "topk"), compressed(sgd, "dgc")], few


def repeated(case: Case, seeds: Sequence[int]) -> list[Case]:
    """The case on every fold, for these seeds."""
    folds = range(FOLDS if case.task == "digits" else 1)
    return [replace(case, fold=fold, seed=seed) for seed in seeds for fold in folds]


def staged(args: Namespace) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield the stages of ``--cases``."""
    if args.cases == "updates":
        return parity_updates.stages()
    others = {
        "lowrank": parity_low_rank.stages,
        "wires": parity_wires.stages,
        "defaults": parity_defaults.defaults,
        "longer": parity_defaults.longer,
    }
    return others.get(args.cases, stages)(args.seeds)


def matrix(args: Namespace) -> list[Case]:
    """All cases, the most important ones first."""
    cases: list[Case] = []
    for stage, seeds in staged(args):
        every = [one for case in stage for one in repeated(case, seeds)]
        cases += sorted(every, key=lambda case: case.seed)  # a stage cut short has whole seeds
    return [case for case in cases if all(word in line(case) for word in args.only.split())]


def more(args: Namespace, records: Records) -> list[Case]:
    """Another seed for every group at density 0.01 whose interval is too wide, and for its dense runs."""
    wide: dict[Case, None] = {}
    for row in parity_report.rows(records):
        case = row["case"]
        if case.density == 0.01 and row["width"] > WIDEST[case.task]:
            used = 1 + max(one.seed for one in records if one.group == case.group)
            if used < args.max_seeds:
                for one in repeated(case, [used]):
                    wide.update({one.dense: None, one: None})
    return [case for case in wide if case not in records and all(word in line(case) for word in args.only.split())]


def line(case: Case) -> str:
    """A case in one line."""
    share = f"rank={case.rank}" if case.rank else f"density={case.density}"
    memory = "" if case.compressor == "none" else f" {share} memory={case.memory}"
    place = f"{f'fold={case.fold} ' if case.task == 'digits' else ''}seed={case.seed}"
    remedy = f" remedy={case.remedy}" if case.remedy else ""
    return (
        f"{case.task} {case.optimizer} workers={case.workers}{' halves' if case.halves else ''} "
        f"{case.compressor}{memory}{remedy}{sync(case)} {place}"
    )


def sync(case: Case) -> str:
    """Return in words what of the updates is exchanged, and what is not usual of it or of gradients."""
    usual = Case(task=case.task)
    names = ("wire", "every", "fragments", "overlap", "merging")
    names = (*names, "clip", "rate", "flat")
    more = [f" {name}={getattr(case, name)}" for name in names if getattr(case, name) != getattr(usual, name)]
    return f"{'' if case.sync == 'gradients' else f' sync=updates carry={case.carry}'}{''.join(more)}"


def read(args: Namespace) -> Records:
    """The finished cases whose recipe still stands."""
    records: Records = {}
    if args.out.exists():
        for text in args.out.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(text)
            except json.JSONDecodeError:  # a line cut short when the program was stopped: its case runs again
                continue
            case = Case(**record.pop("case"))
            if record["recipe"] == case.recipe(args.steps):
                records[case] = record
    return records


def estimate(cases: Sequence[Case], records: Records, jobs: int) -> float:
    """Seconds until all ``cases`` are done."""

    def seconds(case: Case) -> float:
        alike = [one for one in records if (one.task, one.workers) == (case.task, case.workers)]
        if alike:
            return sum(records[one]["seconds"] for one in alike) / len(alike)
        return SECONDS[case.task] * case.workers

    return sum(map(seconds, cases)) / jobs


def prepare() -> None:
    """One core a process, as several of them run."""
    torch.set_num_threads(1)


def run(args: Namespace, cases: Sequence[Case], records: Records, deadline: float) -> list[Case]:
    """Run ``cases`` in this order, into ``records`` and the file; those that failed."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed: list[Case] = []
    waiting, running, done = list(reversed(cases)), {}, 0
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(args.jobs, mp_context=context, initializer=prepare) as pool,
        args.out.open("a", encoding="utf-8") as out,
    ):
        while waiting or running:
            while waiting and len(running) < args.jobs and time.monotonic() < deadline:
                case = waiting.pop()
                running[pool.submit(parity_tasks.train, case, args.steps)] = case
            if not running:
                break
            finished: set[Future[dict[str, Any]]] = wait(running, return_when=FIRST_COMPLETED).done
            for future in finished:
                case, done = running.pop(future), done + 1
                if future.exception() is not None:
                    failed.append(case)
                    print(f"FAILED {line(case)}: {future.exception()}", file=sys.stderr, flush=True)
                    continue
                record = records[case] = future.result()
                out.write("\n" + json.dumps({"case": asdict(case), **record}))  # a line cut short stays alone
                out.flush()
                clock = f"{time.monotonic() - started:5.0f} s {done:4}/{len(cases)}"
                print(f"{clock}  {line(case)}: {record['score']:.4f} in {record['seconds']:.1f} s", flush=True)
        # All is done; a worker that does not notice (seen once, after 19 cases) must not keep the report waiting.
        for child in multiprocessing.active_children():
            child.terminate()
    if waiting:
        print(f"{len(waiting)} cases wait for another call: --budget is spent", file=sys.stderr)
    return failed


def main() -> None:
    """Run what is missing, then report."""
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    records = read(args)
    cases = [case for case in matrix(args) if case not in records]
    if args.list:
        for case in matrix(args):
            print(f"{'done' if case in records else '    '} {line(case)}")
        minutes = estimate(cases, records, args.jobs) / 60
        missing = f"{len(cases)} of {len(matrix(args))} cases are missing"
        print(f"{missing}: about {minutes:.0f} minutes at --jobs {args.jobs}")
        print("Intervals at density 0.01 that turn out too wide get more seeds, which are not in this estimate.")
        return
    deadline = time.monotonic() + args.budget
    failed: list[Case] = []
    while cases and not failed and time.monotonic() < deadline:
        failed += run(args, cases, records, deadline)
        cases = more(args, records) if args.cases == "sparsifiers" else []
    if args.report and args.cases == "updates":
        print("\n".join(parity_updates.tables(records)))
    elif args.report and args.cases == "lowrank":
        print("\n".join(parity_updates.tables({case: records[case] for case in matrix(args) if case in records})))
    elif args.report and args.cases == "wires":
        print("\n".join(parity_wires.tables({case: records[case] for case in matrix(args) if case in records})))
    elif args.report and args.cases in ("defaults", "longer"):
        print("\n".join(parity_defaults.tables({case: records[case] for case in matrix(args) if case in records})))
    elif args.report:
        parity_report.write(records, args.notebook, args.pictures)
    if failed:
        sys.exit(f"{len(failed)} cases failed")


if __name__ == "__main__":
    main()
