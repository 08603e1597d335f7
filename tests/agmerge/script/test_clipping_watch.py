# SPDX-License-Identifier: Apache-2.0
"""Clipping what is no gradient: a changed velocity is an error on every rank, a scaled selection one warning."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, loss_of, mlp, on_ranks, seeded, sgd, wrap
from support.buckets import connected, passed
from torch import nn

import agmerge
import sparsifiers

MODEL = seeded(mlp)
BOUND = 0.05
OWN = {"memory": sparsifiers.memory("dgc", momentum=0.9)}


def clip(model: nn.Module, bound: float = BOUND) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), bound)


def steps(
    rank: int,
    model: nn.Module,
    optimizer: Any,
    change: Callable[[nn.Module], None] = clip,
    numbers: range = range(6),
) -> str:
    """Steps by the wrapper's recipe; what is said by the one that raises, in which no parameter moves."""
    for step in numbers:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.synchronize()
        change(model)
        before = digest(model)
        try:
            with optimizer.skip_synchronize():
                optimizer.step()
        except ValueError as error:
            assert digest(model) == before
            return f"{step}: {error}"
    return ""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, OWN, {"exchange": "two-level"}, {"compression": "topk", "memory": "dgc"}])
def test_a_clipped_velocity_is_the_same_error_on_all_ranks_in_the_first_step(
    options: dict[str, Any], size: int
) -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner = sgd(model, momentum=0.0 if options is OWN else 0.9)
        return steps(rank, model, wrap(model, inner, **{"compression": "dgc", **options}))

    said = agreed(on_ranks(size, MODEL, body))
    assert said.startswith("0: AGM125: Step 0: ") and "a velocity" in said
    for way_out in ("sparsifiers.memory('dgc', clipping=", "compression='eden'", "memory='residual'"):
        assert way_out in said


def test_it_stays_an_error_until_the_memory_is_another_one() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression="dgc")
        found = [steps(rank, model, optimizer)]
        found += [steps(rank, model, optimizer, lambda model: None, range(6, 7))]
        optimizer.zero_grad()
        optimizer.set_compressor("topk", density=0.05)
        found += [steps(rank, model, optimizer, numbers=range(8, 14))]
        optimizer.set_compressor("dgc", density=0.05)
        return [*found, steps(rank, model, optimizer, numbers=range(14, 20))]

    first, second, third, fourth = agreed(on_ranks(2, MODEL, body))
    assert first.startswith("0:") and second.startswith("6:") and not third and fourth.startswith("14:")


def test_the_memorys_own_clipping_is_no_error() -> None:
    def body(rank: int, model: nn.Module) -> str:
        memory = sparsifiers.memory("dgc", clipping=BOUND)
        return steps(rank, model, wrap(model, compression="dgc", memory=memory), lambda model: None)

    assert agreed(on_ranks(2, MODEL, body)) == ""


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_under_a_scaler_too_and_not_for_its_scale(scale: float) -> None:
    """One that is no power of two, which changes in every step."""

    def body(rank: int, model: nn.Module, clips: bool) -> str:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1, growth_factor=1.7)
        optimizer = wrap(model, compression="dgc", scaler=scaler)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            scaler.unscale_(optimizer)
            if clips:
                clip(model)
            try:
                scaler.step(optimizer)
            except ValueError as error:
                return str(error)
            scaler.update()
        return ""

    assert "velocity" in agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, True)))
    assert agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, False))) == ""


def test_after_a_division_by_a_constant_and_in_a_hook_of_the_step() -> None:
    def divided(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.div_(3.0)
        clip(model)

    def body(rank: int, model: nn.Module) -> list[str]:
        first = steps(rank, model, wrap(model, compression="dgc"), divided)
        other = copy.deepcopy(model)
        optimizer = wrap(other, compression="dgc")
        optimizer.register_step_pre_hook(lambda *_: clip(other))
        return [first, steps(rank, other, optimizer, lambda model: None)]

    assert all("velocity" in said for said in agreed(on_ranks(2, MODEL, body)))


def test_a_bound_is_an_error_when_it_binds() -> None:
    """Before that ``clip_grad_norm_`` writes to the gradients, and leaves them as they were."""

    def body(rank: int, model: nn.Module) -> str:
        memory = sparsifiers.memory("dgc", momentum=0.0)  # so that norms go up and down with the gradient's
        optimizer = wrap(model, sgd(model, momentum=0.0), compression="dgc", memory=memory)
        for step in range(10):
            optimizer.zero_grad()
            (loss_of(model, rank, step) * (1e3 if step == 4 else 1e-3)).backward()
            optimizer.synchronize()
            clip(model, 0.2)
            try:
                with optimizer.skip_synchronize():
                    optimizer.step()
            except ValueError as error:
                return f"{step}: {error}"
        return ""

    said = agreed(on_ranks(2, MODEL, body))
    assert said.startswith("4: ") and "velocity" in said


# -- under somebody else's hook -----------------------------------------------------------------------------------


def bucketed(rank: int, model: nn.Module, in_closure: bool, clips: bool = True, **options: Any) -> str:
    """Steps as DistributedDataParallel makes them; with a closure, in which frameworks clip."""
    inner = sgd(model)
    reducer = connected(model, inner, **options)

    def gradients(step: int) -> torch.Tensor:
        inner.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        passed(reducer, model)
        if clips:
            clip(model)
        return loss

    for step in range(4):
        try:
            if in_closure:
                inner.step(lambda step=step: gradients(step))
            else:
                gradients(step)
                inner.step()
        except ValueError as error:
            reducer.close()
            assert not inner._optimizer_step_pre_hooks
            return f"{step}: {error}"
    return ""


@pytest.mark.parametrize("in_closure", [False, True])
def test_in_buckets_it_is_seen_too_also_in_a_closure(in_closure: bool) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        other = copy.deepcopy(model)
        found = [bucketed(rank, model, in_closure, compression="dgc")]
        return [*found, bucketed(rank, other, in_closure, clips=False, compression="dgc")]

    said, nothing = agreed(on_ranks(2, MODEL, body))
    assert said.startswith("0: AGM125: Step 0: ") and "velocity" in said and not nothing


# -- a selection --------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """One large tensor, which gets the gradients that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100, 100))


def warned(agree: bool, density: float, many: int) -> tuple[str, float]:
    """The warning of a rank that begins to clip after so ``many`` steps, and the norm of a dense gradient."""

    def body(rank: int, model: nn.Module) -> tuple[list[str], float]:
        optimizer = wrap(model, sgd(model, lr=0.0), compression="topk", density=density)
        source, said = torch.Generator().manual_seed(1), []
        gradient, norm = torch.randn(100, 100, generator=source), 0.0
        for step in range(many + 8):
            fresh = gradient.clone() if agree else torch.randn(100, 100, generator=source)
            norm = float(fresh.norm())
            model.weight.grad = fresh
            optimizer.synchronize()
            if step >= many:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    clip(model, 1.0)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                said += [str(one.message) for one in caught]
                continue
            with optimizer.skip_synchronize():
                optimizer.step()
        return said, norm

    ((said, norm),) = on_ranks(1, Given(), body)
    assert len(said) == 1
    return said[0], norm


@pytest.mark.parametrize("density", [0.01, 0.05])
@pytest.mark.parametrize("agree", [True, False], ids=["gradients agree", "nothing in common"])
def test_a_dense_gradients_norm_lies_between_what_is_said(agree: bool, density: float) -> None:
    """At its lower end where gradients of all steps are alike, at its upper where they are noise."""
    said, dense = warned(agree, density, many=int(6 / density))
    norm, low, high = map(float, figures(said))
    assert norm == high and 0.8 * low <= dense <= 1.2 * high
    end = low if agree else high
    assert end == pytest.approx(dense, rel=0.25)
    assert norm / low == pytest.approx(density**-0.5, rel=0.05)
    assert "compression='eden'" in said and "AGM125" in said


def figures(said: str) -> tuple[str, str, str]:
    """The norm that was seen, and the two between which a dense gradient's lies."""
    norm = re.search(r"from norm ([\d.e+]+) to", said)
    low = re.search(r"between ([\d.e+]+) and", said)
    high = re.search(r"between [\d.e+]+ and ([\d.e+]+), so", said)
    assert norm and low and high
    return norm[1], low[1], high[1]


def test_rank_0_alone_warns_and_once() -> None:
    def body(rank: int, model: nn.Module) -> str:
        return steps(rank, model, wrap(model, compression="topk"), numbers=range(8))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert agreed(on_ranks(3, MODEL, body)) == ""
    said = [str(one.message) for one in caught if "AGM125" in str(one.message)]
    assert len(said) == 1 and re.search("Step [0-3]: ", said[0]) and "topk" in said[0]


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none"},
        {"compression": "eden"},
        {"compression": "powersgd"},
        {"compression": "topk", "density": 1.0},
        {"compression": "topk", "memory": "none"},
    ],
    ids=str,
)
def test_nothing_is_said_where_the_norm_is_a_gradients(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> str:
        return steps(rank, model, agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options))

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AGM125")
        assert agreed(on_ranks(2, MODEL, body)) == ""


def test_nor_outside_of_the_process_set_nor_with_updates() -> None:
    def body(rank: int, model: nn.Module) -> str:
        other = copy.deepcopy(model)
        optimizer = wrap(model, compression="dgc", process_set=[0, 1])
        said = steps(rank, model, optimizer)
        optimizer = wrap(other, sgd(other), compression="topk", sync="updates")
        for step in range(5):
            optimizer.zero_grad()
            backward(other, rank, step)
            clip(other)
            optimizer.step()
        return said

    found = on_ranks(3, MODEL, body)
    assert "velocity" in found[0] and "velocity" in found[1] and not found[2]
