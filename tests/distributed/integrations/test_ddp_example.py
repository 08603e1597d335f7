# SPDX-License-Identifier: Apache-2.0
"""examples/ddp_digits.py on two real workers."""

from __future__ import annotations

import re

import pytest
from launching import ROOT, torchrun

pytestmark = pytest.mark.timeout(400)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments, sent", [((), 0.02), pytest.param(("--local-steps", "4"), 0.05, marks=pytest.mark.long)]
)
def test_two_epochs_print_the_accuracy(arguments: tuple[str, ...], sent: float) -> None:
    """That is far better than guessing; ``sent``: at most this share of the bytes."""
    ended = torchrun(2, ROOT / "examples" / "ddp_digits.py", "--epochs", "2", *arguments, timeout=300)
    said = re.search(r"accuracy ([\d.]+), (\d+) bytes sent, (\d+) without", ended.output)
    assert ended.code == 0 and said is not None, ended.output[-3000:]
    assert float(said[1]) > 0.7 and int(said[2]) < sent * int(said[3])
