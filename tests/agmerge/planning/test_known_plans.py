# SPDX-License-Identifier: Apache-2.0
"""A plan that was settled on is tried first in the next run like it, and corrected where it is wrong."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import agreed, mlp, on_ranks, seeded, train, wrap
from torch import nn

import merging
from agmerge import testing
from agmerge.metrics.running_times import RunningStepTimes
from agmerge.metrics.step_times import Seconds
from agmerge.planning import known_plans, measurer, plan_trial
from agmerge.planning.cost_probe import MeasuredCosts
from agmerge.planning.known_plans import FRESH, MOST, KnownPlan
from agmerge.planning.probe_budget import Budget
from agmerge.planning.replanner import FIRST, LOOKS
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve

MODEL, OTHER = seeded(mlp), seeded(lambda: mlp(), 5)
EVERY = 20
SETTLED = EVERY  # steps until a plan was looked at, and is kept
OPTIONS: dict[str, Any] = {"compression": "topk", "density": 0.1, "exchange": "auto"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("AGMERGE_CACHE", str(tmp_path))
    return tmp_path / "plans"


class Link:
    """What is measured, in place of times: seconds that a dense element takes, and the exchanges in training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dense, self.factor, self.probes = 1e-5, 1.0, 0
        link = self

        class Scripted(RunningStepTimes):
            def ready(self) -> Seconds:
                self.settle()
                return np.linspace(0.0, 1e-3, len(super().ready()))

            def travel(self) -> Seconds:
                return np.full(len(super().travel()), link.factor)

        def probe(
            buffers: MergeBuffers, step: int, backward: float, budget: Budget, *_: object
        ) -> Iterator[MeasuredCosts]:
            link.probes += buffers.comm.rank == 0
            line, dense = (Curve((0, 10**6), (1e-5, 1e-5 + 1e6 * slope)) for slope in (1e-5, link.dense))
            yield MeasuredCosts(Curve((0, 1), (0.0, 0.0)), line, dense)

        monkeypatch.setattr("agmerge.step.agreed_state.RunningStepTimes", Scripted)
        monkeypatch.setattr(measurer, "measure_costs", probe)
        monkeypatch.setattr(plan_trial, "DOUBTFUL", 0.0)  # no trials


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    return Link(monkeypatch)


def run(steps: int, size: int = 2, model: nn.Module = MODEL, **options: Any) -> tuple[list[str], list[merging.Plan]]:
    """Train, and return what planning did and the plan after each step; the same on all ranks, as are their calls."""

    def body(rank: int, here: nn.Module) -> tuple[list[str], list[merging.Plan], Any, list[str]]:
        planner = merging.get("agmerge", check_every=EVERY)
        optimizer = wrap(here, **{"merging": planner, **OPTIONS, **options})
        states, plans, seen = [], [], []
        for step in range(steps):
            seen += train(here, optimizer, rank, [step])
            states.append(optimizer.stats()["planning"])
            plans.append(optimizer.plan)
        return states, plans, testing.calls(), seen

    states, plans, _, seen = agreed(on_ranks(size, model, body))
    assert len(set(seen)) == steps
    return states, plans


def test_a_plan_that_was_settled_on_is_the_next_runs_from_its_first_step(cache: Path, link: Link) -> None:
    states, plans = run(SETTLED - 1)
    assert set(states[FIRST - 1 :]) == {"settled"} and not cache.exists()
    run(SETTLED)
    assert len(list(cache.iterdir())) == 1 and link.probes == 2
    again, known = run(SETTLED)
    assert again == ["known"] * SETTLED and link.probes == 2
    assert set(known) == {plans[-1]} and plans[0] != plans[-1]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_one_for_another_network_is_replaced_within_ten_steps(factor: float, cache: Path, link: Link) -> None:
    run(SETTLED)
    link.dense, link.factor = 1e-12, factor
    states, plans = run(SETTLED + LOOKS[-1] + EVERY)
    assert states[: LOOKS[-1] - 1] == ["known"] * (LOOKS[-1] - 1) and states[LOOKS[-1] - 1] == "settled"
    assert not any(plans[0].dense) and all(plans[-1].dense) and link.probes == 2
    assert set(run(1)[1]) == {plans[-1]}  # what it was replaced by is kept in its place


def test_it_is_for_a_run_alike_in_all_that_counts(cache: Path, link: Link) -> None:
    run(SETTLED)
    others: list[dict[str, Any]] = [
        {"size": 3},
        {"exchange": "sparse"},
        {"density": 0.2},
        {"compression": "adtopk"},
        {"model": seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 10)))},
    ]
    for other in others:
        assert set(run(2, **other)[0]) == {"timing"}
    plan = merging.Plan((3, 3))
    for fixed in ({"merging": plan}, {"merging": "threshold", "exchange": "sparse"}, {"merging": "exact"}):
        assert "known" not in run(2, **fixed)[0]
    assert run(1, merging=plan)[1][0].counts == plan.counts
    assert set(run(2)[0]) == {"known"}


def test_it_is_for_ranks_that_are_started_and_placed_alike(
    cache: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks share a host, or do not; Horovod's ranks of horovodrun and of mpirun have other collectives."""
    run(SETTLED)
    with monkeypatch.context() as changed:
        changed.setenv("OMPI_COMM_WORLD_SIZE", "2")
        assert set(run(2)[0]) == {"timing"}
    with monkeypatch.context() as changed:
        numbers = itertools.count()
        changed.setattr(known_plans.socket, "gethostname", lambda: f"host{next(numbers)}")
        assert set(run(2)[0]) == {"timing"}
    assert set(run(2)[0]) == {"known"}


def test_a_checkpoint_goes_on_with_the_plan_that_it_has(cache: Path, link: Link) -> None:
    run(SETTLED)

    def body(rank: int, model: nn.Module) -> list[str]:
        planner, states = merging.get("agmerge", check_every=EVERY), []
        optimizer = wrap(model, merging=planner, **OPTIONS)
        train(model, optimizer, rank, range(3))
        saved = optimizer.state_dict()
        optimizer.close()
        optimizer = wrap(model, merging=planner, **OPTIONS)
        optimizer.load_state_dict(saved)
        for step in range(3, 6):
            train(model, optimizer, rank, [step])
            states.append(optimizer.stats()["planning"])
        return states

    assert agreed(on_ranks(2, MODEL, body)) == ["timing"] * 3


@pytest.mark.parametrize("damage", ["", "{", "cut", "edited", "foreign", "plan"])
def test_a_damaged_file_is_ignored_with_one_line(damage: str, cache: Path, link: Link) -> None:
    run(SETTLED)
    (file,) = cache.iterdir()
    whole = file.read_text()
    known = KnownPlan.loads(whole)
    other = KnownPlan(merging.Plan((1,), names=("x",)), known.measured, known.ratio)
    texts = {"cut": whole[:-9], "edited": whole.replace('"ratio":', '"ratio": '), "foreign": known.plan.dumps()}
    file.write_text({**texts, "plan": other.dumps()}.get(damage, damage))
    with pytest.warns(UserWarning, match="AGM702") as seen:
        states, _ = run(SETTLED)
    (text,) = (str(one.message) for one in seen if "AGM702" in str(one.message))
    assert str(file) in text and "measures again: " in text and "\n" not in text and states[0] == "timing"
    assert KnownPlan.loads(file.read_text()).plan == known.plan  # an intact one in its place


def test_after_a_day_it_is_measured_anew(cache: Path, link: Link) -> None:
    run(SETTLED)
    (file,) = cache.iterdir()
    old = file.stat().st_mtime - FRESH - 1
    os.utime(file, (old, old))
    assert run(SETTLED)[0][0] == "timing"
    assert file.stat().st_mtime > old + FRESH and run(1)[0] == ["known"]


def test_a_known_plan_survives_its_text(cache: Path, link: Link) -> None:
    run(SETTLED)
    (file,) = cache.iterdir()
    known = KnownPlan.loads(file.read_text())
    assert KnownPlan.loads(known.dumps()) == known and known.ratio > 0


def test_where_nothing_can_be_kept_one_line_says_so(cache: Path, link: Link) -> None:
    cache.parent.rmdir()
    cache.parent.write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="AGM702") as seen:
        run(SETTLED + EVERY)
    texts = [str(one.message) for one in seen if "AGM702" in str(one.message)]
    (text,) = (text for text in texts if "cannot save" in text)  # another one: it cannot read there either
    assert str(cache.parent) in text and "Set AGMERGE_CACHE to another folder, or to 'off'" in text
    cache.parent.unlink()
    cache.parent.mkdir()


def test_off_keeps_and_reads_nothing(cache: Path, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    run(SETTLED)
    monkeypatch.setenv("AGMERGE_CACHE", "off")
    assert run(1)[0] == ["timing"]
    assert known_plans.folder() is None


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["AGMERGE_CACHE"] == "off"  # of the tests
    monkeypatch.delenv("AGMERGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert known_plans.folder() == Path("/cache/agmerge/plans")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert known_plans.folder() == Path("/home/me/.cache/agmerge/plans")
    monkeypatch.setenv("AGMERGE_CACHE", "~/elsewhere")
    assert known_plans.folder() == Path("/home/me/elsewhere/plans")


def test_the_oldest_files_are_dropped(cache: Path, link: Link) -> None:
    run(SETTLED)
    (file,) = cache.iterdir()
    known = KnownPlan.loads(file.read_text())
    os.utime(file, (0, 0))
    for number in range(MOST):
        known_plans.keep(cache / f"{number}.json", known)
    assert len(list(cache.iterdir())) == MOST and not file.exists()
