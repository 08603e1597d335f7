# SPDX-License-Identifier: Apache-2.0
"""What a script that was written for plain PyTorch does wrong, or rightly expects, in the words that its user meets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Parts, agreed, backward, digest, mlp, on_ranks, same_bits, seeded, sgd, wrap
from torch import nn
from torch.nn import functional as F

import agmerge
import sparsifiers

MODEL, PARTS = seeded(mlp), seeded(Parts)
COMPRESSIONS = ["topk", "none", "eden", "fp16", "powersgd", "acpsgd"]


# -- a gradient that is changed between backward() and step() ----------------------------------------------------


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


def mask(model: nn.Module) -> None:
    model[0].weight.grad[:3] = 0


def forget(model: nn.Module) -> None:
    model.zero_grad()


def drop(model: nn.Module) -> None:
    model[0].weight.grad = None


def replace(model: nn.Module) -> None:
    model[0].weight.grad = model[0].weight.grad * 2


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("change", [clip, mask, forget, drop, replace])
def test_a_change_before_step_is_an_error_in_the_first_step_as_in_later_ones(
    change: Callable[[nn.Module], None], compression: str, late: int
) -> None:
    """Nothing is stepped with, nothing is lost: without the bad step the training is the same to the bit."""

    def body(rank: int, model: nn.Module, bad: int | None) -> tuple[list[str], str]:
        optimizer, seen, said = wrap(model, compression=compression), [], ""
        for step in range(5):
            optimizer.zero_grad()
            backward(model, rank, step)
            if step == bad:
                change(model)
                before = digest(model)
                with pytest.raises(agmerge.AGMergeError) as error:
                    optimizer.step()
                said = str(error.value)
                assert digest(model) == before
                optimizer.zero_grad()
                backward(model, rank, step)
            optimizer.step()
            seen.append(digest(model))
        return seen, said

    found, said = agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, late)))
    assert "'0.weight'" in said and "AGM103" in said
    assert "To clip by the norm, call optimizer.clip_grad_norm_(max_norm)." in said
    assert found == agreed(on_ranks(2, MODEL, lambda rank, model: body(rank, model, None)))[0]


@pytest.mark.parametrize("compression", ["topk", "none"])
def test_clipping_what_was_combined_is_clipping_the_joint_batch(compression: str) -> None:
    twin = copy.deepcopy(MODEL)
    single = sgd(twin)
    for step in range(4):
        single.zero_grad()
        for rank in range(2):
            backward(twin, rank, step)
        for parameter in twin.parameters():
            parameter.grad.div_(2)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        single.step()

    def body(rank: int, model: nn.Module) -> nn.Module:
        optimizer = wrap(model, compression=compression, density=1.0)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        return model

    found = on_ranks(2, MODEL, body)
    assert agreed([digest(model) for model in found])
    for a, b in zip(found[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_between_backward_and_step_a_gradient_is_this_ranks_own(compression: str, set_to_none: bool) -> None:
    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        optimizer = wrap(model, compression=compression)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            twin.load_state_dict(model.state_dict())
            twin.zero_grad()
            backward(model, rank, step)
            backward(twin, rank, step)
            for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(mine.grad, plain.grad)
            optimizer.step()

    on_ranks(2, MODEL, body)


# -- replicas that start different -------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_replicas_that_start_different_are_found_in_the_first_step(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        if rank == 1:
            with torch.no_grad():
                model[2].weight[1, 2] += 1.0
        optimizer = wrap(model, compression=compression)
        backward(model, rank, 0)
        with pytest.raises(agmerge.DivergenceError) as error:
            optimizer.step()
        return str(error.value)

    said = agreed(on_ranks(3, MODEL, body))
    assert "'2.weight'" in said and "ranks 0, 2" in said and "rank 1" in said and "broadcast_parameters" in said


def test_a_learning_rate_that_depends_on_the_rank_is_found_in_the_first_step() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, sgd(model, lr=0.1 * (1 + rank)))
        backward(model, rank, 0)
        with pytest.raises(agmerge.DivergenceError) as error:
            optimizer.step()
        return str(error.value)

    assert "replicas differ" in agreed(on_ranks(2, MODEL, body))


# -- parameters that no rank used in a step ----------------------------------------------------------------------

INNER: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "weight decay": lambda model: sgd(model, momentum=0.0, weight_decay=0.1),
    "momentum": sgd,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
}
USE = ["ab", "", "b", "", "ab", ""]


def weights(model: Parts) -> list[torch.Tensor]:
    return [model.a.weight.detach().clone(), model.a.bias.detach().clone()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_one_that_no_rank_used_is_left_alone_as_in_one_process_on_the_joint_batch(inner: Any, size: int) -> None:
    twin = copy.deepcopy(PARTS)
    single = inner(twin)
    for step, use in enumerate(USE):
        single.zero_grad()
        (sum(twin.loss(rank, step, use) for rank in range(size)) / size).backward()
        single.step()

    def body(rank: int, model: Parts) -> Parts:
        optimizer = wrap(model, inner(model), compression="none")
        for step, use in enumerate(USE):
            before = weights(model)
            optimizer.zero_grad()
            model.loss(rank, step, use).backward()
            optimizer.step()
            moved = [not same_bits(a, b) for a, b in zip(before, weights(model), strict=True)]
            assert moved == ["a" in use] * 2, step
        return model

    found = on_ranks(size, PARTS, body)
    agreed([digest(model) for model in found])
    for a, b in zip(found[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compression", ["topk", "dgc", "fp16"])
def test_what_is_left_of_one_is_sent_without_it_and_then_it_is_left_alone(compression: str) -> None:
    """``a.bias`` is sent whole, so nothing is left of it; ``a.weight`` moves until its residual is empty."""

    def body(rank: int, model: Parts) -> list[tuple[bool, bool]]:
        momentum = 0.0 if compression == "dgc" else 0.9
        options = {"memory": sparsifiers.memory("dgc", momentum=0.0)} if compression == "dgc" else {}
        inner = sgd(model, momentum=momentum, weight_decay=0.1)
        optimizer, moved = wrap(model, inner, compression=compression, density=0.25, merging="layerwise", **options), []
        for step in range(14):
            before = weights(model)
            optimizer.zero_grad()
            model.loss(rank, step, "a" if step == 0 else "").backward()
            optimizer.step()
            weight, bias = (not same_bits(a, b) for a, b in zip(before, weights(model), strict=True))
            moved.append((weight, bias))
        return moved

    moved = agreed(on_ranks(2, PARTS, body))
    assert moved[0] == (True, True)
    if compression == "fp16":  # rounding is left of both, and most of it is sent at once
        assert moved[-1] == (False, False)
    else:
        assert [weight for weight, _ in moved[1:4]] == [True] * 3 and not any(bias for _, bias in moved[1:])
        assert moved[-1] == (False, False)


# -- two optimizers, one loss ------------------------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.ModuleDict({"g": nn.Linear(8, 32), "d": nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 1))})


def adversaries(rank: int, model: Any, steps: int, shield: bool) -> tuple[str, str]:
    """The loop of PyTorch's DCGAN example. ``shield``: the generator's loss stays out of the other's gradients."""
    g = wrap(model["g"], sgd(model["g"], lr=0.02))
    d = wrap(model["d"], sgd(model["d"], lr=0.02), backward_passes_per_step=2)
    source, said = torch.Generator().manual_seed(rank), ""
    for _ in range(steps):
        model["d"].zero_grad()
        real, noise = torch.randn(4, 32, generator=source), torch.randn(4, 8, generator=source)
        fake = model["g"](noise)
        F.softplus(-model["d"](real)).mean().backward()
        F.softplus(model["d"](fake.detach())).mean().backward()
        d.step()
        model["g"].zero_grad()
        loss = F.softplus(-model["d"](fake)).mean()
        if shield:
            with d.no_sync():
                loss.backward()
            g.step()
            continue
        loss.backward()  # counted as the first pass of the next step
        g.step()
        with pytest.raises(AssertionError) as error:
            F.softplus(-model["d"](real)).mean().backward()
            F.softplus(model["d"](fake.detach())).mean().backward()
        said = str(error.value)
        d.zero_grad()
    return digest(model), said


def test_a_gan_trains_with_the_generators_loss_inside_no_sync() -> None:
    found, _ = agreed(on_ranks(2, seeded(generator), lambda rank, model: adversaries(rank, model, 4, True)))
    assert found != digest(seeded(generator))


def test_a_gan_without_it_is_told_the_cure_and_can_go_on() -> None:
    _, said = agreed(on_ranks(2, seeded(generator), lambda rank, model: adversaries(rank, model, 2, False)))
    assert "more than backward_passes_per_step times" in said and "with optimizer.no_sync()" in said
    assert "AGM104" in said
