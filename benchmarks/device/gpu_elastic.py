# SPDX-License-Identifier: Apache-2.0
"""Check 11 of ``benchmarks/gpu.py``: an elastic job of three workers that share a GPU, of which one is killed.

Their tensors go through the host's memory. The others go on: equal to the bit after each step, and to their end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import agmerge
from device.gpu_bench import Bench, bits_of, child_env, free_port
from device.gpu_figures import Figure, must

WORKERS, BEFORE, AFTER = 3, 10, 10  # steps before the kill, at least, and after it
LONGEST = 120.0  # seconds, for each setting
NEXT = 5.0  # seconds from the kill to the others' next step, at most
SETTINGS: dict[str, dict[str, Any]] = {
    "the default": {},
    "topk": {"compression": "topk", "density": 0.01, "exchange": "sparse"},
    "updates": {"sync": "updates", "density": 0.01},
}


def elastic(bench: Bench) -> Iterator[Figure]:
    """Kill a worker with each setting, or with one in a trial of the check; look at what the others say."""
    for name, setting in list(SETTINGS.items())[: 1 if bench.tiny else None]:
        with tempfile.TemporaryDirectory() as folder:
            yield from killed(Path(folder), name, setting, bench.device.type)


def killed(folder: Path, name: str, setting: dict[str, Any], device: str) -> Iterator[Figure]:
    """Run one job, and yield whether the others went on, and how soon."""
    port = str(free_port())
    env = child_env(AGMERGE_LIGHTHOUSE=f"127.0.0.1:{port}")
    running = [subprocess.Popen([sys.executable, "-m", "agmerge", "lighthouse", "--port", port], env=env)]
    logs = [folder / str(number) for number in range(WORKERS)]
    try:
        for log in logs:
            command = [sys.executable, str(Path(__file__).resolve()), json.dumps(setting), device]
            with open(log, "w") as out:
                running.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
        end = time.time() + LONGEST
        while min(len(steps(log)) for log in logs) < BEFORE and time.time() < end:
            time.sleep(0.05)
        running[1].kill()
        at = time.time()
        codes = [process.wait(max(end - time.time(), 1.0)) for process in running[2:]]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = [{step: bits for step, _, bits, _ in steps(log)} for log in logs]
    common = set(said[1]) & set(said[2])
    equal = all(one[step] == said[1][step] for one in said for step in common if step in one)
    ended = codes == [0, 0] and {size for _, size, _, _ in steps(logs[1])[-AFTER:]} == {WORKERS - 1}
    tail = " ".join(log.read_text()[-300:] for log in logs[1:]).replace("\n", " ")
    yield must(11, f"{name}: the others go on without a killed worker", ended, tail)
    yield must(11, f"{name}: they are equal to the bit after each of {len(common)} steps", bool(common) and equal, "")
    later = [moment for log in logs[1:] for _, _, _, moment in steps(log) if moment > at]
    yield Figure(11, f"{name}: their next step ends after", min(later, default=float("nan")) - at, "s", NEXT)


def steps(log: Path) -> list[tuple[int, int, str, float]]:
    """Return what a worker has said after each step: its number, the workers, the parameters' bits, seconds."""
    lines = log.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0].splitlines()
    return [tuple(json.loads(line[5:])) for line in lines if line.startswith("STEP ")]  # type: ignore[misc]


def worker(setting: dict[str, Any], device: str) -> None:
    """Train in an elastic job until so many steps have been made without one of the workers."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 64)).to(device)
    agmerge.init(elastic=agmerge.Elastic(min_workers=2, suspect=2.0))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), check_every=1, **setting)
    state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0, most=0, after=0)
    while state.after < AFTER:
        inputs = torch.randn(32, 64, device=device)
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.most = max(state.most, agmerge.size())
        state.after += state.most == WORKERS > agmerge.size()
        with optimizer.shared():
            bits = bits_of(model)
        print("STEP", json.dumps([state.step, agmerge.size(), bits, time.time()]), flush=True)
        state.commit()
    agmerge.shutdown()


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]), sys.argv[2])
