# SPDX-License-Identifier: Apache-2.0
"""``prove.py``: trainings that resume to the bit, a text with a digest, settings, refusals, tables."""

from __future__ import annotations

import json
import random
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import prove
import pytest
import torch
from evidence import jobs, noise, page, report, text
from evidence.contenders import DENSE, OPTIONS, options_of, told
from evidence.models import SIZES, optimizers_of, rate_factor
from evidence.training import Stopped, Training, first_model, train_in_memory

import agmerge
from agmerge import testing

sys.path.append(str(Path(__file__).parent / "distributed"))
from proving import corpus_in, training_of  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread, as a job does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Trainings.


@pytest.mark.parametrize("contender", ["updates", "default", "topk", "powersgd-4", "local-4", "local-8", DENSE])
@pytest.mark.values
def test_a_training_that_was_cut_off_ends_as_one_that_was_not(tmp_path: Path, contender: str) -> None:
    """It is stopped in its fifth step, where a message of updates is under way, and the checkpoint is read again."""
    training, corpus = training_of(contender, 1 if contender == DENSE else 2), corpus_in(tmp_path)
    whole = train_in_memory(training, corpus, tmp_path / "whole.pt")
    stop, path = threading.Event(), tmp_path / "cut.pt"
    with pytest.raises(Stopped):
        train_in_memory(training, corpus, path, stop=stop, on_progress=lambda step: stop.set() if step == 4 else None)
    assert path.exists()
    steps: list[int] = []
    rest = train_in_memory(training, corpus, path, seconds=0.0, on_progress=steps.append)
    assert steps[0] > 4 and steps[-1] == training.steps and not path.exists()
    same = ("digest", "loss", "curve", "bytes_per_step", "dense_bytes_per_step")
    assert {name: rest[name] for name in same} == {name: whole[name] for name in same}


def test_a_rank_that_fails_ends_the_training_with_its_error(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        train_in_memory(training_of("default"), corpus_in(tmp_path), tmp_path / "x.pt", on_progress=fail)


def test_dense_is_what_workers_compute_together_up_to_rounding(tmp_path: Path) -> None:
    corpus = corpus_in(tmp_path)
    alone = train_in_memory(training_of(DENSE, 1), corpus, tmp_path / "x.pt")
    for workers in (2, 4):
        split = train_in_memory(training_of("split", workers), corpus, tmp_path / "x.pt")
        assert split["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert (alone["bytes_per_step"], alone["arguments"]) == (0, told(DENSE, {}))


@pytest.mark.parametrize("optimizer, expected", [("adamw", "eden-2"), ("sgd", "eden-4"), ("muon", "int8")])
@pytest.mark.values
def test_default_is_the_format_that_the_library_takes_on_a_slow_link(optimizer: str, expected: str) -> None:
    def settings(rank: int) -> tuple[Any, Any]:
        model = first_model(training_of("default"))
        inner = optimizers_of(optimizer, model, 1e-3)
        options = options_of("default", inner)
        given = inner if len(inner) > 1 else inner[0]
        slow = agmerge.DistributedOptimizer(given, model.named_parameters(), exchange="sparse", merging="threshold")
        return options["compression"], slow.settings["compression"]

    ((pinned, taken),) = testing.run(1, settings)
    assert pinned == expected and expected in str(taken)


def test_dgc_trains_with_the_momentum_of_sgd_and_clips_by_itself(tmp_path: Path) -> None:
    training = replace(training_of("dgc"), optimizer="sgd", rate=0.1)
    row = train_in_memory(training, corpus_in(tmp_path), tmp_path / "x.pt")
    assert row["loss"] < 5.6 and row["bytes_per_step"] < row["dense_bytes_per_step"] / 3


def test_learning_rates_warm_up_then_fall_by_a_cosine() -> None:
    factors = [rate_factor(step, 200) for step in range(200)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)]) and factors[10] == 1.0
    assert factors[105] == pytest.approx(0.55) and factors[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in SIZES if name != "tiny"])
@pytest.mark.values
def test_sizes_have_about_the_parameters_of_their_name(name: str) -> None:
    size = SIZES[name]
    assert size.parameters == pytest.approx(float(name[:-1]) * 1e6, rel=0.06)
    assert size.width % size.heads == 0 and size.batch % (8 * size.context) == 0
    if size.parameters < 2_000_000:
        model = first_model(replace(training_of(DENSE), size=name))
        embeddings = model.tokens.weight.numel() + model.places.weight.numel()
        assert sum(parameter.numel() for parameter in model.parameters()) - embeddings == size.parameters


def test_the_noise_scale_is_that_of_drawn_gradients(tmp_path: Path) -> None:
    source = torch.Generator().manual_seed(0)
    mean = torch.full((1000,), 0.1)  # of squared norm 10, and a covariance of trace 4000 a token
    samples = mean + 2.0 / 32**0.5 * torch.randn(400, 1000, generator=source)
    assert noise.noise_scale(samples, 32) == pytest.approx(400.0, rel=0.05)
    training = training_of(DENSE, 1, 20)
    found = list(noise.noise_scales(training, corpus_in(tmp_path)))
    assert [tokens for tokens, _ in found] == [64, 128, 256, 512, 896, 1280]


# Text.

FILES = [(f"lib/{number}.py", b"x = %d\n" % number * 40) for number in range(50)]


def test_the_digest_is_of_names_and_contents_whatever_their_order() -> None:
    shuffled = random.Random(0).sample(FILES, len(FILES))
    kept, digest = text.chosen(FILES)
    assert text.chosen(shuffled) == (kept, digest) and list(kept) == list(text.chosen(shuffled)[0]) == sorted(kept)
    assert text.chosen(FILES[1:])[1] != digest
    assert text.chosen([(name.upper(), content) for name, content in FILES])[1] != digest
    assert text.chosen([*FILES[:-1], (FILES[-1][0], FILES[-1][1] + b"#")])[1] != digest


def test_of_equal_files_one_stays_so_that_none_is_on_both_sides() -> None:
    kept, digest = text.chosen([*FILES, *((f"packages/{name}", content) for name, content in FILES)])
    assert (kept, digest) == text.chosen(FILES)


def test_licenses_go_and_code_stays() -> None:
    code = b'"""Docstring."""\n# a comment of the code\nx = 1\n'
    assert text.cleaned(b"#!/usr/bin/python\n# Copyright of somebody\n\n  # more\n" + code) == code
    assert text.cleaned(b"# nothing else") == b"" and text.cleaned(code) == code


def test_a_text_is_written_once_and_read_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "long.txt").write_bytes(random.Random(0).randbytes(64 << 20))
    corpus = text.prepared(source, text.BYTES, tmp_path / "texts")
    assert text.prepared(source, text.BYTES, tmp_path / "texts") == corpus
    assert text.prepared(None, text.BYTES, tmp_path / "texts", corpus.digest) == corpus
    parts = {name: corpus.part(name) for name in ("train", "held_out")}
    assert [len(part) for part in parts.values()] == [corpus.train, corpus.held_out]
    assert corpus.held_out >= text.LEAST_HELD_OUT and corpus.train + corpus.held_out == (64 << 20) + corpus.files
    rows = text.windows(parts["train"], torch.tensor([0, 7]), 5)
    assert rows.dtype == torch.int64 and rows[1].tolist() == parts["train"][7:12].tolist()


def test_byte_pairs_are_learned_from_the_training_part_alone() -> None:
    pytest.importorskip("tokenizers")
    parts = {"train": [b"the theory of the thing " * 50, b"def f(): pass\n" * 50], "held_out": [b"the xylophone " * 9]}
    found = text.byte_pairs(parts, 300)
    other = text.byte_pairs({**parts, "held_out": [b"something else"]}, 300)
    assert (found["train"] == other["train"]).all() and found["train"].dtype == "int16"
    assert all(0 <= part.min() and part.max() < 300 for part in found.values())
    assert len(found["train"]) < sum(map(len, parts["train"])) / 3


# The command.


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_run_makes_what_is_missing_and_prints_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "require_pictures", lambda error: None)
    monkeypatch.setattr(report, "picture", lambda rows, best, folder: [])
    Path("text").write_bytes(random.Random(0).randbytes(64 << 20))
    line = ["--data", "text", "--contenders", "dense,topk", "--tokens", "4096", "--jobs", "2"]
    prove.prove(prove.arguments([*line, "--seeds", "1"]))
    assert capfd.readouterr().err == ""  # no warning
    prove.prove(prove.arguments(["--resume", "--seeds", "2"]))
    shown = capfd.readouterr()
    stored = json.loads((prove.RUNS / "0.25m-adamw" / "prove.json").read_text(encoding="utf-8"))
    assert sorted((row["seed"], row["contender"]) for row in stored["rows"]) == [
        (seed, name) for seed in range(2) for name in ("dense", "topk")
    ]
    assert all(row["dense_loss"] and row["factor"] == 1 and row["bytes_per_step"] >= 0 for row in stored["rows"])
    assert f"| 2 | topk | {sum(r['loss'] for r in stored['rows'] if r['contender'] == 'topk') / 2:.4f} | " in shown.out
    assert shown.err == "" and report.LIMITS in shown.out


def refused(*line: str) -> str:
    """Return why a command line is refused."""
    with pytest.raises(prove.Refused) as caught:
        prove.prove(prove.arguments(line))
    return str(caught.value)


@pytest.mark.parametrize(
    "line, why",
    [
        (("--contenders", "dense,topkk"), "topkk is unknown. Choose from: dense"),
        (("--workers", "1"), "one worker sends nothing"),
        (("--contenders", "dgc"), "dgc needs --optimizer sgd"),
        (("--workers", "2,3"), "3 workers need a multiple of 192 tokens"),
        (("--tokens", "1k"), "less than the 2048 tokens of one step"),
        (("--data", "nowhere"), "there is no such file or folder"),
        (("--size", "124m", "--workers", "64", "--jobs", "64"), "GiB, and "),
        (("--device", "cuda:7"), "--device cuda:7"),
    ],
)
@pytest.mark.values
def test_what_cannot_work_is_refused_before_anything_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "require_pictures", lambda error: None)
    assert why in refused(*line)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_and_not_made_twice_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "require_pictures", lambda error: None)
    run = prove.Run(prove.RUNS / "0.25m-adamw")
    run.begin({**prove.DEFAULTS, "seeds": 5, "batch": 1024}, {"digest": "a"})
    assert "exists. Add --resume" in refused()
    lock = prove.locked(run.folder)
    assert "another process is working on this run" in refused("--resume")
    lock.close()
    resumed = prove.settings_of(prove.arguments(["--resume", "--workers", "4,8"]), run.stored["settings"])
    assert (resumed["seeds"], resumed["batch"], resumed["workers"]) == (5, 1024, [4, 8])
    larger = prove.settings_of(prove.arguments(["--resume", "--size", "1m"]), run.stored["settings"])
    assert (larger["seeds"], larger["batch"]) == (5, None)
    run.add(row("dense", 0, 2.0, workers=1))
    with pytest.raises(prove.Refused, match="its rows are of a text with digest a"):
        run.begin(run.settings, {"digest": "b"})


def test_trainings_are_planned_seed_by_seed_and_what_is_there_is_left_out(tmp_path: Path) -> None:
    settings = {**prove.DEFAULTS, "batch": 2048, "seeds": 2, "workers": [2, 4], "rates": [0.7, 1.0]}
    settings["contenders"] = ["dense", "topk"]
    planned = prove.plan(settings, 0.004)
    told = [(one.seed, one.contender, one.workers, one.rate) for one in planned]
    first = [(0, "dense", 1, 0.004)]
    first += [(0, "topk", workers, rate) for workers in (2, 4) for rate in (0.004, 0.0028)]
    assert told == first + [(1, *rest) for _, *rest in first]
    run = prove.Run(tmp_path / "run")
    run.add({**asdict(planned[1]), "loss": 1.0})
    assert run.missing(planned) == [planned[0], *planned[2:]]


def test_tokens_are_as_many_as_there_is_time_for() -> None:
    settings = {**prove.DEFAULTS, "batch": 2048}
    amounts = [prove.chosen_tokens(settings, seconds, 1e-4, 2) for seconds in (1, 60, 600, 6000, 60000)]
    assert amounts == sorted(amounts) and len(set(amounts)) > 3
    assert amounts[-1] == 20 * SIZES["0.25m"].parameters


def test_a_training_of_unknown_length_counts_as_long_as_those_under_way() -> None:
    half, quarter = (None, 10.0, 0.0, 0.5), (None, 10.0, 0.0, 0.25)  # of 20 s, and of 40 s
    assert jobs.seconds_left([half, quarter], [None] * 34) == 10 + 30 + 34 * 30
    assert jobs.seconds_left([(100.0, 10.0, 0.0, 0.5)], [50.0, None]) == 90 + 50 + 100
    assert jobs.seconds_left([(100.0, 120.0, 0.0, 0.9)], []) == 0  # it takes longer than the one like it
    assert jobs.seconds_left([], [None]) == 0


def test_a_resumed_training_counts_the_steps_since_then() -> None:
    resumed = (None, 10.0, 0.5, 0.75)  # of 40 s, of which 20 were spent before
    assert jobs.seconds_left([resumed], [None]) == 10 + 40
    assert jobs.seconds_left([(40.0, 10.0, 0.5, 0.75)], []) == 10


def test_numbers_of_the_command_line_are_read_with_their_units_and_must_be_positive(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = prove.arguments(["--tokens", "1.5M", "--batch", "512", "--workers", "2, 4", "--rates", "0.7,1"])
    assert (args.tokens, args.batch, args.workers, args.rates) == (1_500_000, 512, [2, 4], [0.7, 1.0])
    for line in (["--minutes", "0"], ["--tokens", "many"], ["--workers", "0"], ["--workers", ","], ["--seeds", "-1"]):
        with pytest.raises(SystemExit):
            prove.arguments(line)
        assert f"argument {line[0]}: invalid" in capsys.readouterr().err


def test_dense_is_tuned_by_its_loss_and_one_that_diverged_is_not_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, losses = (
        prove.Run(tmp_path / "run"),
        dict(zip((0.0015, 0.0021, 0.003, 0.0042, 0.006), (3, 2, 1, 1.5, 0), strict=True)),
    )

    class Instant:
        def make(self, todo: Any, corpus: Any, folder: Path, on_row: Any) -> list[Any]:
            for one in todo:
                on_row({**asdict(one), "loss": losses[one.rate] or float("nan")})
            return []

    settings = {**prove.DEFAULTS, "batch": 2048, "tune": prove.arguments(["--tune"]).tune}
    assert prove.tuning(settings, run, Instant(), None) == 0.003
    losses[0.006], run.rows = 0.5, []
    assert prove.tuning(settings, run, Instant(), None) == 0.006
    assert "at the end of the range" in capsys.readouterr().out.splitlines()[-1]
    losses[0.0042], run.rows = 0.6, []
    for tried, rates in (("1", "0.003"), ("1.4,1", "0.003, 0.0042"), ("2", "0.003, 0.0042, 0.006")):
        settings["tune"] = prove.arguments(["--tune", tried]).tune
        best = prove.tuning(settings, run, Instant(), None)
        told = capsys.readouterr().out.strip()
        assert best == min(map(float, rates.split(", ")), key=losses.__getitem__)  # of all so far
        assert f"is {best:g}, of {rates}. It is at the end" in told


# Tables.


def row(contender: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    """Return what a table reads of a row."""
    usual = asdict(Training("0.25m", contender, "adamw", 2, 1_000_000, 2048, seed, 0.004))
    sent = {"bytes_per_step": 5e4, "dense_bytes_per_step": 1e6, "curve": [], "device": "cpu"}
    return {**usual, "loss": loss, "seconds": 60.0 * more.get("workers", 2), **sent, **more}


def test_a_table_has_paired_differences_with_their_interval() -> None:
    rows = [row("dense", seed, loss, workers=1) for seed, loss in enumerate((2.0, 4.0, 3.0))]
    rows += [row("topk", seed, loss) for seed, loss in enumerate((2.02, 4.08))]  # of the third seed: not yet
    rows += [row("topk", 0, 2.5, rate=0.0056), row("dense", 0, 2.2, workers=1, rate=0.008)]
    lines = report.table(rows, {"0.25m, adamw, batch 2048": 0.004}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    assert [cells[0][:2], cells[1][:2]] == [["any", "dense"], ["any", "dense, 2x the rate"]]
    assert cells[0][3] == "" and cells[1][3] == "+10.00 %"
    assert cells[2] == ["2", "topk", "3.0500", "+1.50 % ± 6.35", "2", "50 kB", "20x less"]
    assert cells[3][1:5] == ["topk, 1.4x the rate", "2.5000", "+25.00 %", "1"]


def test_every_contender_is_told_with_its_arguments() -> None:
    (inner,) = optimizers_of("adamw", first_model(training_of(DENSE)), 1e-3)
    lines = {name: told(name, options_of(name, [inner])) for name in OPTIONS}
    assert lines["default"] == "DistributedOptimizer(compression='eden-2')"
    assert lines["dgc"].endswith("exchange='sparse', memory=sparsifiers.memory('dgc', clipping=1.0))")
    assert lines["local-30"] == "LocalOptimizer(every=30, exchange='sparse')"
    assert len(set(lines.values())) == len(lines)


# The page.


def test_the_page_has_the_figures_of_the_recorded_runs() -> None:
    """``python benchmarks/prove.py --page`` makes them."""
    written = page.PAGE.read_text(encoding="utf-8")
    assert page.written_page(written, page.recorded()) == written
    runs = page.recorded()
    assert page.digest_of(page.flat(page.drawn(runs))) in page.LADDER.read_text(encoding="utf-8")
    assert page.digest_of(page.curves(runs["rung1"])) in page.CURVES.read_text(encoding="utf-8")


class Recorded:
    """Pool of jobs that trains nothing: it answers with the rows of a recorded run."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = {prove.training_of(row): row for row in rows}

    def __call__(self, *pool: Any) -> Recorded:
        return self

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        """End nothing."""

    def make(self, todo: Sequence[Training], corpus: Any, checkpoints: Path, add: Callable[[Any], None]) -> list[Any]:
        """Add the row of each training. KeyError: the record has none."""
        for one in todo:
            add(self.rows[one])
        return []


@pytest.mark.parametrize("name", ["rung1", "rung2"])
def test_the_commands_of_a_record_make_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    recorded = page.recorded()[name]
    pool = Recorded(recorded["rows"])
    corpus = SimpleNamespace(**recorded["data"], facts=lambda: recorded["data"])
    monkeypatch.chdir(tmp_path)
    for owner, attribute, stand_in in (
        (prove, "Jobs", pool),
        (prove, "check", lambda *settings: None),
        (text, "prepared", lambda *place: corpus),
        (report, "picture", lambda *run: []),
    ):
        monkeypatch.setattr(owner, attribute, stand_in)
    for command in recorded["commands"]:
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        prove.prove(prove.arguments(sys.argv[1:]))
    made = prove.Run(prove.RUNS / name).stored
    assert made is not None and {prove.training_of(row) for row in made["rows"]} == pool.rows.keys()
    assert (made["best"], made["commands"]) == (recorded["best"], recorded["commands"])


def test_curves_are_paired_at_each_point_and_need_two_seeds() -> None:
    rows = [row("dense", seed, 2.0, workers=1, curve=[[100, 4.0], [200, 2.0 + seed]]) for seed in (0, 1)]
    rows += [row("topk", seed, 2.0, curve=[[100, 4.4], [200, (2.0 + seed) * (1.1 + seed / 5)]]) for seed in (0, 1)]
    rows += [row("topk", 0, 2.0, workers=4, curve=[[100, 4.0]]), row("topk", 0, 2.0, workers=8, curve=[[100, 4.0]])]
    found = page.curves({"rows": rows, "best": {"0.25m, adamw, batch 2048": 0.004}})
    assert found == {
        "topk 2": [
            (100.0, pytest.approx(10.0), pytest.approx(0.0, abs=1e-6)),
            (200.0, pytest.approx(20.0), pytest.approx(127.06, abs=0.01)),
        ]
    }


def test_a_rung_shows_each_batch_each_number_of_workers_and_the_rates() -> None:
    rows = []
    for seed, batch in ((0, 2048), (1, 2048), (0, 512)):
        steps = {"batch": batch, "steps": 1_000_000 // batch, "parameters": 260_000, "seed": seed}
        rows += [row("dense", loss=2.0, workers=1, **steps), row("dense", loss=2.4, workers=1, rate=0.008, **steps)]
        rows += [row("topk", loss=2.1 + seed / 50, workers=workers, **steps) for workers in (2, 8)]
        rows += [row("topk", loss=2.3, rate=0.0028, **steps)]
    best = {f"0.25m, adamw, batch {batch}": 0.004 for batch in (2048, 512)}
    run = {"rows": rows, "best": best, "commands": ["a", "b"], "data": {"digest": "d1", "train": 400_000}}
    lines = page.figures({"rung1": run}).splitlines()
    assert (
        lines[0] == "### 0.26 million parameters" and "```bash" in lines and lines.count("a") == lines.count("b") == 1
    )
    about = [line for line in lines if line.startswith("AdamW, 1 M tokens, ")]
    assert [line.split()[4:9] for line in about] == [
        ["488", "steps", "of", "2048", "tokens"],
        ["1953", "steps", "of", "512", "tokens"],
    ]
    assert "is 0.004, the best of 2 that we tried (0.004 to 0.008). The text is read 2.5 times." in about[0]
    cells = [line for line in lines if line.startswith("| `topk`")]
    assert cells[0] == "| `topk` | +5.50 % ± 6.35 (2) | +5.50 % ± 6.35 (2) |"
    assert cells[1] == "| `topk` | +5.00 % (1) | +5.00 % (1) |"
    assert cells[2].startswith("| `topk`, 2 workers | +15.00 % ± 0.00 (2)")
    assert "with dense took 1.0 minutes of one core. With the other settings, which train all" in "\n".join(lines)
    assert cells[-1] == "| `topk` | 50 kB | 20x | 2 / 0.4 / 0.04 ms |"
    assert page.ladder({"rung1": run}) == {"topk": [(260_000.0, pytest.approx(5.5), pytest.approx(6.353, abs=1e-3))]}
    assert page.by_batch(run) == {"topk": [(512.0, pytest.approx(5.0), 0.0), (2048.0, pytest.approx(5.5), ANY)]}
    assert list(page.drawn({"rung1": run})) == ["parameters without embeddings", "tokens of a step"]
    assert page.by_batch({**run, "rows": [one for one in rows if one["batch"] == 512]}) == {}
    assert page.figures({}) == page.NONE
