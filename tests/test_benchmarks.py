"""What benchmarks record, and what they say of it. They themselves need root, and minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rendezvous
import step_time
from network import LINKS, Loopback, Network, named

CELL = {"model": "cnn", "rate": "200mbit", "workers": 2, "date": "2026-11-21"}
FOUND = {"floor": {"seconds": [0.1, 0.1], "bytes": [0, 0], "rounds": [0, 1]}}


@pytest.mark.parametrize(
    "more, words",
    [
        ({"link": "duplex"}, "cnn, 2 workers, 200mbit, full duplex"),
        ({"link": "shared"}, "cnn, 2 workers, 200mbit, both directions share it"),
        ({}, "cnn, 2 workers, 200mbit, both directions share it"),  # from before links had names
    ],
)
def test_every_table_says_which_link_it_is_of(more: dict[str, str], words: str, tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text(json.dumps({**CELL, **more, "found": FOUND}) + "\n")
    (cell,) = step_time.cells_of(file)
    assert step_time.titled(cell) == words and f"**{words}**" in step_time.table(cell)
    assert step_time.cells_of(tmp_path / "none.jsonl") == []


def test_a_link_is_full_duplex_unless_it_is_asked_for_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["step_time.py"])
    assert LINKS[step_time.arguments().link] is Network and LINKS["shared"] is Loopback
    assert named("none", "duplex") == "unshaped, a port each"


def test_horovods_workers_get_the_variables_that_horovodrun_gives() -> None:
    env = rendezvous.variables("10.0.0.1", 7, "net0") | rendezvous.own({"RANK": "1", "WORLD_SIZE": "4"})
    assert (env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "7")
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["HOROVOD_GLOO_IFACE"]) == ("1", "4", "net0")
