# SPDX-License-Identifier: Apache-2.0
"""python -m agmerge advise: the advice follows from measured steps, and a script is never run to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agmerge.backends import registry
from agmerge.cli import advise
from agmerge.cli.advise_turns import OTHERS, ROUNDS, STEPS, TURN, WARM, Turns
from agmerge.options.named_costs import told_cost
from agmerge.planning import advice
from agmerge.planning.advice import DDP, LINES, NOT_HERE, OURS, Candidate, Facts

ROOT = Path(__file__).resolve().parents[3]
COST = "22 to 40 %"


def facts(now: float, framework: str = DDP, **seconds: float) -> Facts:
    """Seconds by compressor; topk is the one that is no default's."""
    candidates = [Candidate(name.replace("_", "-"), took, name != "topk", COST) for name, took in seconds.items()]
    return Facts(framework, "AdamW", 2, 1_000_000, now, tuple(candidates))


@pytest.mark.parametrize(
    ("measured", "use", "words"),
    [
        (facts(1.0, none=1.0, eden_2=0.25, topk=0.3), True, "4 times as fast."),
        (facts(1.0, none=1.0, eden_2=0.25, topk=0.2), True, f"compression='topk', 5 times as fast (loss: {COST})"),
        (facts(1.0, none=1.0, eden_2=0.95, topk=0.94), False, f"{NOT_HERE}: a step takes 1e+03 ms now"),
        (facts(1.0, none=1.0, eden_2=2.0, topk=3.0), False, NOT_HERE),
        (facts(1.0, none=0.8, eden_2=2.0, topk=3.0), False, NOT_HERE),
        (facts(1.0, none=1.0, eden_2=0.95, topk=0.1), False, f"compression='topk', 10 times as fast (loss: {COST})"),
        (facts(0.02, none=0.02, eden_2=0.01), True, "steps of 10 ms in place of 20 ms"),
        (facts(1.0, OURS, none=1.0, eden_2=0.5, topk=0.49), True, "2 times as fast."),
    ],
)
def test_the_advice_follows_from_the_seconds_and_never_costs_loss(measured: Facts, use: bool, words: str) -> None:
    chosen = advice.choose(measured)
    told = advice.text(measured, chosen)
    assert chosen.use is use and words in told
    assert (NOT_HERE in told) is not use
    assert ("topk" in chosen.why) is ("topk" in words)
    assert all(line in told for line in chosen.lines) and bool(chosen.lines) is use
    assert ("as it is" in told) is (measured.framework != OURS)


@pytest.mark.parametrize("framework", LINES)
def test_there_are_lines_for_every_framework(framework: str) -> None:
    chosen = advice.choose(facts(1.0, framework, none=1.0, eden_2=0.5))
    assert chosen.lines == LINES[framework][1] and "agmerge" in "".join(chosen.lines)


def test_the_slowest_worker_counts_by_its_median() -> None:
    assert advice.median_of_slowest([[1.0, 9.0, 2.0], [3.0, 1.0, 4.0]]) == 3.0


def test_costs_are_told_in_words() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert told_cost("topk", 0.01, optimizer).startswith("22 to 40 %")
    assert told_cost("eden-2", None, optimizer) == "less than 1 %, in our runs"
    assert told_cost("none", None, optimizer) == "nothing"
    assert told_cost("qsgd", None, optimizer).startswith("not measured")


class Recorded:
    """Exchange that notes its compressors."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def set_compressor(self, compression: Any, **options: Any) -> None:
        self.names.append(compression)


@pytest.mark.parametrize("as_it_is", [True, False])
@pytest.mark.parametrize(("momentum", "left_out"), [(0.9, "topk"), (0.0, "dgc")])
def test_every_candidate_has_all_its_turns(momentum: float, left_out: str, as_it_is: bool) -> None:
    optimizer, exchange = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=momentum), Recorded()
    turns = Turns(optimizer, lambda _: exchange, as_it_is=as_it_is)
    steps = 0
    while not turns.step():
        steps += 1
        assert as_it_is is False or steps > WARM or exchange.names == []
    tried = [*turns.defaults, *(name for name in OTHERS if name != left_out)]
    assert exchange.names == tried * ROUNDS and steps <= STEPS
    assert set(turns.seconds) == {*tried, *([""] if as_it_is else [])}
    assert {len(seconds) for seconds in turns.seconds.values()} == {ROUNDS * TURN}


HEAD = "import sys, torch, torch.distributed as dist\nfrom torch.nn.parallel import DistributedDataParallel\n"
LOOP = (
    "try:\n    for step in range(10000):\n        optimizer.zero_grad()\n"
    "        model(torch.randn(8, 64)).square().mean().backward()\n        optimizer.step()\n"
    "finally:\n    sys.stdout.write(f'steps {step + 1}\\n')\n"
)
SCRIPTS = {
    "ddp": HEAD + "dist.init_process_group('gloo')\nmodel = DistributedDataParallel(torch.nn.Linear(64, 64))\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n" + LOOP,
    "plain": HEAD + "model = torch.nn.Linear(64, 64)\noptimizer = torch.optim.AdamW(model.parameters())\n" + LOOP,
    "ours": HEAD + "import agmerge\nagmerge.init()\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(64, 64)\n"
    "inner = torch.optim.AdamW(model.parameters())\n"
    "optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters())\n" + LOOP,
    "short": "import sys\nprint('ran with', sys.argv[1:])\nsys.exit()\n",
    "stubborn": HEAD + "dist.init_process_group('gloo')\nmodel = DistributedDataParallel(torch.nn.Linear(64, 64))\n"
    "optimizer = torch.optim.AdamW(model.parameters())\nfor step in range(10000):\n    optimizer.zero_grad()\n"
    "    model(torch.randn(8, 64)).square().mean().backward()\n"
    "    try: optimizer.step()\n    except: print('caught')\n",
    "trainer": "import torch, tempfile\n"
    "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments\n"
    "model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))\n"
    "data = [{'input_ids': torch.arange(16), 'labels': torch.arange(16)}] * 4000\n"
    "args = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, report_to=[], use_cpu=True)\n"
    "Trainer(model=model, args=args, train_dataset=data).train()\n",
}


def asked(tmp_path: Path, name: str, *flags: str) -> tuple[int, str, str]:
    """Exit code and output of advise, for one of SCRIPTS, in two workers that it starts itself."""
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    started = {key: value for key, value in os.environ.items() if key not in registry._sizes()}
    ended = subprocess.run(
        [sys.executable, "-m", "agmerge", "advise", *flags, "train.py", "--lr", "1"],
        cwd=tmp_path, env={**started, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["ddp", pytest.param("ours", marks=pytest.mark.long)])
def test_a_script_that_never_heard_of_us_is_measured_and_ended(tmp_path: Path, name: str) -> None:
    """On this machine's memory the answer may be either; both are valid, and say so by the exit code."""
    code, out, error = asked(tmp_path, name, "--json")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert (code, found["use"]) in ((0, True), (advise.NOT_USED, False)), error
    assert found["framework"] == {"ddp": DDP, "ours": OURS}[name]
    assert (found["workers"], found["parameters"], found["optimizer"]) == (2, 64 * 64 + 64, "AdamW")
    assert {"none", "int8", "eden-4", "eden-2", "topk"} <= {one["name"] for one in found["candidates"]}
    assert all(one["seconds"] > 0 for one in found["candidates"]) and found["now"] > 0
    steps = [int(count) for count in re.findall(r"steps (\d+)", out)]
    assert len(steps) == 2 and max(steps) <= STEPS + 2


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_script_that_catches_everything_ends_all_the_same(tmp_path: Path) -> None:
    code, out, error = asked(tmp_path, "stubborn", "--json")
    assert code in (0, advise.NOT_USED), error
    assert out.count('"framework"') == 1 and out.count("caught") == 2


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_trainers_line_is_found_for_a_script_of_the_trainer(tmp_path: Path) -> None:
    code, out, error = asked(tmp_path, "trainer", "--json")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert code in (0, advise.NOT_USED) and found["framework"] == advice.TRAINER, error


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("plain", "put the line for plain PyTorch into it", marks=pytest.mark.long),
        pytest.param("short", "ended too early, after 0 steps", marks=pytest.mark.long),
    ],
)
def test_where_nothing_can_be_said_it_says_why(tmp_path: Path, name: str, words: str) -> None:
    code, out, error = asked(tmp_path, name)
    assert code == advise.NO_ANSWER and words in error and "ChildFailedError" not in error
    assert name != "short" or "ran with ['--lr', '1']" in out


def test_a_script_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"as_json": False, "patience": 1.0, "workers": 2, "result": ""}
    assert advise.main("nowhere.py", [], **given) == advise.NO_ANSWER
    assert "there is no script nowhere.py" in capfd.readouterr().err
    assert advise.main(__file__, [], **{**given, "workers": 0}) == advise.NO_ANSWER
    assert "--workers 0" in capfd.readouterr().err
