# SPDX-License-Identifier: Apache-2.0
"""``examples/elastic_digits.py``: one is killed, one comes, one leaves, and the training comes to its end."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from launching import ROOT, environment


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_example_shows_what_its_page_says() -> None:
    command = [sys.executable, str(ROOT / "examples" / "elastic_digits.py"), "--show", "--epochs", "40", "--every", "4"]
    shown = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=300).stdout
    assert "workers 2 to 4 have ended with [0, 0, 0]" in shown, shown
    sizes = [int(found) for found in re.findall(r"accuracy .*, (\d) workers", shown)]
    assert set(sizes) <= {1, 2, 3} and sizes[-1] == 2, shown
    accuracies = [float(found) for found in re.findall(r"accuracy (\S+),", shown)]
    assert len(accuracies) == 10 and accuracies[-1] > 0.93, shown
    assert len(re.findall("worker 2: leaves after step", shown)) == 1, shown
