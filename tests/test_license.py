# SPDX-License-Identifier: Apache-2.0
"""Every source file says its license."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agmerge", "sparsifiers", "merging", "examples", "benchmarks", "tests", "docs", ".ci")
COMMENTS = {".py": "# {}", ".sh": "# {}", "": "# {}", ".c": "/* {} */", ".h": "/* {} */"}
LINE = "SPDX-License-Identifier: Apache-2.0"


def lacks(path: Path) -> bool:
    """Return whether neither the first line nor the one below ``#!`` names the license; False for an empty file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return bool(lines) and COMMENTS[path.suffix].format(LINE) not in lines[: 1 + lines[0].startswith("#!")]


def test_every_source_file_names_the_license(tmp_path: Path) -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in COMMENTS]
    sources = [path for path in files if path.is_file() and "__pycache__" not in path.parts] + [ROOT / "setup.py"]
    assert len(sources) > 900
    assert [str(path.relative_to(ROOT)) for path in sources if lacks(path)] == [], f"write # {LINE} in the first line"
    (tmp_path / "new.py").write_text('"""A module."""\n', encoding="utf-8")
    assert lacks(tmp_path / "new.py")
