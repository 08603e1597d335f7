# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with ``sync="updates"``: the shared parameters, where each rank stands from them, and whose moments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, through_a_file, train
from support.updates_checkpoint import CELLS, HALF, MODEL, STEPS, base, carried, mean, near, saved, started, told
from torch import nn

import agmerge


def second_half(start: nn.Module, kept: list[Any], options: dict[str, Any]) -> list[Any]:
    """Resume from the model and optimizer of each rank. Return its digests by step, and the shared parameters' one."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **options)
        model.load_state_dict(kept[rank][0])
        optimizer.load_state_dict(kept[rank][1])
        return train(model, optimizer, rank, range(HALF, STEPS)), digest(base(optimizer).values())

    return on_ranks(2, start, body)


# -- the same ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["own parameters", "shared", "gathered"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_restart_changes_no_bit(cell: str, way: str) -> None:
    """Whatever the model file has: the optimizer's puts parameters where they were."""
    options = CELLS[cell]

    def whole(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **options)
        train(model, optimizer, rank, range(HALF))
        optimizer.flush()
        state: Any = optimizer.state_dict()
        if way == "gathered":
            state = agmerge.broadcast_object(agmerge.gather_state(optimizer))
        if way == "own parameters":
            kept = through_a_file((model.state_dict(), state))
        else:
            with optimizer.shared():
                kept = through_a_file((model.state_dict(), state))
        return kept, train(model, optimizer, rank, range(HALF, STEPS)), digest(base(optimizer).values())

    first = on_ranks(2, MODEL, whole)
    resumed = second_half(MODEL, [kept for kept, *_ in first], options)
    agreed([shared for _, shared in resumed])
    assert [seen for seen, _ in resumed] == [seen for _, seen, _ in first]
    assert [shared for _, shared in resumed] == [shared for _, _, shared in first]


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_what_is_saved_inside_shared_has_what_this_rank_carries(inside: bool) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        train(model, optimizer, rank, range(HALF))
        own, outside = digest(model), carried(optimizer)
        with optimizer.shared():
            assert digest(model) == digest(base(optimizer).values()) != own
            state, unsent = optimizer.state_dict(), carried(optimizer)
        assert digest(model) == own
        assert digest(unsent.values()) == digest(outside.values()) and any(kept.any() for kept in unsent.values())
        other = seeded(mlp)
        optimizer = started(other)
        optimizer.load_state_dict(state)
        assert digest(other) == own
        return None

    on_ranks(2, MODEL, body)


def test_what_moves_parameters_is_refused_inside_shared() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = started(model)
        train(model, optimizer, rank, range(2))
        state, own = optimizer.state_dict(), digest(model)
        with optimizer.shared():
            for call in (
                optimizer.step,
                optimizer.consolidate,
                optimizer.join,
                lambda: optimizer.load_state_dict(state),
                lambda: optimizer.set_compressor("none"),
            ):
                with pytest.raises(agmerge.AGMergeError, match=r"inside shared\(\): changes of parameters"):
                    call()
        assert digest(model) == own
        train(model, optimizer, rank, range(2, 4))
        return digest(base(optimizer).values())

    agreed(on_ranks(2, MODEL, body))


def test_without_flush_what_is_under_way_is_sent_again() -> None:
    """``state_dict()`` asks nobody: the mean of the parameters is what it was when they were saved."""

    def first(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, overlap=1)
        train(model, optimizer, rank, range(HALF))
        kept = through_a_file((model.state_dict(), optimizer.state_dict()))
        return kept, dict(kept[0])

    found = on_ranks(3, MODEL, first)

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, overlap=1)
        model.load_state_dict(found[rank][0][0])
        optimizer.load_state_dict(found[rank][0][1])
        optimizer.consolidate()
        return digest(model), dict(model.named_parameters())

    resumed = on_ranks(3, MODEL, second)
    agreed([seen for seen, _ in resumed])
    near(dict(resumed[0][1]), mean([model for _, model in found]))


def test_with_16_bits_a_message_under_way_is_sent_again_to_the_bit() -> None:
    """Two fragments take turns: one has left when all is saved. Nobody calls ``flush()``."""
    options: dict[str, Any] = {"compression": "eden-2", "every": 2, "fragments": 2, "overlap": 1, "exchange": "sparse"}
    start = seeded(mlp).to(torch.bfloat16)

    def whole(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **options)
        train(model, optimizer, rank, range(HALF))
        kept = through_a_file((model.state_dict(), optimizer.state_dict()))
        return kept, train(model, optimizer, rank, range(HALF, STEPS)), digest(base(optimizer).values())

    first = on_ranks(2, start, whole)
    resumed = second_half(start, [kept for kept, *_ in first], options)
    assert resumed == [(seen, shared) for _, seen, shared in first]


# -- another rank's, or another number of them ----------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["apply", "hold, every 4", "outer"])
def test_rank_0s_file_alone_gives_all_ranks_what_they_had_in_common(cell: str) -> None:
    """Others' carried updates are dropped, with one warning on each of them."""
    kept = saved(3, **CELLS[cell])

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **CELLS[cell])
        model.load_state_dict(kept[0]["model"])
        optimizer.load_state_dict(copy.deepcopy(kept[0]["optimizer"]))
        found = digest(base(optimizer).values()), digest(model), digest(carried(optimizer).values())
        train(model, optimizer, rank, range(HALF, HALF + 4))
        return *found, digest(base(optimizer).values())

    with told() as texts:
        bases, models, unsent, after = zip(*on_ranks(3, MODEL, body), strict=True)
    assert agreed(list(bases)) == digest(kept[0]["base"].values())
    assert models[1] == models[2] == bases[0] and models[0] == digest(kept[0]["model"].values())
    assert unsent[0] == digest(kept[0]["carried"].values()) != unsent[1] == unsent[2]
    agreed(list(after))
    dropped = sorted(text for text in texts if "AGM402" in text)
    assert len(dropped) == 2
    for rank, text in enumerate(dropped, start=1):
        assert "carried updates" in text and "rank 0 of 3" in text and f"this is rank {rank} of 3" in text


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("cell", ["apply", "hold", "apply, every 4", "hold, every 4", "outer", "overlap", "int4"])
def test_another_number_of_ranks_loses_nothing(cell: str, sizes: tuple[int, int]) -> None:
    """Keep the mean of what is carried, the shared parameters too; moments are those of rank r mod W."""
    before, now = sizes
    options = CELLS[cell]
    kept = saved(before, **options)
    whole = through_a_file(kept[0]["gathered"])

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **options)
        optimizer.load_state_dict(copy.deepcopy(whole))
        section = optimizer.state_dict()
        moments = section["state"][0]["exp_avg"].clone()
        own = carried(optimizer) if now > 1 else {}
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        steps = optimizer.stats()["steps"]
        optimizer.consolidate()
        if now == 1 or options.get("carry") == "hold":  # what was beside the parameters is in them now
            parameters = dict(model.named_parameters())
        return section["agmerge"]["updates"]["base"], own, parameters, moments, steps, digest(model)

    with told() as texts:
        bases, unsent, parameters, moments, steps, after = zip(*on_ranks(now, MODEL, body), strict=True)
    assert not any("AGM40" in text for text in texts)
    for rank in range(now):
        assert digest(bases[rank].values()) == digest(kept[0]["base"].values())
        assert torch.equal(moments[rank], kept[rank % before]["optimizer"]["state"][0]["exp_avg"])
        assert steps[rank] == HALF
    agreed(list(after))
    if now > 1:
        near(mean(list(unsent)), mean([one["carried"] for one in kept]))
    expected = {name: kept[0]["base"][name] - m for name, m in mean([one["carried"] for one in kept]).items()}
    near(mean(list(parameters)), expected)
