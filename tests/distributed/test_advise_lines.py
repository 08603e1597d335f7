# SPDX-License-Identifier: Apache-2.0
"""The lines that advise prints are pasted where it says, in scripts without agmerge: they train, and ours exchanges."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from textwrap import indent

import pytest
from launching import Ended, run, torchrun

from agmerge.cli import advice, advisor

# A script with names of its own, as newcomers write it; it knows nothing of agmerge.
OWN_NAMES = r"""
import argparse
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 64), torch.randint(0, 4, (128,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    net = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    amp = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.01, total_steps=args.epochs * len(loader))
    for epoch in range(args.epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(x), y)
            amp.scale(loss).backward()
            amp.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            amp.step(opt)
            amp.update()
            schedule.step()
        sys.stdout.write(f"loss {loss.item()}\n")


if __name__ == "__main__":
    main()
"""
HEAD = """
import sys
import tempfile
import torch
torch.manual_seed(0)
x = torch.randn(32, 64)
data = [{"x": each, "y": each[:4]} for each in x]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 4)
    def forward(self, x, y):
        loss = (self.layer(x) - y).square().mean()
        return {"loss": loss}
model = Net()
"""
LOOP = r"""
for step in range(30):
    optimizer.zero_grad()
    loss = model(x, x[:, :4])["loss"]
    {backward}
    optimizer.step()
    sys.stdout.write(f"loss {{loss.item()}}\n")
"""
SCRIPTS = {
    advice.PLAIN: HEAD
    + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
    + LOOP.format(backward="loss.backward()"),
    advice.OURS: HEAD
    + "import agmerge\nagmerge.init()\nplain = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
    + "optimizer = agmerge.DistributedOptimizer(plain, model.named_parameters(), compression='topk')\n"
    + LOOP.format(backward="loss.backward()"),
    advice.ACCELERATE: HEAD
    + "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
    + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)\n"
    + "model, optimizer = accelerator.prepare(model, optimizer)\n"
    + LOOP.format(backward="accelerator.backward(loss)"),
    advice.TRAINER: HEAD
    + "from transformers import Trainer, TrainingArguments\n"
    + "args = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=15, learning_rate=0.01, logging_steps=1,\n"
    + "    per_device_train_batch_size=8, report_to=[], use_cpu=True, save_strategy='no')\n"
    + "trainer = Trainer(model=model, args=args, train_dataset=data)\n"
    + "trainer.train()\n"
    + "for entry in trainer.state.log_history:\n"
    + "    if 'loss' in entry: sys.stdout.write(f'loss {entry[\"loss\"]}\\n')\n",
    advice.LIGHTNING: HEAD
    + "from lightning.pytorch import LightningModule, Trainer\n"
    + "class Module(LightningModule):\n"
    + "    def __init__(self):\n        super().__init__()\n        self.net = model\n"
    + "    def training_step(self, batch, _):\n"
    + "        loss = self.net(**batch)['loss']\n"
    + "        sys.stdout.write(f'loss {loss.item()}\\n')\n        return loss\n"
    + "    def configure_optimizers(self):\n        return torch.optim.AdamW(self.parameters(), lr=0.01)\n"
    + "loader = torch.utils.data.DataLoader(data, batch_size=8)\n"
    + "trainer = Trainer(max_epochs=15, accelerator='cpu', devices=2, logger=False, enable_progress_bar=False,\n"
    + "    enable_checkpointing=False)\n"
    + "trainer.fit(Module(), loader)\n",
}
# What has the reports of an exchange, after the lines were pasted.
REPORTS = {
    advice.DDP: "compressed",
    advice.PLAIN: "optimizer",
    advice.OURS: "optimizer",
    advice.ACCELERATE: "compressed",
    advice.TRAINER: "compression.compressed",
    advice.LIGHTNING: "strategy.compressed",
}
PACKAGES = {advice.ACCELERATE: "accelerate", advice.TRAINER: "transformers", advice.LIGHTNING: "lightning"}


def paste(script: str, told: str) -> str:
    """The script with the lines that were printed, at the place that was printed."""
    (where,) = re.findall(r"^Put this (.*):$", told, re.MULTILINE)
    lines = "\n".join(re.findall(r"^    (.*)$", told, re.MULTILINE))
    calls = re.findall(r"([\w.]+)\(\.\.\.\)", where) + (["AdamW"] if "the optimizer" in where else [])
    rows = script.splitlines()
    made = re.compile(rf"= ([\w.]+\.)?({'|'.join(map(re.escape, calls))})\(")
    places = [number for number, row in enumerate(rows) if made.search(row)]
    at = places[-1] if "below" in where else places[0]
    while "below" in where and rows[at + 1].startswith("    ") and rows[at].count("(") > rows[at].count(")"):
        at += 1  # a call of several lines
    margin = rows[at][: len(rows[at]) - len(rows[at].lstrip())]
    for other in re.findall(r"and write (\w+)\((.*?), \.\.\.\)", where):
        rows[at] = rows[at].replace(f"{other[0]}(", f"{other[0]}({other[1]}, ")
    first = at if re.match("above|in place of", where) else at + 1
    rest = at + 1 if where.startswith("in place of") else first
    return "\n".join([*rows[:first], indent(lines, margin), *rows[rest:]])


def trained(script: str, report: str, tmp_path: Path) -> Ended:
    """The pasted script in two workers, which say at its end what their exchange has sent."""
    file = tmp_path / "pasted.py"
    sent = f"sent {{{report}.stats()['bytes_sent']}} {{agmerge.size()}}"
    end = f'sys.stdout.write(f"{sent}\\n")'
    called = "\n\n\nif __name__"
    script = script.replace(called, f"\n    {end}{called}") if called in script else f"{script}\n{end}\n"
    file.write_text(script)
    ended = torchrun(2, file, timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.e-]+)", ended.output)]
    assert len(losses) > 12 and sum(losses[-4:]) < 0.7 * sum(losses[:4]), losses
    sent = re.findall(r"sent (\d+) (\d+)", ended.output)
    assert len(sent) == 2 and all(int(count) > 0 and workers == "2" for count, workers in sent), ended.output[-3000:]
    return ended


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_script_that_never_heard_of_us_gets_lines_with_its_own_names(tmp_path: Path) -> None:
    """A real run of advise: a scaler, a sampler, clipping and a schedule change nothing."""
    file = tmp_path / "train.py"
    file.write_text(OWN_NAMES)
    ended = run([sys.executable, "-m", "agmerge", "advise", "--json", str(file), "--epochs", "50"], timeout=300)
    assert ended.code in (0, advisor.NOT_USED), ended.output[-3000:]
    found = json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))
    assert found["framework"] == advice.DDP and found["scaled"]
    assert found["names"] == {"model": "net", "optimizer": "opt", "scaler": "amp"}
    assert "Warning" not in ended.output
    told = "\n".join(advice.pasted(found["framework"], found["names"], scaled=found["scaled"]))
    assert "ddp.compress(net, optimizer=opt, scaler=amp)" in told
    trained(paste(OWN_NAMES.replace("default=200", "default=8"), told), REPORTS[advice.DDP], tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=[pytest.mark.long] * (name != advice.PLAIN)) for name in SCRIPTS]
)
def test_the_lines_for_a_framework_train(framework: str, tmp_path: Path) -> None:
    package = PACKAGES.get(framework)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test` installs it")
    own = {word: word for word in advice.words(framework, scaled=False)}
    told = "\n".join(advice.pasted(framework, own, scaled=False))
    trained(paste(SCRIPTS[framework], told), REPORTS[framework], tmp_path)


def test_every_framework_that_has_lines_is_tried() -> None:
    assert {*SCRIPTS, advice.DDP} == set(advice.LINES) == set(REPORTS)
