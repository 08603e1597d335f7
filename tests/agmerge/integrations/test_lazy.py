# SPDX-License-Identifier: Apache-2.0
"""What a script writes after ``import agmerge`` alone: integrations, planners and sparsifiers are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import agmerge
import merging
import sparsifiers

ROOT = Path(__file__).resolve().parents[3]


def said_by(code: str) -> tuple[int, str]:
    """The exit code of a fresh Python, and what it prints."""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout + ended.stderr


def test_the_line_of_the_readme_works_after_import_agmerge() -> None:
    """``agmerge.integrations.ddp.compress(model, optimizer=optimizer)``, in a process of its own: nothing imported."""
    code = "import agmerge; print(agmerge.integrations.ddp.compress.__module__)"
    assert said_by(code) == (0, "agmerge.integrations.ddp\n")


@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_a_framework_that_is_not_there_is_named(framework: str) -> None:
    code = (
        f"import sys; sys.modules[{framework!r}] = None; import agmerge\n"
        f"try: agmerge.integrations.{framework}\n"
        "except ImportError as error: print(error)"
    )
    code, text = said_by(code)
    assert code == 0 and framework in text


def test_import_agmerge_imports_no_framework_and_no_integration() -> None:
    unwanted = "{'agmerge.integrations', 'accelerate', 'transformers', 'lightning', 'pytorch_lightning'}"
    assert said_by(f"import agmerge, sys; print({unwanted} & set(sys.modules))") == (0, "set()\n")


def test_an_integration_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'agmerge\.integrations' has no attribute 'deepspeed'"):
        agmerge.integrations.deepspeed  # noqa: B018


def test_planners_and_sparsifiers_are_attributes() -> None:
    assert agmerge.merging is merging and agmerge.sparsifiers is sparsifiers
