# SPDX-License-Identifier: Apache-2.0
"""Pauses of an elastic job's survivors when workers are killed and started, and what being elastic costs a step.

    python benchmarks/elastic.py [--kills 10] [--rate 200mbit] [--model gpt2|mlp]    # the rate needs root

Three workers of one machine, in a network of their own whose only link has that rate. One is killed, at random, every
few steps, and another one started. Then the same training with and without ``elastic=True``, in blocks by turns. Prints
medians in seconds, and one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = "29733"
WORKER = """
import json, os, sys, time
import torch, agmerge
folder, until, kind = sys.argv[1], float(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1); torch.manual_seed(0)
if kind == "gpt2":
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=384, n_layer=8, n_head=6))
    step_of = lambda: model(ids := torch.randint(0, 256, (1, 64)), labels=ids).loss
else:
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256))
    step_of = lambda: (model(x := torch.randn(16, 256)) - x).square().mean()
elastic = os.environ.get("AGMERGE_LIGHTHOUSE")
agmerge.init(elastic=bool(elastic))
setting = json.loads(sys.argv[4])
optimizer = agmerge.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=1e-4), model.named_parameters(), timeout=120, **setting)
state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0) if elastic else None
step = 0
with open(f"{folder}/{os.getpid()}.lines", "a") as lines:
    while (state.step if state else step) < until:
        optimizer.zero_grad(); step_of().backward(); optimizer.step(); step += 1
        if state:
            state.step += 1
            state.commit()
        print(json.dumps([time.monotonic(), state.step if state else step, agmerge.size()]), file=lines, flush=True)
agmerge.shutdown()
"""


def start(folder: Path, steps: int, model: str, setting: str, **more: str) -> subprocess.Popen[bytes]:
    """Start one worker."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    with open(folder / "log", "a") as log:
        command = [sys.executable, str(folder / "worker.py"), str(folder), str(steps), model, setting]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def lines(folder: Path, pid: int) -> list[list[float]]:
    """Return what a worker has written: seconds, step, workers."""
    path = folder / f"{pid}.lines"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(one) for one in whole.splitlines()]


def free_port() -> str:
    """Return a port that nobody uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def wait_for(folder: Path, pids: list[int], count: int) -> None:
    """Wait until each worker has made so many steps."""
    end = time.monotonic() + 600
    while not all(len(lines(folder, pid)) >= count for pid in pids):
        if time.monotonic() > end:
            sys.exit((folder / "log").read_text()[-3000:])
        time.sleep(0.05)


def changes(folder: Path, kills: int, model: str, setting: str) -> dict[str, list[float]]:
    """Kill and start workers; return the pauses of others, less a usual step: of deaths and of arrivals, in seconds."""
    serve = subprocess.Popen([sys.executable, "-m", "agmerge", "lighthouse", "--port", PORT], cwd=ROOT)
    where, chance = {"AGMERGE_LIGHTHOUSE": f"127.0.0.1:{PORT}"}, random.Random(0)
    time.sleep(3)
    workers = [start(folder, 10**6, model, setting, **where) for _ in range(3)]
    found: dict[str, list[float]] = {"death": [], "arrival": []}
    try:
        for _ in range(kills):
            wait_for(folder, [one.pid for one in workers], 15)
            victim = workers.pop(chance.randrange(len(workers)))
            at = len(lines(folder, workers[0].pid))
            victim.kill()
            victim.wait()
            wait_for(folder, [workers[0].pid], at + 12)
            workers.append(start(folder, 10**6, model, setting, **where))
            wait_for(folder, [workers[-1].pid], 8)
            times = lines(folder, workers[0].pid)[at - 8 :]
            usual = statistics.median(after[0] - before[0] for before, after in pairwise(times))
            for before, after in pairwise(times):
                if after[2] < before[2]:
                    found["death"].append(after[0] - before[0] - usual)
                if after[2] > before[2]:
                    found["arrival"].append(after[0] - before[0] - usual)
    finally:
        for one in (*workers, serve):
            one.send_signal(signal.SIGKILL)
            one.wait()
    return found


def cost(folder: Path, rounds: int, model: str, setting: str, steps: int) -> list[float]:
    """Return seconds of a step with ``elastic=True`` / without: medians of launches of so many ``steps``, by turns."""
    ratios = []
    for number in range(rounds):
        medians = {}
        for elastic in (number % 2 == 0, number % 2 == 1):
            serve, more = None, {}
            if elastic:
                serve = subprocess.Popen([sys.executable, "-m", "agmerge", "lighthouse", "--port", PORT], cwd=ROOT)
                time.sleep(3)
                more = {"AGMERGE_LIGHTHOUSE": f"127.0.0.1:{PORT}"}
            common = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29800 + number)}
            workers = [
                start(folder, steps, model, setting, **(more or {**common, "RANK": str(rank)})) for rank in range(3)
            ]
            for one in workers:
                one.wait(600)
            if serve is not None:
                serve.kill()
                serve.wait()
            times = lines(folder, workers[0].pid)[25:]
            medians[elastic] = statistics.median(b[0] - a[0] for a, b in pairwise(times))
        ratios.append(medians[True] / medians[False])
    return ratios


def main() -> None:
    """Measure, in a network namespace of this process's own where a rate is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4, help="blocks with and without elastic=True; 0: none")
    parser.add_argument("--steps", type=int, default=60, help="of each of these blocks, 25 of which are not counted")
    parser.add_argument("--rate", default="", help="of the link, as tc writes it; empty: no limit")
    parser.add_argument("--model", choices=["gpt2", "mlp"], default="gpt2")
    parser.add_argument("--setting", default='{"merging": "threshold", "compression": "eden"}', help="JSON")
    chosen = parser.parse_args()
    if chosen.rate and not os.environ.get("AGMERGE_IN_NAMESPACE"):
        bucket = f"tbf rate {chosen.rate} burst 64kb latency 400ms"
        shaped = f"ip link set lo mtu 1500 up && tc qdisc add dev lo root {bucket}"
        again = " ".join(f"'{word}'" for word in [sys.executable, *sys.argv])
        sys.exit(
            subprocess.call(
                ["unshare", "-n", "sh", "-c", f"{shaped} && exec {again}"],
                env={**os.environ, "AGMERGE_IN_NAMESPACE": "1"},
            )
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "worker.py").write_text(WORKER)
        found = changes(folder, chosen.kills, chosen.model, chosen.setting) if chosen.kills else {}
        ratios = cost(folder, chosen.rounds, chosen.model, chosen.setting, chosen.steps) if chosen.rounds else []
    for what, seconds in found.items():
        print(f"{what}: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s, of {len(seconds)}")
    if ratios:
        told = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"a step with elastic=True takes {told} of the time of one without")
    print(json.dumps({"rate": chosen.rate, "model": chosen.model, "pauses": found, "elastic": ratios}))


if __name__ == "__main__":
    main()
