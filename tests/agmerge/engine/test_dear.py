# SPDX-License-Identifier: Apache-2.0
"""DeAR: updates in the next forward are those of the ordinary wrapper, to the bit, each exactly once.

Where the group adds alike in an all-reduce and in a reduce-scatter, which the in-memory group does (in rank order),
nothing at all may differ, with any number of ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import (
    AwkwardModel,
    Parts,
    agreed,
    awkward_batch,
    awkward_groups,
    batch,
    digest,
    loss_of,
    on_ranks,
    residuals,
    seeded,
    sgd,
)
from support.dear import MODEL, PARTS, Build, adamw, dear, plain, same
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
from agmerge import testing

INNER: dict[str, Build] = {
    "sgd": sgd,
    "adamw": adamw,
    "foreach": lambda model: adamw(model, foreach=True),
    "fused": lambda model: adamw(model, fused=True),
}


def state_digest(optimizer: agmerge.DistributedOptimizer) -> str:
    """The bits of the inner optimizer's state. In what order entries were made does not count."""
    return digest(value for _, entry in sorted(optimizer.state_dict()["state"].items()) for value in entry.values())


# -- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_are_those_of_the_ordinary_wrapper(size: int, kind: str) -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> list[str]:
        optimizer = wrap(model, INNER[kind](model))
        seen = []
        for step in range(13):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step % 2:
                optimizer.flush()
                seen.append(digest(model))
        if wrap is dear and size > 1:
            assert optimizer.plan.counts == (2, 2, 2)
        return [*seen, state_digest(optimizer)]

    assert len(set(same(size, MODEL, body, inject=testing.jitter(1)))) == 7


@pytest.mark.parametrize(
    "options",
    [
        {"dense_sum": "ordered"},
        {"op": agmerge.Sum},
        {"gradient_predivide_factor": 3.0},
        {"compression": "bf16"},
        {"compression": "fp16", "gradient_predivide_factor": 2.0},
        {"compression": "bf16", "memory": "none", "dense_sum": "ordered"},
        {"unused": "zero"},
        {"process_set": [0, 1]},
    ],
    ids=str,
)
def test_every_option_of_a_dense_exchange_holds(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> str:
        chosen = {**options, "process_set": [2]} if "process_set" in options and rank == 2 else options
        optimizer = wrap(model, **chosen)
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, 0 if "process_set" in options else rank, step).backward()
            optimizer.step()
        optimizer.flush()
        left[wrap][rank] = digest(tensor for _, tensor in sorted(residuals(optimizer).items()))
        return digest(model)

    left: dict[Any, dict[int, str]] = {plain: {}, dear: {}}
    same(3, MODEL, body)
    assert left[plain] == left[dear]


class Awkward(AwkwardModel):
    """Called as a module, since it uses parameters of its own."""

    def forward(self, batch: tuple[Tensor, Tensor], rank: int, step: int) -> Tensor:
        return self.loss(batch, rank, step)


def test_an_awkward_model_with_three_groups() -> None:
    def body(rank: int, model: AwkwardModel, wrap: Any) -> list[str]:
        optimizer = wrap(model, torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9))
        seen = []
        for step in range(14):
            optimizer.zero_grad()
            if step == 7:
                model.unfreeze()
            model(awkward_batch(rank, step), rank, step).backward()
            optimizer.step()
            optimizer.flush()
            seen.append(digest(model))
        return seen

    assert len(set(same(2, seeded(Awkward), body))) == 14


@pytest.mark.parametrize("uses", [("a", ""), ("ab", "a"), ("a", "b"), ("", "")], ids=str)
def test_modules_that_are_not_used_in_every_step(uses: tuple[str, str]) -> None:
    def body(rank: int, model: Parts, wrap: Any) -> list[str]:
        optimizer = wrap(model, sgd(model, weight_decay=0.1))
        seen = []
        for step in range(24):
            optimizer.zero_grad()
            model.loss(rank, step, uses[(rank + step // 3) % 2]).backward()
            optimizer.step()
            if step % 4 == 3:
                optimizer.flush()
                seen.append(digest(model))
        return seen

    assert len(set(same(2, PARTS, body))) == 6


class Counting(torch.optim.SGD):
    """Counts how often each parameter was stepped."""

    def step(self, closure: Any = None) -> Any:
        self.counts = getattr(self, "counts", {})
        for group in self.param_groups:
            for p in group["params"]:
                self.counts[p] = self.counts.get(p, 0) + (p.grad is not None)
        return super().step(closure)


def test_every_parameter_is_updated_exactly_once_a_step() -> None:
    def body(rank: int, model: Parts) -> list[list[int]]:
        inner = Counting(model.parameters(), lr=0.1)
        optimizer = dear(model, inner)
        for step in range(15):
            optimizer.zero_grad()
            model.loss(rank, step, "ab" if step < 3 or step % 2 else "a").backward()
            optimizer.step()
            if step % 3 == 0:
                model.loss(rank, step, "ab")
        optimizer.flush()
        optimizer.flush()
        return list(inner.counts.values())

    used = [15, 15, 15, 15, 9, 9, 15, 15]  # no rank uses `b` in six of the steps, and nothing of it is left
    assert agreed(on_ranks(2, PARTS, body)) == used


# -- when ---------------------------------------------------------------------------------------------------------


def test_step_moves_nothing_and_the_next_forward_everything() -> None:
    def body(rank: int, model: nn.Module) -> list[bool]:
        optimizer, seen = dear(model), [digest(model)]
        loss_of(model, rank, 0).backward()
        seen.append(digest(model))
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        seen.append(digest(model))
        loss_of(model, rank, 1)
        seen.append(digest(model))
        assert digest(p.grad for p in model.parameters()) == digest(gradients)  # as the script left them
        loss_of(model, rank, 1)
        optimizer.flush()
        seen.append(digest(model))
        return [a == b for a, b in zip(seen, seen[1:], strict=False)]

    assert agreed(on_ranks(2, MODEL, body)) == [True, True, False, True]


@pytest.mark.parametrize("in_place", [True, False], ids=["tensor", "number"])
def test_a_learning_rate_changed_after_step_counts_from_the_next_step_on(in_place: bool) -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> str:
        inner = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1) if in_place else 0.1)
        optimizer = wrap(model, inner)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            scheduler.step()
            for group in optimizer.param_groups:
                group["betas"] = (0.9 - 0.1 * step, 0.99)
        optimizer.flush()
        assert len(optimizer.param_groups) == 1 and len(optimizer.param_groups[0]["params"]) == 6
        return digest(model)

    same(2, MODEL, body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("when", ["before forward", "after step", "after forward", "between", "never"])
def test_zero_grad_anywhere_loses_nothing(when: str, set_to_none: bool) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = dear(model)
        for step in range(4):
            zero = lambda: optimizer.zero_grad(set_to_none)  # noqa: E731
            if when == "before forward":
                zero()
            x, y = batch(rank, step)
            for i, layer in enumerate(model):
                x = layer(x)
                if when == "between" and i == 2:
                    zero()
            loss = F.cross_entropy(x, y)
            if when == "after forward" or (when == "never" and step < 3):
                zero()
            loss.backward()
            optimizer.step()
            if when == "after step":
                zero()
        optimizer.flush()
        return digest(model)

    def usual(rank: int, model: nn.Module) -> str:
        optimizer = plain(model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        return digest(model)

    if when == "never":  # gradients of the last step but one are added locally here, combined there
        agreed(on_ranks(2, MODEL, body))
    else:
        assert agreed(on_ranks(2, MODEL, body)) == agreed(on_ranks(2, MODEL, usual))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_evaluation_after_step_needs_no_flush(guard: Any) -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> list[str]:
        optimizer, seen = wrap(model, adamw(model)), []
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step != 2:  # what an update under guard has made is used outside, too
                model.eval()
                with guard():
                    seen.append(digest([model(batch(0, step)[0]).float()]))
                model.train()
        optimizer.flush()
        return [*seen, digest(model)]

    assert len(set(same(2, MODEL, body))) == 4


def test_states_are_flushed() -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> list[str]:
        optimizer, seen = wrap(model, adamw(model)), []

        def step(number: int) -> None:
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()

        step(0)
        seen.append(digest(model.state_dict().values()))
        step(1)
        seen.append(digest(model[0].state_dict().values()))
        step(2)
        seen.append(state_digest(optimizer))
        seen.append(digest(model))
        step(3)
        state = copy.deepcopy(model.state_dict())
        step(4)
        model.load_state_dict(state)  # the update of step 4 must not be put on top
        seen.append(digest(model))
        loss_of(model, rank, 5)
        seen.append(digest(model))
        step(5)
        optimizer.add_param_group({"params": []})
        seen.append(digest(model))
        step(6)
        optimizer.close()
        return [*seen, digest(model)]

    same(2, MODEL, body)


def test_accumulation_and_no_sync() -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> str:
        optimizer = wrap(model, backward_passes_per_step=2)
        for step in range(0, 12, 3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss_of(model, rank, step).backward()
            loss_of(model, rank, step + 1).backward()
            loss_of(model, rank, step + 2).backward()
            optimizer.step()
        optimizer.flush()
        return digest(model)

    same(2, MODEL, body)
