# SPDX-License-Identifier: Apache-2.0
"""Traces, reports and the plan command: what they show is what happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import agmerge
import merging
from agmerge.__main__ import main
from agmerge.planning.replanner import FIRST
from tests.support import agreed, on_ranks

MODEL = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 40))


def trained(rank: int, net: nn.Module, steps: int, **options: Any) -> agmerge.DistributedOptimizer:
    """Some steps."""
    inner = torch.optim.SGD(net.parameters(), lr=0.01)
    optimizer = agmerge.DistributedOptimizer(
        inner, net.named_parameters(), **{"merging": "layerwise", "exchange": "sparse", **options}
    )
    more(optimizer, net, steps)
    return optimizer


def more(optimizer: agmerge.DistributedOptimizer, net: nn.Module, steps: int) -> None:
    """Some more steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(4, 48)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("first", [0, 2])
def test_a_trace_has_every_buffer_of_every_step_on_each_line(tmp_path: Path, first: int) -> None:
    def body(rank: int, net: nn.Module) -> None:
        optimizer = trained(rank, net, first)
        with optimizer.trace(tmp_path / "trace.json"):
            more(optimizer, net, 3)
        more(optimizer, net, 1)  # not in the trace

    on_ranks(2, MODEL, body)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        lines = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
        assert list(lines) == ["ready", "select", "exchange", "wait", "write"]
        for name, line in lines.items():
            here = [event for event in events if event["tid"] == line and event["ph"] != "M"]
            what = [f"buffer {i}" for i in range(6)]
            if name == "ready":
                what = ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]
            assert sorted((event["args"]["step"], event["name"]) for event in here) == sorted(
                (step, one) for step in range(3) for one in what
            )
            assert all(event["pid"] == rank and event.get("dur", 0.0) >= 0.0 for event in here)


def test_probes_between_steps_are_in_a_row_of_their_own(tmp_path: Path) -> None:
    def body(rank: int, net: nn.Module) -> None:
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(
            inner, net.named_parameters(), compression="topk", wire="fp32", exchange="sparse"
        )
        with optimizer.trace(tmp_path / "trace.json"):
            more(optimizer, net, FIRST + 2)

    on_ranks(2, MODEL, body)
    events = json.loads((tmp_path / "trace.rank1.json").read_text())["traceEvents"]
    (row,) = [event for event in events if event["name"] == "thread_name" and event["args"]["name"] == "between steps"]
    probes = [event for event in events if event["tid"] == row["tid"] and event["ph"] == "X"]
    assert [event["name"] for event in probes] == ["probe"] and probes[0]["dur"] > 0


def test_spans_of_a_buffer_follow_each_other(tmp_path: Path) -> None:
    def body(rank: int, net: nn.Module) -> None:
        optimizer = trained(rank, net, 1)
        with optimizer.trace(tmp_path / "trace.json"):
            more(optimizer, net, 2)

    on_ranks(1, MODEL, body)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for step in range(2):
        for buffer in range(6):
            spans = [e for e in events if e["args"].get("step") == step and e["name"] == f"buffer {buffer}"]
            select, exchange, wait, write = sorted(spans, key=lambda event: event["tid"])
            ends = {event["tid"]: event["ts"] + event["dur"] for event in spans}
            assert ends[2] <= exchange["ts"] + 1 and ends[2] <= wait["ts"] + 1
            assert ends[4] <= write["ts"] + 1 and exchange["ts"] <= ends[4] + 1


def test_two_traces_at_once_are_refused_and_an_error_inside_still_writes(tmp_path: Path) -> None:
    def body(rank: int, net: nn.Module) -> None:
        optimizer = trained(rank, net, 1)
        with pytest.raises(ZeroDivisionError), optimizer.trace(tmp_path / "a.json"):
            with (
                pytest.raises(agmerge.AGMergeError, match="AGM701"),
                optimizer.trace(tmp_path / "b.json"),
            ):
                pass
            more(optimizer, net, 1)
            _ = 1 / 0
        with optimizer.trace(tmp_path / "c.json"):
            more(optimizer, net, 1)

    on_ranks(1, MODEL, body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "c.json"]


def test_the_report_has_a_line_a_buffer_and_predictions_once_measured() -> None:
    def body(rank: int, net: nn.Module) -> tuple[str, str]:
        optimizer = trained(rank, net, 3, merging=merging.Plan((2, 4)), compression="topk")
        before = optimizer.merge_report()
        with pytest.raises(agmerge.AGMergeError, match=r"call measure\(\)"):
            _ = optimizer.measurements
        plan = optimizer.plan
        measured = optimizer.measure()
        assert optimizer.measurements == measured and optimizer.plan == plan
        return before, optimizer.merge_report()

    before, after = on_ranks(2, MODEL, body)[0]
    assert len(before.splitlines()) == 5 and before.splitlines()[1].split()[:3] == ["0", "2", "1960"]
    assert before.splitlines()[2].split()[-3:] == ["-", "-", "-"]
    assert len(after.splitlines()) == 6 and "-" not in after.splitlines()[2].split()
    assert after.splitlines()[0].count("(ms)") == 7 and after.splitlines()[3].startswith("times count from")
    assert after.splitlines()[4].startswith("measured / predicted finish: ")
    assert re.fullmatch(r"\d+ % of the communication is hidden behind backward", after.splitlines()[-1])


def test_measuring_gives_all_ranks_the_same_and_changes_no_bit() -> None:
    def body(rank: int, net: nn.Module) -> tuple[str, list[bytes]]:
        optimizer = trained(rank, net, 3, compression="adtopk", density=0.1)
        kept = {name: one.clone() for name, one in optimizer.state_dict()["agmerge"]["residuals"].items()}
        text = optimizer.measure().dumps()
        for name, one in optimizer.state_dict()["agmerge"]["residuals"].items():
            assert torch.equal(one, kept[name])
        more(optimizer, net, 2)
        return text, [parameter.detach().numpy().tobytes() for parameter in net.parameters()]

    def plain(rank: int, net: nn.Module) -> list[bytes]:
        trained(rank, net, 5, compression="adtopk", density=0.1)
        return [parameter.detach().numpy().tobytes() for parameter in net.parameters()]

    assert agreed(on_ranks(2, MODEL, body))[1] == agreed(on_ranks(2, MODEL, plain))


def test_the_plan_command_compares_draws_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, net: nn.Module) -> merging.Measurements:
        return trained(rank, net, 12, merging="exact", compression="topk", density=0.1).measurements

    measured = agreed(on_ranks(2, MODEL, body))
    measured.save(tmp_path / "profile.json")
    command = ["plan", str(tmp_path / "profile.json"), "--picture", str(tmp_path / "plan.svg")]
    assert main([*command, "--planner", "exact", "--save", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "6 tensors" in printed and all(name in printed for name in merging.names())
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")
    saved = merging.Plan.load(tmp_path / "plan.json")
    assert saved.counts == merging.best(merging.get("exact"), measured)[0].counts

    def replay(rank: int, net: nn.Module) -> merging.Plan:
        plan = trained(rank, net, 2, merging=tmp_path / "plan.json", compression="topk", density=0.1).plan
        assert plan is not None
        return plan

    assert agreed(on_ranks(2, MODEL, replay)) == saved


def test_the_plan_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}")
    assert main(["plan", str(tmp_path / "other.json")]) == 1
    assert "other.json" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err
