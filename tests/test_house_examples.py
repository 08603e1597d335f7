# SPDX-License-Identifier: Apache-2.0
"""The rooms of ``examples/``: which may import which, read off the sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_house import ROOT, imports

EXAMPLES = ROOT / "examples"
ROOMS = {  # from below to above: which of the rooms below it each may import
    "networks": "",
    "data": "",
    "jobs": "networks data",
    "training": "jobs",
    "cluster": "",
    "reporting": "",
}
SHARED = ("digits", "gpt", "launchers", "options", "replicas")  # files beside the scripts that rooms may import
LONGEST = 250  # lines of a file


def problems(room: str, name: str, source: str) -> Iterator[str]:
    """What a file of ``room`` imports of the examples though it may not."""
    ours = {path.stem for path in EXAMPLES.glob("*.py")} | set(ROOMS)
    for one in imports(name, source, False):
        root = one.target.partition(".")[0]
        if root in ours and root not in (room, *SHARED, *ROOMS[room].split()):
            yield f"{room}/{name}.py:{one.line} imports {one.target}"


def files() -> list[Path]:
    return [path for room in ROOMS for path in (EXAMPLES / room).glob("*.py")]


def test_rooms_import_those_below_and_nothing_of_the_scripts() -> None:
    assert len(files()) > 40
    found = [
        problem
        for path in files()
        for problem in problems(path.parent.name, path.stem, path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_folder_is_a_room() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/*.py")} == set(ROOMS)


def test_files_are_short() -> None:
    paths = [*files(), *EXAMPLES.glob("*.py")]
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


@pytest.mark.parametrize(
    "room, source",
    [("jobs", "from training.loop import Loop"), ("networks", "import jobs"), ("training", "import train")],
)
def test_a_way_up_is_found(room: str, source: str) -> None:
    assert list(problems(room, "x", source))
