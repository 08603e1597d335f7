# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` by hooks on an optimizer that somebody else steps; and momentum withheld from its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded, sgd
from torch import nn

import agmerge
from agmerge.engine.step_hooks import follow, withhold
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.options import momentum
from agmerge.options.resolve import resolve
from agmerge.options.typed import Options
from agmerge.tensors.parameters import ParameterTable

MODEL = seeded(mlp)
COMMON: dict[str, Any] = {"exchange": "sparse", "merging": "threshold", "compression": "topk", "density": 0.05}


def following(model: nn.Module, inner: torch.optim.Optimizer, **options: Any) -> UpdateReducer:
    """A reducer that is connected."""
    config = resolve(Options(sync="updates", **COMMON, **options))
    reducer = UpdateReducer(ParameterTable(inner, model.named_parameters()), config)
    reducer.connect()
    return reducer


@contextmanager
def followed(reducer: UpdateReducer, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside of it the steps of somebody else."""
    end = follow(reducer, check)
    try:
        yield
    finally:
        end()


def spoilt(model: nn.Module, rank: int, step: int) -> None:
    """Gradients; one is not finite on rank 1 in step 3."""
    backward(model, rank, step)
    if (rank, step) == (1, 3):
        model[2].weight.grad[0, 0] = torch.inf


@pytest.mark.parametrize("options", [{}, {"every": 3, "overlap": 1}, {"carry": "hold"}], ids=str)
def test_hooks_give_the_bits_of_the_wrapper(options: dict[str, Any]) -> None:
    """In a step that is left out on one rank, too; and afterwards the optimizer is as it was."""

    def hooked(rank: int, model: nn.Module) -> list[str]:
        inner, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
        before = dict(vars(inner))
        with followed(following(model, inner, nonfinite="skip", **options)):
            for step in range(6):
                inner.zero_grad()
                spoilt(model, rank, step)
                gradients = [parameter.grad for parameter in model.parameters()]
                inner.step()
                assert all(p.grad is given for p, given in zip(model.parameters(), gradients, strict=True))
                seen.append(digest(model))
        assert vars(inner) == before and not inner._optimizer_step_pre_hooks and not inner._optimizer_step_post_hooks
        return seen

    def wrapped(rank: int, model: nn.Module) -> list[str]:
        inner, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
        optimizer = agmerge.DistributedOptimizer(
            inner, model.named_parameters(), sync="updates", nonfinite="skip", **COMMON, **options
        )
        for step in range(6):
            optimizer.zero_grad()
            spoilt(model, rank, step)
            optimizer.step()
            seen.append(digest(model))
        return seen

    assert on_ranks(2, MODEL, hooked) == on_ranks(2, MODEL, wrapped)


def test_what_is_not_finite_is_the_same_error_on_all_ranks() -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner = sgd(model)
        with followed(following(model, inner)), pytest.raises(agmerge.NonFiniteError, match="rank 1: '2.weight'") as it:
            for step in range(5):
                spoilt(model, rank, step)
                inner.step()
        assert step == 3 and all(parameter.isfinite().all() for parameter in model.parameters())
        return str(it.value)

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("fused", [False, True], ids=["scaled by us", "by the optimizer"])
def test_a_scaler_that_finds_something_on_one_rank_hangs_nobody(fused: bool) -> None:
    """That rank leaves its step out, and takes part in the exchange."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]

    def body(rank: int, model: nn.Module) -> list[int]:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        reducer, scaler, counts = following(model, inner), scalers[rank], []
        with followed(reducer):
            for step in range(5):
                inner.zero_grad()
                scaler.scale(torch.ones(1))
                spoilt(model, rank, step)
                for parameter in model.parameters():
                    parameter.grad *= 64.0 if step < 4 or rank == 0 else 32.0
                scaler.step(inner)
                scaler.update()
                counts.append(int(inner.state[model[0].weight].get("step", torch.tensor(0))))
        assert inner._step_supports_amp_scaling if fused else not hasattr(inner, "_step_supports_amp_scaling")
        assert (
            all(parameter.isfinite().all() for parameter in model.parameters()) and reducer.exchange.agreed.steps == 5
        )
        assert reducer.exchange.agreed.totals.steps_skipped == int(rank == 1)
        return counts

    first, second = on_ranks(2, MODEL, body)
    assert first == [1, 2, 3, 4, 5] and second == [1, 2, 3, 3, 4]


def test_a_check_comes_before_anything_moves() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner, before = sgd(model), digest(model)

        def check() -> None:
            raise agmerge.AGMergeError("not now")

        with followed(following(model, inner), check), pytest.raises(agmerge.AGMergeError, match="not now"):
            backward(model, rank, 0)
            inner.step()
        assert digest(model) == before

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("by_name", [True, False])
def test_the_gradients_of_a_closure_are_looked_at(by_name: bool) -> None:
    """It is called once, and its loss returned; a step with an infinity is left out."""

    def body(rank: int, model: nn.Module) -> list[str]:
        inner, seen, calls = sgd(model), [digest(model)], []

        def closure() -> str:
            inner.zero_grad()
            calls.append(len(calls))
            spoilt(model, 1, 2 + calls[-1])  # the second
            return f"loss {calls[-1]}"

        with followed(following(model, inner, nonfinite="skip")):
            for step in range(3):
                loss = inner.step(closure=closure) if by_name else inner.step(closure)
                assert loss == f"loss {step}"
                seen.append(digest(model))
        assert calls == [0, 1, 2]
        return seen

    (seen,) = on_ranks(1, MODEL, body)
    assert seen[0] != seen[1] == seen[2] != seen[3]


def applying(inner: torch.optim.Optimizer) -> Any:
    """Return what ``withhold`` reads of an exchange that applies momentum."""
    config = resolve(Options(compression="dgc"))
    config = config.changed(rates=momentum.rates(inner, config.compression.memory))
    group = SimpleNamespace(outside=False, comm=SimpleNamespace(rank=0))
    return SimpleNamespace(agreed=SimpleNamespace(config=config), group=group)


def test_momentum_is_withheld_from_steps_and_shown_again_after_one_that_raises() -> None:
    model = seeded(mlp)
    inner = sgd(model)
    seen: list[float] = []

    def look(*_: Any) -> None:
        seen.append(inner.param_groups[0]["momentum"])
        if len(seen) == 2:
            raise RuntimeError("a hook of the script's")

    end = withhold(applying(inner), inner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that no group has a momentum any more
        handle = inner.register_step_pre_hook(look)  # it comes after ours
        for _ in range(2):
            backward(model, 0, 0)
            if len(seen) == 1:
                with pytest.raises(RuntimeError, match="a hook of the script's"):
                    inner.step()
            else:
                inner.step()
                assert inner.param_groups[0]["momentum"] == 0.9
        assert not inner.state[model[0].weight].get("momentum_buffer") and seen == [0.0, 0.0]
        handle.remove()
        inner.step()
    end()
    assert inner.param_groups[0]["momentum"] == 0.9 and not inner._optimizer_step_pre_hooks
