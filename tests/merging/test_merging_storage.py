# SPDX-License-Identifier: Apache-2.0
"""Records: damage is seen, files are replaced as a whole."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from merging import Plan, Profile, storage

PLAN = Plan((2, 1), (True, False), ("fp16", "é"), ("fc.weight", "fc.bias", "conv"))


def test_every_changed_character_is_seen() -> None:
    text = PLAN.dumps()
    for position, was in enumerate(text):
        for now in {
            "0",
            "1",
            "a",
            "A",
            " ",
            '"',
            "}",
            "\0",
            "é",
            was.upper(),
            was.lower(),
            was.swapcase(),
        } - {was}:
            with pytest.raises(ValueError, match="damaged"):
                Plan.loads(text[:position] + now + text[position + 1 :])


def test_every_lost_doubled_or_swapped_character_is_seen() -> None:
    text = PLAN.dumps()
    for i in range(len(text)):
        variants = {
            text[:i],
            text[:i] + text[i + 1 :],
            text[:i] + text[i] + text[i:],
            text[:i] + " " + text[i:],
            text[:i] + text[i : i + 2][::-1] + text[i + 2 :],
        }
        for variant in variants - {text}:
            with pytest.raises(ValueError, match="damaged"):
                Plan.loads(variant)


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "3", '"merging.Plan"', "{}", "hello", "[" * 100_000, '{"kind":"other"}', "9" * 5000],
)
def test_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a merging\.Plan record"):
        Plan.loads(text)


def test_the_same_values_written_otherwise_are_refused() -> None:
    text = PLAN.dumps()
    for other in (json.dumps(json.loads(text)), text.replace("\\u00e9", "é"), text[:-1] + ',"format":1}'):
        assert json.loads(other) == json.loads(text)
        with pytest.raises(ValueError, match="damaged or was edited"):
            Plan.loads(other)


def test_kind_format_and_contents_are_checked(tmp_path: Path) -> None:
    body: dict[str, Any] = {"counts": [2], "dense": [False], "labels": [""], "names": None}
    assert Plan.loads(storage.seal("merging.Plan", body)) == Plan((2,))
    with pytest.raises(ValueError, match="format 2, but only format 1 is supported"):
        Plan.loads(storage.seal("merging.Plan", body, version=2))
    for change in ({"counts": [0]}, {"counts": "2"}, {"dense": [7]}, {"unknown": 1}):
        with pytest.raises(ValueError, match="record is undamaged, but its content is"):
            Plan.loads(storage.seal("merging.Plan", {**body, **change}))
    with pytest.raises(TypeError, match="must be a str, got bytes"):
        Plan.loads(PLAN.dumps().encode())  # type: ignore[arg-type]
    Profile(["a"], [1], [0.5]).save(tmp_path / "profile.json")
    with pytest.raises(ValueError, match=r"profile\.json: this is not a merging\.Plan record"):
        Plan.load(tmp_path / "profile.json")


def test_crc32_is_that_of_the_text_without_it() -> None:
    record = json.loads(PLAN.dumps())
    crc = record.pop("crc32")
    plain = json.dumps(record, sort_keys=True, separators=(",", ":"))
    assert crc == f"{zlib.crc32(plain.encode()):08x}"


def test_damaged_files_name_the_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    whole = path.read_bytes()
    for damaged in (
        whole[:-20],
        whole.replace(b"2,1", b"1,2"),
        whole.replace(b"conv", b"c\xffnv"),
        b"",
        b"\x80",
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"plan\.json: .*damaged"):
            Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "absent.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(str(path))
    seen: list[tuple[Path, bytes]] = []

    def fail(source: Path, target: Path) -> None:
        seen.append((Path(source).parent, Path(source).read_bytes()))
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            Plan((3,)).save(path)
    assert seen == [(tmp_path, Plan((3,)).dumps().encode() + b"\n")]
    assert Plan.load(path) == PLAN and os.listdir(tmp_path) == ["plan.json"]
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    Plan((3,)).save(path)
    assert synced == [path.stat().st_size]
    assert Plan.load(path) == Plan((3,)) and os.listdir(tmp_path) == ["plan.json"]
