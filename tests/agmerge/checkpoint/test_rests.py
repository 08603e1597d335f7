# SPDX-License-Identifier: Apache-2.0
"""Follow what was kept of a tensor into what sends it after a restart with other options: whole, too."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import torch
from support import Parts, agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from torch import Tensor, nn

import agmerge

MODEL, PARTS = seeded(mlp), seeded(Parts)
RANKS = 2
WAYS: list[dict[str, Any]] = [  # whose sums are not rounded to 16 bits
    {"compression": "none"},
    {"compression": "topk", "wire": "fp32"},
    {"compression": "topk", "wire": "int8"},
    {"compression": "topk", "wire": "int4", "sparsify": "ahead"},
    {"compression": "topk", "dense": ["a.weight"]},
    {"compression": "topk", "dense": [".*bias", "head.*"], "wire": "int8"},
    {"compression": "topk", "dense": "partial"},
    {"compression": "topk", "exchange": "masked"},
    {"compression": "topk", "exchange": "oktopk"},
    {"compression": "gaussiank", "wire": "bf16"},
    {"compression": {"a.*": "topk", ".*": "none"}},
    {"compression": {"a.*": "topk", ".*": "powersgd"}, "rank": 2},
    {"compression": "acpsgd", "rank": 2},
]


def rests(optimizer: agmerge.DistributedOptimizer) -> dict[str, Tensor]:
    """Return what a rank keeps to be sent, by name."""
    residuals: dict[str, Tensor] = optimizer.state_dict()["agmerge"]["residuals"]
    return residuals


def gradients(model: nn.Module, rank: int, step: int) -> dict[str, Tensor]:
    """Return a rank's own gradients, of a copy of its model."""
    own = copy.deepcopy(model)
    loss_of(own, rank, step).backward()
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("who", ["all", "rank 0"])
@pytest.mark.parametrize(
    ("options", "exact"),  # and what is sent whole and exactly with them
    [
        ({"compression": "none"}, ".*"),
        ({"compression": "fp16"}, "nothing"),
        ({"compression": "powersgd", "rank": 2}, ".*bias"),
        ({"compression": "acpsgd", "rank": 2}, ".*bias"),
        ({"compression": "topk", "wire": "fp32"}, ".*bias"),
        ({"compression": "topk", "wire": "int8"}, "nothing"),
        ({"compression": "topk", "dense": [".*weight"]}, ".*weight"),
        ({"compression": "topk", "dense": ["0.weight"], "dense_sum": "ordered"}, "0.weight"),
        ({"compression": "topk", "dense": ["0.weight"], "exchange": "masked"}, "0.weight"),
    ],
    ids=str,
)
def test_a_rest_of_what_is_sent_whole_now_is_in_the_first_update(options: dict[str, Any], exact: str, who: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], str]:
        optimizer = wrap(model, sgd(model, momentum=0.0), compression="topk", wire="int8")
        train(model, optimizer, rank, range(3))
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.close()
        optimizer = wrap(model, sgd(model, momentum=0.0), **options)
        before: dict[str, Tensor] = {}
        if who == "all" or rank == 0:
            optimizer.load_state_dict(state)
            before = rests(optimizer)
            assert all(before[name].any() for name, _ in model.named_parameters())
        there = {name: own + before.get(name, 0.0) for name, own in gradients(model, rank, 3).items()}
        train(model, optimizer, rank, [3])
        update = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return there, update, rests(optimizer), digest(model)

    found = on_ranks(RANKS, MODEL, body)
    agreed([digest for *_, digest in found])
    rounded = 1e-3 if options["compression"] == "fp16" else 1e-5  # sums have 16 bits
    for name, update in found[0][1].items():
        given = torch.stack([there[name] for there, *_ in found]).mean(dim=0)
        left = [kept[name] for _, _, kept, _ in found if name in kept]
        if re.fullmatch(exact, name):
            assert not any(kept.any() for kept in left)
        torch.testing.assert_close(update + sum(left) / RANKS, given, rtol=rounded, atol=0.1 * rounded)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_where_every_restart_has_other_options(seed: int) -> None:
    """All gradients are in the updates, or kept at the end; tensors are unused and frozen at times."""
    source = random.Random(seed)
    size = source.choice([2, 4])  # whose averages are exact
    runs = [(source.choice(WAYS), source.randint(1, 5)) for _ in range(6)]
    uses = [["".join(name for name in "ab" if source.random() < 0.6) for _ in range(size)] for _ in range(30)]
    frozen = [source.random() < 0.15 for _ in range(30)]

    def body(rank: int, model: Parts) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        accounted = copy.deepcopy(given)  # this rank's share of updates, and what it keeps
        state, step = None, 0
        for options, steps in runs:
            model.b.requires_grad_(True)
            optimizer = wrap(model, sgd(model, momentum=0.0), **options)
            if state is not None:
                optimizer.load_state_dict(state)
            for number in range(step, step + steps):
                model.b.requires_grad_(not frozen[number])
                own = copy.deepcopy(model)
                for target in (own, model):
                    target.zero_grad()
                    target.loss(rank, number, uses[number][rank]).backward()
                optimizer.step()
                for (name, p), (_, q) in zip(own.named_parameters(), model.named_parameters(), strict=True):
                    given[name] += 0.0 if p.grad is None else p.grad.double()
                    accounted[name] += 0.0 if q.grad is None else q.grad.double()
            step += steps
            state = copy.deepcopy(optimizer.state_dict())
            rest = rests(optimizer)
            optimizer.close()
        return given, {name: total + rest[name] if name in rest else total for name, total in accounted.items()}

    found = on_ranks(size, PARTS, body)
    for name in found[0][0]:
        given, accounted = (
            torch.stack([part[name] for part in parts]).mean(dim=0) for parts in zip(*found, strict=True)
        )
        torch.testing.assert_close(accounted, given, rtol=1e-4, atol=1e-5)
