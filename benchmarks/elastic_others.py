# SPDX-License-Identifier: Apache-2.0
"""What a killed worker costs the others, here and under torchrun, Horovod Elastic and torchft: by turns, in one run.

    python benchmarks/elastic_others.py [--kills 20] [--turns 4] [--rate 200mbit] [--only agmerge,torchft] # needs root

Three workers of one machine, in a network of their own whose only link has that rate, train a GPT-2 of 13.8 million
parameters with AdamW. One is killed, at random, every few steps, and replaced. Each contender's turn is in namespaces
of its own, which end with all that it has started. ``--install-torchft`` first makes build/torchft-venv.

Prints medians over all kills, and one JSON object on the last line. "death", "arrival": the longest time without a
finished step, less a usual step of those who make the next one, and the worst of it. "from kill": from the SIGKILL to
the others' next finished step; how long the step under way had lasted before is not in it. "again": steps begun in vain
at a death. "goodput": steps gained from first to last x usual step / seconds. torchrun starts all workers again, so a
death is an arrival there, too.

    python benchmarks/elastic_others.py --every 60 --minutes 10 --turns 1 [--file-every 100]

kills by the clock instead: a worker at the beginning of each minute, whose replacement starts at once; while that has
not come, no other is killed ("skipped"). "goodput": steps gained / steps that those present would have made without an
interruption = seconds with all / a step of all + seconds with one away / a step of the others. Away: from the kill to
its replacement's first finished step. Steps of both are measured without kills, before (of all: after, too), for as
long as between two kills. torchrun has no step of the others; that of all holds throughout. "pauses": the share of time
without a finished step, beyond a usual one, where it is more than two.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recovery.contenders import CONTENDERS, WORKERS, install_torchft
from recovery.goodput import ClockTurn
from recovery.turn import MEASURED, Turn

HEADS = "contender | death s | worst | from kill s | worst | arrival s | worst | again | a step s | MB a step"
HEADS += " | goodput | steps/min"
BY_CLOCK = "contender | goodput | steps/min | kills | skipped | pauses % | a step s | of one less | MB a step"
SPACES = "setpriv --pdeathsig KILL unshare --net --uts --pid --fork --mount-proc --kill-child"


def isolated(arguments: Sequence[str], name: str, kills: int, number: int, limit: float) -> dict[str, Any]:
    """Run one turn in namespaces of its own; return what it has measured, with "failed" where it did not end well."""
    more = ["--turn", name, "--kills", str(kills), "--number", str(number)]
    command = [*SPACES.split(), sys.executable, str(Path(__file__).resolve()), *arguments, *more]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit, start_new_session=True)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {limit:g} s"}
    if done.returncode:
        return {"failed": f"its driver ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def turn(chosen: argparse.Namespace) -> dict[str, Any]:
    """Shape this namespace's link, and return what one contender's turn has measured."""
    socket.sethostname("localhost")  # what workers look up is then here
    for command in ("ip link set lo mtu 1500 up", *(f"ip addr add 127.0.0.{n}/8 dev lo" for n in range(2, 200))):
        subprocess.run(command.split(), check=True)
    if chosen.rate:
        bucket = f"tc qdisc add dev lo root tbf rate {chosen.rate} burst 64kb latency 400ms"
        subprocess.run(bucket.split(), check=True)
    with tempfile.TemporaryDirectory() as folder:
        job = CONTENDERS[chosen.turn](Path(folder), chosen.model, chosen.suspect, chosen.file_every)
        if chosen.every:
            by_clock = ClockTurn(job, chosen.patience, chosen.number, chosen.every)
            found = by_clock.run_by_clock(chosen.steps, round(60 * chosen.minutes / chosen.every))
        else:
            found = Turn(job, chosen.patience, chosen.number).run(chosen.kills, chosen.steps)
        if chosen.logs:
            shutil.copy(Path(folder, "log"), Path(chosen.logs, f"{chosen.turn}.{chosen.number}.log"))
        return found


def row(name: str, turns: Sequence[dict[str, Any]]) -> list[str]:
    """Return one contender's cells: medians over all its turns."""
    failures = [one["failed"].splitlines()[0] for one in turns if "failed" in one]
    every = {key: [x for one in turns for x in one.get(key, ())] for key in MEASURED}
    if not every["deaths"]:
        return [name, failures[0] if failures else "nothing measured"]
    whole = [one for one in turns if "failed" not in one]
    goodputs = [one["useful"] * statistics.median(one["steps"]) / one["seconds"] for one in whole]
    rates = [60 * one["useful"] / one["seconds"] for one in whole]
    cells = [name]
    for values in (every["deaths"], every["from_kill"], every["arrivals"]):
        cells += [f"{statistics.median(values):.1f}", f"{max(values):.1f}"] if values else ["-", "-"]
    for values, form in ((every["repeated"], "g"), (every["steps"], ".2f"), (every["megabytes"], ".1f")):
        cells.append(format(statistics.median(values), form))
    for values, form in ((goodputs, ".2f"), (rates, ".1f")):
        cells.append(format(statistics.median(values), form) if values else "-")
    return [*cells, *(f"failed {len(failures)} of {len(turns)} turns: {failures[0]}" for _ in failures[:1])]


def row_by_clock(name: str, turns: Sequence[dict[str, Any]]) -> list[str]:
    """Return one contender's cells of kills by the clock: medians over its turns that ended well."""
    failures = [one["failed"].splitlines()[0] for one in turns if "failed" in one]
    whole = [one for one in turns if "failed" not in one]
    if not whole:
        return [name, failures[0]]
    columns = [
        ([one["goodput"] for one in whole], ".3f"),
        ([60 * one["gained"] / one["seconds"] for one in whole], ".1f"),
        ([one["kills"] for one in whole], "g"),
        ([one["skipped"] for one in whole], "g"),
        ([100 * one["paused"] / one["seconds"] for one in whole], ".1f"),
        ([one["paces"][str(WORKERS)] for one in whole], ".2f"),
        ([one["paces"][str(WORKERS - 1)] for one in whole if str(WORKERS - 1) in one["paces"]], ".2f"),
        ([x for one in whole for x in one["megabytes"]], ".1f"),
    ]
    cells = [format(statistics.median(values), form) if values else "-" for values, form in columns]
    return [name, *cells, *(f"failed {len(failures)} of {len(turns)} turns: {failures[0]}" for _ in failures[:1])]


def main() -> None:
    """Run the contenders by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each contender, in all its turns")
    parser.add_argument("--turns", type=int, default=4, help="of each contender")
    parser.add_argument("--steps", type=int, default=6, help="at least, before a kill; up to twice as many")
    parser.add_argument("--every", type=float, default=0, help="seconds from one kill to the next, by the clock")
    parser.add_argument("--minutes", type=float, default=10, help="of kills by the clock, in each turn")
    parser.add_argument("--file-every", type=int, default=10, help="steps from one file to the next, of torchrun")
    parser.add_argument("--rate", default="200mbit", help="of the link, as tc writes it; empty: no limit")
    parser.add_argument("--model", choices=["gpt2", "mlp"], default="gpt2")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, with commas between")
    parser.add_argument("--patience", type=float, default=400, help="seconds to wait for a few steps")
    parser.add_argument("--suspect", type=int, default=5, help="seconds without a sign of life, of agmerge and torchft")
    parser.add_argument("--install-torchft", action="store_true")
    parser.add_argument("--logs", default="", help="a folder for what workers print")
    parser.add_argument("--turn", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.turn:
        print(json.dumps(turn(chosen)), flush=True)
        return
    if os.geteuid() or not all(shutil.which(tool) for tool in ("setpriv", "unshare", "ip", "tc")):
        sys.exit("namespaces of its own need root, setpriv and unshare (util-linux), ip and tc (iproute2)")
    if chosen.install_torchft and CONTENDERS["torchft"].missing():
        install_torchft()
    names = chosen.only.split(",")
    absent = {name: why for name in names if (why := CONTENDERS[name].missing())}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names if name not in absent}
    for number in range(chosen.turns):
        kills = (chosen.kills + number) // chosen.turns  # together as many as were asked for
        for name in found if kills else ():
            limit = (kills * 4 + 2) * chosen.patience
            if chosen.every:
                limit = 60 * chosen.minutes + 3 * chosen.every + 8 * chosen.patience
            found[name].append(isolated(sys.argv[1:], name, kills, number, limit))
            print(f"turn {number}, {name}: {json.dumps(found[name][-1])}", file=sys.stderr, flush=True)
    print(BY_CLOCK if chosen.every else HEADS)
    cells = row_by_clock if chosen.every else row
    for name in names:
        print(" | ".join([name, f"not here: {absent[name]}"] if name in absent else cells(name, found[name])))
    print(json.dumps({**vars(chosen), "workers": WORKERS, "absent": absent, "found": found}))


if __name__ == "__main__":
    main()
