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
FRAMEWORKS = ("accelerate", "transformers", "lightning")


def said_by(code: str) -> tuple[int, str]:
    """The exit code of a fresh Python, and what it prints."""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout + ended.stderr


def test_import_agmerge_imports_no_framework_and_the_line_of_the_readme_works() -> None:
    """``agmerge.integrations.ddp.compress(model, optimizer=optimizer)``, in a process of its own: nothing imported."""
    unwanted = "{'agmerge.integrations', 'accelerate', 'transformers', 'lightning', 'pytorch_lightning'}"
    code = f"import agmerge, sys; print({unwanted} & set(sys.modules))"
    code += "; print(agmerge.integrations.ddp.compress.__module__)"
    assert said_by(code) == (0, "set()\nagmerge.integrations.ddp\n")


def test_a_framework_that_is_not_there_is_named() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({FRAMEWORKS})); import agmerge\n"
        f"for name in {FRAMEWORKS}:\n"
        "    try: getattr(agmerge.integrations, name)\n"
        "    except ImportError as error: print(error)"
    )
    ended, text = said_by(code)
    assert ended == 0 and len(text.splitlines()) == len(FRAMEWORKS)
    assert all(name in line for name, line in zip(FRAMEWORKS, text.splitlines(), strict=True))


def test_an_integration_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'agmerge\.integrations' has no attribute 'deepspeed'"):
        agmerge.integrations.deepspeed  # noqa: B018


def test_planners_and_sparsifiers_are_attributes() -> None:
    assert agmerge.merging is merging and agmerge.sparsifiers is sparsifiers
