# SPDX-License-Identifier: Apache-2.0
"""Code blocks of README.md and docs/, each made a script that runs: a set-up, the block, and an end.

A comment before a block, which no reader sees, names what it needs: ``<!-- runs: wrapped -->`` one of SETUPS, or
``<!-- not run: two hosts -->`` the reason why it cannot. ``<!-- runs: continued -->`` is for a page that is read from
its beginning: the blocks before it run, too. Of a diff the new lines are taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("README.md", "docs/*.md", "docs/dev/*.md", "examples/*.md", "benchmarks/*.md", "benchmarks/notebook/*.md")
COMMENT = r"(?:<!-- (not run|runs): (.*?) -->\s*\n)?"
FENCE = re.compile(COMMENT + r"^```(python|diff)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)

MODEL = """
import os, sys, tempfile
import torch, agmerge, merging, sparsifiers
from dataclasses import dataclass
from typing import ClassVar
from torch import nn
from torch.nn.functional import cross_entropy
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.fc, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.transformer = nn.ModuleDict({"wte": nn.Linear(64, 64)})
    def forward(self, x):
        return self.out(self.transformer.wte(torch.tanh(self.fc(torch.tanh(self.wte(x))))))
torch.manual_seed(0)
batches = loader = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(4)]
loss_of = loss = cross_entropy
evaluate = lambda model: float(cross_entropy(model(batches[0][0]), batches[0][1]))
net = model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
step, steps, path = 0, 3, tempfile.mkdtemp()
z, params = torch.ones(3, requires_grad=True), {"compressor": "dgc", "memory": "dgc", "communicator": "allgather"}
comm_params = params
torch.cuda.set_device = lambda device: None
def train_some_steps():
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
"""
INIT = MODEL + "agmerge.init()\n"
WRAPPED = INIT + "optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters())\ntrain_some_steps()\n"
IN_WORLD = MODEL + "torch.distributed.init_process_group('gloo')\nagmerge.init()\n"
DDP = IN_WORLD + "from torch.nn.parallel import DistributedDataParallel\n"
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
args = TrainingArguments(tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True)
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
model, loader = Module(), torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.randn(16, 64), torch.randint(10, (16,))), batch_size=4)
def Trainer(**more):
    return lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, **more)
"""
ELIDED = """
def DistributedOptimizer(_, **options):
    global optimizer, model
    model = Net()
    optimizer = agmerge.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), **options)
    train_some_steps()
    return optimizer
DistributedOptimizer(..., merging="single").plan.save("plan.json")
"""
ELASTIC = """
from agmerge.backends import generations
lighthouse = generations.serve(0)
os.environ["AGMERGE_LIGHTHOUSE"] = f"127.0.0.1:{lighthouse.port}"
def batch(step, rank, size):
    if step == 3:
        agmerge.shutdown()
        os._exit(0)
    return batches[step]
"""
DATA = "data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(10, (64,)))\n"
DISTRIBUTED = """
agmerge.init(elastic=True)
optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters())
"""
STATE = """
state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0)
train_some_steps()
count_right = lambda model: (3.0, 4.0)
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
# name: (what comes before the block, what Python is given before the script)
SETUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": (INIT, ()),
    "wrapped": (WRAPPED, ()),
    "backward": (WRAPPED + "loss = cross_entropy(model(batches[0][0]), batches[0][1])\noptimizer.zero_grad()\n", ()),
    "measured": (WRAPPED + "for _ in range(20):\n    train_some_steps()\n", TORCHRUN),
    "updates": (WRAPPED.replace("parameters())\ntrain", "parameters(), sync='updates')\ntrain"), ()),
    "elided": (INIT + ELIDED, ()),
    "elastic": (MODEL + ELASTIC, ()),
    "elastic state": (MODEL + ELASTIC + DISTRIBUTED + STATE, ()),
    "elastic sampler": (MODEL + ELASTIC + DISTRIBUTED + DATA, ()),
    "elastic script": (MODEL + ELASTIC + DATA + "import signal\ncount_right = lambda model: (3.0, 4.0)\n", ()),
    "elastic trainer": (MODEL + TRAINER + ELASTIC + "import signal\n", ()),
    "elastic accelerate": (MODEL + ELASTIC + DATA + "from accelerate import Accelerator\n", ()),
    "data parallel": (DDP, TORCHRUN),
    "in data parallel": (DDP + "model = DistributedDataParallel(net)\n", TORCHRUN),
    "trainer": (MODEL + TRAINER, TORCHRUN),
    "accelerate": (MODEL + "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n", TORCHRUN),
    "lightning": (MODEL + LIGHTNING, TORCHRUN),
    "script": ("", TORCHRUN),
    "script, 4 workers": ("", (*TORCHRUN[:-1], "--nproc_per_node=4")),
}
END = """
import agmerge
for name, value in list(globals().items()):
    if name.startswith("test_"):
        value()
agmerge.shutdown()
"""


@dataclass(frozen=True)
class Block:
    """Code block of a page."""

    page: str
    line: int
    code: str
    setup: str  # one of SETUPS
    why_not: str  # it is not run; empty: it is

    def is_in(self, other: Block) -> bool:
        """Return whether the script of ``other``, of the same page, begins with this one."""
        return self.page == other.page and self != other and other.code.startswith(self.code)

    def script(self) -> str:
        """Return the whole script."""
        return SETUPS[self.setup][0] + "#" * 60 + "\n" + self.code + END


def blocks() -> list[Block]:
    """Return all blocks of README.md, docs/ and docs/dev/, and of the pages beside examples and benchmarks."""
    found: list[Block] = []
    for path in (path for place in PLACES for path in sorted(ROOT.glob(place))):
        text = path.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            kind, said, language, code = match.groups()
            line, name = text[: match.start(4)].count("\n"), str(path.relative_to(ROOT))
            new = after_the_change(code) if language == "diff" else code
            setup, why_not = (said if kind == "runs" else "plain"), (said if kind == "not run" else "")
            if setup == "continued":
                new, setup = found[-1].code + new, found[-1].setup
            found.append(Block(name, line, new, setup, why_not))
    return found


def after_the_change(diff: str) -> str:
    """Return the lines that a diff leads to."""
    kept = [line for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(line[1:] for line in kept) + "\n"
