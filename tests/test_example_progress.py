# SPDX-License-Identifier: Apache-2.0
"""Bars and curves of the examples: where a person sees them or asks for them, of the first worker alone."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch
from support.tensorboard_curves import scalars
from training.progress import Curves, bar


class Terminal(io.StringIO):
    """A text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "first", "seen"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_bar_is_shown_to_a_terminal_by_the_first_worker(
    terminal: bool, first: bool, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    batches = torch.arange(6).view(3, 2)
    assert [batch.tolist() for batch in bar("epoch 1/2", batches, first=first)] == batches.tolist()
    assert ("epoch 1/2" in shown.getvalue() and "3" in shown.getvalue()) is seen
    assert bool(shown.getvalue()) is seen


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_curves_are_written_by_the_first_worker_where_they_are_asked_for(
    first: bool, asked: bool, tmp_path: Path
) -> None:
    curves = Curves(tmp_path / "log" if asked else None, first)
    curves.add(1, {"train/loss": torch.tensor(0.5, requires_grad=True)})
    curves.add(2, {"train/loss": 0.25, "val/accuracy": 1.0})
    curves.close()
    expected = {"train/loss": [(1, 0.5), (2, 0.25)], "val/accuracy": [(2, 1.0)]}
    assert scalars(tmp_path) == (expected if first and asked else {})
    assert (tmp_path / "log").exists() is (first and asked)


# -- numbers of workers, which published lines say -----------------------------------------------------------------
