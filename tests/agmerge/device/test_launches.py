# SPDX-License-Identifier: Apache-2.0
"""benchmarks/launches.py: its line of figures, small."""

from __future__ import annotations

import json

import launches
import pytest

SMALL = ["--tensors", "7", "--messages", "2", "--workers", "2"]
# Launches a collective; it only falls.
MOST = {"topk": 23, "dgc": 24.5, "adtopk": 23, "gaussiank": 18, "none": 9, "eden": 20}


@pytest.mark.long
@pytest.mark.parametrize("compression", MOST)
def test_it_prints_one_line_of_figures(compression: str, capsys: pytest.CaptureFixture[str]) -> None:
    launches.main([*SMALL, "--compression", compression, "--step", "3", "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures["messages"] == 2 and figures["races"] == 0
    assert figures["host_waits_in_hooks"] == 0 and figures["host_waits_in_synchronize"] == 1
    assert figures["launches_per_message"] <= MOST[compression]
    assert figures["launches_per_message"] == round(figures["launches"] / 2, 1) and figures["launches"] > 7
    assert 12 < figures["bytes_per_element"] < 200  # what an addition takes is the least


def test_without_json_it_says_which_lines_ask(capsys: pytest.CaptureFixture[str]) -> None:
    launches.main([*SMALL, "--compression", "topk"])
    assert "agmerge/exchanges/sparse.py" in capsys.readouterr().out
