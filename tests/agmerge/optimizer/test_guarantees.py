# SPDX-License-Identifier: Apache-2.0
"""G2, G3, G7 and G11 of docs/dev/guarantees_tests.md. Two more files hold G1, and G12 with G13."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    WIDTH,
    AwkwardModel,
    agreed,
    awkward_batch,
    awkward_groups,
    batch,
    digest,
    mlp,
    on_ranks,
    random_plan,
    residuals,
    seeded,
    train,
    wrap,
)
from torch import nn
from torch.nn import functional as F

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)
Calls = list[tuple[str, str, int]]


class Branches(nn.Module):
    """Parallel layers; the order in which they are called is the order in which backward does not reach them."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH if i % 2 else 10) for i in range(6))
        self.head = nn.Linear(WIDTH, 10)

    def loss(self, rank: int, step: int, order: list[int]) -> torch.Tensor:
        x, y = batch(rank, step)
        found = {i: self.branches[i](x) for i in order}
        logits = sum(self.head(torch.tanh(out)) if i % 2 else out for i, out in sorted(found.items()))
        return F.cross_entropy(logits, y)


BRANCHES = seeded(Branches)
TENSORS = len(list(BRANCHES.parameters()))


# -- G2: one sequence of collectives, whatever a rank sees ------------------------------------------------------


def by_communicator(calls: Calls) -> tuple[Calls, Calls]:
    """Those of the communicator of all, and those of the one that second phases of quantised sums have."""
    second = [call for call in calls if call[1].endswith("/sum")]
    return [call for call in calls if call not in second], second


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("compression", ["none", "topk", "eden", "powersgd", "acpsgd"])
def test_g2_ranks_make_the_same_calls_in_any_order_of_readiness(seed: int, compression: str) -> None:
    """Every rank and step has an order of its own; some ranks do not use some layers; ranks run at random speeds."""
    plan, size = random_plan(seed, TENSORS), 2 + seed % 3

    def body(rank: int, model: Branches) -> tuple[tuple[Calls, Calls], list[tuple[Calls, Calls]], list[str]]:
        source = random.Random(100 * seed + rank)
        optimizer = wrap(model, compression=compression, merging=plan)
        steps, seen = [], []
        for step in range(5):
            used = source.sample(range(6), k=source.randint(2, 6))
            optimizer.zero_grad()
            before = len(testing.calls())
            model.loss(rank, step, used).backward()
            optimizer.step()
            steps.append(by_communicator(testing.calls()[before:]))
            seen.append(digest(model))
        return by_communicator(testing.calls()), steps, seen

    _, steps, _ = agreed(on_ranks(size, BRANCHES, body, inject=testing.jitter(seed)))
    assert all(calls == steps[1] for calls in steps[2:])  # names and sizes are stable from step to step
    first, second = steps[1]
    assert len(first) >= len(plan.counts) and len(second) in (0, len(plan.counts))
    assert all(len(name) < 30 for _, name, _ in (*first, *second))


def test_g2_one_message_per_merge_buffer_and_it_leaves_during_backward() -> None:
    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer = wrap(model, merging=merging.Plan((2, 2, 2)))
        left = []
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            before = len(testing.calls())
            F.cross_entropy(model(x), y).backward()
            left.append(len(testing.calls()) - before)
            optimizer.step()
            assert step == 0 or len(testing.calls()) - before == 3
        return left

    assert agreed(on_ranks(3, MODEL, body)) == [0, 3, 3]  # the first step only watches the order


def test_g2_messages_wait_for_those_before_them_in_the_plan() -> None:
    """Backward reaches the first layer last, but the plan wants its message first."""
    names = tuple(name for name, _ in MODEL.named_parameters())

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, merging=merging.Plan((2, 2, 2), names=names))
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        before = len(testing.calls())
        x, y = batch(rank, 1)
        F.cross_entropy(model(x), y).backward()
        return [name for _, name, _ in testing.calls()[before:]]

    assert agreed(on_ranks(2, MODEL, body)) == ["buffer 0", "buffer 1", "buffer 2"]


# -- G3: nothing is left out silently (more in test_optimizer_members.py) ----------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_g3_twenty_steps_in_which_everything_changes(size: int) -> None:
    def body(rank: int, model: AwkwardModel) -> list[str]:
        groups = awkward_groups(model)
        inner = torch.optim.SGD(groups[:2], lr=0.05, momentum=0.9)
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), check_every=1)
        seen = []
        for step in range(20):
            if step == 4:
                optimizer.add_param_group(groups[2])
            if step == 8:
                model.unfreeze()
            model.first.requires_grad_(not 12 <= step < 16)
            optimizer.zero_grad()
            for p in groups[2]["params"]:
                p.grad = None
            model.loss(awkward_batch(rank, step), rank, step).backward()
            optimizer.step()
            seen.append(digest(model))
        return seen

    assert len(set(agreed(on_ranks(size, seeded(AwkwardModel, 7), body)))) == 20


# -- G7: nothing is lost (more in test_optimizer_awkward.py) ------------------------------------------------------


def outlier(shape: torch.Size, source: torch.Generator) -> torch.Tensor:
    values = torch.ones(shape)
    values.view(-1)[0] = 1e30
    return values


FILLS: dict[str, Callable[[torch.Size, torch.Generator], torch.Tensor]] = {
    "normal": lambda shape, source: torch.randn(shape, generator=source),
    "constant": lambda shape, source: torch.full(shape, -0.75),
    "zero": lambda shape, source: torch.zeros(shape),
    "ties": lambda shape, source: torch.randint(-1, 2, shape, generator=source).float(),
    "negative": lambda shape, source: -torch.rand(shape, generator=source),
    "outlier": outlier,
    "tiny": lambda shape, source: torch.randn(shape, generator=source) * 1e-40,
}


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 37), min_size=0, max_size=3), min_size=1, max_size=4),
    fill=st.sampled_from(sorted(FILLS)),
    density=st.sampled_from([1e-4, 0.01, 0.3, 1.0]),
    compression=st.sampled_from(["topk", "bf16", "none"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_g7_the_update_and_what_is_kept_are_what_was_there(
    shapes: list[list[int]], fill: str, density: float, compression: str, dtype: torch.dtype, seed: int
) -> None:
    """On one rank the update is what was sent, so every term can be seen from outside; exact, element by element."""
    options: dict[str, Any] = {"density": density, "dense": []} if compression == "topk" else {}

    def body(rank: int) -> None:
        source = torch.Generator().manual_seed(seed)
        tensors = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        optimizer = agmerge.DistributedOptimizer(torch.optim.SGD(tensors, lr=0.1), compression=compression, **options)
        old: dict[str, torch.Tensor] = {}
        for _ in range(3):
            gradients = [FILLS[fill](p.shape, source).to(dtype) for p in tensors]
            for p, gradient in zip(tensors, gradients, strict=True):
                p.grad = gradient.clone()
            optimizer.synchronize()
            updates = [p.grad.clone() for p in tensors]
            with optimizer.skip_synchronize():
                optimizer.step()
            new = residuals(optimizer)
            for i, (update, gradient) in enumerate(zip(updates, gradients, strict=True)):
                kept = new.get(f"noname.0.{i}", torch.zeros_like(update))
                whole = old.get(f"noname.0.{i}", torch.zeros_like(kept)) + gradient.to(kept.dtype)
                assert torch.equal(kept + update.to(kept.dtype), whole)
            old = new

    testing.run(1, body)


# -- G11: a replica that went its own way is found --------------------------------------------------------------


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
@pytest.mark.parametrize("name", ["0.weight", "2.bias", "4.weight"])
def test_g11_a_changed_parameter_is_found_by_name_at_the_next_check(name: str, size: int, rank: int) -> None:
    def body(here: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="topk", check_every=3)
        train(model, optimizer, here, range(7))
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # or the next steps might round the bit away
        if here == rank:
            flat = dict(model.named_parameters())[name].detach().view(-1)
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))  # one bit of one element
        train(model, optimizer, here, range(7, 8))  # no check is due
        with pytest.raises(agmerge.DivergenceError) as raised:
            train(model, optimizer, here, range(8, 9))
        return str(raised.value)

    text = agreed(on_ranks(size, MODEL, body))
    assert f"first in parameter '{name}'" in text and text.startswith("AGM102: Step 9: ")
    assert f"on rank {rank}" in text and "broadcast_parameters" in text
    assert len(set(re.findall(r"\b[0-9a-f]{32}\b", text))) == 2  # whole digests, so that they differ visibly


@pytest.mark.parametrize(("options", "found"), [({}, [100]), ({"check_every": 0}, [])])
def test_g11_a_replica_that_changes_later_is_found_within_a_hundred_steps_unless_told_otherwise(
    options: dict[str, Any], found: list[int]
) -> None:
    """What a native sum loses on its way to one rank shows nowhere else: it carries no checksum."""

    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer, told = wrap(model, compression="none", **options), []
        for step in range(1, 103):
            if step == 7 and rank == 1:
                model.get_parameter("2.bias").data[0] += 1
            try:
                train(model, optimizer, rank, range(step, step + 1))
            except agmerge.DivergenceError as error:
                assert "'2.bias'" in str(error) and "AGM102" in str(error)
                told.append(step)
                break
        return told

    assert on_ranks(2, MODEL, body) == [found, found]


def test_g11_frozen_parameters_are_looked_at_too_and_equal_ones_are_never_an_error() -> None:
    def body(rank: int, model: nn.Sequential) -> str:
        optimizer = wrap(model, check_every=1)
        train(model, optimizer, rank, range(10))
        if rank == 1:
            model[0].weight.data[0, 0] += 1
        with pytest.raises(agmerge.DivergenceError) as raised:
            train(model, optimizer, rank, range(1))
        return str(raised.value)

    model = copy.deepcopy(MODEL)
    model[0].requires_grad_(False)
    assert "'0.weight'" in agreed(on_ranks(3, model, body))
