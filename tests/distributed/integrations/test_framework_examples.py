# SPDX-License-Identifier: Apache-2.0
"""The examples of the frameworks: two epochs on two workers, and two more from the checkpoint."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from launching import ROOT, torchrun

LEAST = {"transformers": 0.75, "accelerate": 0.85, "lightning": 0.8}  # accuracy after two epochs


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", LEAST)
def test_the_example_learns_and_goes_on(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; `make test` installs it")
    found = []
    few = ["--updates"] if name == "transformers" else []  # the default may send whole gradients where that is faster
    for more in (["--epochs", "2"], ["--epochs", "4", "--resume"]):
        ended = torchrun(2, ROOT / "examples" / f"{name}_digits.py", *more, *few, "--out", str(tmp_path), timeout=300)
        assert ended.code == 0, ended.output[-4000:]
        accuracy = re.search(r"^accuracy (\S+)$", ended.output, re.MULTILINE)
        sent = re.search(r"^bytes sent (\d+), dense (\d+)$", ended.output, re.MULTILINE)
        assert accuracy is not None and sent is not None, ended.output[-4000:]
        found.append(float(accuracy[1]))
        assert int(sent[1]) * 10 < int(sent[2])
    assert found[0] >= LEAST[name] and found[1] > found[0]
