# SPDX-License-Identifier: Apache-2.0
"""The report of the examples: logs in, rows and tables out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import report
from reporting import logs
from reporting.comparison import Spread, rows

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


def test_seeds_share_a_row(tmp_path: Path) -> None:
    values = (0.7, 0.9, 0.8)
    runs = [a_run(tmp_path, f"s{n}", epoch(1, value), end(), seed=n) for n, value in enumerate(values)]
    (row,) = rows(runs, 0.75)
    assert row.runs == ["s0", "s1", "s2"] and row.best == Spread(0.8, 0.7, 0.9) and row.other == {}
    assert row.train_seconds == Spread(1.0, 1.0, math.inf)
    head, line = report.table([row]).splitlines()
    assert "0.8 (0.7 to 0.9)" in line and "1 (1 to -)" in line and "runs" in head


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
