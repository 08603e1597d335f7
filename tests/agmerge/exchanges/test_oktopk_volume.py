# SPDX-License-Identifier: Apache-2.0
"""How much a sparse all-reduce moves: the paper's bound, and what an all-gather moves."""

from __future__ import annotations

import json
from pathlib import Path

import exchange_volume as volume
import pytest

from agmerge.exchanges import SparseExchange
from agmerge.exchanges.oktopk.exchange import OkTopkExchange


@pytest.mark.parametrize("case", list(volume.CASES))
@pytest.mark.parametrize("workers", [2, 5, 8])
def test_volume_is_within_the_bound(case: str, workers: int) -> None:
    k = 20_000
    ours = volume.measure(OkTopkExchange, case, workers, k, 10 * k, steps=2)
    assert ours.payload <= 1.25 * volume.bound(k, workers)
    # The bound has eight bytes a slot, and here indices take about one. Also at most the slack of the last all-gather.
    assert ours.payload <= 0.65 * 1.125 * volume.bound(k, workers)
    assert ours.elements == k
    # Beside the payload: one histogram, rounded up to whole bytes, and 0.4 KB a rank and call.
    exact = 2 * volume.BINS * (workers - 1) / workers
    assert exact <= ours.histogram < exact + 1 / 4
    assert ours.control <= 300 * (workers - 1)
    theirs = volume.measure(SparseExchange, case, workers, k, 10 * k, steps=1)
    assert theirs.total == volume.model(k, workers)[1]
    if workers >= volume.crossover(k):
        assert ours.total < theirs.total


@pytest.mark.slow
def test_sixteen_ranks_and_the_size_of_the_claim() -> None:
    k = 100_000
    ours = volume.measure(OkTopkExchange, "skewed", 16, k, 10 * k, steps=1)
    assert ours.elements == k and ours.payload <= 1.25 * volume.bound(k, 16)
    assert ours.total < 0.25 * volume.model(k, 16)[1]


def test_surplus_is_moved_where_the_result_lies_in_few_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the last all-gather is twice as long."""
    moved = volume.measure(OkTopkExchange, "opposed", 4, 20_000, 200_000, steps=1)
    monkeypatch.setattr("agmerge.exchanges.oktopk.exchange.SLACK", 4.0)
    padded = volume.measure(OkTopkExchange, "opposed", 4, 20_000, 200_000, steps=1)
    assert moved.received < 0.8 * padded.received and moved.sent < 0.95 * padded.sent


def test_the_model_is_never_below_what_is_measured() -> None:
    for workers in (2, 3, 7):
        ours = volume.measure(OkTopkExchange, "opposed", workers, 2_000, 20_000, steps=1)
        assert ours.total <= volume.model(2_000, workers)[0]


def test_crossover() -> None:
    assert [volume.crossover(k) for k in (10, 100, 1000, 10_000, 10**6)] == [None, None, 9, 4, 4]


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "volume.json"
    volume.main(["--k", "500", "--ranks", "2", "3", "--cases", "skewed", "--steps", "1", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["ranks"] for row in rows] == [2, 3]
    lines = capsys.readouterr().out.splitlines()
    assert f"{rows[1]['oktopk']['sent']:,.0f}" in lines[-1]
    with pytest.raises(SystemExit):
        volume.main(["--ranks", "1"])
