# SPDX-License-Identifier: Apache-2.0
"""Parameters that leave, come back, join later or change their dtype."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from support import (
    WIDTH,
    Parts,
    agreed,
    batch,
    digest,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    sgd,
    train,
    wrap,
)
from torch import Tensor, nn

import agmerge
from agmerge import testing

Residuals = dict[str, Tensor]
MODEL = seeded(mlp)
WHOLE = ["none", "topk"]  # with density 1 they send all there is
COMPRESSIONS = [*WHOLE, "powersgd", "acpsgd", "eden"]
PARTS = seeded(Parts)


@pytest.mark.values
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_freezing_keeps_a_residual_for_the_time_after(size: int, compression: str) -> None:
    def body(rank: int, model: Parts) -> list[str]:
        optimizer = wrap(model, compression=compression)
        seen = []
        for step in range(12):
            if step in (4, 8):
                model.a.requires_grad_(step == 8)
                model.a.weight.grad = None
                model.a.bias.grad = None
                before, weight = residuals(optimizer), model.a.weight.clone()
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
            if 4 <= step < 8:
                assert torch.equal(model.a.weight, weight)
                assert all(same_bits(residuals(optimizer)[name], before[name]) for name in before if name[0] == "a")
            if step == 8:
                assert not torch.equal(model.a.weight, weight)
            seen.append(digest(model))
        assert "a.weight" in optimizer.plan.names
        return seen

    assert len(set(agreed(on_ranks(size, PARTS, body)))) == 12


def test_a_residual_that_was_kept_over_a_freeze_is_not_lost() -> None:
    """What froze unsent arrives after the thaw, though the layer itself is not used any more."""

    def body(rank: int, model: Parts) -> tuple[Tensor, Tensor]:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), merging="layerwise")
        model.loss(rank, 0, "a").backward()
        optimizer.step()
        kept = residuals(optimizer)["a.weight"]
        model.a.weight.requires_grad_(False)
        optimizer.zero_grad()
        model.loss(rank, 1, "a").backward()
        optimizer.step()
        model.a.weight.requires_grad_(True)
        total = torch.zeros_like(kept)
        for step in range(2, 4):
            optimizer.zero_grad()
            model.loss(rank, step, "b").backward()
            optimizer.step()
            total += model.a.weight.grad
        return kept - residuals(optimizer)["a.weight"], total

    found = on_ranks(2, PARTS, body)
    gone = (found[0][0] + found[1][0]) / 2
    assert gone.any()
    torch.testing.assert_close(found[0][1], gone)


@pytest.mark.parametrize("compression", WHOLE)
@pytest.mark.parametrize("how", ["wrapper", "inner", "thaw"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parameters_that_join_later_are_exchanged_from_then_on(size: int, how: str, compression: str) -> None:
    twin = copy.deepcopy(PARTS)

    def join(model: Parts, optimizer: torch.optim.Optimizer) -> None:
        if how == "thaw":
            model.a.requires_grad_(True)
        else:
            adder = optimizer.optimizer if how == "inner" and optimizer is not single else optimizer
            adder.add_param_group({"params": list(model.a.parameters()), "lr": 0.05})

    def prepare(model: Parts) -> torch.optim.SGD:
        if how == "thaw":
            model.a.requires_grad_(False)
            return sgd(model)
        return torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)

    single = prepare(twin)
    for step in range(8):
        single.zero_grad(set_to_none=False)
        twin.a.zero_grad()
        if step == 4:
            join(twin, single)
        (sum(twin.loss(rank, step, "a") for rank in range(size)) / size).backward()
        single.step()

    def body(rank: int, model: Parts) -> Parts:
        optimizer = wrap(model, prepare(model), compression=compression, density=1.0)
        for step in range(8):
            optimizer.zero_grad()
            model.a.zero_grad()
            if step == 4:
                join(model, optimizer)
            model.loss(rank, step, "a").backward()
            optimizer.step()
        assert "a.weight" in optimizer.plan.names
        return model

    found = on_ranks(size, PARTS, body)
    agreed([digest(model) for model in found])
    for a, b in zip(found[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["wrapper", "inner", "thaw"])
def test_newcomers_are_hooked_and_go_behind_those_who_were_there(how: str) -> None:
    def body(rank: int, model: Parts) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
        model.a.requires_grad_(how != "thaw")
        parts = [model.trunk, model.head, *([model.a] if how == "thaw" else [])]
        inner = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
        optimizer = wrap(model, inner, merging="layerwise")
        for step in range(4):
            if step == 2:
                before = optimizer.plan.names
                model.a.requires_grad_(True)
                if how != "thaw":
                    (optimizer if how == "wrapper" else inner).add_param_group({"params": list(model.a.parameters())})
            optimizer.zero_grad()
            model.a.zero_grad()
            calls = len(testing.calls())
            model.loss(rank, step, "ab").backward()
            left = len(testing.calls()) - calls
            if step == 3:
                with pytest.raises(AssertionError, match="Gradients were computed more than"):
                    model.a(torch.ones(1, WIDTH)).sum().backward()
            else:
                optimizer.step()
        return left, before, optimizer.plan.names

    left, before, after = agreed(on_ranks(2, PARTS, body))
    assert left == len(after)  # every message leaves during backward
    assert after[: len(before)] == before and set(after[len(before) :]) == {"a.weight", "a.bias"}


def test_a_recast_between_backward_and_step_is_an_error_by_name() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        loss_of(model, rank, 2).backward()
        model.double()
        with pytest.raises(agmerge.AGMergeError) as raised:
            optimizer.step()
        return str(raised.value)

    text = agreed(on_ranks(2, MODEL, body))
    assert "changed from torch.float32 on cpu to torch.float64 on cpu between backward() and step()" in text
    assert any(f"'{name}'" in text for name, _ in MODEL.named_parameters())


def test_the_agreed_order_stands_though_backward_has_another_one_by_now() -> None:
    def body(rank: int, model: Parts) -> tuple[tuple[str, ...], tuple[str, ...]]:
        optimizer = wrap(model)
        model.a.bias.requires_grad_(False)
        model.loss(rank, 0, "ab").backward()
        optimizer.step()
        before = optimizer.plan.names
        model.a.bias.requires_grad_(True)
        optimizer.zero_grad()
        model.loss(rank, 1, "ba").backward()
        optimizer.step()
        return before, optimizer.plan.names

    before, after = agreed(on_ranks(2, PARTS, body))
    assert after == (*before, "a.bias")


@pytest.mark.parametrize("step", [0, 2])
def test_joining_in_the_middle_of_a_step_is_an_error_and_never_silent(step: int) -> None:
    def body(rank: int, model: Parts) -> str:
        inner = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
        optimizer = wrap(model, inner)
        for i in range(step):
            optimizer.zero_grad()
            model.loss(rank, i, "a").backward()
            optimizer.step()
        optimizer.zero_grad()
        model.loss(rank, step, "a").backward()
        group = {"params": list(model.a.parameters())}
        with pytest.raises(agmerge.AGMergeError, match=r"add_param_group\(\) was called between backward"):
            optimizer.add_param_group(group)
        inner.add_param_group(group)  # behind the wrapper's back; their gradients are local
        if step == 0:
            optimizer.step()  # nothing was sent yet, so they are in time
            return digest(model)
        with pytest.raises(agmerge.AGMergeError, match="'a.weight' was added or unfrozen during backward"):
            optimizer.step()
        return "refused"

    agreed(on_ranks(2, PARTS, body))


def test_thawing_between_two_backward_passes_of_a_step_is_an_error() -> None:
    def body(rank: int, model: Parts) -> None:
        optimizer = wrap(model)
        for step in range(4):
            model.a.weight.requires_grad_(step < 2)
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
        optimizer.zero_grad()
        model.head(torch.ones(1, WIDTH)).sum().backward()
        model.a.weight.requires_grad_(True)  # its hook is there from before
        model.a(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(agmerge.AGMergeError, match="'a.weight' was added or unfrozen during backward"):
            optimizer.step()

    on_ranks(2, PARTS, body)


def test_a_change_on_one_rank_only_is_the_same_error_on_all() -> None:
    def body(rank: int, model: Parts) -> None:
        optimizer = wrap(model)
        for step in range(4):
            if step == 2 and rank == 1:
                model.a.requires_grad_(False)
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()

    found = on_ranks(3, PARTS, body, return_errors=True)
    assert all(isinstance(error, agmerge.RankMismatchError) for error in found)
    text = agreed([str(error) for error in found])
    assert "tensor 2: a.weight" in text and "on ranks 0, 2; b.weight" in text and " on rank 1" in text
    assert "on every rank at the same step" in text


@pytest.mark.parametrize("compression", ["none", "topk", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_is_recast_later_goes_on_in_sync(dtype: torch.dtype, compression: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[str], Residuals, Residuals, Residuals]:
        optimizer = wrap(model, compression=compression)
        seen = train(model, optimizer, rank, range(3))
        before = {name: kept for name, kept in residuals(optimizer).items() if kept.any()}  # of compressed tensors
        model.to(dtype)
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
        optimizer.zero_grad()
        optimizer.synchronize()  # no gradient: what is offered is what was kept
        with optimizer.skip_synchronize():
            optimizer.step()
        after, sent = residuals(optimizer), {n: p.grad.clone() for n, p in model.named_parameters() if n in before}
        return [*seen, *train(model, optimizer, rank, range(3, 6))], before, after, sent

    found = on_ranks(2, MODEL, body)
    assert len(set(agreed([seen for seen, *_ in found]))) == 6
    for name in found[0][1]:
        gone = sum(before[name] - after[name] for _, before, after, _ in found) / 2
        assert gone.any()
        torch.testing.assert_close(found[0][3][name], gone.to(dtype))


def put_anew(optimizer: agmerge.DistributedOptimizer, values: Tensor) -> weakref.ref[Tensor]:
    """Put a new parameter with ``values`` in the place of the first one, and return a reference to the old one."""
    group = optimizer.param_groups[0]
    old, group["params"][0] = group["params"][0], nn.Parameter(values)
    optimizer.state.pop(old, None)
    return weakref.ref(old)


@pytest.mark.parametrize("more_rows", [0, 8])
@pytest.mark.parametrize("compression", ["none", "topk", "dgc", "powersgd", "eden"])
def test_a_parameter_that_is_replaced_ten_times_leaves_nothing_behind(compression: str, more_rows: int) -> None:
    """Each is a new one, as in densification: with a residual of its own, and its predecessor leaves memory."""

    def body(rank: int, model: nn.Linear) -> tuple[list[str], str]:
        optimizer = wrap(model, sgd(model, lr=1.0), compression=compression)
        gone, found = [], []
        for step in range(10):
            for gradient in (float(rank + 1), 0.0):  # the second step would show a residual of the first one's
                first, bias = optimizer.param_groups[0]["params"]
                kept = first.detach().clone()
                optimizer.zero_grad()
                source = torch.Generator().manual_seed(step)
                weights = gradient * torch.randn(first.shape, generator=source)
                ((first * weights).sum() + (bias * 0.0).sum()).backward()
                optimizer.step()
                if gradient:
                    now = first.detach()
                    gone.append(put_anew(optimizer, torch.cat([now, now[:more_rows]])))
                else:
                    assert torch.equal(first.detach(), kept), "the residual of a predecessor was sent"
            found.append(digest(optimizer.param_groups[0]["params"]))
            del first, bias
        gc.collect()  # the first one is the model's
        assert not [reference for reference in gone[1:] if reference() is not None]
        assert len(residuals(optimizer)) <= 2
        return found, repr(sorted(optimizer.plan.names))

    agreed(on_ranks(2, seeded(lambda: nn.Linear(WIDTH, WIDTH)), body))


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"carry": "hold"}, {"overlap": 1}, {"outer": agmerge.Nesterov()}])
def test_a_parameter_is_replaced_while_updates_are_exchanged(options: dict[str, Any]) -> None:
    """What takes its place is made of the shared values; the others' tensors are let go."""

    def body(rank: int, model: nn.Linear) -> str:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = wrap(model, inner, sync="updates", compression="topk", **options)
        gone = []
        for step in range(12):
            first, bias = optimizer.param_groups[0]["params"]
            optimizer.zero_grad()
            x, _ = batch(rank, step)
            torch.nn.functional.linear(x, first, bias).square().mean().backward()
            optimizer.step()
            if step % 3 == 2:
                with optimizer.shared():
                    values = first.detach().clone()
                gone.append(put_anew(optimizer, values))
            del first, bias
        optimizer.consolidate()
        gc.collect()  # the first one is the model's
        assert not [reference for reference in gone[1:] if reference() is not None]
        return digest(optimizer.param_groups[0]["params"])

    agreed(on_ranks(2, seeded(lambda: nn.Linear(WIDTH, WIDTH)), body))


def test_a_replacement_that_differs_by_rank_is_an_error_on_all_ranks() -> None:
    """With sync="updates" a worker's own values are no common ones: training would go on from different models."""

    def body(rank: int, model: nn.Linear) -> None:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = wrap(model, inner, sync="updates", compression="topk")
        train(model, optimizer, rank, range(2))
        put_anew(optimizer, optimizer.param_groups[0]["params"][0].detach().clone())
        optimizer.param_groups[0]["params"][0].sum().backward()
        with pytest.raises(agmerge.DivergenceError, match="shared()"):
            optimizer.step()

    on_ranks(2, seeded(lambda: nn.Linear(WIDTH, WIDTH)), body)
