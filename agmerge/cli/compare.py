# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge compare FILE.py``: a compressor of a file beside agmerge's own, on three small tasks."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import sparsifiers
from agmerge.cli.compare_tasks import TASKS, Outcome, steps_to, train
from agmerge.metrics.paired import Interval, excess_percent, mean_interval
from agmerge.runtime.pretended_link import bytes_a_second
from sparsifiers.custom import Custom, adapted, is_compressor, is_memory

DENSE, MINE = "none", "yours"
WORD = "compression"  # name in a file that says what to compare
DENSITY, NEAR = 0.01, 1.02  # of sparsifiers; the loss that counts as reached, in those of dense training
LEGEND = """loss: excess over uncompressed training after the same steps, mean of the seeds and its 95 % interval
steps: until the loss is within 2 % of uncompressed training's, in those of the training; -: not reached
MB/step: bytes that leave a worker. codec: processor time of a worker and step beyond uncompressed training
time: steps x (backward pass + codec + bytes / rate), an estimate without overlap, in those of uncompressed training"""


class Refused(Exception):
    """End with a message before anything is trained."""


# The compressor of a file.


def module_of(path: Path) -> ModuleType:
    """Return the module that a file makes. Raises Refused if it cannot be imported."""
    name = f"compared_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise Refused(f"{path}: there is no such Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Refused(f"{path}: {type(error).__name__}: {error}") from error
    return module


def compressor_in(module: ModuleType, wanted: str | None) -> Any:
    """Return the compressor of a module: its object ``compression``, or the one that its only class makes.

    ``wanted``: the name of the class or object; None: there is only one. Raises Refused if that is not clear.
    """
    path = module.__file__
    if wanted is None and hasattr(module, WORD):
        wanted = WORD
    own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    if wanted is None:
        found = [name for name, value in own.items() if isinstance(value, type) and _compresses(value)]
        if len(found) != 1:
            known = (
                f"{len(found)} compressors ({', '.join(found)})"
                if found
                else "no class with compress() and decompress()"
            )
            raise Refused(f"{path}: found {known}. Name one: {path}:NAME, or set {WORD} = ... in the file.")
        wanted = found[0]
    if not hasattr(module, wanted):
        raise Refused(f"{path}: there is no {wanted!r}")
    made = getattr(module, wanted)
    try:
        made = made() if isinstance(made, type) else made
        memories = [value for value in own.values() if isinstance(value, type) and _remembers(value)]
        if is_compressor(made) and len(memories) == 1:
            return Custom(made, memories[0]())
    except TypeError as error:
        raise Refused(f"{path}: {wanted}: {error}. Set {WORD} = {wanted}(...) in the file.") from error
    made = adapted(made)
    if not hasattr(made, "kinds"):
        raise Refused(f"{path}: {wanted} has no compress(tensor, name) and decompress(tensors, ctx)")
    return made


def _compresses(kind: type) -> bool:
    """Return whether objects of a class compress. Methods of a class take the object itself, too."""
    return hasattr(kind, "kinds") or is_compressor(kind, bound=False)


def _remembers(kind: type) -> bool:
    """Return whether objects of a class are memories beside a compressor."""
    return is_memory(kind, bound=False)


# Trainings.


@dataclass(frozen=True)
class Job:
    """One training, which a process of its own runs."""

    task: str
    contender: str  # MINE, or a name
    seed: int
    workers: int
    steps: int
    digest: str  # of the file, for MINE

    @property
    def key(self) -> str:
        """Return what says which training it is."""
        return json.dumps(asdict(self), sort_keys=True)


def options_of(contender: str, path: Path, wanted: str | None) -> dict[str, Any]:
    """Return the arguments of the optimizer for a contender."""
    compression = compressor_in(module_of(path), wanted) if contender == MINE else contender
    options: dict[str, Any] = {"compression": compression, "merging": "threshold"}
    if contender != MINE and contender in sparsifiers.names():
        options["density"] = DENSITY
    if "density" in options or contender in sparsifiers.low_rank_names() or getattr(compression, "selects", False):
        options["exchange"] = "sparse"  # always compressed: in memory an exchange costs nothing
    return options


def run(job: Job, path: Path, wanted: str | None) -> Outcome:
    """Train, in this process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="AGM70[57]")  # of names that are compared on purpose
    return train(TASKS[job.task], options_of(job.contender, path, wanted), job.workers, job.seed, job.steps)


def jobs_of(tasks: Sequence[str], contenders: Sequence[str], seeds: int, workers: int, digest: str) -> Iterator[Job]:
    """Yield all trainings, those of the first seed first: a run that is cut off can be read."""
    for seed in range(seeds):
        for task in tasks:
            for contender in contenders:
                of = digest if contender == MINE else ""
                yield Job(task, contender, seed, workers, TASKS[task].steps, of)


def finished(
    jobs: Sequence[Job], known: dict[str, Outcome], start: Callable[[Job], Future[Outcome]], until: float
) -> Iterator[tuple[Job, Outcome]]:
    """Yield trainings as they end, those that are ``known`` first; after ``until`` (time.monotonic) none begins."""
    for job in jobs:
        if job.key in known:
            yield job, known[job.key]
    waiting = [job for job in jobs if job.key not in known]
    running: dict[Future[Outcome], Job] = {}
    at_once = os.cpu_count() or 1
    while waiting or running:
        while waiting and len(running) < at_once and time.monotonic() < until:
            job = waiting.pop(0)
            running[start(job)] = job
        if not running:
            return
        done = next(as_completed(running))
        yield running.pop(done), done.result()


# The table.


@dataclass(frozen=True)
class Row:
    """Line of the table: a contender on a task."""

    task: str
    contender: str
    seeds: int
    loss: float
    excess: Interval  # %, over dense training
    steps: float | None  # to the loss that counts, in those of a training; None: not reached with every seed
    megabytes: float  # that leave a worker in a step
    codec: float  # ms
    time: float | None  # to that loss, in those of dense training


def rows_of(found: Mapping[Job, Outcome], rate: float) -> list[Row]:
    """Return the table of the trainings that have ended. ``rate``: bytes a second of the link.

    Seeds without dense training are left out.
    """
    dense = {(job.task, job.seed): outcome for job, outcome in found.items() if job.contender == DENSE}
    groups: dict[tuple[str, str], list[tuple[Job, Outcome]]] = {}
    for job, outcome in found.items():
        if (job.task, job.seed) in dense:
            groups.setdefault((job.task, job.contender), []).append((job, outcome))
    rows = []
    for (task, contender), runs in groups.items():
        partners = [dense[task, job.seed] for job, _ in runs]
        losses = [outcome.losses[-1] for _, outcome in runs]
        excess = Interval(math.inf, None, len(losses))  # of a training that has diverged
        if all(map(math.isfinite, losses)):
            excess = mean_interval(excess_percent(losses, [other.losses[-1] for other in partners]))
        pairs = [(job, outcome, other) for (job, outcome), other in zip(runs, partners, strict=True)]
        steps = [steps_to(outcome.losses, NEAR * other.losses[-1], job.steps) for job, outcome, other in pairs]
        theirs = [steps_to(other.losses, NEAR * other.losses[-1], job.steps) for job, _, other in pairs]
        moved = sum(outcome.bytes_per_step for _, outcome in runs) / len(runs)
        spent = sum(outcome.seconds_per_step for _, outcome in runs) / len(runs)
        usual = sum(other.seconds_per_step for other in partners) / len(runs)
        whole = sum(other.bytes_per_step for other in partners) / len(runs)
        reached = [one / runs[0][0].steps for one in steps if one is not None]
        share = sum(reached) / len(reached) if len(reached) == len(runs) else None
        base = sum(one or 0.0 for one in theirs) / len(runs) / runs[0][0].steps * (usual + whole / rate)
        took = None if share is None else share * (max(spent, usual) + moved / rate) / base
        codec = 1e3 * max(0.0, spent - usual)
        rows.append(Row(task, contender, len(runs), sum(losses) / len(losses), excess, share, moved / 1e6, codec, took))
    return rows


HEAD = ("task", "compression", "seeds", "loss", "excess, %", "steps", "MB/step", "codec, ms", "time")


def cells(row: Row) -> list[str]:
    """Return the words of a line."""
    half = "" if row.excess.half is None else f" ± {row.excess.half:.1f}"
    excess = f"{row.excess.mean:+.1f}{half}" if math.isfinite(row.excess.mean) else "diverged"
    part = [excess, "-" if row.steps is None else f"{row.steps:.2f}"]
    speed = [f"{row.megabytes:.3g}", f"{row.codec:.2g}", "-" if row.time is None else f"{row.time:.2f}"]
    return [row.task, row.contender, str(row.seeds), f"{row.loss:.3f}", *part, *speed]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


WIDE, HIGH, NAMES = 640, 26, 200  # pixels of the picture, of a line of it, of the names


def picture(rows: Sequence[Row]) -> str:
    """Return the excess losses with their intervals, as SVG: a line for each contender, a block for each task."""
    shown = [row for row in rows if row.contender != DENSE and math.isfinite(row.excess.mean)]
    ends = [abs(row.excess.mean) + (row.excess.half or 0.0) for row in shown]
    scale = (WIDE - NAMES) / 2.2 / max([*ends, 1.0])
    zero, parts = NAMES + (WIDE - NAMES) / 2, []
    for number, row in enumerate(shown):
        y, half = HIGH * (number + 1), (row.excess.half or 0.0) * scale
        x = zero + row.excess.mean * scale
        parts.append(f'<text x="8" y="{y + 4}">{row.task}, {row.contender}</text>')
        parts.append(f'<path d="M{x - half:.1f} {y}H{x + half:.1f}" stroke="currentColor" stroke-width="2"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="4"><title>{row.excess.mean:+.2f} %</title></circle>')
    height = HIGH * (len(shown) + 2)
    parts.append(f'<path d="M{zero} 8V{height - HIGH}" stroke="gray"/>')
    parts.append(
        f'<text x="{zero - 60}" y="{height - 8}">excess loss; line: 0 %, span: {max([*ends, 1.0]):.1f} %</text>'
    )
    size = f'width="{WIDE}" height="{height}" viewBox="0 0 {WIDE} {height}" font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


# The command.


def main(
    file: str,
    against: Sequence[str],
    tasks: Sequence[str],
    seeds: int,
    workers: int,
    minutes: float,
    rate: str,
    out: str,
) -> int:
    """Train, print the table, and write it to a folder; return the exit code.

    Args:
        file: a Python file, and after a colon the name of a class or object in it.
        against: names of agmerge's own compressors.
        tasks: names of ``TASKS``.
        seeds: number of trainings of each contender on each task.
        workers: number of ranks in memory.
        minutes: after these no training begins.
        rate: of the link of each worker, for the estimate of the time, such as ``"200mbit"``.
        out: folder. A run that was cut off there continues.
    """
    try:
        name, _, wanted = file.partition(":")
        path, folder, speed = Path(name), Path(out), bytes_a_second(rate)
        mine = compressor_in(module_of(path), wanted or None)
        check(tasks, against, seeds, workers)
    except (Refused, ValueError) as error:
        sys.stderr.write(f"agmerge compare: {error}\n")
        return 1
    contenders = [DENSE, MINE, *(each for each in dict.fromkeys(against) if each != DENSE)]
    jobs = list(jobs_of(tasks, contenders, seeds, workers, hashlib.sha256(path.read_bytes()).hexdigest()[:16]))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "compare.json"
    known = {key: Outcome(**value) for key, value in json.loads(kept.read_text()).items()} if kept.exists() else {}
    sys.stdout.write(f"{path}: {mine}. {len(jobs)} trainings, for at most {minutes:g} minutes; results in {folder}\n")
    found: dict[Job, Outcome] = {}
    began, context = time.monotonic(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        try:
            for job, outcome in finished(
                jobs, known, lambda job: pool.submit(run, job, path, wanted or None), began + 60 * minutes
            ):
                found[job] = known[job.key] = outcome
                kept.write_text(json.dumps({key: asdict(each) for key, each in known.items()}), encoding="utf-8")
                sys.stdout.write(
                    f"{len(found)} of {len(jobs)}, {time.monotonic() - began:.0f} s: {job.task}, {job.contender}, "
                    f"seed {job.seed}: loss {outcome.losses[-1]:.4f}\n"
                )
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
        except Exception as error:
            pool.shutdown(cancel_futures=True)
            sys.stderr.write(f"agmerge compare: a training failed: {type(error).__name__}: {error}\n")
            return 1
    return report(rows_of(found, speed), folder, rate, len(jobs) - len(found))


def check(tasks: Sequence[str], against: Sequence[str], seeds: int, workers: int) -> None:
    """Raise Refused for names that are unknown and numbers that are too small."""
    known = (*sparsifiers.names(), *sparsifiers.quantizers(), *sparsifiers.low_rank_names(), DENSE, "fp16", "bf16")
    for what, names, choice in (("--task", tasks, tuple(TASKS)), ("--against", against, known)):
        for name in names:
            if name not in choice:
                raise Refused(f"{what}: {name!r} is unknown. Choose from: {', '.join(choice)}")
    if seeds < 1 or workers < 1:
        raise Refused("--seeds and --workers must be at least 1")
    if any(TASKS[task].batch % workers for task in tasks):
        raise Refused(f"--workers {workers}: choose a number that divides 32")
    if importlib.util.find_spec("sklearn") is None and set(tasks) - {"gpt-small"}:
        raise Refused("the digits are a file of scikit-learn: pip install scikit-learn, or pass --task gpt-small")


def report(rows: Sequence[Row], folder: Path, rate: str, missing: int) -> int:
    """Print the table, write it as Markdown, CSV and picture, and return the exit code."""
    table = markdown(rows)
    (folder / "compare.md").write_text(f"{table}\n{LEGEND}\nLink: {rate} for each worker.\n", encoding="utf-8")
    with (folder / "compare.csv").open("w", newline="", encoding="utf-8") as out:
        csv.writer(out).writerows([HEAD, *map(cells, rows)])
    (folder / "compare.svg").write_text(picture(rows), encoding="utf-8")
    sys.stdout.write(f"\n{table}\n{LEGEND}\nLink: {rate} for each worker. Tables are in {folder}.\n")
    if missing:
        sys.stdout.write(f"{missing} trainings are missing. Run the same command again to continue.\n")
    return 0 if rows else 1
