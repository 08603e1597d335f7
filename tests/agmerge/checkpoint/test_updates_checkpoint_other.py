# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint of ``sync="updates"`` elsewhere: another sync or carry, another model, a copy, a ``LocalSync``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from support import agreed, digest, mlp, on_ranks, seeded, through_a_file, train, wrap
from support.updates_checkpoint import (
    CELLS,
    HALF,
    MODEL,
    SMALL,
    STEPS,
    adamw,
    base,
    carried,
    mean,
    near,
    saved,
    started,
    told,
)
from torch import nn

import agmerge

# -- another sync, another carry, another model ----------------------------------------------------------------------


def test_a_checkpoint_of_updates_becomes_one_of_gradients_with_the_shared_parameters() -> None:
    kept = saved(2)

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, adamw(model), compression="topk", density=0.2)
        model.load_state_dict(kept[rank]["model"])
        optimizer.load_state_dict(copy.deepcopy(kept[0]["optimizer"]))
        found = digest(model)
        return found, train(model, optimizer, rank, range(3))

    with told() as texts:
        found = agreed(on_ranks(2, MODEL, body))
    assert found[0] == digest(kept[0]["base"].values())
    assert sum("AGM402" in text for text in texts) == 2


def test_a_checkpoint_of_gradients_becomes_one_of_updates() -> None:
    def first(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, adamw(model), compression="topk", density=0.2)
        train(model, optimizer, rank, range(3))
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    kept = on_ranks(2, MODEL, first)

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        model.load_state_dict(kept[rank][0])
        optimizer.load_state_dict(kept[rank][1])
        assert digest(model) == digest(kept[rank][0].values())
        train(model, optimizer, rank, range(3, 6))
        return digest(base(optimizer).values())

    with told() as texts:
        agreed(on_ranks(2, MODEL, second))
    assert sum("AGM402" in text for text in texts) == 2


def test_a_plain_optimizers_checkpoint_makes_the_parameters_the_shared_ones() -> None:
    inner = adamw(copy.deepcopy(MODEL))

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        train(model, optimizer, rank, range(3))
        model.load_state_dict(MODEL.state_dict())
        optimizer.load_state_dict(inner.state_dict())
        assert digest(model) == digest(MODEL)
        return train(model, optimizer, rank, range(1)), digest(base(optimizer).values())

    with told() as texts:
        agreed([shared for _, shared in on_ranks(2, MODEL, body)])
    assert sum("AGM401" in text for text in texts) == 2


@pytest.mark.parametrize("ways", [("hold", "apply"), ("apply", "hold"), ("hold", "none"), ("apply", "fp16")], ids=str)
@pytest.mark.parametrize("every", [1, 4])
def test_what_was_carried_in_one_way_is_carried_in_the_other(ways: tuple[str, str], every: int) -> None:
    """Nothing is counted twice: what parameters show cannot be in a residual too."""
    kept = saved(2, carry=ways[0], every=every)
    now = {"carry": ways[1]} if ways[1] in ("apply", "hold") else {"compression": ways[1], "carry": ways[0]}

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, every=every, **now)
        model.load_state_dict(kept[rank]["model"])
        optimizer.load_state_dict(copy.deepcopy(kept[rank]["optimizer"]))
        found = carried(optimizer)
        optimizer.consolidate()
        return found, dict(model.named_parameters()), digest(model)

    found, models, after = zip(*on_ranks(2, MODEL, body), strict=True)
    agreed(list(after))
    for rank in range(2):
        near(found[rank], kept[rank]["carried"])
    expected = {name: kept[0]["base"][name] - m for name, m in mean([one["carried"] for one in kept]).items()}
    near(dict(models[0]), expected)


@pytest.mark.parametrize("sync", ["updates", "gradients"])
def test_a_checkpoint_of_another_model_is_refused_by_name(sync: str) -> None:
    kept = saved(2, steps=2)
    wider = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 1))

    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model) if sync == "updates" else wrap(model, adamw(model), compression="none")
        with pytest.raises(ValueError, match=r"parameter '4.weight' has shape \[10, 32\] in the checkpoint"):
            optimizer.load_state_dict(copy.deepcopy(kept[rank]["optimizer"]))

    with told():
        on_ranks(2, wider, body)


@pytest.mark.parametrize("key", ["base", "own"])
def test_shared_parameters_that_are_not_finite_are_refused(key: str) -> None:
    kept = saved(2, steps=2)

    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model)
        state = copy.deepcopy(kept[rank]["optimizer"])
        state["agmerge"]["updates"][key]["2.weight"][0, 0] = float("nan")
        with pytest.raises(ValueError, match="of parameter '2.weight' in the checkpoint is infinite or NaN"):
            optimizer.load_state_dict(state)
        train(model, optimizer, rank, range(2))  # nothing has changed

    on_ranks(2, MODEL, body)


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"])
@pytest.mark.parametrize("cell", ["apply", "hold, every 4", "outer, fragments", "overlap", "local"])
def test_a_copy_goes_on_as_the_original(cell: str, how: Callable[[Any], Any]) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        if cell == "local":
            optimizer: Any = agmerge.LocalOptimizer(adamw(model), model.named_parameters(), 3, merging=SMALL)
        else:
            optimizer = started(model, **CELLS[cell])
        train(model, optimizer, rank, range(HALF))
        optimizer.flush()
        other, copied = how((model, optimizer))
        assert type(copied) is type(optimizer) and digest(other) == digest(model)
        seen = train(model, optimizer, rank, range(HALF, STEPS))
        assert train(other, copied, rank, range(HALF, STEPS)) == seen
        assert digest(base(copied).values()) == digest(base(optimizer).values())
        return digest(base(copied).values())

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("gathered", [False, True], ids=["by rank", "gathered"])
def test_a_local_sync_goes_on_to_the_bit(gathered: bool) -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner, other = adamw(model), seeded(mlp)
        with agmerge.LocalSync(model, inner, 3, merging=SMALL) as sync:
            train(model, inner, rank, range(HALF))
            state = agmerge.broadcast_object(agmerge.gather_state(sync)) if gathered else sync.state_dict()
            kept = through_a_file(state)
            seen = train(model, inner, rank, range(HALF, STEPS))
        inner = adamw(other)
        with agmerge.LocalSync(other, inner, 3, merging=SMALL) as sync:
            sync.load_state_dict(kept)
            assert train(other, inner, rank, range(HALF, STEPS)) == seen

    on_ranks(2, MODEL, body)


def test_where_only_rank_0_loads_all_are_told_that_the_shared_parameters_differ() -> None:
    kept = saved(2)

    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model)
        if rank == 0:
            model.load_state_dict(kept[0]["model"])
            optimizer.load_state_dict(copy.deepcopy(kept[0]["optimizer"]))
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        with pytest.raises(agmerge.DivergenceError, match="first in parameter '0.weight'"):
            train(model, optimizer, rank, range(HALF, HALF + 1))

    on_ranks(2, MODEL, body)
