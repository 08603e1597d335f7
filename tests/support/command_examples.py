# SPDX-License-Identifier: Apache-2.0
"""Run the examples of docs/command_line.md and keep their output: ``python tests/support/command_examples.py``.

Names of commands as arguments run only these. ``build-horovod`` is run if it is named, because it installs Horovod.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "_data" / "command_line"
SECONDS = 600.0
EXAMPLES = {
    "doctor": "python -m agmerge doctor --patience 120",
    "build-horovod": "python -m agmerge build-horovod",
    "plan": "python -m agmerge plan profile.json --planner exact --save plan.json",
    "advise": "AGMERGE_LINK=200mbit python -m agmerge advise train.py",
    "compare": "python -m agmerge compare powers.py --task digits --against eden-2,topk",
    "lighthouse": "python -m agmerge lighthouse",
    "explain": "python -m agmerge explain AGM102",
}
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
def train(steps):
    for step in range(steps):
        x, y = torch.randn(32, 512), torch.randint(10, (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
DDP = """
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train(2000)
"""
MEASURED = """
import agmerge
agmerge.init()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters())
train(120)
if agmerge.rank() == 0:
    optimizer.measurements.save("profile.json")
agmerge.shutdown()
"""


def shown(command: str, folder: Path) -> str:
    """Return what a command prints, with the names of folders of this machine replaced."""
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    arguments = [sys.executable if word == "python" else word for word in words if not re.match(r"[A-Z_]+=", word)]
    arguments += ["--port", "0"] if "lighthouse" in words else []  # another one may have the usual port
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}
    stdout = folder / "stdout"
    with stdout.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(arguments, cwd=folder, env=environment, stdout=file, stderr=subprocess.DEVNULL)
        if "lighthouse" in words:  # it serves until it is interrupted
            while process.poll() is None and not stdout.read_text(encoding="utf-8"):
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
        process.wait(SECONDS)
    text = stdout.read_text(encoding="utf-8")
    text = re.sub(r"(LIGHTHOUSE=)\S+", r"\g<1>10.0.0.1:29510", text)
    text = text.replace(sys.executable, "python").replace(str(Path(sys.executable).parent), "/usr/bin")
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), "/home/you/agmerge")
    return text.replace(os.uname().nodename, "node1").rstrip() + "\n"


def main(names: list[str]) -> None:
    """Run examples and write their output."""
    KEPT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(MODEL + DDP, encoding="utf-8")
        page = (ROOT / "docs" / "compare_a_compressor.md").read_text(encoding="utf-8")
        (folder / "powers.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
        (folder / "measure.py").write_text(MODEL + MEASURED, encoding="utf-8")
        if "plan" in names:
            shown(
                "AGMERGE_LINK=200mbit python -m torch.distributed.run --standalone --nproc_per_node=2 measure.py",
                folder,
            )
        for one in names:
            text = f"$ {EXAMPLES[one]}\n{shown(EXAMPLES[one], folder)}"
            (KEPT / f"{one}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in EXAMPLES if name != "build-horovod"])
