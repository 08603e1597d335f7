# SPDX-License-Identifier: Apache-2.0
"""``state_dict`` and ``load_state_dict``: residuals travel by name, and belong to their rank."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support import (
    AwkwardModel,
    agreed,
    awkward_batch,
    awkward_groups,
    digest,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    sgd,
    through_a_file,
    train,
    wrap,
)
from torch import nn

import agmerge
import merging

MODEL = seeded(mlp)
COMPRESSIONS = ["none", "topk", "eden", "fp16", "bf16", "powersgd", "acpsgd"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_residuals_come_back_to_the_bit_on_every_rank(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression=compression)
        train(model, optimizer, rank, range(3))
        state = optimizer.state_dict()
        section = state["agmerge"]
        assert (section["rank"], section["size"], section["steps"]) == (rank, 3, 3)
        kept = residuals(optimizer)
        train(model, optimizer, rank, range(3, 5))  # a state_dict is a copy: it does not follow
        assert all(same_bits(section["residuals"][name], value) for name, value in kept.items())
        other = wrap(copy.deepcopy(model), compression=compression)
        other.load_state_dict(through_a_file(state))
        assert residuals(other).keys() == kept.keys()
        assert all(same_bits(value, kept[name]) for name, value in residuals(other).items())
        assert other.state_dict()["agmerge"]["steps"] == 3
        return digest(kept.values())

    found = on_ranks(3, MODEL, body)
    assert len(set(found)) == (1 if compression in ("none", "eden") else 3)  # some keep nothing


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_twenty_and_twenty_steps_are_forty(size: int, inner: Any, compression: str) -> None:
    options = {"momentum": 0.9} if inner is torch.optim.SGD else {}

    def started(model: nn.Module) -> agmerge.DistributedOptimizer:
        plain = inner(model.parameters(), lr=0.01, weight_decay=0.1, **options)
        return wrap(model, plain, compression=compression, merging=merging.get("threshold", bytes=4096))

    def whole(rank: int, model: nn.Module) -> list[str]:
        return train(model, started(model), rank, range(40))

    def first(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        train(model, optimizer, rank, range(20))
        return through_a_file((model.state_dict(), optimizer.state_dict()))

    saved = on_ranks(size, MODEL, first)

    def second(rank: int, model: nn.Module) -> list[str]:
        optimizer = started(model)
        model.load_state_dict(saved[rank][0])
        optimizer.load_state_dict(saved[rank][1])
        return train(model, optimizer, rank, range(20, 40))

    assert on_ranks(size, MODEL, second) == [seen[20:] for seen in on_ranks(size, MODEL, whole)]


def test_resuming_keeps_plan_and_use_also_where_the_order_is_another() -> None:
    """Step 20 sees other layers, in another order, than step 0; a layer that was used before is not used again."""

    def loss(model: AwkwardModel, rank: int, step: int) -> torch.Tensor:
        # Rank 1 and even steps decide which layers are used: let the second half use fewer of them.
        return model.loss(awkward_batch(rank, step), 0, 2 * step + (step >= 10))

    def started(model: AwkwardModel) -> agmerge.DistributedOptimizer:
        inner = torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9)
        options = {"merging": merging.get("threshold", bytes=8192), "dense_sum": "ordered", "exchange": "sparse"}
        return agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)

    def go(model: AwkwardModel, optimizer: agmerge.DistributedOptimizer, rank: int, steps: range) -> list[str]:
        seen = []
        for step in steps:
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            seen.append(digest(model))
        return seen

    def body(rank: int, model: AwkwardModel, restart: bool) -> tuple[list[str], merging.Plan]:
        optimizer = started(model)
        go(model, optimizer, rank, range(10))
        if restart:
            state, model = through_a_file(optimizer.state_dict()), copy.deepcopy(model)
            optimizer = started(model)
            optimizer.load_state_dict(state)
        return go(model, optimizer, rank, range(10, 20)), optimizer.plan

    model = seeded(AwkwardModel, 7)
    through, restarted = (agreed(on_ranks(2, model, lambda r, m, b=b: body(r, m, b))) for b in (False, True))
    assert through == restarted


def test_another_merging_in_the_script_counts_more_than_the_plan_of_the_checkpoint() -> None:
    def body(rank: int, model: nn.Module) -> list[int]:
        first = wrap(model, merging="single")
        train(model, first, rank, range(2))
        again = copy.deepcopy(model)
        second = wrap(again, merging="layerwise")
        second.load_state_dict(through_a_file(first.state_dict()))
        train(again, second, rank, range(2, 3))
        return [len(first.plan.counts), len(second.plan.counts), len(list(model.parameters()))]

    merged, alone, tensors = agreed(on_ranks(2, MODEL, body))
    assert merged < alone == tensors


@pytest.mark.parametrize("who", ["every rank", "rank 0"])
def test_what_was_kept_for_a_layer_that_is_not_used_any_more_arrives_after_a_restart(who: str) -> None:
    """Its gradient must not be None on any rank, or what was sent would be taken off and go nowhere."""

    def body(rank: int, model: nn.Sequential) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer = wrap(model, sgd(model, momentum=0.0), merging="layerwise")
        train(model, optimizer, rank, range(2))
        state = through_a_file(optimizer.state_dict())
        model = copy.deepcopy(model)
        optimizer = wrap(model, sgd(model, momentum=0.0), merging="layerwise")
        if who == "every rank" or rank == 0:
            optimizer.load_state_dict(state)
        else:
            state["agmerge"]["residuals"]["0.weight"].zero_()
        model[2:](torch.ones(1, 48)).sum().backward()  # without the first layer
        optimizer.step()
        before, after = state["agmerge"]["residuals"]["0.weight"], residuals(optimizer)["0.weight"]
        return before - after, model[0].weight.grad

    found = on_ranks(2, MODEL, body)
    gone = (found[0][0] + found[1][0]) / 2
    assert gone.any()
    assert all(torch.equal(update, gone) for _, update in found)


@pytest.mark.parametrize("same_object", [True, False], ids=["rewound", "restarted"])
def test_only_rank_0_loads_and_the_broadcasts_do_the_rest(same_object: bool) -> None:
    """Horovod's way to resume, with residuals: rank 0 has its own, the others start from zero."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, sgd(model, weight_decay=0.1))
        train(model, optimizer, rank, range(5))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if same_object:
            train(model, optimizer, rank, range(5, 8))
        else:
            model = copy.deepcopy(MODEL)
            optimizer = wrap(model, sgd(model, weight_decay=0.1))
        if rank == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        start = digest(model)
        assert start == digest(saved[0].values())
        seen = train(model, optimizer, rank, range(5, 10))
        assert optimizer.state_dict()["agmerge"]["steps"] == 10
        return [start, *seen]

    assert len(set(agreed(on_ranks(3, MODEL, body)))) == 6


def test_a_plain_optimizers_checkpoint_loads_with_one_warning() -> None:
    plain_model = copy.deepcopy(MODEL)
    plain = sgd(plain_model)
    loss_of(plain_model, 0, 0).backward()
    plain.step()
    state = through_a_file(plain.state_dict())

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model)
        optimizer.load_state_dict(copy.deepcopy(state))
        buffers = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        expected = [plain.state[p]["momentum_buffer"] for p in plain_model.parameters()]
        assert all(same_bits(a, b) for a, b in zip(buffers, expected, strict=True))
        return train(model, optimizer, rank, range(3))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreed(on_ranks(2, MODEL, body))
    assert len(caught) == 2 and all("AGM401" in str(w.message) for w in caught)
    assert caught[0].filename == __file__


def test_a_plain_optimizer_loads_ours() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(3))
        return optimizer.state_dict(), [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]

    state, buffers = on_ranks(2, MODEL, body)[0]
    plain_model = copy.deepcopy(MODEL)
    plain = sgd(plain_model)
    plain.load_state_dict(through_a_file(state))
    for p, buffer in zip(plain_model.parameters(), buffers, strict=True):
        assert same_bits(plain.state[p]["momentum_buffer"], buffer)


@pytest.mark.whole
@pytest.mark.parametrize("size", [2, 3])
def test_another_ranks_section_is_dropped_with_one_warning(size: int) -> None:
    def save(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(3))
        return through_a_file((model.state_dict(), optimizer.state_dict()))

    saved = on_ranks(2, MODEL, save)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model)
        model.load_state_dict(saved[0][0])
        optimizer.load_state_dict(copy.deepcopy(saved[0][1]))  # every rank reads rank 0's file
        expected = saved[0][1]["agmerge"]["residuals"] if (rank, size) == (0, 2) else {}
        assert residuals(optimizer).keys() == expected.keys()
        return train(model, optimizer, rank, range(3, 6))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreed(on_ranks(size, MODEL, body))
    expected = {2: ["this is rank 1 of 2"], 3: [f"this is rank {rank} of 3" for rank in range(3)]}[size]
    texts = sorted(str(warning.message) for warning in caught)
    assert len(texts) == len(expected)
    assert all(
        "were saved by rank 0 of 2" in text and words in text for text, words in zip(texts, expected, strict=True)
    )


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(1))
        state = optimizer.state_dict()
        state["agmerge"]["residuals"]["0.weight"] = torch.zeros(3, 3)
        with pytest.raises(ValueError, match=r"'0.weight' has shape \[3, 3\] in the checkpoint"):
            optimizer.load_state_dict(state)
        for version in (1, 2, 99):  # by its version first, whatever keys it lacks
            section = {"version": version, "rank": rank, "size": 2}
            for other in (section, {"version": version, "ranks": [section, section]}):
                with pytest.raises(ValueError, match=f"version {version}.* supports version 4 only"):
                    optimizer.load_state_dict({**state, "agmerge": other})

    on_ranks(2, MODEL, body)


def test_loading_between_backward_and_step_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        state = optimizer.state_dict()
        loss_of(model, rank, 0).backward()
        with pytest.raises(agmerge.AGMergeError, match=r"load_state_dict\(\) was called between backward"):
            optimizer.load_state_dict(state)
        optimizer.step()

    on_ranks(2, MODEL, body)
