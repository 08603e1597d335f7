# SPDX-License-Identifier: Apache-2.0
"""python -m agmerge advise: the table follows from what was measured, and the script stays as it is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from support import agreed, on_ranks
from torch import nn

import agmerge
import merging
from agmerge.cli import advise
from agmerge.options.arguments import Options
from agmerge.planning import advice
from merging import Curve, Measurements


def measured(sparse: float, dense: float | None, message: Curve | None = None) -> Measurements:
    """Four tensors, the last one exempt; these seconds an element of load and of numel."""
    names, numel = ["a", "b", "c", "d"], [40_000, 40_000, 40_000, 100]
    work, load = [40_000, 40_000, 40_000, 0], [400, 400, 400, 50]
    profile = merging.Profile(names, numel, [0.0, 0.01, 0.01, 0.01], work=work, load=load)
    return Measurements(
        profile=profile,
        sparsify=Curve((0, 1), (0.0, 1e-4)),
        exchange=Curve((0, 1_000_000), (1e-4, 1e-4 + sparse * 1e6)),
        dense=None if dense is None else Curve((0, 1_000_000), (1e-4, 1e-4 + dense * 1e6)),
        modes=("behind", "ahead"),
        workers=2,
        message=message,
    )


@pytest.mark.parametrize("message", [None, Curve((0, 1000), (1e-3, 1.0))], ids=["", "dear messages"])
def test_rows_are_sorted_and_auto_is_never_behind_its_parts(message: Curve | None) -> None:
    """Also where what a message takes grows with what is selected, of which dense ones have nothing."""
    rows = advice.compare(measured(2e-6, 1e-6, message), 0.1, 0.08)
    assert [row.step for row in rows] == sorted(row.step for row in rows)
    by_name = {row.strategy: row for row in rows}
    assert len(by_name) == 1 + 2 * len(advice.DENSITIES)
    for density in advice.DENSITIES:
        auto = by_name[f"auto, density {density:g}"].finish
        assert auto <= by_name[f"sparse, density {density:g}"].finish * (1 + 1e-9)
        assert auto <= by_name["dense"].finish * (1 + 1e-9)


def test_a_step_is_its_exchange_and_the_rest_of_what_was_measured() -> None:
    for row in advice.compare(measured(2e-6, 1e-6), 0.1, 0.08):
        assert row.step == pytest.approx(row.finish + 0.02)


def test_a_lower_density_is_never_slower() -> None:
    by_name = {row.strategy: row.finish for row in advice.compare(measured(1e-4, 1e-4), 0.1, 0.08)}
    finishes = [by_name[f"sparse, density {density:g}"] for density in advice.DENSITIES]
    assert finishes == sorted(finishes, reverse=True) and finishes[0] > finishes[-1]


@pytest.mark.parametrize(
    ("sparse", "dense", "words"),
    [(1e-2, 1e-8, "do not compress"), (1e-8, 1e-4, "times as fast as dense"), (1e-6, None, "only its own")],
)
def test_the_recommendation_may_be_not_to_compress(sparse: float, dense: float | None, words: str) -> None:
    printed = advice.text(advice.compare(measured(sparse, dense), 0.1, 0.08), 0.1, 0.1, "AdamW")
    (line,) = [line for line in printed.splitlines() if words in line]
    assert line.startswith("recommendation") is (dense is not None)
    assert ("accuracy with AdamW" in printed) is ("times as fast" in words)


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam", "SGD"])
@pytest.mark.parametrize(("gain", "off", "sure"), [(1.09, 0.32, False), (1.09, 0.05, True), (2.0, 0.32, True)])
def test_it_is_unsure_where_it_is_wrong_about_the_steps_that_were_measured(
    gain: float, off: float, sure: bool, optimizer: str
) -> None:
    rows = (advice.Row("sparse, density 0.01", 1.0, 0.9, 1, 0, 0.01), advice.Row("dense", gain, 0.9, 1, 1))
    for sign in (-1, 1):
        *_, recommendation, accuracy = advice.text(rows, 2.0, 2.0 * (1 + sign * off), optimizer).splitlines()
        assert recommendation.startswith("recommendation: unsure.") is not sure
        assert ("32 % off" in recommendation) is not sure
        assert ("22 to 40 %" in accuracy) is (optimizer != "SGD") and "docs/parity.md" in accuracy


def test_what_is_not_compressed_needs_no_word_of_accuracy() -> None:
    rows = (advice.Row("auto, density 0.1", 1.0, 0.9, 1, 1), advice.Row("dense", 1.01, 0.9, 1, 1))
    assert "accuracy" not in advice.text(rows, 1.0, 1.0, "AdamW")


def test_at_another_density_exempt_tensors_are_as_they_were() -> None:
    assert advice.at(measured(1e-6, 1e-6), 0.1).profile.load.tolist() == [4000, 4000, 4000, 50]


def options(**given: object) -> Options:
    return Options(**(dict.fromkeys(field.name for field in fields(Options)) | given))  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", ["topk", "none", "FP16", agmerge.Compression.fp16])
def test_a_script_is_measured_with_a_choice(compression: object) -> None:
    given = options(compression=compression, merging="agmerge", exchange="sparse", density=0.02)
    widened = advise.widened(given)
    assert widened.exchange == "auto" and widened.density == 0.02
    assert widened.compression == "topk"
    dear = options(compression=compression, merging="DeAR", exchange="sparse", density=0.02)
    assert advise.widened(dear) is dear


@pytest.mark.slow
def test_every_rank_of_the_script_ends_after_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))

    def body(rank: int, net: nn.Module) -> int:
        import torch

        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = advise.AdvisedOptimizer(inner, net.named_parameters(), compression="none")
        for step in range(100):
            optimizer.zero_grad()
            net(torch.ones(2, 64)).sum().backward()
            try:
                optimizer.step()
            except advise.Enough:
                return step
        return -1

    assert advise.STEPS <= agreed(on_ranks(2, model, body)) <= advise.STEPS + 2
    printed = capsys.readouterr().out
    assert printed.count("strategy") == 1 and "recommendation" in printed and "predicted of it: " in printed


def test_a_script_that_is_too_short_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("import sys\nprint('ran with', sys.argv[1:])\n")
    command = [sys.executable, "-m", "agmerge", "advise", str(tmp_path / "short.py"), "--lr", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ran with ['--lr', '1']" in ended.stdout and "give it more to do" in ended.stderr


@pytest.mark.parametrize(
    "imported", ["import agmerge as a", pytest.param("from agmerge import optimizer as a", marks=pytest.mark.long)]
)
def test_an_unchanged_script_ends_well_and_runs_its_finally(tmp_path: Path, imported: str) -> None:
    (tmp_path / "train.py").write_text(
        f"import torch, agmerge\n{imported}\n"
        "agmerge.init()\nmodel = torch.nn.Linear(64, 64)\n"
        "optimizer = a.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())\n"
        "try:\n"
        "    for step in range(100):\n"
        "        optimizer.zero_grad(); model(torch.ones(2, 64)).sum().backward()\n"
        "        try:\n"
        "            optimizer.step()\n"
        "        except Exception:\n"
        "            print('caught')\n"
        "finally:\n"
        "    print('steps', step + 1)\n"
    )
    command = [sys.executable, "-m", "agmerge", "advise", str(tmp_path / "train.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert f"steps {advise.STEPS + 1}" in ended.stdout and "caught" not in ended.stdout
