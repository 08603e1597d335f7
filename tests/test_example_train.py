"""``examples/train.py``: what its command line comes to, and trainings of it among ranks in memory."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import assemble
import jobs
import pytest
import show
import torch
import train
import train_options
from jobs.base import Job, Recipe, Settings, Task, generator, held_out, share
from schedules import Linear, Steps
from stopping import Stopping

import agmerge
import merging
from agmerge.testing import run

LOCK, SEED = threading.Lock(), torch.manual_seed


class Locked(Job):
    """Make networks of the same weights in every run, though ranks are threads and share torch's generator."""

    def make(self, settings: Settings) -> Task:
        with LOCK:
            SEED(settings.seed)
            return super().make(settings)


@pytest.fixture(autouse=True)
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = jobs.get
    monkeypatch.setattr(assemble.jobs, "get", lambda name: Locked(**vars(real(name))))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # in the middle of what another rank draws
    torch.set_num_threads(1)
    yield


def results(line: str, folder: Path, workers: int = 2) -> list[dict[str, Any]]:
    """What every worker returns of ``train.py line``; logs lie in ``folder/log``."""
    args = train_options.arguments([*line.split(), "--log-dir", str(folder), "--run", "log", "--merging", "threshold"])
    return run(workers, lambda rank: train.train(args, Stopping()))


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log" / "log.jsonl").read_text().splitlines()]


SAME = ("accuracy", "loss", "perplexity", "bytes_sent", "residual_norm", "step", "epoch", "best")


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """What is the same to the bit where a run is."""
    return {name: found[name] for name in SAME if name in found}


# -- the command line ------------------------------------------------------------------------------------------


def options(line: str) -> dict[str, Any]:
    args = train_options.arguments(line.split())
    return train_options.library_options(args, jobs.get(args.job), "the model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("digits", {"exchange": "sparse"}),
        ("digits --compression topk --density 0.1", {"compression": "topk", "density": 0.1, "exchange": "sparse"}),
        ("digits --compressor none", {"compression": "none"}),
        ("digits --merging agtf --exchange auto", {"merging": "agtf", "exchange": "auto"}),
        ("digits --merging dear", {"merging": "dear", "model": "the model", "compression": "none"}),
        ("digits --threshold 1000", {"merging": merging.get("threshold", bytes=4000), "exchange": "sparse"}),
        ("digits --compression powersgd --rank 8", {"compression": "powersgd", "rank": 8, "exchange": "sparse"}),
        (
            "digits --memory none --dense .*bias fc2.* --warmup-density 20",
            {"memory": "none", "dense": [".*bias", "fc2.*"], "warmup": 20, "exchange": "sparse"},
        ),
        ("digits --warmup-density dgc --dense partial", {"warmup": "dgc", "dense": "partial", "exchange": "sparse"}),
        ("gpt-stdlib", {"sync": "updates", "exchange": "sparse"}),
        ("gpt-stdlib --sync gradients --compression none", {"sync": "gradients", "compression": "none"}),
        (
            "gpt-stdlib --every 8 --overlap 2 --fragments 2 --density 1 --wire int4 --carry apply",
            {"sync": "updates", "every": 8, "overlap": 2, "fragments": 2, "density": 1.0, "wire": "int4"}
            | {"carry": "apply", "exchange": "sparse"},
        ),
        ("gpt-stdlib --local-steps 8 --wire int8", {"wire": "int8", "exchange": "sparse"}),
    ],
)
def test_only_what_was_asked_for_is_passed_on(line: str, expected: dict[str, Any]) -> None:
    assert options(line) == expected


def recipe(line: str) -> Recipe:
    args = train_options.arguments(line.split())
    return train_options.recipe_of(jobs.get(args.job), args)


def test_a_recipe_is_as_published_unless_a_flag_says_otherwise() -> None:
    published = jobs.get("digits").recipe
    assert recipe("digits") == published
    changed = recipe("digits --lr 0.5 --epochs 3 --train_batch_size 4 --momentum 0.1 --wd 0 --clip 2")
    assert changed == replace(published, lr=0.5, epochs=3, batch_size=4, momentum=0.1, wd=0.0, clip=2.0)
    assert recipe("digits --tiny").epochs < published.epochs


def test_a_warm_up_is_for_rates_that_have_one() -> None:
    steps = replace(jobs.get("digits").recipe, schedule=Steps(((30, 0.1),)))
    assert train_options.warmed(steps, 2.0, "x") == Steps(((30, 0.1),), warmup=2.0)
    linear = replace(steps, schedule=Linear(), epochs=10)
    assert train_options.warmed(linear, 2.0, "x") == Linear(0.2)
    with pytest.raises(ValueError, match="--warmup-epochs: the rate of digits has no warm-up"):
        recipe("digits --warmup-epochs 2")


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "a job is missing"),
        ("digit", "did you mean 'digits'"),
        ("digits --resume", "--resume goes on from --checkpoint-dir"),
        ("digits --portable", "--portable is about --checkpoint-dir"),
        ("digits --stop-at-target", "--stop-at-target needs --target"),
        ("digits --local-steps 4 --sync updates", "leave --sync out"),
        ("digits --epochs 0", "no whole number above 0"),
        ("digits --use-adasum", "--use-adasum"),
        ("digits --merging threshold:bites=3", "bites"),
    ],
)
def test_what_has_no_meaning_is_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train_options.arguments(line.split())
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_momentum_is_about_sgd() -> None:
    with pytest.raises(ValueError, match="--momentum is about SGD, and gpt-stdlib trains with adamw"):
        recipe("gpt-stdlib --momentum 0.9")


def test_jobs_are_listed_and_shown_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--list"])
    listed = capsys.readouterr().out
    assert all(f"{name} " in listed for name in jobs.JOBS)
    train.main("gpt-stdlib --dry-run --local-steps 4".split())
    shown = capsys.readouterr().out
    assert "817,920 parameters in 52 tensors" in shown and "agmerge.LocalOptimizer(every=4, " in shown


def test_options_that_contradict_end_with_the_librarys_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="merging='dear' halves an all-reduce.*pass compression='none'"):
        train.main(["digits", "--merging", "dear", "--compression", "topk", "--log-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="every=4 is about sync='updates'"):
        train.main(["gpt-stdlib", "--sync", "gradients", "--every", "4", "--log-dir", str(tmp_path)])
    agmerge.shutdown()


# -- a worker's part -------------------------------------------------------------------------------------------


def settings(rank: int, workers: int, uneven: bool = False) -> Settings:
    return Settings(jobs.get("digits").recipe, seed=3, rank=rank, workers=workers, uneven=uneven)


@pytest.mark.parametrize("uneven", [False, True])
def test_parts_are_disjoint_and_as_many_as_there_are(uneven: bool) -> None:
    parts = [share(11, settings(rank, 3, uneven), epoch=1).tolist() for rank in range(3)]
    assert [len(part) for part in parts] == ([4, 4, 3] if uneven else [3, 3, 3])
    together = [sample for part in parts for sample in part]
    assert len(set(together)) == len(together)
    assert share(11, settings(0, 3), 1).tolist() == parts[0][: 3 if not uneven else 4][:3]
    assert share(11, settings(0, 3), 2).tolist() != share(11, settings(0, 3), 1).tolist()


def test_all_that_is_held_out_is_some_workers() -> None:
    seen = [sample for rank in range(3) for sample in range(11)[held_out(11, settings(rank, 3))]]
    assert sorted(seen) == list(range(11))


def test_what_is_drawn_depends_on_the_place_alone() -> None:
    def drawn(rank: int, epoch: int, step: int) -> float:
        return torch.rand(1, generator=generator(settings(rank, 2), epoch, step)).item()

    places = [(rank, epoch, step) for rank in range(2) for epoch in range(3) for step in range(3)]
    values = [drawn(*place) for place in places]
    assert len(set(values)) == len(values) and values == [drawn(*place) for place in places]


# -- training --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", merging.names())
def test_the_main_job_takes_every_planner_and_names_it(name: str, tmp_path: Path) -> None:
    args = train_options.arguments(f"digits --merging {name} --max-steps 4 --log-dir {tmp_path}".split())
    found = run(2, lambda rank: train.train(args, Stopping()))[0]
    assert found["replicas_equal"] and found["reason"] == "max-steps"
    shown = show.table(found)
    assert f"plan              {name}, " in shown and "merge buffer" in shown
    assert ("none" if name == "dear" else "density 0.01, sparse exchange") in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, most",
    [
        ("gpt-stdlib", 24),
        ("gpt-stdlib --carry hold", 24),
        ("gpt-stdlib --overlap 1", 24),
        ("gpt-stdlib --local-steps 4", 24),
        ("gpt-stdlib --compression none", 24),
        ("gpt-stdlib --sync gradients --compression powersgd", 24),
        ("gpt-stdlib --sync gradients --compression none --amp bf16", 24),
    ],
)
def test_a_language_model_learns_whatever_is_exchanged(line: str, most: float, tmp_path: Path) -> None:
    found = results(f"{line} --tiny --max-steps 100", tmp_path)
    assert found[0]["replicas_equal"] and found[0]["step"] == 100
    assert found[0]["perplexity"] == found[1]["perplexity"] < most  # a unigram model has 24.9
    assert "of a unigram model" in show.table(found[0])


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
@pytest.mark.parametrize(
    "line",
    [
        "digits --compression topk",
        "digits --compression dgc --clip 1",
        "digits --compression none --batches-per-allreduce 2",
        "digits --compression acpsgd --amp bf16",
        "gpt-stdlib --tiny",
        "gpt-stdlib --tiny --local-steps 3",
        "gpt-stdlib --tiny --sync gradients --compression topk",
    ],
)
def test_a_run_goes_on_to_the_bit(line: str, tmp_path: Path) -> None:
    straight = results(f"{line} --max-steps 10", tmp_path)
    kept = f"--checkpoint-dir {tmp_path / 'kept'}"
    results(f"{line} --max-steps 4 {kept}", tmp_path / "halves")
    resumed = results(f"{line} --max-steps 10 {kept} --resume", tmp_path / "halves")
    assert [outcome(found) for found in resumed] == [outcome(found) for found in straight]
    kinds = [entry["kind"] for entry in log(tmp_path / "halves")]
    assert kinds == ["start", "plan", "epoch", "end"] * 2
    assert [entry["step"] for entry in log(tmp_path / "halves") if entry["kind"] == "start"] == [0, 4]


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3)])
def test_other_numbers_of_workers_go_on_from_a_portable_checkpoint(before: int, after: int, tmp_path: Path) -> None:
    line = f"digits --compression topk --checkpoint-dir {tmp_path / 'kept'}"
    first = results(f"{line} --portable --epochs 8 --max-steps 100", tmp_path, before)[0]
    again = results(f"{line} --resume --epochs 8", tmp_path, after)[0]
    assert again["replicas_equal"] and again["epoch"] == 8 and again["accuracy"] > 0.85
    assert again["bytes_sent"] > first["bytes_sent"]  # totals go on
    steps = {workers: 1437 // (16 * workers) for workers in (before, after)}
    expected = first["epoch"] * steps[before] + (100 - first["epoch"] * steps[before])
    assert expected == 100
    done = (100 - first["epoch"] * steps[before]) * before // after
    assert again["step"] == 100 + steps[after] - min(done, steps[after]) + (8 - first["epoch"] - 1) * steps[after]


def test_a_checkpoint_of_another_number_of_workers_is_an_error_that_says_so(tmp_path: Path) -> None:
    line = f"digits --compression topk --checkpoint-dir {tmp_path / 'kept'} --max-steps 2"
    results(line, tmp_path)
    with pytest.raises(Exception, match="step 2 of 2 workers, and here are 1: save with --portable"):
        results(f"{line} --resume", tmp_path, workers=1)


def test_resuming_where_nothing_lies_begins(tmp_path: Path) -> None:
    found = results(f"digits --checkpoint-dir {tmp_path / 'kept'} --resume --max-steps 2", tmp_path)
    assert found[0]["step"] == 2


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    results(f"digits --checkpoint-dir {tmp_path / 'kept'} --max-steps 1", tmp_path, workers=1)
    with pytest.raises(ValueError, match="has checkpoints of digits, not of gpt-stdlib"):
        results(f"gpt-stdlib --tiny --checkpoint-dir {tmp_path / 'kept'} --resume", tmp_path, workers=1)


def test_two_checkpoints_are_kept_and_one_that_was_not_finished_is_not_taken(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    line = f"digits --compression none --batch-size 512 --checkpoint-dir {kept}"  # two steps an epoch
    results(f"{line} --epochs 3", tmp_path, workers=1)
    assert sorted(path.name for path in kept.iterdir()) == ["4", "6"]
    (kept / "9").mkdir()
    (kept / "9" / ".0.pt.unfinished").write_bytes(b"half")
    found = results(f"{line} --epochs 4 --resume", tmp_path, workers=1)
    assert found[0]["step"] == 8


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


def test_a_signal_to_one_worker_ends_all_after_the_same_step(tmp_path: Path) -> None:
    args = train_options.arguments(
        f"digits --compression topk --checkpoint-dir {tmp_path / 'kept'} --log-dir {tmp_path}".split()
    )

    def body(rank: int) -> dict[str, Any]:
        stopping = Stopping()
        if rank == 1:
            stopping.note(15, None)
        return train.train(args, stopping)

    found = run(2, body)
    assert [one["reason"] for one in found] == ["signal"] * 2 and found[0]["step"] == found[1]["step"] < 44
    assert sorted(path.name for path in (tmp_path / "kept").glob("*/*")) == ["0.pt", "1.pt"]
