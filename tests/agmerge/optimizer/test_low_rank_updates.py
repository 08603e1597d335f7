# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` with low rank: ``base`` is equal to the bit on all ranks, and no exchange loses anything."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, loss_of, mlp, on_ranks, seeded, train, wrap
from support.low_rank_conservation import LOW_RANK, assert_bases_are_orthonormal, bases
from support.updates import assert_common, assert_kept, base_of, updating, watched
from torch import nn

import agmerge

MODEL = seeded(mlp)
COMPRESSORS: dict[str, Any] = {**{name: name for name in LOW_RANK}, "hybrid": {"0.*": "topk", ".*": "acpsgd"}}
WHEN: list[dict[str, Any]] = [
    {},
    {"every": 3},
    {"every": 2, "fragments": 2},
    {"overlap": 1},
    {"every": 3, "overlap": 2},
    {"every": 4, "fragments": 3, "overlap": 1},
]
HOW: list[dict[str, Any]] = [
    {},
    {"merging": "layerwise"},
    {"merging": "agmerge", "exchange": "auto"},
    {"dense": []},
    {"rank": 1},
    {"dense_sum": "ordered"},
]
MOVING: list[dict[str, Any]] = [
    {"outer": agmerge.Nesterov()},
    {"wire": "bf16"},  # what the sum of 16 bits is rounded by is lost, as it is with compression="bf16"
]


def described(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "plain"


def trained(size: int, **options: Any) -> list[Any]:
    """What each rank sees in nine steps, after which all are equal."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, **options)
        seen = watched(rank, model, optimizer, range(9))
        kept = bases(optimizer)
        assert_bases_are_orthonormal(kept)
        assert_common(optimizer)
        return seen, digest(model), digest(kept[key] for key in sorted(kept)), len(kept)

    found = on_ranks(size, MODEL, body)
    agreed([rest for _, *rest in found])
    assert found[0][3]
    return [seen for seen, *_ in found]


@pytest.mark.parametrize("how", HOW, ids=described)
@pytest.mark.parametrize("when", WHEN, ids=described)
@pytest.mark.parametrize("compression", COMPRESSORS)
def test_an_exchange_moves_no_mean(compression: str, when: dict[str, Any], how: dict[str, Any]) -> None:
    seen = trained(3, compression=COMPRESSORS[compression], **when, **how)
    assert_kept(seen, equal=False, roundings=16)
    assert seen[0][-1].base != seen[0][0].base


@pytest.mark.parametrize("moving", MOVING, ids=described)
@pytest.mark.parametrize("compression", COMPRESSORS)
def test_what_is_meant_to_move_the_mean_leaves_ranks_equal(compression: str, moving: dict[str, Any]) -> None:
    seen = trained(2, compression=COMPRESSORS[compression], **moving)
    for ranks in zip(*seen, strict=True):
        agreed([one.base for one in ranks])
    assert seen[0][-1].base != seen[0][0].base


@pytest.mark.parametrize("compression", LOW_RANK)
def test_local_steps_with_low_rank_learn(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, float, float]:
        optimizer = agmerge.LocalOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.02), model.named_parameters(), every=4, compression=compression
        )
        before = sum(loss_of(model, rank, step % 4).item() for step in range(4))
        for step in range(40):
            optimizer.zero_grad()
            backward(model, rank, step % 4)
            optimizer.step()
        optimizer.consolidate()
        return digest(model), before, sum(loss_of(model, rank, step % 4).item() for step in range(4))

    found = on_ranks(2, MODEL, body)
    agreed([bits for bits, *_ in found])
    assert all(after < 0.7 * before for _, before, after in found)


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_what_is_held_beside_parameters_is_refused_with_what_it_costs(compression: str) -> None:
    with pytest.raises(ValueError, match="carry='hold' is not supported with compression=.*Pass carry='apply'"):
        updating(MODEL, compression=COMPRESSORS[compression], carry="hold")


@pytest.mark.parametrize("compression", LOW_RANK)
def test_a_rank_that_skips_its_step_exchanges_all_the_same(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, int]:
        optimizer = updating(model, compression=compression, nonfinite="skip")
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            (loss * math.nan if (rank, step) in ((1, 1), (1, 2), (0, 4)) else loss).backward()
            optimizer.step()
            assert all(p.isfinite().all() for p in model.parameters())
        skipped = optimizer.stats()["steps_skipped"]
        optimizer.consolidate()
        return digest([*model.parameters(), *base_of(optimizer).values()]), skipped

    found = on_ranks(2, MODEL, body)
    agreed([bits for bits, _ in found])
    assert [skipped for _, skipped in found] == [1, 2]


@pytest.mark.parametrize("name", ["topk", "none"])
@pytest.mark.parametrize("compression", LOW_RANK)
def test_compressors_may_follow_each_other_with_updates(compression: str, name: str) -> None:
    """What one has not sent the next one sends."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, sync="updates", compression=name, exchange="sparse")
        seen = []
        for number, other in enumerate((compression, "topk", compression, "acpsgd", "powersgd")):
            seen += watched(rank, model, optimizer, range(4 * number, 4 * number + 4))
            optimizer.set_compressor(other)
        train(model, optimizer, rank, range(20, 23))
        assert_common(optimizer)
        return seen, digest(model)

    found = on_ranks(2, MODEL, body)
    agreed([bits for _, bits in found])
    assert_kept([seen for seen, _ in found], roundings=16)
