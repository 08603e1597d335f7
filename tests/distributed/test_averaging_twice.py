# SPDX-License-Identifier: Apache-2.0
"""An optimizer or a script that averages gradients by itself is named, with what to delete; other sums are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import HERE, torchrun

TWICE = ("optimizer", "optimizer, scattered", "optimizer, flattened", "script")
REFUSED = ("updates, in place", "updates, flattened", "updates, handed round")
FINE = ("nothing", "figures", "handed round", "alone", "updates, figures", "updates, alone")


@pytest.fixture(scope="module")
def warned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the warnings of rank 0, by scenario, from one launch."""
    folder: Path = tmp_path_factory.mktemp("twice")
    ended = torchrun(2, HERE / "averaging_twice.py", str(folder), timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    found: dict[str, list[str]] = json.loads((folder / "warned.json").read_text(encoding="utf-8"))
    assert set(found) == {*TWICE, *REFUSED, *FINE}
    return found


@pytest.mark.parametrize("name", TWICE)
def test_gradients_that_are_averaged_twice_are_one_warning_that_says_what_to_delete(
    warned: dict[str, list[str]], name: str
) -> None:
    said = [text for text in warned[name] if "AGM136" in text]
    assert len(said) == 1 and "Delete" in said[0]
    assert said[0].startswith("AGM136: the script" if name == "script" else "AGM136: the optimizer, Averaging,")


@pytest.mark.parametrize("name", FINE)
def test_other_sums_of_a_script_are_none_of_ours(warned: dict[str, list[str]], name: str) -> None:
    assert not [text for text in warned[name] if "AGM136" in text or "exchanges" in text]


@pytest.mark.parametrize("name", REFUSED)
def test_with_updates_an_optimizer_that_exchanges_by_itself_is_refused(warned: dict[str, list[str]], name: str) -> None:
    assert warned[name][0].startswith("Averaging exchanges parameters or gradients in its own step (8320 elements)")
    assert not [text for text in warned[name] if "AGM136" in text]
