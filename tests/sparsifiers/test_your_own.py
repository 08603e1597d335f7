# SPDX-License-Identifier: Apache-2.0
"""The classes that docs/compressors.md shows, which keep the contract as they stand there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from sparsifiers import catalogue

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compressors.md"
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "conformance" in block]


@pytest.mark.parametrize(("number", "name"), [(0, "test_plain_topk"), (1, "test_coarse")])
def test_a_class_of_your_own_keeps_the_contract_as_it_is_shown(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"shown_{number}.py").write_text(BLOCKS[number])
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (catalogue._sparsifiers, catalogue._quantisers):  # what is registered goes with the test
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    getattr(importlib.import_module(f"shown_{number}"), name)()


def test_no_other_class_is_shown() -> None:
    assert len(BLOCKS) == 2
