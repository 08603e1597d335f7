# SPDX-License-Identifier: Apache-2.0
"""Fifty steps of a model with everything that is awkward, against the three promises of a correct exchange."""

from __future__ import annotations

import copy
import functools

import pytest
import support
import torch
from support import (
    AwkwardModel,
    Sent,
    agreed,
    assert_conserved,
    awkward_batch,
    awkward_groups,
    on_ranks,
    residuals,
    seeded,
)
from support.awkward_training import backward, wrapped_awkward
from torch import Tensor

STEPS, THAW = 50, 20
LOSSY = ["topk", "fp16", "bf16"]
MODEL = seeded(AwkwardModel, 7)


train = functools.partial(support.train, backward=functools.partial(backward, thaw=THAW))


def largest(tensor: Tensor) -> float:
    return max(tensor.abs().flatten().tolist(), default=0.0)


@pytest.mark.parametrize("compression", ["topk", "none", "eden", "fp16", "bf16", "powersgd", "acpsgd"])
@pytest.mark.parametrize("size", [2, 4])
def test_replicas_are_equal_to_the_bit_after_every_step(size: int, compression: str) -> None:
    def body(rank: int, model: AwkwardModel) -> list[str]:
        return train(model, wrapped_awkward(model, compression=compression), rank, range(STEPS))

    seen = agreed(on_ranks(size, MODEL, body))
    assert len(set(seen)) == STEPS  # and it moved in every one


@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_none_equals_one_process_with_all_the_data(size: int, half: torch.dtype) -> None:
    start = seeded(lambda: AwkwardModel(half), 7)
    twin = copy.deepcopy(start)
    single = torch.optim.SGD(awkward_groups(twin), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        single.zero_grad()  # a parameter that no rank uses in a step is left alone in it
        if step == THAW:
            twin.unfreeze()
        losses = [twin.loss(awkward_batch(rank, step), rank, step) for rank in range(size)]
        (sum(losses) / size).backward()
        single.step()

    def body(rank: int, model: AwkwardModel) -> AwkwardModel:
        train(model, wrapped_awkward(model, compression="none"), rank, range(STEPS))
        return model

    # A gradient of sixteen bits is rounded once a rank, and not once in all.
    tolerance = 0.0 if size == 1 else 1e-5 if half == torch.float32 else 3e-2
    for model in on_ranks(size, start, body):
        for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (found - expected).double().norm() <= tolerance * expected.double().norm(), name


@pytest.mark.parametrize("compression", LOSSY)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_sent_and_what_is_kept_is_what_was_there(
    size: int, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: AwkwardModel) -> int:
        optimizer = wrapped_awkward(model, compression=compression)
        checked = 0
        old: dict[str, Tensor] = {}
        for step in range(30):
            optimizer.zero_grad()
            backward(model, rank, step, THAW)
            gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            new = residuals(optimizer)
            assert_conserved(step, old, gradient, sent.of[rank], new)
            for name, kept in new.items():
                checked += int(kept.count_nonzero()) + int(sent.of[rank][name].count_nonzero())
            old = new
        return checked

    assert min(on_ranks(size, MODEL, body)) > 50_000


@pytest.mark.parametrize("compression", LOSSY)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_updates_add_up_to_gradients_less_residuals(size: int, compression: str) -> None:
    Sums = dict[str, Tensor]

    def body(rank: int, model: AwkwardModel) -> tuple[Sums, Sums, Sums]:
        optimizer = wrapped_awkward(model, compression=compression, lr=0.01)
        gradients, updates = {}, {}
        for name, p in model.named_parameters():
            gradients[name], updates[name] = (torch.zeros(p.shape, dtype=torch.float64) for _ in range(2))
        for step in range(30):
            optimizer.zero_grad()
            backward(model, rank, step, THAW)
            for sums in (gradients, updates):
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        sums[name] += p.grad
                if sums is gradients:
                    optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        return gradients, updates, residuals(optimizer)

    found = on_ranks(size, MODEL, body)
    for name, update in found[0][1].items():
        left = sum(gradients[name] - kept.get(name, torch.zeros(())).double() for gradients, _, kept in found) / size
        dtype = dict(MODEL.named_parameters())[name].dtype
        # Where 16 bits travel, adding up ranks rounds once more, after everyone has committed what it sent.
        rough = compression != "topk" or dtype == torch.bfloat16
        tolerance = 1e-2 if rough and size > 1 else 1e-6
        assert largest(update - left) <= tolerance * largest(left) + 1e-12, name


def test_what_no_rank_uses_is_left_alone_and_what_thaws_moves() -> None:
    def body(rank: int, model: AwkwardModel) -> list[list[str]]:
        optimizer = wrapped_awkward(model)
        moved = []
        for steps in (range(THAW), range(THAW, THAW + 5)):
            before = copy.deepcopy(model)
            train(model, optimizer, rank, steps)
            pairs = zip(model.named_parameters(), before.parameters(), strict=True)
            moved.append([name for (name, now), then in pairs if not torch.equal(now, then)])
        assert model.unused.weight.grad is None and model.frozen.weight.grad is None
        assert model.only_rank_1.weight.grad is not None
        return moved

    frozen, thawed = agreed(on_ranks(2, MODEL, body))
    still = {"unused.weight", "unused.bias", "frozen.weight", "frozen.bias", "nothing"}
    everything = {name for name, _ in MODEL.named_parameters()}
    assert set(thawed) == everything - still
    assert set(frozen) == everything - still - {"late.weight", "late.bias"}


def test_a_rank_that_never_uses_a_layer_has_no_say_in_what_it_is() -> None:
    def body(rank: int, model: AwkwardModel) -> tuple[Tensor, Tensor]:
        optimizer = wrapped_awkward(model, compression="none")
        backward(model, rank, 0)
        local = model.only_rank_1.weight.grad
        mine = torch.zeros_like(model.only_rank_1.weight) if local is None else local.clone()
        optimizer.synchronize()
        return mine, model.only_rank_1.weight.grad.clone()

    found = on_ranks(4, MODEL, body)
    assert [bool(local.any()) for local, _ in found] == [False, True, False, False]
    for _, combined in found:
        assert torch.equal(combined, found[1][0] / 4)
