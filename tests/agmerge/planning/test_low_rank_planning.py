# SPDX-License-Identifier: Apache-2.0
"""Planning with low rank: loads are those of factors, every planner plans, auto chooses, reports say so."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from support.low_rank_conservation import LOW_RANK, Books, assert_nothing_is_lost, bases, run
from torch import nn

import agmerge
import merging
from agmerge.planning import cost_probe, measuring
from agmerge.planning.cost_probe import Budget
from agmerge.planning.replanner import FIRST
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve, Measurements, Pieces

MODEL = seeded(mlp)
HYBRID = {"0.*": "topk", ".*": "acpsgd"}
PLANNERS = [name for name in merging.names() if name != "dear"]
# Rows and columns of what is factorised; everything else has 48 + 32 + 10 + 320 elements.
MATRICES = {"0.weight": (48, 32), "2.weight": (32, 48)}
WHOLE = 48 + 32 + 10 + 320
CONTROL = 320  # bytes of a step at most: control numbers and padding


def costing(compressed: float, dense: float) -> Any:
    """A probe that finds these seconds an element of load and of numel."""

    def line(slope: float) -> Curve:
        return Curve((0, 1_000_000), (1e-3, 1e-3 + slope * 1_000_000))

    def probe(
        buffers: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
    ) -> Pieces[cost_probe.MeasuredCosts]:
        yield from ()
        return cost_probe.MeasuredCosts(Curve((0, 1), (0.0, 0.0)), line(compressed), line(dense))

    return probe


def trained(number: int, model: nn.Module, steps: int = FIRST, **options: Any) -> agmerge.DistributedOptimizer:
    optimizer = wrap(model, **{"merging": "agmerge", "exchange": "auto", **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, number, range(steps))
    return optimizer


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("compression", [*LOW_RANK, "hybrid"])
def test_every_planner_plans_it_and_nothing_is_lost(compression: str, name: str) -> None:
    how: Any = HYBRID if compression == "hybrid" else compression
    run(2, MODEL, range(FIRST + 8), compression=how, merging=name)


@pytest.mark.parametrize(("compressed", "dense", "flags"), [(1.0, 1e3, {False}), (1e3, 1e-6, {True})])
@pytest.mark.parametrize("compression", LOW_RANK)
def test_auto_takes_what_costs_less(
    compression: str, compressed: float, dense: float, flags: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure_costs", costing(compressed, dense))
    plans = on_ranks(2, MODEL, lambda rank, model: trained(rank, model, compression=compression).plan)
    assert plans[0] == plans[1] and set(plans[0].dense) == flags


@pytest.mark.parametrize("compression", LOW_RANK)
def test_from_factors_to_dense_and_back_nothing_is_lost(compression: str) -> None:
    """As the planner may do at any time: what factors left is sent whole, bases stay for the time after."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, books = wrap(model, sgd(model, lr=0.05), compression=compression, exchange="auto"), Books(model)
        for step in range(9):
            if step in (3, 6):
                names = optimizer.plan.names
                optimizer._reducer.exchange.agreed.use_plan(
                    merging.Plan((2, 4), dense=(step == 3, step == 3), names=names)
                )
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            books.step(optimizer)
            assert any(kept.any() for kept in residuals(optimizer).values()) is (step // 3 != 1)
        return books, residuals(optimizer)

    assert_nothing_is_lost(on_ranks(2, MODEL, body))


@pytest.mark.parametrize(("compression", "rank", "each"), [("powersgd", 4, 1), ("powersgd", 2, 1), ("acpsgd", 4, 2)])
def test_loads_are_elements_of_factors(compression: str, rank: int, each: int) -> None:
    def body(number: int, model: nn.Module) -> dict[str, tuple[int, int]]:
        optimizer = trained(number, model, FIRST + 1, compression=compression, rank=rank)
        profile = optimizer.measure().profile
        loads = zip(profile.work.tolist(), profile.load.tolist(), strict=True)
        assert profile.names is not None
        return dict(zip(profile.names, loads, strict=True))

    loads = agreed(on_ranks(2, MODEL, body))
    for name, shape in MATRICES.items():
        assert loads[name] == (shape[0] * shape[1], rank * sum(shape) // each)
    assert loads["4.weight"] == (0, 320) and loads["4.bias"] == (0, 10)


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["auto", "bf16"])
@pytest.mark.parametrize("rank", [1, 4, {"0.weight": 2, ".*": 3}])
def test_bytes_are_those_of_the_formula(rank: Any, wire: str) -> None:
    """Both factors a step, or one in turn behind a first step with both; and little else."""
    rows = {name: rank if isinstance(rank, int) else 2 if name == "0.weight" else 3 for name in MATRICES}
    both = sum(rows[name] * sum(shape) for name, shape in MATRICES.items())
    size = 2 if wire == "bf16" else 4

    def body(number: int, model: nn.Module, compression: str) -> list[int]:
        optimizer, seen = wrap(model, compression=compression, rank=rank, wire=wire, merging="single"), [0]
        for step in range(5):
            train(model, optimizer, number, range(step, step + 1))
            seen.append(optimizer.stats()["bytes_sent"])
        return [after - before for before, after in zip(seen, seen[1:], strict=False)]

    for compression in LOW_RANK:
        sent = agreed(on_ranks(2, MODEL, lambda r, m, c=compression: body(r, m, c)))
        # In a step with one factor the left one of a matrix goes with the right one of another, or the other way.
        factors = size * (both if compression == "powersgd" else both // 2)
        unlike = 0 if compression == "powersgd" else size * max(rows.values()) * 16
        assert size * both <= sent[0] - 4 * WHOLE <= size * both + CONTROL
        for one in sent[1:]:
            assert factors - unlike <= one - 4 * WHOLE <= factors + unlike + CONTROL, (compression, one, factors)


@pytest.mark.parametrize("compression", [*LOW_RANK, "hybrid"])
def test_reports_and_traces_have_it(compression: str, tmp_path: Path) -> None:
    how: Any = HYBRID if compression == "hybrid" else compression

    def body(rank: int, model: nn.Module) -> None:
        optimizer = trained(rank, model, compression=how, merging="layerwise", exchange="sparse")
        with optimizer.trace(tmp_path / "trace.json"):
            train(model, optimizer, rank, range(20, 23))
        merge, compressed = str(optimizer.merge_report()), str(optimizer.compression_report())
        assert "buffer" in merge and all(name in compressed for name in MATRICES)
        stats = optimizer.stats()
        assert stats["bytes_sent"] < stats["bytes_dense"] and stats["residual_norm"] > 0
        assert optimizer.measure().workers == 2

    on_ranks(2, MODEL, body)
    events = json.loads((tmp_path / "trace.rank0.json").read_text())
    assert len(events["traceEvents"] if isinstance(events, dict) else events) > 10


@pytest.mark.parametrize("exchange", ["sparse", "auto"])
@pytest.mark.parametrize("compression", [*LOW_RANK, "hybrid"])
def test_who_looks_changes_no_bit(compression: str, exchange: str) -> None:
    """Measurements send messages of their own, through the same exchanges and bases."""
    how: Any = HYBRID if compression == "hybrid" else compression

    def body(rank: int, model: nn.Module, looks: bool) -> tuple[list[str], str]:
        optimizer, seen = wrap(model, compression=how, exchange=exchange), []
        for step in range(6):
            seen += train(model, optimizer, rank, range(step, step + 1))
            if looks and step in (1, 2, 4):
                optimizer.measure()
                optimizer.compression_report()
        kept, left = bases(optimizer), residuals(optimizer)
        return seen, digest([*(kept[key] for key in sorted(kept)), *(left[name] for name in sorted(left))])

    found = on_ranks(2, MODEL, lambda rank, model: body(rank, model, True))
    assert found == on_ranks(2, MODEL, lambda rank, model: body(rank, model, False))


# -- measurements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rank"),
    [({"compression": "powersgd"}, "rank=4"), ({"compression": "acpsgd", "rank": 2}, "rank=2")],
    ids=str,
)
def test_measurements_say_of_what_rank_they_are(options: dict[str, Any], rank: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"

    def body(number: int, model: nn.Module) -> None:
        measured = trained(number, model, FIRST + 1, **options).measure()
        if number == 0:
            measured.save(path)

    on_ranks(2, MODEL, body)
    found = Measurements.load(path)
    assert rank in dict(found.facts)["compressor"]
    for name in PLANNERS:
        merging.best(merging.get(name), found)


@pytest.mark.slow
def test_plan_prints_its_table_and_keeps_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"

    def body(rank: int, model: nn.Module) -> None:
        measured = trained(rank, model, FIRST + 1, compression="acpsgd").measure()
        if rank == 0:
            measured.save(path)

    on_ranks(2, MODEL, body)
    planned = tmp_path / "plan.json"
    command = [sys.executable, "-m", "agmerge", "plan", str(path), "--save", str(planned)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "rank=4" in ended.stdout

    def replay(rank: int, model: nn.Module) -> list[str]:
        return train(model, wrap(model, compression="acpsgd", merging=planned, exchange="auto"), rank, range(4))

    agreed(on_ranks(2, MODEL, replay))
