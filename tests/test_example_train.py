# SPDX-License-Identifier: Apache-2.0
"""Trainings of ``examples/train.py`` among ranks in memory: planners, precisions, targets, and their log."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import train
from report import read_all
from reporting import comparison
from support.example_trainings import locked, log, outcome, results  # noqa: F401
from training import assemble, show
from training import options as train_options
from training.stopping import Stopping

import merging
from agmerge.testing import run


@pytest.mark.slow
@pytest.mark.parametrize("name", merging.names())
def test_the_main_job_takes_every_planner_and_names_it(name: str, tmp_path: Path) -> None:
    args = train_options.arguments(f"digits --merging {name} --max-steps 4 --log-dir {tmp_path}".split())
    found = run(2, lambda rank: train.train(args, Stopping()))[0]
    assert found["replicas_equal"] and found["reason"] == "max-steps"
    shown = show.table(found)
    assert f"on the link       {found['link_bytes'] / 1e6:.2f} MB leave a worker; dense " in shown
    assert found["link_bytes_dense"] == found["bytes_dense"] > 0  # of two workers
    assert f"plan              {name}, " in shown and "merge buffer" in shown
    assert ("none" if name == "dear" else "density 0.01, sparse exchange") in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "",
        "--carry hold",
        "--overlap 1",
        "--local-steps 4",
        "--compression none",
        "--sync gradients --compression powersgd",
    ],
)
def test_a_language_model_learns_whatever_is_exchanged(line: str, tmp_path: Path) -> None:
    found = results(f"gpt-stdlib {line} --tiny --max-steps 100", tmp_path)
    assert found[0]["replicas_equal"] and found[0]["step"] == 100
    assert found[0]["perplexity"] == found[1]["perplexity"]
    assert found[0]["loss"] < 3.4  # a guess has 4.9, a unigram model 3.1
    assert "of a unigram model" in show.table(found[0])


@pytest.mark.long
@pytest.mark.slow
def test_digits_learn_in_bfloat16(tmp_path: Path) -> None:
    found = results("digits --amp bf16 --compression topk --density 0.05 --max-steps 150", tmp_path)
    assert found[0]["accuracy"] > 0.7 and found[0]["replicas_equal"]


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["gradients", "updates"])
def test_16_bits_learn_with_a_scaler(sync: str, tmp_path: Path) -> None:
    found = results(f"gpt-stdlib --tiny --fp16 --sync {sync} --density 0.2 --max-steps 50", tmp_path)
    assert found[0]["perplexity"] < 40 and found[0]["replicas_equal"]  # a guess has 128


def test_batches_of_a_step_count_as_one(tmp_path: Path) -> None:
    one = results("digits --compression none --batch-size 16 --max-steps 3 --base-lr 0.02", tmp_path, workers=1)
    two = results(
        f"digits --compression none --batch-size 8 --max-steps 3 --base-lr {0.02 / math.sqrt(2)} --nsteps-update 2",
        tmp_path / "two",
        workers=1,
    )
    assert two[0]["step"] == 3 and two[0]["accuracy"] == pytest.approx(one[0]["accuracy"], abs=0.02)
    losses = [
        next(line["loss"] for line in log(place) if line["kind"] == "epoch") for place in (tmp_path, tmp_path / "two")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("sync", ["gradients", "updates"])
def test_clipping_bounds_what_a_step_does(sync: str, tmp_path: Path) -> None:
    line = f"digits --compression none --sync {sync} --lr 1 --momentum 0 --wd 0 --max-steps 1 --epochs 1"
    moved = {}
    for clip in (1e-3, 1e3):
        before, after = [], []

        def body(rank: int, clip: float = clip, before: list[Any] = before, after: list[Any] = after) -> None:
            args = train_options.arguments([*line.split(), "--clip", str(clip), "--log-dir", str(tmp_path / str(clip))])
            loop = assemble.loop_of(args)[0]
            parameters = list(loop.task.model.parameters())
            if rank == 0:
                before.extend(p.detach().clone() for p in parameters)
            next(loop.epoch(lambda: False))
            if rank == 0:
                after.extend(p.detach().clone() for p in parameters)

        run(2, body)
        squares = [float((a - b).double().square().sum()) for a, b in zip(after, before, strict=True)]
        moved[clip] = math.sqrt(sum(squares))
    rate = moved[1e-3] / 1e-3  # of the schedule's first step
    assert rate <= 0.08 and moved[1e3] > 10 * moved[1e-3]


@pytest.mark.slow
def test_a_target_is_noted_and_may_be_the_end(tmp_path: Path) -> None:
    found = results("digits --compression topk --target 0.9 --stop-at-target", tmp_path)[0]
    assert found["reason"] == "target" and found["accuracy"] >= 0.9 and found["epoch"] < 20
    entries = log(tmp_path)
    (target,) = [entry for entry in entries if entry["kind"] == "target"]
    assert target["epoch"] == found["epoch"] and target["step"] == found["step"] and target["value"] >= 0.9
    assert entries[-1]["kind"] == "end" and entries[-1]["reason"] == "target"


def test_the_log_says_what_ran_and_what_came_of_it(tmp_path: Path) -> None:
    results("digits --compression topk --epochs 2 --batch-size 256 --measure-selection", tmp_path)
    first, plan, *epochs, last = log(tmp_path)
    assert first["kind"] == "start" and first["job"] == "digits" and first["workers"] == 2
    assert first["optimizer"]["compression"] == "topk" and first["parameters"] == 151_306
    assert first["settings"]["compression"] == "topk" and first["metric"] == "accuracy"
    assert plan["kind"] == "plan" and sum(plan["counts"]) == 8
    assert [entry["epoch"] for entry in epochs] == [1, 2] and [entry["step"] for entry in epochs] == [2, 4]
    for entry in epochs:
        assert entry["kind"] == "epoch" and 0 < entry["metrics"]["accuracy"] < 1 and entry["lr"] > 0
        assert 0 < entry["train_seconds"] < entry["wall_seconds"] and entry["samples_per_second"] > 0
        assert entry["stats"]["bytes_sent"] > 0 and 0 < entry["stats"]["selection"]["contraction_mean"] < 1
    assert last["kind"] == "end" and last["reason"] == "done" and last["replicas_equal"] is True
    assert last["best"]["accuracy"] == max(entry["metrics"]["accuracy"] for entry in epochs)


def test_the_report_reads_what_a_run_writes_and_puts_seeds_together(tmp_path: Path) -> None:
    logs = []
    for seed in (1, 2):
        args = f"digits --compression topk --batch-size 256 --epochs 2 --seed {seed} --target 0.01 --log-dir {tmp_path}"
        given = train_options.arguments([*args.split(), "--run-name", f"seed {seed}"])
        run(2, lambda rank, given=given: train.train(given, Stopping()))
        logs.append(tmp_path / f"seed {seed}" / "log.jsonl")
    (row,) = comparison.rows(read_all(logs))
    assert row.runs == ["seed 1", "seed 2"] and row.compression == "topk" and row.replicas_equal
    assert row.steps.median == 2 and row.megabytes.median > 0 and row.train_seconds.low > 0
