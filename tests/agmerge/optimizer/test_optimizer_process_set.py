# SPDX-License-Identifier: Apache-2.0
"""``process_set=`` as in Horovod: the members exchange gradients, the others step by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge

MODEL = seeded(mlp)


def alone(rank: int, steps: int) -> str:
    """What plain training gives."""
    model = copy.deepcopy(MODEL)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return digest(model)


@pytest.mark.parametrize("compression", ["topk", "none", "eden", "powersgd", "acpsgd"])
def test_members_are_equal_and_the_others_train_alone(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, int]:
        optimizer = wrap(model, process_set=[2, 0], compression=compression)
        train(model, optimizer, rank, range(4))
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            pass
        return digest(model), optimizer.stats()["bytes_sent"]

    found = on_ranks(4, MODEL, body)
    assert found[0] == found[2] and found[0][1] > 0
    for rank in (1, 3):
        assert found[rank] == (alone(rank, 4), 0)
    assert found[0][0] != alone(0, 4)


def test_members_get_what_a_world_of_their_own_would_give() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, process_set=[1, 2])
        train(model, optimizer, rank - 1, range(3))
        return digest(model)

    def two(rank: int, model: nn.Module) -> str:
        train(model, wrap(model), rank, range(3))
        return digest(model)

    assert on_ranks(3, MODEL, body)[1:] == on_ranks(2, MODEL, two)


def test_disjoint_sets_train_beside_each_other() -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        mine = [0, 2] if rank % 2 == 0 else [1, 3]
        train(model, wrap(model, process_set=mine), rank, range(3))
        first = digest(model)
        other = copy.deepcopy(MODEL)
        train(other, wrap(other), rank, range(2))  # and one of all ranks afterwards
        return first, digest(other)

    found = on_ranks(4, MODEL, body)
    assert found[0] == found[2] and found[1] == found[3] and found[0][0] != found[1][0]
    assert len({other for _, other in found}) == 1


def test_clipping_works_on_every_rank() -> None:
    def body(rank: int, model: nn.Module) -> float:
        optimizer = wrap(model, process_set=[0, 1])
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            with optimizer.skip_synchronize():
                optimizer.step()
        return norm

    norms = on_ranks(3, MODEL, body)
    assert norms[0] == norms[1] != norms[2] > 0


WRONG = {
    "a rank that does not exist": ([[0, 5]] * 3, ValueError, "ranks must be in 0 to 2"),
    "members that differ": ([[0, 1], [1, 2], [1, 2]], agmerge.RankMismatchError, "contains rank 1, which passed"),
    "a rank without a set": ([[0, 1], [0, 1], None], agmerge.RankMismatchError, r"ranks \[2\] pass none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_sets_that_do_not_fit_are_one_error_on_all_ranks(case: str) -> None:
    sets, kind, text = WRONG[case]

    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(kind, match=text) as raised:
            wrap(model, process_set=sets[rank])
        return str(raised.value)

    agreed(on_ranks(3, MODEL, body))
