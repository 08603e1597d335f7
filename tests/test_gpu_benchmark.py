# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/gpu.py`` prints and exits with, by pretended figures: it needs a GPU for real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import gpu
import pytest
import torch
from device.gpu_bench import Bench
from device.gpu_figures import (
    LARGE,
    SMALL,
    Figure,
    as_json,
    exit_code,
    finish_of,
    must,
    of_compressor,
    of_hooks,
    of_kernels,
    of_memory,
    of_overlap,
    of_world,
)
from support.recorded_cuda import Cuda

from agmerge import testing

TOOK = {"K1": 60.0, "K2": 3.0, "K3": 25.0, "K1+K2+K3": 84.0, "K4": 38.0}  # of the specification, at 16 M elements


# -- one figure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "figure, line",
    [
        (Figure(2, "K1", 1.05, "U", 1.1), "ok     2  K1: 1.05 U  (limit 1.1)"),
        (Figure(2, "K1", 1.1, "U", 1.1), "ok     2  K1: 1.1 U  (limit 1.1)"),
        (Figure(2, "K1", 1.2, "U", 1.1), "FAILED 2  K1: 1.2 U  (limit 1.1)"),
        (Figure(1, "copy", 2987.4, "GB/s"), "       1  copy: 2.99e+03 GB/s"),
        (Figure(3, "kernels", 19, "launches", 10), "FAILED 3  kernels: 19 launches  (limit 10)"),
        (must(4, "NaN is found", True, "why"), "ok     4  NaN is found: 0 faults  (limit 0)"),
        (must(4, "NaN is found", False, "why"), "FAILED 4  NaN is found: 1 faults  (limit 0)  why"),
        (Figure(9, "graph", math.nan, "", 0, "E: x"), "FAILED 9  graph: nan  (limit 0)  E: x"),
    ],
)
def test_a_line_says_what_was_found_and_what_is_allowed(figure: Figure, line: str) -> None:
    assert figure.line() == line


def test_the_exit_code_is_0_only_if_something_was_judged_and_nothing_failed() -> None:
    told, good, bad = Figure(1, "a", 1.0), Figure(2, "b", 1.0, "U", 1.5), Figure(2, "c", 2.0, "U", 1.5)
    assert [exit_code(given) for given in ([], [told], [told, good], [good, bad], [bad])] == [1, 1, 0, 1, 1]
    assert exit_code([good, Figure(3, "d", math.nan, "", 1.0)]) == 1


# -- the rules --------------------------------------------------------------------------------------------------


def failed(figures: list[Figure]) -> list[str]:
    """Which figures failed."""
    return [figure.what.split(",")[0] for figure in figures if figure.failed]


def test_kernels_are_held_against_the_add_where_memory_is_what_they_wait_for() -> None:
    for n in LARGE:
        assert failed(of_kernels(n, "normal 0.01", TOOK, 57.0)) == []
        assert failed(of_kernels(n, "normal 0.01", {**TOOK, "K1": 64.0}, 57.0)) == ["K1"]
        assert failed(of_kernels(n, "normal 0.01", {**TOOK, "K1+K2+K3": 86.0, "K3": 26.0}, 57.0)) == ["K3", "K1+K2+K3"]
        assert failed(of_kernels(n, "normal 0.01", {**TOOK, "K4": 58.0}, 57.0)) == ["K4"]
    assert failed(of_kernels(SMALL, "normal 0.01", {**TOOK, "K1+K2+K3": 59.0}, 4.0)) == []
    assert failed(of_kernels(SMALL, "normal 0.01", {**TOOK, "K1+K2+K3": 61.0}, 4.0)) == ["K1+K2+K3"]


def test_a_selection_in_kernels_may_take_three_adds_and_ten_of_them() -> None:
    assert failed(of_compressor(SMALL, "topk", 30.0, 10, 10.0, judged=True)) == []
    assert [figure.failed for figure in of_compressor(SMALL, "topk", 31.0, 11, 10.0, judged=True)] == [True, True]
    assert [figure.limit for figure in of_compressor(SMALL, "adtopk-fill", 99.0, 42, 10.0, judged=False)] == [None] * 2


def test_hooks_may_take_two_microseconds_a_tensor_and_two_launches_time_for_each_kernel() -> None:
    allowed = 2e-6 * 161 + 18 * 17 * 2 * 5e-6
    assert failed(of_hooks("m", 10e-3, 10e-3 + 0.99 * allowed, 161, 17, 5e-6)) == []
    assert len(failed(of_hooks("m", 10e-3, 10e-3 + 1.01 * allowed, 161, 17, 5e-6))) == 1
    assert len(failed(of_hooks("m", 10e-3, 10e-3 + allowed, 161, 17, 4e-6))) == 1  # of a host that launches faster


def test_messages_leave_in_order_and_one_at_a_time() -> None:
    assert finish_of([0.0, 1.0, 5.0], [2.0, 2.0, 1.0]) == 6.0
    assert finish_of([0.0, 1.0], [3.0, 2.0]) == 5.0
    assert finish_of([], []) == 0.0


def test_what_is_exposed_may_be_a_tenth_more_than_predicted() -> None:
    assert failed(of_overlap("m", 10e-3, 11e-3, 100e-3)) == []
    assert len(failed(of_overlap("m", 10e-3, 11.2e-3, 100e-3))) == 1
    assert of_overlap("m", 10e-3, 11e-3, 100e-3)[0].value == pytest.approx(89.0)


def test_memory_is_two_slabs_and_the_update() -> None:
    assert failed(of_memory("m", 1000, 50_000, 62_500, 0)) == []
    assert [figure.failed for figure in of_memory("m", 1000, 50_000, 66_000, 1)] == [True, True]


def test_a_step_without_anything_to_gain_costs_a_twentieth_more_than_ddps_at_most() -> None:
    assert not any(figure.failed for figure in of_world({"DDP, dense": 0.1, "ours, auto": 0.104, "DDP, fp16": 0.2}))
    slow = {"DDP, dense": 0.1, "ours, auto": 0.106}
    assert any(figure.failed for figure in of_world(slow))
    assert not any(figure.failed for figure in of_world(slow, judged=False))  # workers share a GPU: speed is none


# -- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, as far as the command can see."""
    Cuda().install(monkeypatch)
    monkeypatch.setattr(gpu, "about", lambda: {"device": "Pretended 100"})


def check(*figures: Figure) -> gpu.Check:
    """A check that finds these."""
    return lambda bench: iter(figures)


def broken(bench: Bench) -> Iterator[Figure]:
    """A check that finds one thing and breaks then."""
    yield Figure(3, "first", 1.0, "us", 2.0)
    raise RuntimeError("CUDA error: out of luck\nmore")


def test_without_cuda_it_says_so_and_judges_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().out


@pytest.mark.usefixtures("pretended")
def test_it_prints_a_line_a_figure_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, good = tmp_path / "gpu.json", Figure(1, "copy", 3.0, "TB/s", 4.0)
    assert gpu.main(["--json", str(file)], {1: check(good)}) == 0
    assert capsys.readouterr().out.splitlines() == [
        "device: Pretended 100",
        good.line(),
        "1 figures, 1 judged, 0 failed",
    ]
    (row,) = json.loads(file.read_text())["figures"]
    assert row["what"] == "copy" and row["failed"] is False


@pytest.mark.usefixtures("pretended")
def test_a_check_that_breaks_has_failed_and_the_others_still_run(capsys: pytest.CaptureFixture[str]) -> None:
    later = Figure(4, "later", 1.0, "us", 2.0)
    assert gpu.main([], {3: broken, 4: check(later)}) == 1
    out = capsys.readouterr().out
    assert "FAILED 3  check 3: nan  (limit 0)  RuntimeError: CUDA error: out of luck\n" in out and later.line() in out


@pytest.mark.usefixtures("pretended")
def test_one_can_ask_for_some_checks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = Figure(1, "one", 1.0, "us", 2.0), Figure(2, "other", 3.0, "us", 2.0)
    assert gpu.main(["--checks", "1"], {1: check(one), 2: check(other)}) == 0
    assert "other" not in capsys.readouterr().out


def test_every_check_of_the_list_is_there() -> None:
    assert sorted([*gpu.CHECKS, *gpu.WORLD]) == list(range(1, 12)) and set(gpu.WORLD) == {8, 10}


def test_what_could_not_be_found_out_is_no_number_in_json() -> None:
    kept = as_json({"device": "x"}, [Figure(9, "graph", math.nan, "", 0)])
    assert json.loads(json.dumps(kept, allow_nan=False))["figures"][0]["value"] is None and kept["exit_code"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(one, marks=[pytest.mark.long] * (one in (5, 6, 11))) for one in sorted(gpu.CHECKS)]
)
def test_every_check_runs_on_the_cpu_and_finds_nothing_wrong(number: int) -> None:
    bench = Bench(torch.device("cpu"), sizes=(10_000,), runs=1, warm=0, tiny=True)
    (figures,) = testing.run(1, lambda rank: list(gpu.CHECKS[number](bench)))
    assert figures or number == 9  # there are no graphs here
    assert [figure.line() for figure in figures if figure.failed and number in (4, 11) and figure.unit != "s"] == []
