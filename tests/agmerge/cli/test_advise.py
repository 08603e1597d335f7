# SPDX-License-Identifier: Apache-2.0
"""python -m agmerge advise: the advice follows from measured steps, and a script is never run to its end."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agmerge.backends import registry
from agmerge.cli import advice, advise, advise_script, advisor
from agmerge.cli.advice import DDP, LINES, NOT_HERE, OURS, Candidate, Facts
from agmerge.cli.advisor import COST_OF_UPDATES, OTHERS, ROUNDS, STEPS, TURN, WARM, Turns, kept, told_cost_of_updates
from agmerge.options.defaults import told_cost
from agmerge.step.config import UPDATES

ROOT = Path(__file__).resolve().parents[3]
COST = "22 to 40 %"


def facts(now: float, framework: str = DDP, **seconds: float) -> Facts:
    """Seconds by compressor; topk is the one that is no default's."""
    named = {"topk": "", "updates": "send little"}
    candidates = [
        Candidate(name.replace("_", "-"), took, name not in named, COST, use=named.get(name, ""))
        for name, took in seconds.items()
    ]
    return Facts(framework, "AdamW", 2, 1_000_000, now, tuple(candidates))


@pytest.mark.parametrize(
    ("measured", "use", "words"),
    [
        (facts(1.0, none=1.0, eden_2=0.25, topk=0.3), True, "a speedup of 4x."),
        (facts(1.0, none=1.0, eden_2=0.25, topk=0.2), True, f"'topk': a speedup of 5x (effect on the loss: {COST})"),
        (facts(1.0, none=1.0, eden_2=0.95, topk=0.94), False, f"{NOT_HERE}: a step takes 1e+03 ms now"),
        (facts(1.0, none=1.0, eden_2=2.0, topk=3.0), False, NOT_HERE),
        (facts(1.0, none=0.8, eden_2=2.0, topk=3.0), False, NOT_HERE),
        (facts(1.0, none=1.0, eden_2=0.95, topk=0.1), False, f"'topk': a speedup of 10x (effect on the loss: {COST})"),
        (facts(1.0, none=0.8, eden_2=2.0, topk=3.0), False, "uncompressed gradients, as the script sends them"),
        (facts(1.0, none=1.0, eden_2=0.5, updates=0.1), True, "To send little, set sync='updates': a speedup of 10x"),
        (facts(0.02, none=0.02, eden_2=0.01), True, "10 ms per step instead of 20 ms"),
        (facts(1.0, OURS, none=1.0, eden_2=0.5, topk=0.49), True, "a speedup of 2x."),
    ],
)
def test_the_advice_follows_from_the_seconds_and_never_costs_loss(measured: Facts, use: bool, words: str) -> None:
    chosen = advice.choose(measured)
    told = advice.text(measured, chosen)
    assert chosen.use is use and words in told
    assert (NOT_HERE in told) is not use
    assert ("topk" in chosen.why) is ("topk" in words)
    assert all(line in told for line in chosen.lines) and bool(chosen.lines) is use
    assert ("compared with the unmodified script" in told) is (measured.framework != OURS)


def test_over_a_pretended_link_and_with_our_own_optimizer_dense_is_what_it_is_compared_with() -> None:
    linked = replace(facts(1.0, none=1.0, eden_2=0.25), link="200mbit")
    told = advice.text(linked, advice.choose(linked))
    assert "simulated network of 200mbit" in told and "compared with uncompressed gradients" in told
    assert "unmodified script" not in told
    own = replace(facts(1.0, OURS, none=1.0, eden_2=0.25), has_default=True)
    chosen = advice.choose(own)
    assert chosen.use and not chosen.lines and "Change nothing, the script already" in advice.text(own, chosen)


@pytest.mark.parametrize(
    ("now", "best", "use"),
    [((1.0, 1.2), (0.5, 0.8), True), ((0.85, 1.2), (0.5, 0.8), False), ((1.0, 1.2), (0.3, 0.95), False)],
)
def test_a_gain_that_not_every_turn_shows_is_none(now: tuple[float, ...], best: tuple[float, ...], use: bool) -> None:
    candidates = (Candidate("none", 1.1, True, "", (1.1, 1.1)), Candidate("eden-2", 0.6, True, "", best))
    measured = Facts(DDP, "AdamW", 2, 1_000_000, 1.1, candidates, now)
    chosen = advice.choose(measured)
    assert chosen.use is use and (NOT_HERE in chosen.why) is not use
    assert use or "no reliable speedup" in chosen.why
    noisy = replace(measured, candidates=(*candidates, Candidate("topk", 0.2, False, COST, (0.1, 2.0))))
    assert "topk" not in advice.choose(noisy).why


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("framework", LINES)
def test_there_are_lines_for_every_framework(framework: str, scaled: bool) -> None:
    """With the script's names, or with gaps and a sentence that says what they stand for."""
    measured = replace(facts(1.0, framework, none=1.0, eden_2=0.5), scaled=scaled)
    wanted = advice.words(framework, scaled=scaled)
    assert ("scaler" in wanted) is (scaled and framework in (DDP, OURS, advice.PLAIN))
    own = replace(measured, names={word: f"my_{word}" for word in wanted})
    for one in (measured, own):
        chosen = advice.choose(one)
        told = advice.text(one, chosen)
        assert "agmerge" in "".join(chosen.lines) and "{" not in chosen.where + "".join(chosen.lines)
        runs = one is own or not wanted  # as it is printed: what does not has gaps, and no four blanks before it
        assert all((f"    {line}" in told) is runs for line in chosen.lines)
        assert (f"Put this {chosen.where}:" in told) is runs and f"ut this {chosen.where}:" in told
        for word in wanted:
            assert (f"<{word}> is {advice.WORDS[word]}" in told) is (one is measured)
            assert (f"my_{word}" in told) is (one is own)
        assert ("GradScaler(...)" in chosen.where) is (scaled and framework in (DDP, advice.PLAIN))


def test_the_slowest_worker_counts_by_its_median() -> None:
    assert advice.median_of_slowest([[1.0, 9.0, 2.0], [3.0, 1.0, 4.0]]) == 3.0


def test_costs_are_told_in_words() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert told_cost("topk", 0.01, optimizer).startswith("22 to 40 %")
    assert told_cost("eden-2", None, optimizer) == "less than 1 % higher in our tests"
    assert told_cost("none", None, optimizer) == "none"
    assert told_cost("qsgd", None, optimizer).startswith("not measured")


def test_the_cost_of_updates_is_told_for_adamw_alone() -> None:
    adamw, nadam = (kind(nn.Linear(2, 2).parameters()) for kind in (torch.optim.AdamW, torch.optim.NAdam))
    assert told_cost_of_updates(adamw) == f"{COST_OF_UPDATES} higher in our tests"
    assert told_cost_of_updates(nadam).startswith("not measured")


class Recorded:
    """Exchange that notes its compressors."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def set_compressor(self, compression: Any, **options: Any) -> None:
        self.names.append(compression)


def of_sgd(momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=momentum)


@pytest.mark.parametrize("as_it_is", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "left_out", "has_updates"),
    [
        (of_sgd(0.9), "topk", False),
        (of_sgd(0.0), "dgc", False),
        (torch.optim.AdamW(nn.Linear(2, 2).parameters()), "dgc", True),
    ],
)
def test_every_candidate_has_all_its_turns(
    optimizer: torch.optim.Optimizer, left_out: str, has_updates: bool, as_it_is: bool
) -> None:
    exchange, inside, ended = Recorded(), [], []

    @contextmanager
    def updates(_: torch.optim.Optimizer) -> Iterator[None]:
        assert exchange.names == []  # one exchange of gradients stays in its place for good
        inside.append(steps)
        yield
        ended.append(steps)

    steps = 0
    turns = Turns(optimizer, lambda _: exchange, updates, as_it_is=as_it_is)
    while not turns.step():
        steps += 1
        assert as_it_is is False or steps > WARM or exchange.names == []
    tried = [*turns.defaults, *(name for name in OTHERS if name != left_out)]
    assert exchange.names == tried * ROUNDS and steps <= STEPS
    before = [*([""] if as_it_is else []), *([UPDATES] if has_updates else [])]
    assert set(turns.seconds) == {*tried, *before}
    assert {len(seconds) for seconds in turns.seconds.values()} == {ROUNDS * TURN}
    assert [after - at for at, after in zip(inside, ended, strict=True)] == [1 + TURN] * ROUNDS * has_updates


def test_after_a_turn_of_updates_parameters_and_state_are_as_before() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    restore = kept(optimizer)
    step(1)
    weight = next(iter(model.parameters()))
    optimizer.state[weight]["exp_avg"] = torch.zeros(2, 3)  # another object, as optimizers may have it
    restore()
    assert_equal((model.state_dict(), optimizer.state_dict()), before)
    step(2)
    after = copy.deepcopy(model.state_dict())
    restore()
    step(2)
    assert_equal(model.state_dict(), after)


def assert_equal(values: Any, others: Any) -> None:
    torch.testing.assert_close(values, others, rtol=0, atol=0)


class Fitting:
    """A script's own class, with a model and an optimizer in it."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)


def described(found: dict[str, Any], file: str = __file__) -> advise_script.Script:
    """What is found by a step; the frame of the hook lies between."""
    return (lambda: advise_script.described(file, DDP, found))()


def test_names_are_those_of_one_frame_of_the_script(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    found = {"model": advise_script.is_model(net), "optimizer": lambda each: each is opt}
    assert described(found).names == {"model": "net", "optimizer": "opt"}
    assert described(found, str(tmp_path / "train.py")).names == {}  # no frame is of a script there

    def train(model: nn.Module, stepper: Any) -> advise_script.Script:
        return described(found)

    assert train(net, opt).names == {"model": "net", "optimizer": "opt"}  # of several frames the outermost
    held = Fitting()
    about = {"model": advise_script.holding(held.opt), "optimizer": lambda each: each is held.opt}
    assert described(about).names == {"model": "held.net", "optimizer": "held.opt"}


def test_a_scaler_that_makes_the_step_is_found() -> None:
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    amp = torch.amp.GradScaler("cpu")
    seen: list[advise_script.Script] = []
    found = {"model": advise_script.is_model(net), "optimizer": lambda each: each is opt}
    hook = opt.register_step_post_hook(lambda *_: seen.append(described(found)))
    amp.scale(net(torch.ones(1, 2)).sum()).backward()
    amp.step(opt)
    opt.step()
    hook.remove()
    assert [one.scaler for one in seen] == [amp, None]
    assert seen[0].names == {"model": "net", "optimizer": "opt", "scaler": "amp"}


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
    "short": "import sys\nprint('ran with', sys.argv[1:])\nsys.exit(7)\n",
    "spawns": "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=2)\n",
    "failing": HEAD + "dist.init_process_group('gloo')\nmodel = DistributedDataParallel(torch.nn.Linear(64, 64))\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n"
    + LOOP.replace("optimizer.step()", "optimizer.step(); 1 // (step - 1)"),
    "refused": HEAD + "dist.init_process_group('gloo')\n"
    "embedding = torch.nn.Embedding(9, 4, sparse=True)\n"
    "model = DistributedDataParallel(torch.nn.Sequential(embedding, torch.nn.Linear(4, 4)))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    + LOOP.replace("torch.randn(8, 64)", "torch.ones(8, dtype=int)"),
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


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["ddp", pytest.param("ours", marks=pytest.mark.long)])
def test_a_script_that_never_heard_of_us_is_measured_and_ended(tmp_path: Path, name: str) -> None:
    """On this machine's memory the answer may be either; both are valid, and say so by the exit code."""
    code, out, error = asked(tmp_path, name, "--json")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert (code, found["use"]) in ((0, True), (advisor.NOT_USED, False)), error
    assert found["framework"] == {"ddp": DDP, "ours": OURS}[name]
    assert (found["workers"], found["parameters"], found["optimizer"]) == (2, 64 * 64 + 64, "AdamW")
    names = {one["name"] for one in found["candidates"]}
    assert names >= {"none", "int8", "eden-4", "eden-2", "topk"} and (UPDATES in names) is (name == "ddp")
    own = {"model": "model", "optimizer": "optimizer"}
    assert found["names"] == {"ddp": own, "ours": {**own, "plain": "inner"}}[name]
    assert all(one["seconds"] > 0 for one in found["candidates"]) and found["now"] > 0
    steps = [int(count) for count in re.findall(r"steps (\d+)", out)]
    assert len(steps) == 2 and max(steps) <= STEPS + 2


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_script_that_catches_everything_ends_all_the_same(tmp_path: Path) -> None:
    code, out, error = asked(tmp_path, "stubborn", "--json")
    assert code in (0, advisor.NOT_USED), error
    assert out.count('"framework"') == 1 and out.count("caught") == 2


@pytest.mark.long
@pytest.mark.timeout(200)
def test_one_that_is_told_to_end_prints_a_line_a_turn_and_the_table_so_far(tmp_path: Path) -> None:
    """By a signal that comes to the command alone, as ``kill`` sends it; there is no traceback of the launcher."""
    slow = SCRIPTS["ddp"].replace("optimizer.step()", "optimizer.step(); time.sleep(0.3)")  # half a minute for all
    (tmp_path / "train.py").write_text(f"import time\n{slow}")
    started = {key: value for key, value in os.environ.items() if key not in {*registry._sizes(), "AGMERGE_LINK"}}
    with subprocess.Popen(
        [sys.executable, "-m", "agmerge", "advise", "train.py"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**started, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        turn = next(line for line in process.stderr if "per step unmodified" in line)
        assert re.search(r"train.py: step \d+ of at most \d+: [\d.e+]+ ms per step unmodified", turn)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=100)
    assert process.returncode == advisor.NO_ANSWER, error
    assert ": stopped after" in error and "Traceback" not in error
    assert "unmodified script" in out and "effect on the loss" in out and "agmerge." not in out


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_trainers_line_is_found_for_a_script_of_the_trainer(tmp_path: Path) -> None:
    code, out, error = asked(tmp_path, "trainer", "--json")
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert code in (0, advisor.NOT_USED) and found["framework"] == advice.TRAINER, error


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("plain", "DistributedOptimizer(optimizer, model.named_parameters())", marks=pytest.mark.long),
        pytest.param("spawns", "it starts its workers itself", marks=pytest.mark.long),
        pytest.param("refused", "an embedding has sparse=True", marks=pytest.mark.long),
        pytest.param("failing", "failed in step 3", marks=pytest.mark.long),
        pytest.param("short", "ended too early, by itself with exit code 7, after 0 steps", marks=pytest.mark.long),
    ],
)
def test_where_nothing_can_be_said_it_says_why(tmp_path: Path, name: str, words: str) -> None:
    code, out, error = asked(tmp_path, name)
    assert code == advisor.NO_ANSWER and words in error and ("ChildFailedError" in error) is (name == "failing")
    assert name != "short" or "ran with ['--lr', '1']" in out


def test_a_script_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"as_json": False, "patience": 1.0, "workers": 2, "result": ""}
    assert advise.main("nowhere.py", [], **given) == advisor.NO_ANSWER
    assert "file not found: nowhere.py" in capfd.readouterr().err
    assert advise.main(__file__, [], **{**given, "workers": 0}) == advisor.NO_ANSWER
    assert "--workers must be at least 2" in capfd.readouterr().err
