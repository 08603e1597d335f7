# SPDX-License-Identifier: Apache-2.0
"""Loss of a training of which a worker is killed every so many steps, beside that of one that is left alone.

    python benchmarks/elastic_training.py [--steps 800] [--every 100] [--seeds 2]

A small GPT-2 learns the standard library's own source text, byte by byte, with AdamW and three workers of this machine.
A worker that was killed is replaced at once by a new one. Prints the loss on text that was held back, which all workers
evaluate alike, seconds, and one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elastic import PORT, ROOT, lines, start, wait_for

SETTING = '{"merging": "threshold", "compression": "eden"}'
WORKER = """
import json, os, pathlib, sys, time
import torch, agmerge
from transformers import GPT2Config, GPT2LMHeadModel
folder, until, seed, setting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
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
agmerge.init(elastic=True)
optimizer = agmerge.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=2e-3), model.named_parameters(), timeout=120, **setting)
state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0)
with open(f"{folder}/{os.getpid()}.lines", "a") as lines:
    while state.step < until:
        optimizer.zero_grad()
        number = (seed * 100_000 + state.step) * 16 + agmerge.rank()
        loss_of(batch(number, 0, held_back)).backward()
        optimizer.step(); state.step += 1; state.commit()
        print(json.dumps([time.monotonic(), state.step, agmerge.size()]), file=lines, flush=True)
with torch.no_grad():
    found = sum(loss_of(batch(-1 - number, held_back, len(text))).item() for number in range(100)) / 100
pathlib.Path(folder, f"{os.getpid()}.loss").write_text(str(found))
agmerge.shutdown()
"""


def trained(seed: int, steps: int, every: int) -> tuple[float, float, int]:
    """Return the loss, the seconds from the first step to the last one, and how many were killed; ``every`` 0: none."""
    chance, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "worker.py").write_text(WORKER)
        serve = subprocess.Popen([sys.executable, "-m", "agmerge", "lighthouse", "--port", PORT], cwd=ROOT)
        where = {"AGMERGE_LIGHTHOUSE": f"127.0.0.1:{PORT}"}
        time.sleep(3)
        workers = [start(folder, steps, str(seed), SETTING, **where) for _ in range(3)]
        try:
            wait_for(folder, [one.pid for one in workers], 1)
            began = min(lines(folder, one.pid)[0][0] for one in workers)
            for due in range(every, steps, every) if every else ():
                while max((lines(folder, one.pid) or [[0, 0, 0]])[-1][1] for one in workers) < due:
                    time.sleep(0.05)
                victim = workers.pop(chance.randrange(len(workers)))
                victim.kill()
                victim.wait()
                killed += 1
                workers.append(start(folder, steps, str(seed), SETTING, **where))
            in_time = [one for one in workers if lines(folder, one.pid)]  # others came too late to be let in
            codes = [one.wait(900) for one in in_time]
            assert not any(codes), (folder / "log").read_text()[-3000:]
            losses = {(folder / f"{one.pid}.loss").read_text() for one in in_time}
            assert len(losses) == 1, f"workers differ: {losses}"
            return float(losses.pop()), max(lines(folder, one.pid)[-1][0] for one in in_time) - began, killed
        finally:
            for one in (*workers, serve):
                one.kill()
                one.wait()


def main() -> None:
    """Train by turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=100, help="steps between two kills")
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args()
    rows = []
    for seed in range(chosen.seeds):
        for every in (0, chosen.every):
            loss, seconds, killed = trained(seed, chosen.steps, every)
            rows.append({"seed": seed, "killed": killed, "loss": loss, "seconds": seconds})
            print(f"seed {seed}, {killed} killed: loss {loss:.4f}, {seconds:.0f} s", flush=True)
    ratios = [rows[i + 1]["loss"] / rows[i]["loss"] for i in range(0, len(rows), 2)]
    print(f"loss with kills / without: median {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")
    print(json.dumps({"steps": chosen.steps, "rows": rows, "ratios": ratios}))


if __name__ == "__main__":
    main()
