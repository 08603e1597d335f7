# SPDX-License-Identifier: Apache-2.0
"""The five lines of ``summary()``, and the share of hidden communication in it and in the report of merge buffers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from support import mlp, on_ranks, seeded, train, wrap
from torch import nn

import agmerge
import merging
from agmerge.engine.reporting import hidden
from agmerge.metrics.step_times import StepTimes

MODEL = seeded(mlp)
LINES = ["compression", "traffic", "time", "plan", "warnings"]


def summary(size: int, steps: int = 3, **options: Any) -> dict[str, str]:
    """Return rank 0's lines by their first word."""

    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, torch.optim.AdamW(model.parameters()), **options)
        with pytest.raises(agmerge.AGMergeError, match="first step"):
            optimizer.summary()
        train(model, optimizer, rank, range(steps))
        text = optimizer.summary()
        if "sync" in options:
            optimizer.consolidate()
        return text

    found = dict(line.split(": ", 1) for line in on_ranks(size, MODEL, body)[0].splitlines())
    assert list(found) == LINES
    return found


def test_it_says_what_is_sent_how_much_and_how_long_it_takes() -> None:
    found = summary(2, compression="eden-4", merging=merging.Plan((2, 4)))
    assert found["compression"].startswith("eden-4, 4 bits per value (")
    since = "per step on average since the first one"
    assert re.fullmatch(rf"[\d.]+ kB {since}, \d[\d.]*x less than an uncompressed all-reduce", found["traffic"])
    assert re.fullmatch(r"[\d.]+ ms per step, \d+ % of the communication is hidden behind backward", found["time"])
    assert found["plan"].startswith("2 merge buffers, planner ") and found["plan"].endswith(", fixed")
    assert found["warnings"] == "none"


def test_a_lone_worker_sends_nothing() -> None:
    found = summary(1)
    assert found["traffic"] == "none, because there is one worker"
    assert "hidden" not in found["time"] and found["time"].endswith("ms per step")


@pytest.mark.filterwarnings("ignore:AGM705")
def test_it_warns_of_a_compressor_that_increased_the_loss() -> None:
    found = summary(2, compression="topk", exchange="sparse", merging="single")
    assert found["compression"].startswith("topk(density=0.01) (")
    assert re.search(r"compression='topk' increased the loss by .* % in tests with AdamW", found["warnings"])


def test_it_warns_while_it_measures_and_of_traffic_that_is_no_less() -> None:
    found = summary(2, compression="none", merging="agmerge")
    assert found["compression"].startswith("uncompressed") and "about as much as" in found["traffic"]
    assert "still measuring" in found["plan"] and "measuring has not ended" in found["warnings"]
    many = summary(4, compression="topk", density=0.9, exchange="sparse", merging="single")
    assert "more than an uncompressed all-reduce" in many["traffic"] and "sends more than" in many["warnings"]


@pytest.mark.parametrize("compression", ["fp16", agmerge.Compression.fp16, "bf16"])
def test_a_cast_is_named(compression: Any) -> None:
    found = summary(2, compression=compression)
    name = compression if isinstance(compression, str) else compression.value
    assert found["compression"] == f"{name}, 16 bits per value (you set it)"
    assert ", 2x less than " in found["traffic"]


def test_it_counts_skipped_steps() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, nonfinite="skip")
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        (model(torch.ones(2, 32)).sum() * float("inf" if rank else 1)).backward()
        optimizer.step()
        return str(optimizer.summary())

    assert "1 steps were skipped because" in on_ranks(2, MODEL, body)[1]


@pytest.mark.parametrize("compression", ["powersgd", "dgc"])
def test_every_kind_of_compressor_has_lines(compression: str) -> None:
    assert compression in summary(2, compression=compression, memory="residual")["compression"]


def test_updates_have_lines() -> None:
    assert summary(2, sync="updates", exchange="sparse")["traffic"].endswith("x less than an uncompressed all-reduce")


def times(handed: list[float], arrived: list[float], waited: list[float]) -> StepTimes:
    """Return a step in which merge buffers are under way and waited for at these times."""
    zeros = np.zeros(len(handed))
    return StepTimes(zeros, zeros, zeros, np.array(handed), zeros, np.array(waited), zeros, np.array(arrived))


def test_hidden_is_the_share_that_no_step_waits_for() -> None:
    assert hidden(times([0, 5], [4, 9], [0, 2]), "backward") == "75 % of the communication is hidden behind backward"
    assert hidden(times([0], [1], [3]), "computation") == "0 % of the communication is hidden behind computation"
    assert hidden(times([0], [0], [0]), "backward").startswith("100 %")
