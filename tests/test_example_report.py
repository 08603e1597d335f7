# SPDX-License-Identifier: Apache-2.0
"""The report of the examples: logs in, rows and tables out."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import report
from reporting import curves, logs
from reporting.comparison import Spread, rows, spread

Line = dict[str, Any]


def start(run: str = "a", compression: str = "none", step: int = 0, **more: Any) -> Line:
    settings = {"job": "digits", "run_name": run, "log_dir": "runs", "compression": compression, **more}
    optimizer = {"sync": more.get("sync", "gradients"), "compression": compression, "density": "0.01"}
    found = {"kind": "start", "job": more.get("job", "digits"), "run": run, "settings": settings, "step": step}
    return found | {"optimizer": optimizer, "metric": more.get("metric", "accuracy"), "unit": "images", "workers": 2}


def epoch(number: int, value: float, seconds: float = 1.0, metric: str = "accuracy", **more: Any) -> Line:
    """``seconds`` of training an epoch, of ten steps; as many bytes as microseconds."""
    stats = {"bytes_sent": 9, "link_bytes": 1_000_000 * number, "exposed_seconds": 0.02 * number}
    found = {"kind": "epoch", "epoch": number, "step": 10 * number, "metrics": {metric: value, "loss": 1.0}}
    times = {
        "train_seconds": seconds * number,
        "wall_seconds": 2 * seconds * number,
        "samples_per_second": 100 + number,
    }
    return found | times | {"stats": stats} | more


def end(equal: bool = True) -> Line:
    return {"kind": "end", "step": 30, "reason": "done", "replicas_equal": equal}


def written(folder: Path, name: str, *lines: Line | str) -> Path:
    path = folder / name / "log.jsonl"
    path.parent.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(texts))
    return path


def a_run(folder: Path, name: str, *lines: Line, **more: Any) -> logs.Run:
    return logs.read(written(folder, name, start(name, **more), *lines))


def test_a_run_is_read(tmp_path: Path) -> None:
    plan = {"kind": "plan", "step": 0, "buffers": 1}
    found = a_run(tmp_path, "a", plan, epoch(1, 0.5), epoch(2, 0.8), epoch(3, 0.7), end(), compression="topk")
    assert (found.name, found.metric, found.compression, found.density) == ("a", "accuracy", "topk", 0.01)
    assert found.best() == 0.8 and found.samples_per_second() == 102 and found.note == ""
    assert found.exposed_ms() == pytest.approx(2.0)
    point = found.reached(0.75)
    assert point == logs.Point(0.8, 2, 20, 2.0, 4.0, 2e6)
    assert found.reached(0.81) is None and found.reached(None) is None
    assert found.end == end()


def test_a_target_between_epochs_counts(tmp_path: Path) -> None:
    spent = {"train_seconds": 1.4, "wall_seconds": 2.0, "bytes_sent": 9, "link_bytes": 5}
    target = {"kind": "target", "metric": "accuracy", "target": 0.7, "value": 0.72, "epoch": 1.5, "step": 15, **spent}
    other = {**target, "metric": "top5", "step": 11}
    found = a_run(tmp_path, "a", epoch(1, 0.5), other, target, epoch(2, 0.8), target=0.7)
    assert found.reached(None) == logs.Point(0.72, 1.5, 15, 1.4, 2.0, 5)
    assert found.reached(0.75) == logs.Point(0.8, 2, 20, 2.0, 4.0, 2e6)


def test_of_perplexity_less_is_better(tmp_path: Path) -> None:
    lines = [epoch(n + 1, value, metric="perplexity") for n, value in enumerate((90.0, math.nan, 40.0, 50.0))]
    found = a_run(tmp_path, "a", *lines, metric="perplexity")
    assert found.best() == 40.0
    point = found.reached(95.0)
    assert point is not None and point.epoch == 1
    assert found.reached(39.0) is None


def test_what_was_done_again_counts_once(tmp_path: Path) -> None:
    """Killed in the third epoch, and resumed after the first."""
    again = [epoch(2, 0.6, seconds=3.0), epoch(3, 0.7, seconds=3.0), end()]
    found = a_run(tmp_path, "a", epoch(1, 0.5), epoch(2, 0.9), end(False), start("a", step=10), *again)
    assert [point.value for point in found.points] == [0.5, 0.6, 0.7] and found.best() == 0.7
    assert found.end == end()
    assert a_run(tmp_path, "b", epoch(1, 0.5), end(), start("b", step=10)).end is None


def test_half_a_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    half = json.dumps(epoch(2, 0.9))[:50]
    path = written(tmp_path, "a", start(), epoch(1, 0.5), half)
    found = logs.read(path)
    assert found.best() == 0.5 and found.note == f"{path}:3: left out, this line was cut off"
    path = written(tmp_path, "b", start(), epoch(1, 0.5), half + "\n", start(step=10), epoch(2, 0.6))
    found = logs.read(path)
    assert found.best() == 0.6 and ":3: left out" in found.note


@pytest.mark.parametrize(
    "lines, why",
    [
        ([], "log.jsonl:1: a log begins with a line of kind 'start'"),
        ([epoch(1, 0.5)], "log.jsonl:1: a log begins with a line of kind 'start'"),
        ([start(), "{broken\n", epoch(1, 0.5)], "log.jsonl:2: no JSON object"),
        ([start(), "3\n"], "log.jsonl:2: a line of kind None without kind"),
        ([start(), {"kind": "epoch", "epoch": 1}], "log.jsonl:2: a line of kind 'epoch' without metrics, samples_per"),
    ],
)
def test_broken_logs_are_refused(lines: list[Line | str], why: str, tmp_path: Path) -> None:
    path = written(tmp_path, "a", *lines)
    with pytest.raises(SystemExit, match=why):
        report.main([str(path)])


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"report.py: .*nothing.jsonl"):
        report.main([str(tmp_path / "nothing.jsonl")])


def test_runs_are_compared_with_the_dense_one_of_their_kind(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path, "topk", epoch(1, 0.5), epoch(2, 0.8), end(), compression="topk"),
        a_run(tmp_path, "other", epoch(1, 0.9, seconds=100.0), end(), job="other"),
        a_run(tmp_path, "signs", epoch(1, 0.9, seconds=50.0), end(), sync="updates"),
        a_run(tmp_path, "none", epoch(1, 0.5, seconds=4.0), epoch(2, 0.8, seconds=4.0), end()),
        a_run(tmp_path, "never", epoch(1, 0.5), end(False), compression="randomk"),
    ]
    found = {row.runs[0]: row for row in rows(runs, 0.75)}
    assert list(found) == ["topk", "other", "signs", "none", "never"]
    assert found["topk"].times_dense == 4.0 and found["none"].times_dense == 1.0
    assert found["topk"].train_seconds == Spread(2.0, 2.0, 2.0) and found["topk"].megabytes == Spread(2.0, 2.0, 2.0)
    assert found["never"].train_seconds.median == found["never"].times_dense == math.inf
    assert found["never"].replicas_equal is False and found["topk"].replicas_equal is True
    assert found["signs"].other == {"sync": "updates"} and found["topk"].other == {}
    assert {row.runs[0]: row.times_dense for row in rows(runs, 0.75, "signs")}["topk"] == 25.0
    with pytest.raises(ValueError, match="--dense no: there is no such run, but topk, other"):
        rows(runs, 0.75, "no")


def test_of_several_dense_runs_the_most_alike_counts(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path, "plain", epoch(1, 0.9, seconds=8.0)),
        a_run(tmp_path, "omgs", epoch(1, 0.9, seconds=6.0), merging="omgs"),
        a_run(tmp_path, "sparse", epoch(1, 0.9, seconds=2.0), merging="omgs", compression="topk"),
    ]
    last = rows(runs, 0.5)[-1]
    assert last.times_dense == 3.0 and last.other == {"merging": "omgs"}


def test_seeds_share_a_row(tmp_path: Path) -> None:
    values = (0.7, 0.9, 0.8)
    runs = [a_run(tmp_path, f"s{n}", epoch(1, value), end(), seed=n) for n, value in enumerate(values)]
    (row,) = rows(runs, 0.75)
    assert row.runs == ["s0", "s1", "s2"] and row.best == Spread(0.8, 0.7, 0.9) and row.other == {}
    assert row.train_seconds == Spread(1.0, 1.0, math.inf)
    head, line = report.table([row]).splitlines()
    assert "0.8 (0.7 to 0.9)" in line and "1 (1 to -)" in line and "runs" in head


def test_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([]) == Spread(math.inf, math.inf, math.inf)


def test_tables_for_people_and_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = written(tmp_path, "none", start("none"), epoch(1, 0.5, seconds=3.0), epoch(2, 0.8, seconds=3.0), end())
    sparse = written(tmp_path, "topk", start("topk", "topk"), epoch(1, 0.8), '{"kind": "end", "ste')
    line = [str(dense.parent), str(sparse), "--target", "0.75"]
    report.main(line)
    out, err = capsys.readouterr()
    assert out == (
        "job     compression  workers  best          train s  wall s  steps  link MB  x dense  samples/s     "
        "exposed ms  replicas\n"
        "digits  none         2        accuracy 0.8  6        12      20     2        1        101.5 images  "
        "2           equal\n"
        "digits  topk 0.01    2        accuracy 0.8  1        2       10     1        6        101 images    "
        "2           -\n"
    )
    assert err == f"{sparse}:3: left out, this line was cut off\n"
    report.main([*line, "--markdown"])
    head, rule, *body = capsys.readouterr().out.splitlines()
    assert head.startswith("| job    | compression |") and set(rule) == set("| -") and len(body) == 2
    report.main([*line[:2], "--json"])
    first, second = json.loads(capsys.readouterr().out)
    assert first["best"] == {"median": 0.8, "low": 0.8, "high": 0.8} and first["density"] is None
    assert second["times_dense"] is None and second["density"] == 0.01  # no target, so no times


def test_without_a_target_figures_are_of_whole_runs_and_of_as_many_steps(tmp_path: Path) -> None:
    dense, long = (a_run(tmp_path, name, epoch(1, 0.5, 3.0), epoch(2, 0.6, 3.0)) for name in ("none", "long"))
    topk = a_run(tmp_path, "topk", epoch(1, 0.5), epoch(2, 0.6), compression="topk")
    short = a_run(tmp_path, "short", epoch(1, 0.5), compression="dgc")
    found = {row.compression: row for row in rows([dense, long, topk, short])}
    assert found["topk"].train_seconds.median == 2.0 and found["topk"].steps.median == 20
    assert found["topk"].times_dense == 3.0 and found["topk"].megabytes.median == 2.0
    assert found["dgc"].train_seconds.median == 1.0 and found["dgc"].times_dense == math.inf  # it made fewer steps


def test_logs_of_any_script_and_of_the_trainer_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "mine" / "log.jsonl"
    own.parent.mkdir()
    told = {"compression": "none", "workers": 2}
    lines = [{"step": step, "loss": 3.0 - step / 10, "seconds": step / 2, **told} for step in (5, 10)]
    own.write_text("begin\n" + "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 15, "lo')
    history = [
        {"step": step, "epoch": step / 10, "loss": 3.0 - step / 10, "agmerge/bytes_sent": 1_000_000 * step}
        for step in (5, 10)
    ]
    state = tmp_path / "trainer" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"log_history": [*history, {"step": 10, "eval_loss": 1.5}]}))
    report.main([str(own), str(state), "--target", "2.2"])
    head, mine, trainer = capsys.readouterr().out.splitlines()
    assert mine.split()[:7] == ["log", "none", "2", "loss", "2", "5", "5"] and "10" in mine.split()
    assert trainer.split()[:2] == ["log", "trainer"] and "10" in trainer.split()  # steps, and megabytes
    report.main([str(state), "--metric", "eval_loss"])
    assert "eval_loss 1.5" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--metric takes one of .*eval_loss"):
        report.main([str(state), "--metric", "accuracy"])


@pytest.mark.parametrize("value, text", [(12345.6, "12346"), (0.123456, "0.1235"), (math.inf, "-"), (math.nan, "-")])
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_curves_of_one_setting_have_one_label(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path, "a", epoch(1, 0.5), epoch(2, 0.6), seed=1),
        a_run(tmp_path, "b", epoch(1, 0.7), seed=2),
        a_run(tmp_path, "c", epoch(1, 0.7, seconds=3.0), compression="topk", merging="omgs"),
    ]
    found = curves.curves(runs)
    assert [one.label for one in found] == ["none 2w", "none 2w", "topk 0.01 2w merging=omgs"]
    assert (found[0].seconds, found[0].epochs, found[0].values) == ([1.0, 2.0], [1, 2], [0.5, 0.6])


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a", start(), epoch(1, 0.5))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="--picture needs matplotlib: pip install matplotlib"):
        report.main([str(path), "--picture", str(tmp_path / "out.svg")])


def test_a_picture_shows_every_setting_and_is_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [a_run(tmp_path, name, epoch(1, 0.5), epoch(2, 0.7), compression=name) for name in ("none", "topk")]
    for name in ("one.svg", "two.svg"):
        curves.draw(runs, tmp_path / name, 0.6)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text() and text.count("topk 0.01 2w") == 1
