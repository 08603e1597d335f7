# SPDX-License-Identifier: Apache-2.0
"""What scripts do to combined gradients: a velocity is theirs to read, a selection to do more with."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import agreed, backward, digest, loss_of, mlp, on_ranks, seeded, sgd, wrap
from torch import nn

MODEL = seeded(mlp)
STEPS = 12
DGC: dict[str, Any] = {"compression": "dgc"}
TOPK: dict[str, Any] = {"compression": "topk", "density": 0.05}
Change = Callable[[nn.Module, int], None]  # of the gradients of a model, in a step


@contextmanager
def no_alarm() -> Iterator[None]:
    """An alarm is an error inside, a warning too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AGM125")
        yield


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def nothing(model: nn.Module, step: int) -> None:
    """A script that only looks."""
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def unbound(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def a_constant(model: nn.Module, step: int) -> None:
    torch._foreach_div_(gradients(model), 3.0)


def two_constants(model: nn.Module, step: int) -> None:
    """The last accumulation of an epoch has fewer batches."""
    torch._foreach_mul_(gradients(model), 1.0 if step % 4 < 3 else 0.75)


def tokens(model: nn.Module, step: int) -> None:
    """A number that differs from step to step."""
    torch._foreach_div_(gradients(model), 1.0 + random.Random(step).random())


def rare(model: nn.Module, step: int) -> None:
    """Batches of which some are smaller."""
    source = random.Random(step)
    torch._foreach_mul_(gradients(model), source.random() if source.random() < 0.4 else 1.0)


def a_warm_up(model: nn.Module, step: int) -> None:
    torch._foreach_mul_(gradients(model), min(1.0, (step + 1) / 8))


def decay(model: nn.Module, step: int) -> None:
    """Weight decay that the script adds itself."""
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.01)


def noise(model: nn.Module, step: int) -> None:
    source = torch.Generator().manual_seed(step)  # the same on all ranks
    for gradient in gradients(model):
        gradient.add_(torch.randn(gradient.shape, generator=source), alpha=1e-3)


def zeroed(model: nn.Module, step: int) -> None:
    model[2].weight.grad.zero_()


def all_zeroed(model: nn.Module, step: int) -> None:
    torch._foreach_zero_(gradients(model))


def dropped(model: nn.Module, step: int) -> None:
    model[0].weight.grad = None


def replaced(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


def by_layer(model: nn.Module, step: int) -> None:
    """Learning rates by layer, by hand."""
    for number, gradient in enumerate(gradients(model)):
        gradient.mul_(0.9**number)


def by_value(model: nn.Module, step: int) -> None:
    """Bounds each element: that is no common factor, and it is not looked for."""
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def larger(model: nn.Module, step: int) -> None:
    torch._foreach_mul_(gradients(model), 1.0 + 0.1 * step)


def signs(model: nn.Module, step: int) -> None:
    for gradient in gradients(model):
        gradient.sign_()


LOOKS = [nothing, unbound, dropped, replaced]  # after which each gradient has the value that it had, or is gone
SMALLER = [a_constant, tokens, rare, a_warm_up, two_constants]  # by one factor, as clipping makes them
OTHERS = [decay, noise, zeroed, all_zeroed, by_layer, by_value, larger, signs]


def trained(rank: int, model: nn.Module, changes: list[Change], **options: Any) -> str:
    optimizer = wrap(model, sgd(model, lr=0.01), **options)
    for step, change in enumerate(changes):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.synchronize()
        change(model, step)
        with optimizer.skip_synchronize():
            optimizer.step()
    return digest(model)


@pytest.mark.parametrize(
    ("options", "change"), [*((DGC, change) for change in LOOKS), *((TOPK, change) for change in (*LOOKS, *OTHERS))]
)
def test_nothing_is_said_of_it(change: Change, options: dict[str, Any]) -> None:
    with no_alarm():
        agreed(on_ranks(2, MODEL, lambda rank, model: trained(rank, model, [change] * STEPS, **options)))


@pytest.mark.long
@given(st.lists(st.sampled_from([*LOOKS, *OTHERS]), min_size=2, max_size=20), st.booleans())
def test_nor_in_any_order(changes: list[Change], velocity: bool) -> None:
    known = [change for change in changes if not velocity or change in LOOKS]
    with no_alarm():
        on_ranks(1, MODEL, lambda rank, model: trained(rank, model, known, **(DGC if velocity else TOPK)))


@pytest.mark.parametrize("change", [*SMALLER, *OTHERS])
def test_a_velocity_is_not_to_be_changed(change: Change) -> None:
    """Each element counts: what is divided, decayed, or bounded by itself is a velocity as well."""
    with pytest.raises(ValueError, match="AGM125: .* a velocity"):
        on_ranks(2, MODEL, lambda rank, model: trained(rank, model, [change] * STEPS, **DGC))


@pytest.mark.parametrize("options", [DGC, TOPK], ids=["velocity", "selection"])
def test_nor_is_what_happens_to_a_training(options: dict[str, Any]) -> None:
    """Accumulation, a schedule of rate and momentum, skipped steps, a frozen layer, another compressor, join()."""

    def body(rank: int, model: Any) -> str:
        optimizer = wrap(model, **options, nonfinite="skip", backward_passes_per_step=2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=0.1, total_steps=40)
        for step in range(24 + rank):
            optimizer.zero_grad()
            for part in range(2):
                loss = loss_of(model, rank, 100 * part + step)
                (loss * (torch.nan if (rank, step) == (1, 5) else 1.0)).backward()
            optimizer.synchronize()
            nothing(model, step)
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
            if step == 8:
                model[0].weight.grad = None
                model[0].weight.requires_grad_(False)
            if step == 12:
                optimizer.set_compressor("topk" if options is DGC else "dgc", density=0.1)
            if step == 16:
                model[0].weight.requires_grad_(True)
        optimizer.join()
        return digest(model)

    with no_alarm():
        agreed(on_ranks(2, MODEL, body))


def test_a_rank_that_has_joined_does_not_wait_for_those_that_clip() -> None:
    """They clip, and it does not: all are given the last one's replica in the end, as ever."""

    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, **DGC)
        for step in range(2 + 4 * rank):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.synchronize()
            if step >= 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        assert optimizer.join() == 1
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_another_norm_and_each_tensor_by_itself_are_seen_too(norm_type: float) -> None:
    def by_itself(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_(parameter, 1e-3, norm_type=norm_type)

    with pytest.raises(ValueError, match="AGM125: Step 0: .* a velocity"):
        on_ranks(2, MODEL, lambda rank, model: trained(rank, model, [by_itself] * 2, **DGC))


def test_of_tensors_that_are_not_sampled_nothing_is_seen() -> None:
    """Known limit: some tensors of a model are compared, and of each the elements in the middle."""

    def first(model: Any, step: int) -> None:
        model[0].weight.grad.view(-1)[:1000].mul_(0.5)

    with no_alarm():
        model = seeded(lambda: nn.Sequential(nn.Linear(32, 500), nn.Linear(500, 10)))
        on_ranks(1, model, lambda rank, model: trained(rank, model, [first] * 3, **DGC))
