# SPDX-License-Identifier: Apache-2.0
"""What is said of a compressor that a script has named: what it cost where it was measured, and what costs less."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import sparsifiers
from agmerge.options.defaults import COSTS

MODEL = seeded(mlp)
Make = Callable[[nn.Module], torch.optim.Optimizer]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "compressor_reference.md"


@contextmanager
def told() -> Iterator[list[str]]:
    """What is said inside of what something cost, by all ranks."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [text for one in heard if "AGM705" in (text := str(one.message))]


class NorMuon(torch.optim.SGD):
    """By its name, one of Muon's family."""


class Lion(torch.optim.SGD):
    """By its name, one of those that were measured."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.0)


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, weight_decay=1e-3)


def made(kind: Any, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), lr=0.01, **options)


ADAMW, NADAM, MUON, LION = (made(kind) for kind in (torch.optim.AdamW, torch.optim.NAdam, NorMuon, Lion))
DEFAULT = "Use the default, which increased it less"
TOPK_ADAMW = [
    "compression='topk' increased the loss of a small language model by 22 to 40 %",
    "with AdamW at density 0.01.",
    "Use the default or sync='updates', which increased it less",
]

# The optimizer, the options, and words of the one line; none: nothing is said.
CASES: dict[str, tuple[Make, dict[str, Any], list[str]]] = {
    "the default": (ADAMW, {"compression": "auto"}, []),
    "topk": (ADAMW, {"compression": "topk"}, TOPK_ADAMW),
    "a density": (ADAMW, {"compression": "auto", "density": 0.01}, TOPK_ADAMW),
    "a smaller density": (ADAMW, {"compression": "topk", "density": 0.001}, TOPK_ADAMW),
    "Adam": (made(torch.optim.Adam), {"compression": "topk"}, TOPK_ADAMW),
    "the least density counts": (ADAMW, {"compression": "topk", "density": {"0.*": 0.5, ".*": 0.01}}, TOPK_ADAMW),
    "dgc without its memory": (
        ADAMW,
        {"compression": "dgc", "memory": "residual"},
        ["compression='dgc' increased the loss of a small language model by 22 to 40 %", "at density 0.01."],
    ),
    "dgc without it, momentum": (
        sgd,
        {"compression": "dgc", "memory": "residual"},
        ["compression='dgc'", "7.9 to 18 %", "at density 0.01.", DEFAULT],
    ),
    "topk with dgc's memory": (decayed, {"compression": "topk", "memory": "dgc"}, []),
    "a larger density": (
        ADAMW,
        {"compression": "topk", "density": 0.05},
        ["increased the loss of a small language model by 0.1 to 5.7 %", "at density 0.1."],
    ),
    "a density that was not measured": (ADAMW, {"compression": "topk", "density": 0.2}, []),
    "one that was not measured": (ADAMW, {"compression": "gaussiank"}, []),
    "what drops the rest": (ADAMW, {"compression": "topk", "memory": "none"}, []),
    "updates": (ADAMW, {"compression": "topk", "sync": "updates"}, []),
    "adtopk": (ADAMW, {"compression": "adtopk"}, ["'adtopk'", "29 %"]),
    "NAdam": (NADAM, {"compression": "topk"}, ["7.5 %", "NAdam", DEFAULT]),
    "Muon": (MUON, {"compression": "topk"}, ["25 %", "Muon", DEFAULT]),
    "Lion": (LION, {"compression": "topk"}, ["25 %", "Lion", DEFAULT]),
    "SGD": (sgd, {"compression": "topk"}, ["7.9 to 18 %", "SGD with momentum", DEFAULT]),
    "SGD, momentum": (sgd, {"compression": "dgc"}, []),
    "SGD, a density": (sgd, {"compression": "auto", "density": 0.01}, []),
    "a cost below the bound": (decayed, {"compression": "auto", "density": 0.01}, []),
    "SGD, no momentum": (
        plain,
        {"compression": "topk"},
        ["12 %", "with SGD at", DEFAULT],
    ),
    "powersgd": (ADAMW, {"compression": "powersgd"}, []),
    "acpsgd": (
        ADAMW,
        {"compression": "acpsgd", "rank": {"0.*": 2, ".*": 32}},
        ["'acpsgd' increased the loss of a small language model by 12 %", "at rank 4."],
    ),
    "acpsgd, rank 16": (ADAMW, {"compression": "acpsgd", "rank": 16}, []),
    "acpsgd, rank 16, SGD": (sgd, {"compression": "acpsgd", "rank": 16}, ["at rank 16.", "5 %", "SGD with momentum"]),
    "powersgd, rank 16": (ADAMW, {"compression": "powersgd", "rank": 16}, []),
    "several": (ADAMW, {"compression": {"0.*": "topk", ".*": "powersgd"}}, TOPK_ADAMW),
    "bits that cost nothing": (ADAMW, {"compression": "eden"}, []),
    "one bit": (ADAMW, {"compression": "eden-1"}, []),
    "bits with Muon": (
        MUON,
        {"compression": "eden"},
        [
            "'eden-2' increased the loss of a small language model by 1.7 to 6.2 %",
            DEFAULT,
        ],
    ),
    "int8 with Muon": (MUON, {"compression": "int8"}, []),
    "dense": (ADAMW, {"compression": "none"}, []),
    "a cast": (ADAMW, {"compression": "bf16"}, []),
}


@pytest.mark.parametrize("case", CASES)
def test_one_rank_says_once_what_a_named_compressor_cost(case: str) -> None:
    make, options, words = CASES[case]

    def body(rank: int, model: nn.Module) -> None:
        train(model, wrap(model, make(model), **options), rank, range(2))

    with told() as texts:
        on_ranks(2, MODEL, body)
    assert len(texts) == bool(words)
    assert all(word in texts[0] for word in words)


def test_it_is_said_when_a_compressor_is_named_in_training_and_once_of_the_same() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, torch.optim.AdamW(model.parameters()), compression="none")
        for name in ("none", "topk", "topk", "adtopk", "eden", "auto"):
            optimizer.set_compressor(name)
            train(model, optimizer, rank, range(2))

    with told() as texts:
        on_ranks(2, MODEL, body)
    assert [re.findall(r"compression='([a-z]+)'", text)[0] for text in texts] == ["topk", "adtopk"]


def test_nothing_is_said_where_nobody_knows_which_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, torch.optim.AdamW(model.parameters()), compression="none")
        monkeypatch.setattr(optimizer, "_inner", None)
        optimizer.set_compressor("topk")

    with told() as texts:
        on_ranks(1, MODEL, body)
    assert texts == []


def test_figures_are_of_what_there_is() -> None:
    there = {*sparsifiers.names(), *sparsifiers.low_rank_names(), *sparsifiers.quantisers()}
    for cost in COSTS:
        assert cost.compressor in there and cost.least <= cost.most
        assert (cost.bound is None) is (cost.compressor in sparsifiers.quantisers())
    assert len({cost[:3] for cost in COSTS}) == len(COSTS)


def test_the_page_shows_the_same_figures() -> None:
    section = PAGE.read_text().partition("## Measured effect on the loss")[2].partition("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines() if "|" in line]
    assert rows[2:] == [(f"`{cost.compressor}`", cost.size, cost.optimizer, cost.percent) for cost in COSTS]
