# SPDX-License-Identifier: Apache-2.0
"""What benchmarks record, and what they say of it. They themselves need root, and minutes."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import parity_phases
import pytest
import quantising
import scale
import scale_nodes
import step_time
import torch
import updates_ablation
from lab import rendezvous
from lab.network import LINKS, Loopback, Network, named
from speed import shapes

import merging
from sparsifiers import native

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


# -- more workers ----------------------------------------------------------------------------------------------


def test_a_nodes_port_carries_one_selection_for_each_other_node_in_two_levels() -> None:
    """Flat rings carry one for each other worker; with one worker a node both are the same, in time as in bytes."""
    for nodes, local in scale_nodes.SHAPES:
        net = scale_nodes.cluster("10 Gbit", nodes, local)
        took = scale_nodes.predicted("bert-large", net)
        assert took["sparse"].port / took["two-level"].port == pytest.approx((nodes * local - 1) / (nodes - 1))
        assert took["two-level"].seconds < took["sparse"].seconds < took["dense"].seconds
        inside = 4 * sum(map(math.prod, shapes.shapes("bert-large"))) * (local - 1) / local
        slow = scale_nodes.predicted("bert-large", scale_nodes.cluster("10 Gbit", nodes, local, inside=1.0))
        assert slow["two-level"].seconds > 2 * 8 * inside / 1e9  # there, and back
        assert slow["sparse"] == took["sparse"] and slow["dense"] == took["dense"]
    alone = scale_nodes.predicted("bert-large", scale_nodes.cluster("10 Gbit", 8, 1))
    assert alone["two-level"] == alone["sparse"]


def test_bytes_of_a_step_are_those_that_training_was_seen_to_send() -> None:
    """Four workers with topk at 1 % of the small GPT-2 sent 2.30 to 2.50 MB each (results.md), 1.6 with fp16."""
    dimensions = shapes.small_gpt2()[::-1]
    sizes = [math.prod(shape) for shape in dimensions]
    tensors = merging.Profile([f"t{i}" for i in range(len(sizes))], sizes, [0.0] * len(sizes))
    for wire, seen in (("fp32", 2.4e6), ("fp16", 1.62e6)):
        strategy = scale.strategies(wire)["sparse 1 %"]
        load = float(scale.loaded(strategy, tensors, dimensions).load.sum())
        assert strategy.sent(scale.Network(4, 1e-5, 1e-9), load) == pytest.approx(seen, rel=0.1)


def test_horovods_workers_get_the_variables_that_horovodrun_gives() -> None:
    env = rendezvous.variables("10.0.0.1", 7, "net0") | rendezvous.own({"RANK": "1", "WORLD_SIZE": "4"})
    assert (env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "7")
    assert (env["HOROVOD_RANK"], env["HOROVOD_SIZE"], env["HOROVOD_GLOO_IFACE"]) == ("1", "4", "net0")


# -- time to a loss --------------------------------------------------------------------------------------------


# -- codec work of quantisers ------------------------------------------------------------------------------------


def test_quantisers_are_measured_at_every_level_and_as_torchs_operations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, threads, level = tmp_path / "quantising.json", torch.get_num_threads(), native.level()
    try:
        quantising.main(["--elements", "4096", "--repeats", "1", "--only", "eden-2", "int8", "--json", str(file)])
    finally:
        torch.set_num_threads(threads)
    recorded = json.loads(file.read_text())
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert recorded["about"]["levels"] == [*native.names(), "torch"] and native.level() == level
    assert len(shown) == 2 * len(recorded["about"]["levels"])
    for result in recorded["results"]:
        assert all(taken > 0 for columns in result["additions"].values() for taken in columns.values())
    with pytest.raises(SystemExit):
        quantising.arguments(["--elements", "1000"])


@pytest.mark.parametrize(
    ("bits", "workers", "least"), [("4+4", 3, 0.97), ("2+2", 4, 0.85), ("4", 2, 0.97), ("none", 3, 1.0)]
)
def test_phases_give_the_mean_of_the_workers_and_the_bits_they_take(bits: str, workers: int, least: float) -> None:
    rows = [torch.randn(6, 128, generator=torch.Generator().manual_seed(rank)) for rank in range(workers)]
    mean = torch.stack(rows).mean(0)
    found = parity_phases.combined(rows, parity_phases.phases_of(bits), (0, 1, 2))
    assert torch.nn.functional.cosine_similarity(found.flatten(), mean.flatten(), 0) >= least - 1e-6
    size = rows[0].numel()
    record = sum(one.record_bytes(128) for one in parity_phases.phases_of(bits)) * (size // 128) * 8 / size
    share = workers - 1 if "+" not in bits else (workers - 1) / workers
    if bits != "none":
        assert parity_phases.sent(workers, bits) == pytest.approx(share * record, rel=0.05)


def test_cells_that_are_named_in_full_are_measured_and_none_is_left_out_in_silence() -> None:
    def asked(**more: Any) -> list[tuple[str, str, int]]:
        return step_time.wanted_cells(Namespace(**{"models": None, "rates": None, "workers": None, **more}))

    assert asked() == step_time.CELLS
    assert asked(models=["cnn"], rates=["none"]) == [("cnn", "none", 2)]
    assert asked(models=["cnn"], rates=["5gbit"], workers=[4]) == [("cnn", "5gbit", 4)]
    with pytest.raises(SystemExit, match="Name --models, --rates and --workers"):
        asked(rates=["5gbit"])


# Ablations of updates.


@pytest.mark.parametrize("variant", updates_ablation.REPLACED)
def test_what_an_ablation_replaces_is_there(variant: str) -> None:
    with mock.patch(*updates_ablation.REPLACED[variant]):  # raises AttributeError if the name is gone
        pass


def test_the_recorded_ablations_are_paired_with_dense_of_their_seed() -> None:
    rows = updates_ablation.rows_of(Path(updates_ablation.ROOT) / "benchmarks/notebook/updates_ablation.jsonl")
    assert {row["variant"] for row in rows} == {"dense", *updates_ablation.VARIANTS}
    lines = updates_ablation.table([*rows, {**rows[0], "seed": 7, "loss": 0.0}]).splitlines()
    assert len(lines) == 2 + len(updates_ablation.VARIANTS)
    assert lines[2] == "| all parts | 4 | +0.92 % ± 0.26 | +0.9, +0.9 |"
