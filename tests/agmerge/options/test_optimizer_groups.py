# SPDX-License-Identifier: Apache-2.0
"""``groups=`` and ``num_groups=`` as in Horovod: which gradients share a message because the script says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Parts, agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
from agmerge import testing

MODEL = seeded(mlp)
NAMES = [name for name, _ in MODEL.named_parameters()]  # 0.weight 0.bias 2.weight 2.bias 4.weight 4.bias


def pairs(model: nn.Module) -> list[list[torch.Tensor]]:
    """The first and the last layer together; the middle one is in no group."""
    return [[*model[0].parameters(), *model[4].parameters()]]


def buffers(optimizer: agmerge.DistributedOptimizer) -> list[set[str]]:
    """The tensors of every merge buffer."""
    names = optimizer.plan.names
    assert names is not None
    return [set(names[start:stop]) for start, stop in optimizer.plan.bounds]


@pytest.mark.parametrize("number", [1, 2, 4, 6, 9])
def test_a_number_splits_the_parameters_in_their_order(number: int) -> None:
    def body(rank: int, model: nn.Module) -> list[set[str]]:
        optimizer = wrap(model, groups=number)
        train(model, optimizer, rank, range(1))
        return buffers(optimizer)

    found = agreed(on_ranks(2, MODEL, body))
    expected = {
        1: [NAMES],
        2: [NAMES[:3], NAMES[3:]],
        4: [NAMES[:2], NAMES[2:4], NAMES[4:5], NAMES[5:]],
        6: [[name] for name in NAMES],
        9: [[name] for name in NAMES],
    }[number]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_lists_are_groups_and_the_rest_is_alone() -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[set[str]], list[tuple[str, str, int]]]:
        optimizer = wrap(model, groups=pairs(model), compression="none")
        train(model, optimizer, rank, range(2))
        return buffers(optimizer), testing.calls()[-3:]

    found, calls = agreed(on_ranks(2, MODEL, body))
    # A group leaves when its last member is there, which the first layer's are.
    assert found[:2] in ([{"2.bias"}, {"2.weight"}], [{"2.weight"}, {"2.bias"}])
    assert found[2:] == [{"0.weight", "0.bias", "4.weight", "4.bias"}]
    assert [kind for kind, *_ in calls] == ["all_reduce"] * 3


def test_the_update_does_not_depend_on_the_groups() -> None:
    def run(groups: Any) -> str:
        def body(rank: int, model: nn.Module) -> str:
            given = groups(model) if callable(groups) else groups
            optimizer = wrap(model, groups=given, compression="none", dense_sum="ordered")
            train(model, optimizer, rank, range(4))
            return digest(model)

        return agreed(on_ranks(3, MODEL, body))

    assert len({run(groups) for groups in (None, 1, 3, 6, pairs, [])}) == 1


def test_a_sparsifier_selects_from_a_whole_group() -> None:
    def body(rank: int, model: nn.Module) -> int:
        optimizer = wrap(model, groups=1, density=0.01, dense=[])
        train(model, optimizer, rank, range(1))
        return int(optimizer.stats()["elements_sent"])

    numel = sum(parameter.numel() for parameter in MODEL.parameters())
    assert agreed(on_ranks(2, MODEL, body)) == -(-numel // 100)  # by tensor, six times the ceiling would be taken


def test_a_member_that_one_rank_does_not_use_is_flushed() -> None:
    """Horovod's own waits for ever here."""

    def body(rank: int, model: Any) -> str:
        optimizer = wrap(model, groups=[list(model.parameters())], density=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model.loss(rank, step, "a" if rank else "ab").backward()
            optimizer.step()
        return digest(model)

    agreed(on_ranks(2, seeded(Parts), body))


def test_a_frozen_member_joins_its_group_when_it_is_unfrozen() -> None:
    def body(rank: int, model: nn.Module) -> list[list[set[str]]]:
        model[4].requires_grad_(False)
        optimizer = wrap(model, groups=pairs(model), density=0.1)
        seen = []
        for frozen in (True, False):
            model[4].requires_grad_(not frozen)
            train(model, optimizer, rank, range(2))
            seen.append(buffers(optimizer))
        return seen

    before, after = agreed(on_ranks(2, MODEL, body))
    assert {"0.weight", "0.bias"} in before
    assert {"0.weight", "0.bias", "4.weight", "4.bias"} in after


def test_num_groups_is_the_old_name() -> None:
    def body(rank: int, model: nn.Module) -> list[set[str]]:
        if rank == 0:
            with pytest.warns(DeprecationWarning, match="replaced by `groups`"):
                optimizer = wrap(model, num_groups=2, groups=None)
        else:
            optimizer = wrap(model, groups=2)  # the same thing: no mismatch
        train(model, optimizer, rank, range(1))
        return buffers(optimizer)

    # One thread at a time changes what warnings do, so one rank warns.
    assert len(agreed(on_ranks(2, MODEL, body))) == 2


def test_ranks_that_group_differently_are_told() -> None:
    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(agmerge.RankMismatchError) as raised:
            wrap(model, groups=2 + rank)
        return str(raised.value)

    text = agreed(on_ranks(2, MODEL, body))
    assert "2.weight" in text and "group 0" in text and "group 1" in text


def test_groups_of_a_copy_are_of_the_copy(tmp_path: Any) -> None:
    def body(rank: int, model: nn.Module) -> None:
        import copy

        optimizer = wrap(model, groups=pairs(model))
        model2, optimizer2 = copy.deepcopy((model, optimizer))
        optimizer.close()
        optimizer2.zero_grad()
        loss_of(model2, rank, 0).backward()
        optimizer2.step()
        assert {"0.weight", "0.bias", "4.weight", "4.bias"} in buffers(optimizer2)

    on_ranks(1, MODEL, body)


def test_the_inner_optimizer_is_as_before() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = sgd(model)
        assert wrap(model, inner, groups=2).param_groups is inner.param_groups

    on_ranks(1, MODEL, body)
