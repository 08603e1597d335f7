# SPDX-License-Identifier: Apache-2.0
"""Loss of a language model with each contender, beside that of dense training from the same start on the same text.

    make prove                                                        # ten minutes: five contenders, two workers
    make prove ARGS="--size 1m --workers 4 --seeds 2 --contenders dense,default,updates,topk"
    make prove ARGS="--resume"                                        # the same again, from where it was cut off
    make prove ARGS="--size 14m --workers 4,8 --tune --contenders dense,default,updates,local-30,powersgd-4"

Workers are ranks in memory, of one process and on one device: the library's own optimizers, exchanges and codecs, but
no network. Formats are pinned, because in memory nothing is slow and ``auto`` would send everything uncompressed. The
text is the Python source of what is installed, or ``--data``. Results are in runs/prove/NAME: prove.json, prove.png and
prove.svg. A checkpoint is written every two minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

import torch
from evidence import noise, page, report, text
from evidence.contenders import DENSE, OPTIONS, options_of, told
from evidence.jobs import Failed, Jobs, serve
from evidence.models import OPTIMIZERS, SIZES, optimizers_of
from evidence.training import AT_THE_END, OF_A_POINT, POINTS, Training, first_model

from agmerge.backends.horovod import cores

RUNS = Path("runs/prove")
QUICK = ("dense", "default", "updates", "topk", "powersgd-4")
DEFAULTS: dict[str, Any] = {
    "size": "0.25m",
    "workers": [2],
    "tokens": None,  # 20 a parameter
    "batch": None,  # of the size
    "optimizer": "adamw",
    "seeds": None,  # 3, or as many as there is time for
    "contenders": list(QUICK),
    "rates": [1.0],
    "data": None,
    "tune": [],  # learning rates of dense that are tried, in rates of the size
}
TUNED = (0.5, 0.7, 1.0, 1.4, 2.0)  # times the rate of the size
PER_PARAMETER, SEEDS, MOST_SEEDS = 20, 3, 10
FEWER = (20.0, 8.0, 4.0, 2.0, 1.0, 0.5)  # tokens a parameter, for what there is time for
EVALUATED = POINTS * OF_A_POINT + AT_THE_END  # held-out tokens of a training
DEARER, USED = 1.4, 0.9  # a contender's seconds, in those of dense; share of the time that is planned


class Refused(SystemExit):
    """End with a message before anything has begun."""

    def __init__(self, message: str) -> None:
        super().__init__(f"prove: {message}")


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line; what it does not name is None."""

    def words(value: str) -> list[str]:
        return [word for word in re.split(r"[,\s]+", value) if word]

    def numbers(kind: type) -> Any:
        def read(value: str) -> list[Any]:
            found = [kind(word) for word in words(value)]
            if not found or min(found) <= 0:
                raise ValueError
            return found

        read.__name__ = f"positive {kind.__name__}"  # as argparse's error says
        return read

    def count(value: str) -> int:
        number = float(value.rstrip("MKmk")) * {"m": 1e6, "k": 1e3}.get(value[-1:].lower(), 1)
        if number < 1:
            raise ValueError
        return int(number)

    def positive(value: str) -> float:
        if not float(value) > 0:
            raise ValueError
        return float(value)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, help="parameters without embeddings; 0.25m if not given")
    add("--workers", type=numbers(int), metavar="W,W", help="numbers of workers; 2 if not given")
    add("--tokens", type=count, metavar="N", help="tokens of a training, such as 5M; 20 a parameter if not given")
    add("--batch", type=count, metavar="N", help="tokens of a step, of all workers together; by size if not given")
    add("--optimizer", choices=OPTIMIZERS, help="adamw if not given")
    add("--seeds", type=count, metavar="N", help="number of seeds; 3 if not given")
    add("--contenders", type=words, metavar="NAME,NAME", help=f"of {', '.join(OPTIONS)}")
    add("--rates", type=numbers(float), metavar="X,X", help="of contenders, in learning rates of dense; 1 if not given")
    tune = "first find dense's best learning rate, of these, in rates of the size; of 0.5, 0.7, 1, 1.4 and 2 if none"
    add("--tune", type=numbers(float), nargs="?", const=list(TUNED), metavar="X,X", help=f"{tune} is given")
    add("--data", type=Path, metavar="PATH", help="a file or folder of text; without it, installed Python sources")
    add("--minutes", type=positive, metavar="N", help="stop in time, with what there is")
    add("--resume", action="store_true", help="continue a run, with its settings where you give none")
    add("--name", help="of the folder in runs/prove; size and optimizer if not given")
    add("--jobs", type=count, metavar="N", help="trainings side by side; one for each core, or one on a GPU")
    add("--device", help="cpu, or a GPU such as cuda:0; a GPU if there is one")
    add("--record", metavar="RUNG", help="train nothing: copy the run to benchmarks/prove/RUNG.json, for the page")
    add("--page", action="store_true", help="train nothing: write the figures of docs/evidence.md")
    add("--noise", action="store_true", help="only measure the noise scale of the gradient, near the best batch")
    add("--job", metavar="NUMBER:DEVICE", help=argparse.SUPPRESS)
    return parser.parse_args(line)


def settings_of(args: argparse.Namespace, stored: dict[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a run: those given, those of the run that is resumed, the defaults."""
    given = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
    if "data" in given:
        given["data"] = str(given["data"].resolve())
    kept = dict(stored or {})
    if given.get("size", kept.get("size")) != kept.get("size"):
        kept = {name: value for name, value in kept.items() if name not in ("tokens", "batch")}  # of the other size
    return {**DEFAULTS, **kept, **given}


def check(settings: dict[str, Any], device: str, jobs: int) -> None:
    """Raise Refused for settings that cannot work, and for a model that does not fit into memory."""
    size, batch = SIZES[settings["size"]], settings["batch"]
    unknown = [name for name in settings["contenders"] if name not in OPTIONS]
    if unknown:
        raise Refused(f"--contenders: {', '.join(unknown)} is unknown. Choose from: {', '.join(OPTIONS)}.")
    if "dgc" in settings["contenders"] and settings["optimizer"] != "sgd":
        raise Refused("--contenders dgc needs --optimizer sgd: without SGD's momentum dgc is topk. Name topk instead.")
    if min(settings["workers"]) < 2:
        raise Refused("--workers 1: one worker sends nothing. Pass 2 or more; dense always runs as one.")
    for workers in settings["workers"]:
        if batch % (workers * size.context):
            raise Refused(
                f"--batch {batch}: {workers} workers need a multiple of {workers * size.context} tokens, a row of "
                f"{size.context} each."
            )
    if settings["tokens"] is not None and settings["tokens"] < batch:
        raise Refused(f"--tokens {settings['tokens']}: less than the {batch} tokens of one step (--batch).")
    if settings["data"] is not None and not Path(settings["data"]).exists():
        raise Refused(f"--data {settings['data']}: there is no such file or folder.")
    try:
        free = memory_left(device)
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"--device {device}: {error}") from error
    needed = jobs * size.bytes_needed(max(settings["workers"]), batch)
    if needed > free:
        raise Refused(
            f"{max(settings['workers'])} workers of size {settings['size']}, {jobs} trainings side by side, need about "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free. Lower --jobs, --workers, --batch or --size."
        )
    report.require_pictures(Refused)


def memory_left(device: str) -> int:
    """Return the bytes that are free on a device. Raises RuntimeError for one that is not there."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    known = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+)", known.read_text(encoding="ascii")) if known.exists() else None
    limits = [int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    allowed = Path("/sys/fs/cgroup/memory.max")
    if allowed.exists() and (text_ := allowed.read_text(encoding="ascii").strip()) != "max":
        limits.append(int(text_))
    return min(limits)


class Run:
    """Folder of a run: its settings and rows, which are on disk after every training."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "prove.json"
        self.rows: list[dict[str, Any]] = []  # of trainings that have ended
        self.settings: dict[str, Any] = {}  # as last given
        self.data: dict[str, Any] = {}  # facts about the text
        self.best: dict[str, float] = {}  # learning rate of dense, by report.task_of
        self.commands: list[str] = []  # that have made the rows

    @property
    def stored(self) -> dict[str, Any] | None:
        """Return what is on disk; None: nothing is."""
        return dict(json.loads(self.file.read_text(encoding="utf-8"))) if self.file.exists() else None

    def load(self) -> None:
        """Take over what is on disk."""
        stored = self.stored or {}
        self.rows, self.settings = stored.get("rows", []), stored.get("settings", {})
        self.data, self.best, self.commands = stored.get("data", {}), stored.get("best", {}), stored.get("commands", [])

    def begin(self, settings: dict[str, Any], data: dict[str, Any]) -> None:
        """Note settings and text. Raises Refused if the text is another one than that of the rows."""
        if self.rows and self.data["digest"] != data["digest"]:
            raise Refused(
                f"{self.file}: its rows are of a text with digest {self.data['digest']}, and this one has "
                f"{data['digest']}. Use another --name."
            )
        self.settings, self.data = settings, data
        command = f"python benchmarks/prove.py {shlex.join(sys.argv[1:])}".strip()
        self.commands += [command] if command not in self.commands else []
        self.save()

    def tuned(self, rate: float) -> None:
        """Note dense's best learning rate with these settings."""
        self.best[report.task_of(self.settings)] = rate
        self.save()

    def add(self, row: dict[str, Any]) -> None:
        """Keep the row of a training."""
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Write the file."""
        rows = report.with_dense(self.rows, self.best)
        content = {"commands": self.commands, "settings": self.settings, "data": self.data, "best": self.best}
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(row) for row in rows)
        whole = json.dumps({**content, "rows": []}, indent=1).removesuffix("[]\n}") + f"[\n{lines}\n]\n}}\n"
        text.written(self.file, whole.encode())

    def missing(self, trainings: Sequence[Training]) -> list[Training]:
        """Return the trainings that have no row yet."""
        known = {training_of(row) for row in self.rows}
        return [one for one in dict.fromkeys(trainings) if one not in known]


def training_of(row: dict[str, Any]) -> Training:
    """Return the training that a row is of."""
    return Training(**{name: row[name] for name in Training.__dataclass_fields__})


def plan(settings: dict[str, Any], best: float) -> list[Training]:
    """Return all trainings, seed by seed, so that a run that is cut off has pairs."""
    size = SIZES[settings["size"]]
    tokens = settings["tokens"] or PER_PARAMETER * size.parameters
    found = []
    for seed in range(settings["seeds"]):
        one = Training(settings["size"], DENSE, settings["optimizer"], 1, tokens, settings["batch"], seed, best)
        found.append(one)
        for workers in settings["workers"]:
            for factor in sorted(settings["rates"], key=lambda factor: abs(factor - 1)):
                rate = rounded(best * factor)
                names = [name for name in settings["contenders"] if name != DENSE]
                found += [replace(one, contender=name, workers=workers, rate=rate) for name in names]
    return found


def rounded(rate: float) -> float:
    """Return a rate with five digits, so that equal ones are equal."""
    return float(f"{rate:.5g}")


def chosen_tokens(settings: dict[str, Any], seconds: float, per_token: float, jobs: int) -> int:
    """Return as many tokens as leave time for ``SEEDS`` seeds.

    Args:
        settings: of the run.
        seconds: that there are.
        per_token: seconds of one token of dense, in one job.
        jobs: trainings side by side.
    """
    size, seeds = SIZES[settings["size"]], settings["seeds"] or SEEDS
    trainings = len(plan({**settings, "seeds": seeds, "tokens": settings["batch"]}, 1.0))
    rounds = -(-trainings // jobs)
    for amount in FEWER:
        tokens = int(amount * size.parameters)
        if rounds * per_token * (DEARER * tokens + EVALUATED / 3) < USED * seconds:  # a third: forward passes
            return tokens
    return max(settings["batch"], int(FEWER[-1] * size.parameters))


def tuning(settings: dict[str, Any], run: Run, jobs: Jobs, corpus: text.Corpus) -> float | None:
    """Return dense's best learning rate of those tried so far, with one seed; None: there was no time for all."""
    base = SIZES[settings["size"]].rate * OPTIMIZERS[settings["optimizer"]]
    one = plan({**settings, "seeds": 1, "contenders": []}, rounded(base))[0]
    todo = [replace(one, rate=rounded(base * factor)) for factor in settings["tune"]]
    if jobs.make(run.missing(todo), corpus, run.folder / "checkpoints", run.add):
        return None
    losses = {row["rate"]: row["loss"] for row in run.rows if replace(training_of(row), rate=one.rate) == one}
    best = min((loss, rate) for rate, loss in losses.items() if math.isfinite(loss))[1]
    rates = sorted(losses)
    edge = " It is at the end of the range: try others." if best in (rates[0], rates[-1]) else ""
    tell(f"dense's best learning rate is {best:g}, of {', '.join(f'{rate:g}' for rate in rates)}.{edge}")
    return best


def tell(line: str) -> None:
    """Print a line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def prove(args: argparse.Namespace) -> None:
    """Make the trainings, and show the table and the pictures."""
    began = time.monotonic()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    jobs = args.jobs or (cores() if device == "cpu" else 1)
    quick = not any(getattr(args, name) for name in (*DEFAULTS, "minutes", "resume"))
    minutes = args.minutes or (8.5 if quick else None)  # of ten: a first call also installs
    run = folder_of(args)
    run.load()
    settings = settings_of(args, run.settings)
    size = SIZES[settings["size"]]
    settings["batch"] = settings["batch"] or size.batch
    check(settings, device, jobs)
    lock = locked(run.folder)
    tell("reading the text")
    source = Path(settings["data"]) if settings["data"] else None
    try:
        known = run.data.get("digest") if run.settings.get("data") == settings["data"] else None
        corpus = text.prepared(source, size.vocabulary, RUNS / "texts", known)
    except text.NoText as error:
        raise Refused(str(error)) from error
    run.begin(settings, corpus.facts())
    deadline = None if minutes is None else began + 60 * minutes
    with Jobs(jobs, device, tell, deadline) as pool:
        if settings["tokens"] is None and minutes is not None:
            per_token = pool.seconds_per_token(settings["size"], settings["batch"])
            left = deadline - time.monotonic() if deadline else 0.0
            settings["tokens"] = chosen_tokens(settings, left, per_token, jobs)
        settings["tokens"] = settings["tokens"] or PER_PARAMETER * size.parameters
        settings["seeds"] = settings["seeds"] or (MOST_SEEDS if minutes else SEEDS)
        run.begin(settings, corpus.facts())
        introduce(settings, corpus, device, jobs)
        try:
            best = run.best.get(report.task_of(settings), 0.0)
            if args.tune or (settings["tune"] and not best):
                best = tuning(settings, run, pool, corpus) or 0.0
            elif not best:
                best = rounded(size.rate * OPTIMIZERS[settings["optimizer"]])
            left_out = None
            if best:
                run.tuned(best)
                todo = run.missing(plan(settings, best))
                left_out = pool.make(todo, corpus, run.folder / "checkpoints", run.add)
        except KeyboardInterrupt:
            raise Refused("interrupted. To continue, add --resume.") from None
        except Failed as error:
            raise Refused(f"{error}. Rows so far are in {run.file}; --resume continues.") from error
    show(run, corpus)
    if left_out or not best:
        unpaired = "" if not left_out else f" {len(left_out)} trainings were left out."
        tell(f"The time was up.{unpaired} To continue, add --resume.")
    lock.close()


def folder_of(args: argparse.Namespace) -> Run:
    """Return the run that the command line is about. Raises Refused if it is there and not to be resumed."""
    name = args.name or f"{args.size or DEFAULTS['size']}-{args.optimizer or DEFAULTS['optimizer']}"
    run = Run(RUNS / name)
    if run.file.exists() and not (args.resume or args.record):
        raise Refused(f"{run.file} exists. Add --resume to continue it, or --name for another run.")
    if args.record and not run.file.exists():
        raise Refused(f"{run.file}: there is no such run.")
    return run


def locked(folder: Path) -> Any:
    """Return a file that says that a run is under way. Raises Refused if another process has it."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Refused(f"{folder}: another process is working on this run. Use another --name.") from error
    return lock


def introduce(settings: dict[str, Any], corpus: text.Corpus, device: str, jobs: int) -> None:
    """Print model, text, batch, device and the arguments of each contender."""
    size, tokens = SIZES[settings["size"]], settings["tokens"]
    kind = "bytes" if size.vocabulary == text.BYTES else "byte pairs"
    tell(
        f"GPT of {size.parameters / 1e6:.2f} M parameters without embeddings, {settings['optimizer']}, "
        f"{tokens / 1e6:.2f} M tokens ({kind}) in steps of {settings['batch']}; {device}, {jobs} at a time"
    )
    tell(
        f"text {corpus.digest}: {corpus.files} files, {corpus.train / 1e6:.0f} M tokens for training, "
        f"{corpus.held_out / 1e6:.1f} M held out; {tokens / corpus.train:.2g} epochs"
    )
    example = first_model(Training(settings["size"], DENSE, settings["optimizer"], 1, 1, 1, 0, 1.0))
    inner = optimizers_of(settings["optimizer"], example, 1.0)
    for name in dict.fromkeys([DENSE, *settings["contenders"]]):
        tell(f"  {name}: {told(name, options_of(name, inner))}")


def show(run: Run, corpus: text.Corpus) -> None:
    """Print the table, and draw the pictures."""
    print(f"\n{report.table(run.rows, run.best)}\n")
    if run.settings["tokens"] > corpus.train:
        print(f"Each training reads its text {run.settings['tokens'] / corpus.train:.1f} times.")
    print(report.LIMITS)
    files = report.picture(run.rows, run.best, run.folder)
    print(f"{run.file}, {', '.join(map(str, files))}", flush=True)


def main() -> None:
    """Train, or write down what was trained."""
    args = arguments()
    if args.job:
        answers, sys.stdout = sys.stdout, sys.stderr
        serve(args.job, sys.stdin, answers)
    elif args.noise:
        settings = settings_of(args, None)
        size = SIZES[settings["size"]]
        corpus = text.prepared(Path(settings["data"]) if settings["data"] else None, size.vocabulary, RUNS / "texts")
        (training,) = plan(
            {**settings, "seeds": 1, "contenders": [], "batch": settings["batch"] or size.batch}, size.rate
        )
        for tokens, scale in noise.noise_scales(training, corpus):
            tell(f"after {tokens / 1e6:.2f} M tokens: {scale:.0f} tokens")
    elif args.page:
        page.write_page()
    elif args.record:
        run = folder_of(args)
        run.load()
        if len({report.task_of({**row, "batch": 0}) for row in run.rows}) != 1:
            raise Refused(f"--record: a rung has one size and one optimizer. {run.file} has none, or several.")
        print(page.record(run.file, args.record))
    else:
        prove(args)


if __name__ == "__main__":
    main()
