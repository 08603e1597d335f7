# SPDX-License-Identifier: Apache-2.0
"""Other code that has the name of one of our packages: it is named, and what to do, before any of it is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agmerge import siblings
from agmerge.cli import doctor

ROOT = Path(__file__).resolve().parents[1]
RUN_BY_ACCIDENT = "raise SystemExit('another file was run')\n"


def run(command: list[str], folder: Path, path: Path = ROOT) -> str:
    """What a program prints at its end, the last line; run in ``folder``, with ``path`` behind it."""
    env = {**os.environ, "PYTHONPATH": str(path)}
    ended = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    return (ended.stdout + ended.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("name", siblings.OWN)
def test_a_file_of_that_name_beside_the_script_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(RUN_BY_ACCIDENT)
    (tmp_path / "train.py").write_text("import agmerge\n")
    text = run(["train.py"], tmp_path)
    own = f"ImportError: AGM002: agmerge needs its own package {name!r}, but Python finds"
    assert text.startswith(f"{own} {tmp_path / name}.py in its place")
    assert "Rename that file or folder, or move it out" in text


def test_a_script_of_that_name_is_named_and_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "merging.py").write_text("import agmerge\n")
    assert f"Python finds {tmp_path / 'merging.py'} in its place" in run(["merging.py"], tmp_path)


def test_a_module_that_the_script_has_imported_before_is_named(tmp_path: Path) -> None:
    (tmp_path / "merging.py").write_text("")
    assert f"finds {tmp_path / 'merging.py'} in" in run(["-c", "import merging, agmerge"], tmp_path)


def test_a_folder_of_data_beside_the_script_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "merging").mkdir()
    (tmp_path / "train.py").write_text("import agmerge; print(agmerge.merging.Plan.__name__)\n")
    assert run(["train.py"], tmp_path) == "Plan"


@pytest.mark.parametrize("text", ["", "from merging.strategies import merge\n"])
def test_another_distribution_that_overwrote_ours_is_named(text: str, tmp_path: Path) -> None:
    """Two distributions with one package name lie in one folder: the files of the later one are there."""
    site = tmp_path / "site"
    for package in ("agmerge", *siblings.OWN):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "merging" / "__init__.py").write_text(text)
    info = site / "mergers-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mergers\nVersion: 2.0\n")
    (info / "RECORD").write_text("merging/__init__.py,,\n")
    (info / "top_level.txt").write_text("merging\n")
    said = run(["-c", "import agmerge"], tmp_path, site)
    assert said.startswith("ImportError: AGM002: agmerge needs its own package 'merging', but ")
    assert "mergers has installed a package of that name into the same folder. Uninstall the other one, then" in said


def test_a_missing_torch_is_not_taken_for_another_package(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import agmerge"
    assert run(["-c", code], tmp_path) == "ModuleNotFoundError: import of torch halted; None in sys.modules"


def test_the_doctor_has_a_row_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "others", lambda name: [])
    row = doctor.packages_row()
    assert (row.works, row.name) == (True, "merging, sparsifiers") and row.detail == f"agmerge's own, in {ROOT}"


def test_the_doctor_names_a_distribution_that_claims_the_same_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "others", lambda name: ["mergers"] if name == "merging" else [])
    row = doctor.packages_row()
    assert not row.works and "mergers also has a package 'merging'" in row.detail
    assert "-m pip uninstall mergers, then " in row.fix


IMPORTS = """
from agmerge.elastic import Sampler, State
import agmerge.merging.registry, agmerge.sparsifiers.conformance, agmerge.ops, agmerge.testing, agmerge.integrations.ddp
import agmerge, merging, sparsifiers, sparsifiers.conformance
assert agmerge.elastic.State is State and agmerge.merging is merging and agmerge.sparsifiers is sparsifiers
assert agmerge.merging.registry is merging.registry and agmerge.sparsifiers.conformance is sparsifiers.conformance
assert sparsifiers.conformance.__spec__.name == sparsifiers.conformance.__name__ == "sparsifiers.conformance"
try:
    import agmerge.merging.nonsense
except ModuleNotFoundError as error:
    print(error)
"""


def test_public_names_that_read_like_modules_are_imported_as_modules(tmp_path: Path) -> None:
    """As scripts do that come from horovod.torch.elastic. Each is one module under both of its names."""
    assert run(["-c", IMPORTS], tmp_path) == "No module named 'agmerge.merging.nonsense'"
