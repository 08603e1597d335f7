# SPDX-License-Identifier: Apache-2.0
"""Seconds per step, what of it is communication, and bytes: this library beside others, on a slow network.

    make bench                                                   # all cells, an hour at most; finished ones are kept
    python benchmarks/step_time.py --models gpt2 --rates 200mbit --workers 2
    python benchmarks/step_time.py --link shared                 # both directions of all workers share the rate
    python benchmarks/step_time.py --contenders DDP "DDP PowerSGD" "agmerge acpsgd" --against "DDP PowerSGD"
    python benchmarks/step_time.py --peer grace=grace_peer.py    # a library that is brought along: speed/contenders.py
    python benchmarks/step_time.py --report                      # only read what has been measured

A cell is a model, a rate, a link and a number of workers on this machine. Its contenders are started once, each a job
of its own, and take blocks of steps in turn, every round in another order, while the others are frozen. One that takes
at most twice as long as the floor takes ``--blocks`` of them, and up to twice as many until its interval is ``--width``
wide; a slower one as many as fit into ``--seconds``. ``/ floor`` is the ratio of medians in the same round to a job
that trains alone and gathers eight bytes a step, with its bootstrap interval over rounds; "floor again" is a second
such job, the A/A. ``--against`` adds the ratio to another contender, which says more where both are far from the floor.
Where all would be more processes than memory holds (``--together``), they come in groups, each beside a floor of its
own; between two groups there are no ratios. Bytes are what left the network interfaces, per step and worker. Peers take
part where all contenders do. ``--link duplex``: every worker is at a full-duplex port with the rate, as at a switch;
``shared``: on one medium, see network.py. Where there can be no namespaces, only unshaped cells are run, on the machine
as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab import rendezvous
from lab.interleaved import Job, Stage
from lab.intervals import interval
from lab.network import LINKS, Machine, named, usable
from speed.contenders import CONTENDERS, KNOWN, Contender

FLOOR = "floor"
CELLS = [
    *[("gpt2", rate, 2) for rate in ("200mbit", "1gbit", "none", "100mbit")],
    *[(model, rate, 2) for model in ("resnet50", "cnn") for rate in ("200mbit", "1gbit", "none")],
    *[("gpt2", rate, 4) for rate in ("200mbit", "1gbit", "none")],
]
# Where not all contenders take part.
LIGHT = ("no exchange", FLOOR, "agmerge", "agmerge eden-2", "agmerge eden-4", "agmerge topk", "agmerge powersgd",
         "agmerge acpsgd", "Horovod", "Horovod fp16", "DDP", "DDP bf16", "DDP PowerSGD", f"{FLOOR} again")  # fmt: skip
WHOLE = [("gpt2", rate, 2) for rate in ("200mbit", "1gbit")]
MOST = 0.25  # of the seconds of a slow contender, that one block may take: it takes fewer steps a block
NEAR = 2.0  # times the floor
TOGETHER = 20  # processes, of 0.6 to 1 GB


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="seconds per step beside other libraries, on a slow network")
    parser.add_argument("--models", nargs="+", choices=("gpt2", "resnet50", "cnn"))
    parser.add_argument("--rates", nargs="+", help="as tc writes them, or none")
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--link", choices=LINKS, default="duplex", help="what has the rate, see network.py")
    parser.add_argument("--contenders", nargs="+", help=f"of {', '.join(CONTENDERS)}; the default is all")
    parser.add_argument("--peer", nargs="+", default=[], metavar="NAME=FILE", help="see speed/contenders.py")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the blocks of one that is slow")
    parser.add_argument("--width", type=float, default=0.10, help="of the interval of one that is near the floor")
    parser.add_argument("--together", type=int, default=TOGETHER, metavar="PROCESSES", help="that memory holds")
    parser.add_argument("--against", default="", metavar="NAME", help="a contender to hold all others against, too")
    parser.add_argument("--out", type=Path, default=Path("runs/step_time.jsonl"), help="one line a cell")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    return parser.parse_args()


def command(stage: Stage, name: str, model: str, peers: dict[str, str]) -> Job:
    """Start a contender."""
    one = KNOWN.get(name.removesuffix(" again")) or Contender("peer", horovod=True)
    trained = peers.get(name, name.removesuffix(" again"))
    line = [sys.executable, "-W", "ignore", "-m", "speed.contenders", trained, model]
    if not one.horovod:
        return stage.start(name, line)
    network = stage.network
    if one.horovod == "mpi":
        return stage.start(name, line, launcher=rendezvous.mpirun(network), **rendezvous.PATIENT)
    server = network.launch([sys.executable, "-m", "lab.rendezvous", str(network.workers)], {})
    assert server.stdout is not None
    port = server.stdout.readline()
    if not port.strip().isdigit():
        raise RuntimeError(f"{name}: {port}{server.communicate()[0]}")
    return stage.start(name, line, **rendezvous.variables(network.address, int(port), network.interface))


def groups(names: list[str], workers: int, together: int = TOGETHER) -> list[list[str]]:
    """Return the contenders that are started together, each time with the floor: at most ``together`` processes."""
    others, size = [name for name in names if name != FLOOR], max(1, together // workers - 1)
    count = -(-len(others) // size)
    return [[FLOOR, *others[number::count]] for number in range(count)] or [[FLOOR]]


def joined(parts: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """What groups have found, as if it were one: their rounds follow each other."""
    found: dict[str, Any] = {}
    first = 0
    for part in parts:
        for name, one in part.items():
            known = found.setdefault(name, {**one, "seconds": [], "bytes": [], "rounds": []})
            known["seconds"] += one["seconds"]
            known["bytes"] += one["bytes"]
            known["rounds"] += [first + number for number in one["rounds"]]
        first += 1 + max((number for one in part.values() for number in one["rounds"]), default=0)
    return {name: found[name] for name in dict.fromkeys([*names, FLOOR]) if name in found}


def measure(stage: Stage, names: list[str], model: str, peers: dict[str, str], args: argparse.Namespace) -> Any:
    """Start contenders, and let them take turns. What was found, by contender."""
    jobs, found = {}, {}
    for name in names:
        try:
            jobs[name] = command(stage, name, model, peers)
        except RuntimeError as error:
            print(f"  {name} does not take part: {str(error)[-600:]}", flush=True)
            continue
        found[name] = {"seconds": [], "bytes": [], "rounds": []}
    left = dict.fromkeys(jobs, args.seconds)
    typical: dict[str, float] = {}
    for number in range(2 * args.blocks):
        near = [name for name, took in typical.items() if took <= NEAR * typical.get(FLOOR, 0.0)]
        turns = list(jobs)
        if number >= args.blocks:
            others = [name for name in (FLOOR, args.against) if name in jobs]
            wide = [name for name in near if any(high_less_low(found, name, to) > args.width for to in others)]
            turns = list(dict.fromkeys([*others, *wide])) if wide else []
        for name in random.Random(number).sample(turns, len(turns)):
            job, expected, steps = jobs[name], typical.get(name, 0.0), args.steps if name in near else 1
            if name not in near:
                if left[name] < expected:
                    continue
                steps = max(1, min(args.steps, int(MOST * args.seconds / expected))) if expected else 1
            before, start = stage.network.sent(), time.perf_counter()
            told = job.block(steps)
            left[name] -= time.perf_counter() - start
            sent = (stage.network.sent() - before) / steps / len(told)
            took = statistics.fmean(statistics.median(one["seconds"]) for one in told)
            typical[name] = took
            found[name]["seconds"].append(took)
            found[name]["bytes"].append(sent)
            found[name]["rounds"].append(number)
            more = {key: value for key, value in told[0].items() if key != "seconds"}
            found[name].update(more)
    return found


def ratios(found: dict[str, Any], name: str, to: str = FLOOR) -> list[float]:
    """Return a contender's blocks over those of another one, the floor if not said, in the same rounds."""
    other = dict(zip(found[to]["rounds"], found[to]["seconds"], strict=True)) if to in found else {}
    pairs = zip(found[name]["rounds"], found[name]["seconds"], strict=True)
    return [seconds / other[number] for number, seconds in pairs if number in other]


def ratio_text(values: list[float]) -> str:
    """Return the middle of ratios and its interval, as a cell of a table."""
    middle, low, high = interval(values) if values else (float("nan"),) * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def high_less_low(found: dict[str, Any], name: str, to: str) -> float:
    """Return how wide the interval of the ratio to ``to`` is; 0 where there is none."""
    here = ratios(found, name, to)
    if not here:
        return 0.0
    _, low, high = interval(here)
    return high - low


def cells_of(path: Path) -> list[dict[str, Any]]:
    """What is in a file of results, a cell a line; none if it is not there. Before links had names they were shared."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [{"link": "shared", **json.loads(line)} for line in lines]


def titled(cell: dict[str, Any]) -> str:
    """What a cell is of, in words."""
    return f"{cell['model']}, {cell['workers']} workers, {named(cell['rate'], cell['link'])}"


def table(cell: dict[str, Any], against: str = "") -> str:
    """Return one cell, as text; with ``against``, a contender, all others are held against it, too."""
    found = cell["found"]
    alone = statistics.median(found["no exchange"]["seconds"]) if "no exchange" in found else None
    lines = [f"**{titled(cell)}** ({cell['date']})", ""]
    more = [f"/ {against}"] if against else []
    head = ["ms a step", "/ floor", *more, "communication, ms", "MB a step", "blocks"]
    lines += [f"| | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for name, one in found.items():
        if not one["seconds"]:
            continue
        typical = statistics.median(one["seconds"])
        here = ratios(found, name)
        compared = [ratio_text(here), *(ratio_text(ratios(found, name, against)) for _ in more)]
        waits = "" if alone is None else f"{1e3 * (typical - alone):.0f}"
        size = f"{statistics.median(one['bytes']) / 1e6:.2f}"
        lines.append(f"| {name} | {1e3 * typical:.0f} | {' | '.join(compared)} | {waits} | {size} | {len(here)} |")
    return "\n".join([*lines, ""])


def wanted_cells(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return the cells to measure: the usual ones with these models, rates and workers, or all, if each is given."""
    if args.models and args.rates and args.workers:
        return list(itertools.product(args.models, args.rates, args.workers))
    asked = ((args.models, 0), (args.rates, 1), (args.workers, 2))
    found = [cell for cell in CELLS if all(not values or cell[place] in values for values, place in asked)]
    if not found:
        raise SystemExit("step_time: none of the usual cells is like this. Name --models, --rates and --workers.")
    return found


def main() -> None:
    """Measure the cells that are missing, then print all."""
    args = arguments()
    peers = dict(one.split("=", 1) for one in args.peer)
    cells = cells_of(args.out)
    known = {(cell["model"], cell["rate"], cell["workers"], cell["link"]) for cell in cells}
    wanted = [] if args.report else wanted_cells(args)
    why = usable()
    link, kind = args.link, LINKS[args.link]
    if why and not args.report:
        print(f"no shaped network here: {why}. Run as root on Linux for the others; unshaped cells follow", flush=True)
        wanted, link, kind = [cell for cell in wanted if cell[1] == "none"], "shared", Machine
    for model, rate, workers in wanted:
        if (model, rate, workers, link) in known:
            continue
        print(titled({"model": model, "workers": workers, "rate": rate, "link": link}), flush=True)
        whole = [*CONTENDERS, f"{FLOOR} again", *peers] if (model, rate, workers) in WHOLE else LIGHT
        names = args.contenders or list(whole)
        parts = []
        for group in groups(names, workers, args.together):
            with kind(workers, None if rate == "none" else rate) as network, Stage(network) as stage:
                parts.append(measure(stage, group, model, peers, args))
        found = joined(parts, names)
        date = time.strftime("%Y-%m-%d")
        where = {"model": model, "rate": rate, "link": link, "workers": workers}
        cells.append({**where, "date": date, "found": found})
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(cells[-1]) + "\n")
        print(table(cells[-1], args.against), flush=True)
    if args.report:
        for cell in cells:
            print(table(cell, args.against))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
