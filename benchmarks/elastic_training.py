# SPDX-License-Identifier: Apache-2.0
"""Loss of a training whose workers are killed and replaced, beside one that is left alone and sees as many batches.

    python benchmarks/elastic_training.py [--setting default|dgc|updates] [--seeds 5] [--first 0] [--clip NORM]

A small GPT-2 learns the standard library's own source text, byte by byte, with four workers of this machine. One is
killed every hundred steps, another one comes fifty steps later. Prints, for each seed, the loss on text that was held
back, which all workers evaluate alike, and its ratio to that of the uninterrupted training: at the step after which its
four workers have made as many batches, which is an earlier one, and at the same step, after more batches. Then the
medians of ratios, and one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic import ROOT, free_port, lines, start, wait_for

SETTINGS = {  # optimizer, and arguments of agmerge.DistributedOptimizer
    "default": ("AdamW", {"compression": "eden"}),
    "dgc": ("SGD", {"compression": "dgc", "density": 0.01, "exchange": "sparse"}),
    "updates": ("AdamW", {"sync": "updates", "density": 0.01, "exchange": "sparse"}),
}
WORKER = """
import contextlib, json, os, pathlib, sys, time
import torch, agmerge
from transformers import GPT2Config, GPT2LMHeadModel
folder, until, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
kind, setting, clip, evaluated = json.loads(sys.argv[4])
torch.set_num_threads(1); torch.manual_seed(seed)
library = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
text = torch.tensor(list(b"".join(path.read_bytes() for path in library)), dtype=torch.uint8)
held_back = len(text) * 9 // 10
def batch(number, start, stop):
    source = torch.Generator().manual_seed(number)
    at = torch.randint(start, stop - 64, (8, 1), generator=source)
    return text[at + torch.arange(64)].long()
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
loss_of = lambda ids: model(ids, labels=ids).loss
def evaluate():
    with torch.no_grad(), optimizer.shared() if setting.get("sync") == "updates" else contextlib.nullcontext():
        return sum(loss_of(batch(-1 - number, held_back, len(text))).item() for number in range(100)) / 100
if kind == "SGD":
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
else:
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
while "AGMERGE_WAITS" in os.environ and not (folder / f"{os.getpid()}.enter").exists():
    time.sleep(0.02)
agmerge.init(elastic=agmerge.Elastic(suspect=60.0))  # others may use this machine: who is late is not dead
optimizer = agmerge.DistributedOptimizer(
    inner, model.named_parameters(), timeout=120, merging="threshold", **setting)
state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0)
def step():
    if not clip:
        return optimizer.step()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    with optimizer.skip_synchronize():
        optimizer.step()
with open(folder / f"{os.getpid()}.lines", "a") as lines:
    losses = {}
    while state.step < until:
        optimizer.zero_grad()
        number = (seed * 100_000 + state.step) * 16 + agmerge.rank()
        loss_of(batch(number, 0, held_back)).backward()
        step(); state.step += 1; state.commit()
        print(json.dumps([time.monotonic(), state.step, agmerge.size()]), file=lines, flush=True)
        if state.step in evaluated:
            losses[state.step] = evaluate()
(folder / f"{os.getpid()}.loss").write_text(json.dumps(losses))
agmerge.shutdown()
"""


class Training:
    """Lighthouse and workers of one training."""

    def __init__(self, folder: Path, chosen: argparse.Namespace, seed: int, evaluated: list[int]) -> None:
        """Start all. ``evaluated``: steps after which the loss is evaluated; the last one ends the training."""
        (folder / "worker.py").write_text(WORKER)
        arguments = json.dumps([*SETTINGS[chosen.setting], chosen.clip, evaluated])
        self.folder, self.arguments = folder, (evaluated[-1], str(seed), arguments)
        self.killed: list[subprocess.Popen[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []  # those that wait to be let in, too
        self.port = free_port()
        command = [sys.executable, "-m", "agmerge", "lighthouse", "--port", self.port]
        self.lighthouse = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        self.lighthouse.stdout.readline()  # its address: it serves from now on
        self.workers = [self.start() for _ in range(chosen.workers)]

    def start(self, **more: str) -> subprocess.Popen[bytes]:
        """Start a worker; with ``AGMERGE_WAITS`` it does not join before :meth:`let_in`."""
        self._started.append(start(self.folder, *self.arguments, AGMERGE_LIGHTHOUSE=f"127.0.0.1:{self.port}", **more))
        return self._started[-1]

    def reach(self, step: int) -> None:
        """Wait until a worker has made this step."""
        while max(self.last_step(one) for one in self.workers) < step:
            for one in self.workers:
                assert one.poll() in (None, 0), (self.folder / "log").read_text()[-3000:]
            time.sleep(0.05)

    def last_step(self, worker: subprocess.Popen[bytes]) -> float:
        """Return the last step that a worker has made; 0: none."""
        return (lines(self.folder, worker.pid) or [[0, 0, 0]])[-1][1]

    def kill(self, number: int) -> None:
        """Kill a worker."""
        victim = self.workers.pop(number)
        victim.kill()
        victim.wait()
        self.killed.append(victim)

    def let_in(self, spare: subprocess.Popen[bytes]) -> None:
        """Admit a worker that was started to wait, and wait for its first step; it may come too late for that."""
        (self.folder / f"{spare.pid}.enter").touch()
        while not lines(self.folder, spare.pid):
            assert spare.poll() is None, (self.folder / "log").read_text()[-3000:]
            if any(one.poll() is not None for one in self.workers):
                spare.kill()
                spare.wait()
                return
            time.sleep(0.05)
        self.workers.append(spare)

    def losses(self) -> list[float]:
        """Wait for the end; return the losses, which are the same on all workers."""
        codes = [one.wait(1800) for one in self.workers]
        assert not any(codes), (self.folder / "log").read_text()[-3000:]
        losses = {(self.folder / f"{one.pid}.loss").read_text() for one in self.workers}
        assert len(losses) == 1, f"workers differ: {losses}"
        return list(json.loads(losses.pop()).values())

    def batches(self) -> int:
        """Return how many batches all workers together have made; those of steps that killed ones began are not."""
        return sum(len(lines(self.folder, one.pid)) for one in (*self.workers, *self.killed))

    def close(self) -> None:
        """End all processes."""
        for one in (*self._started, self.lighthouse):
            one.kill()
            one.wait()


def trained(chosen: argparse.Namespace, seed: int, evaluated: list[int], every: int) -> dict[str, Any]:
    """Train; return the losses after steps ``evaluated``, seconds from the first step to the last one, and batches.

    ``every``: steps from one kill to the next; 0: none.
    """
    chance, steps = random.Random(seed), evaluated[-1]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        training = Training(folder, chosen, seed, evaluated)
        try:
            wait_for(folder, [one.pid for one in training.workers], 1)
            began = min(lines(folder, one.pid)[0][0] for one in training.workers)
            for due in range(every, steps, every) if every else ():
                spare = training.start(AGMERGE_WAITS="1")
                training.reach(due)
                training.kill(chance.randrange(len(training.workers)))
                training.reach(due + chosen.later)
                training.let_in(spare)
            losses = training.losses()
            ended = max(lines(folder, one.pid)[-1][0] for one in training.workers)
            sizes = [size for _, _, size in lines(folder, training.workers[0].pid)]
            return {
                "losses": losses,
                "seconds": ended - began,
                "steps": evaluated,
                "batches": training.batches(),
                "killed": len(training.killed),
                "arrived": len(training.workers) + len(training.killed) - chosen.workers,
                "steps of fewer": sizes.count(chosen.workers - 1),
            }
        finally:
            training.close()


def main() -> None:
    """Train by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=list(SETTINGS), default="default")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--clip", type=float, default=0.0, help="norm to which combined gradients are clipped; 0: none")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--every", type=int, default=100, help="steps between two kills")
    parser.add_argument("--later", type=int, default=50, help="steps from a kill to the arrival of another worker")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    chosen = parser.parse_args()
    if chosen.clip and chosen.setting == "updates":
        parser.error("--clip: no gradients are combined with sync='updates'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are ended then, too
    pairs = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        killed = trained(chosen, seed, [chosen.steps], chosen.every)
        equal = round(killed["batches"] / chosen.workers)
        alone = trained(chosen, seed, [equal, chosen.steps], 0)
        loss, (as_many, more) = killed["losses"][0], alone["losses"]
        pair = {"seed": seed, "killed": killed, "alone": alone, "ratio": loss / as_many, "same steps": loss / more}
        pairs.append(pair)
        print(f"seed {seed}: {killed['killed']} killed, {killed['batches']} batches, loss {loss:.4f}; alone ", end="")
        print(f"{as_many:.4f} after {equal} steps, {more:.4f} after {chosen.steps}", flush=True)
    for what, words in (("ratio", "as many batches"), ("same steps", "as many steps")):
        ratios = [pair[what] for pair in pairs]
        told = f"median {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
        print(f"{chosen.setting}: loss with kills / without, {words}: {told}, {len(ratios)} seeds")
    print(json.dumps({**vars(chosen), "pairs": pairs}))


if __name__ == "__main__":
    main()
