# SPDX-License-Identifier: Apache-2.0
"""Horovod's recipes with our optimizer and with all of our module, beside Horovod's own; and its example scripts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from launching import HERE, ROOT, launch, missing, results

pytestmark = pytest.mark.timeout(400)

Found = dict[str, list[dict[str, Any]]]

LAUNCHERS = [pytest.param(one, marks=pytest.mark.long) for one in ("horovodrun, Gloo", "mpirun")]
WORKERS = 2
STACKS = {"mixed none", "mixed topk", "agmerge none", "agmerge topk"}
STEPS = {  # and which stacks besides ours
    "plain": (10, {"horovod"}),
    "clipping": (10, {"horovod"}),
    "accumulation": (6, {"horovod"}),
    "resume, wrapped first": (4, {"horovod"}),
    "resume, broadcast first": (4, set()),
    "learning rate": (12, {"horovod"}),
    "metrics": (8, {"horovod"}),
}

recipes = pytest.mark.parametrize("recipe", STEPS)


def need(launcher: str) -> None:
    """Skip where ``launcher`` is not installed, unless it must be."""
    why = missing(launcher)
    if why and os.environ.get("AGMERGE_TEST_ALL_LAUNCHERS") != "1":
        pytest.skip(why)
    assert not why, why


@pytest.fixture(scope="module", params=LAUNCHERS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks saw, per recipe."""
    need(request.param)
    folder: Path = tmp_path_factory.mktemp("recipes")
    ended = launch(request.param, WORKERS, HERE / "horovod_recipes.py", str(folder), timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    return results(folder, WORKERS)


@recipes
def test_every_stack_takes_every_step_with_equal_replicas(found: Found, recipe: str) -> None:
    first, *others = found[recipe]
    steps, besides = STEPS[recipe]
    expected = STACKS | besides
    if recipe == "resume, wrapped first":
        expected -= {"mixed none", "mixed topk"}
    assert set(first) == expected
    for stack, seen in first.items():
        assert len(seen["digests"]) == len(set(seen["digests"])) == steps
        assert all(other[stack]["digests"] == seen["digests"] for other in others)
        assert all(other[stack]["numbers"] == seen["numbers"] for other in others)


@recipes
def test_none_trains_as_horovods_optimizer_does(found: Found, recipe: str) -> None:
    reference = "resume, wrapped first" if recipe == "resume, broadcast first" else recipe
    for rank, seen in enumerate(found[recipe]):
        numbers = found[reference][rank]["horovod"]["numbers"]
        for stack in {"mixed none", "agmerge none"} & set(seen):
            assert seen[stack]["apart"] < 1e-6
            for name, values in seen[stack]["numbers"].items():
                assert values == pytest.approx(numbers[name], rel=1e-6, abs=1e-6)


@recipes
def test_topk_is_something_else_and_the_same_on_both_stacks(found: Found, recipe: str) -> None:
    for seen in found[recipe]:
        assert seen["agmerge topk"]["apart"] > 1e-3
        if "mixed topk" in seen:
            assert seen["agmerge topk"]["digests"] == seen["mixed topk"]["digests"]


def test_gradients_were_clipped(found: Found) -> None:
    for seen in found["clipping"]:
        for one in seen.values():
            assert min(one["numbers"]["before"]) > 0.06
            assert one["numbers"]["after"] == pytest.approx([0.05] * 10, rel=1e-3)


def test_the_last_window_was_shorter(found: Found) -> None:
    for seen in found["accumulation"]:
        assert all(one["numbers"]["window"] == [3, 3, 1, 3, 3, 1] for one in seen.values())


@pytest.mark.parametrize("order", ["wrapped first", "broadcast first"])
def test_a_resumed_run_goes_on_as_the_whole_one(found: Found, order: str) -> None:
    for seen in found[f"resume, {order}"]:
        for stack in {"horovod", "mixed none", "agmerge none"} & set(seen):
            assert seen[stack]["numbers"]["from whole"] == [0.0]


def test_the_learning_rate_is_the_schedules(found: Found) -> None:
    warmup = [0.0625, 0.075, 0.0875, 0.1]
    after = [0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001, 0.001]
    for seen in found["learning rate"]:
        assert all(one["numbers"]["lr"] == pytest.approx(warmup + after) for one in seen.values())


def test_metrics_are_of_both_workers(found: Found) -> None:
    for seen in found["metrics"]:
        for one in seen.values():
            assert one["numbers"]["images"] == [2 * 8] * 8
            assert all(0 < loss < 5 for loss in one["numbers"]["loss"])


def in_order(output: str, *lines: str) -> None:
    """Assert that ``output`` has these lines (as regular expressions) in this order, each once."""
    at = 0
    for line in lines:
        assert len(re.findall(rf"^{line}$", output, re.MULTILINE)) == 1, f"{line}\n{output[-3000:]}"
        match = re.compile(rf"^{line}$", re.MULTILINE).search(output, at)
        assert match, f"{line} is too early\n{output[-3000:]}"
        at = match.end()


def test_the_synthetic_benchmark_prints_horovods_lines_and_writes_all_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = "--model cnn --image-size 16 --batch-size 4 --num-warmup-batches 2 --num-batches-per-iter 3 --num-iters 2"
    ours = ["--compression", "topk", "--density", "0.02", "--no-cuda", "--json", str(out)]
    script = ROOT / "examples" / "synthetic_benchmark.py"
    ended = launch("torchrun", WORKERS, script, *options.split(), *ours, timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    number = r"\d+\.\d"
    in_order(
        ended.output,
        "Model: cnn",
        "Batch size: 4",
        "Number of CPUs: 2",
        r"Running warmup\.\.\.",
        r"Running benchmark\.\.\.",
        rf"Iter #0: {number} img/sec per CPU",
        rf"Iter #1: {number} img/sec per CPU",
        rf"Img/sec per CPU: {number} \+-{number}",
        rf"Total img/sec on 2 CPU\(s\): {number} \+-{number}",
        r"Compression: topk, density 0\.02, sparse exchange, memory residual",
        "Plan: threshold, 1 merge buffer",
        rf"Bytes sent per step and worker: \d+ \(dense \d+, {number}x\)",
        r"Exposed seconds per step: \d+\.\d{6}",
        "Backend: torch, launcher: torchrun",
    )
    found = json.loads(out.read_text())
    rates = found["rates"]
    assert len(rates) == 2 and min(rates) > 0
    assert found["mean"] == pytest.approx(sum(rates) / 2)
    assert found["interval"] == pytest.approx(1.96 * abs(rates[0] - rates[1]) / 2)
    assert (found["workers"], found["device"], found["unit"], found["steps"]) == (2, "CPU", "img/sec", 6)
    assert (found["backend"], found["launcher"]) == ("torch", "torchrun")
    assert found["bytes_dense"] == 6 * 4 * found["parameters"]
    assert 0 < found["bytes_sent"] < 0.1 * found["bytes_dense"]
    assert found["exposed_seconds"] >= 0
    expected = {"model": "cnn", "image_size": 16, "compression": "topk", "density": 0.02, "exchange": "sparse"}
    assert expected.items() <= found["settings"].items()


@pytest.mark.long
@pytest.mark.parametrize("more", ["--gradient-predivide-factor 2", "--use-mixed-precision"])
def test_the_mnist_example_learns_and_prints_horovods_lines(more: str) -> None:
    launcher = "horovodrun, Gloo"
    need(launcher)
    options = f"--epochs 2 --lr 0.1 --log-interval 50 --no-cuda --compression topk {more}"
    ended = launch(launcher, WORKERS, ROOT / "examples" / "mnist.py", *options.split(), timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    output = ended.output.replace("[0]<stdout>:", "")  # horovodrun says which worker wrote a line
    test = r"Test set: Average loss: \d+\.\d{4}, Accuracy: (\d+\.\d\d)%"
    train = [re.escape(f"Train Epoch: {epoch} [0/719 (0%)]\tLoss: ") + r"\d+\.\d{6}" for epoch in (1, 2)]
    in_order(output, *train)
    accuracies = [float(text) for text in re.findall(rf"^{test}$", output, re.MULTILINE)]
    assert len(accuracies) == 2 and accuracies[-1] > 90
