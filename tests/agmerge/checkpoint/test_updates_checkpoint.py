"""Checkpoints with ``sync="updates"``: the shared parameters, where each rank stands from them, and whose moments."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, through_a_file, train, wrap
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)
SMALL = merging.get("threshold", bytes=4096)  # a merge buffer a layer: fragments have something to take turns with
UPDATES: dict[str, Any] = {"sync": "updates", "compression": "topk", "merging": SMALL}
DENSE = {"compression": "none", "exchange": "sparse", "merging": SMALL}
CELLS: dict[str, dict[str, Any]] = {
    "apply": {},
    "hold": {"carry": "hold"},
    "apply, every 4": {"every": 4},
    "hold, every 4": {"carry": "hold", "every": 4},
    "fragments": {"every": 4, "fragments": 2},
    "fragments, hold": {"every": 4, "fragments": 4, "carry": "hold"},
    "outer": {"every": 3, "outer": agmerge.Nesterov()},
    "outer, hold": {"every": 3, "outer": agmerge.Nesterov(), "carry": "hold"},
    "outer, fragments": {"every": 4, "fragments": 2, "outer": agmerge.Nesterov()},
    "decay": {"carry": "hold", "decay": 0.9},
    "overlap": {"overlap": 1},
    "overlap, every 4": {"overlap": 2, "every": 4, "fragments": 2},
    "int4": {"wire": "int4", "density": 1.0, "every": 2},
    "none": {"compression": "none", "every": 3},
    "fp16": {"compression": "fp16", "every": 2},
    "thresholds": {"compression": "redsync"},
    "two-level": {"exchange": "two-level", "carry": "hold"},
    "oktopk": {"exchange": "oktopk"},
    "ahead": {"sparsify": "ahead"},
}
HALF, STEPS = 7, 14


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def started(model: nn.Module, **options: Any) -> Any:
    return wrap(model, adamw(model), **{**UPDATES, **options})


def base(optimizer: Any) -> dict[str, Tensor]:
    return dict(optimizer.state_dict()["agmerge"]["updates"]["base"])


def carried(optimizer: Any) -> dict[str, Tensor]:
    """All that this rank has not sent."""
    return dict(testing.inspect(optimizer).residuals)


def mean(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over ranks, in float64."""
    return {name: torch.stack([part[name].double() for part in parts]).mean(0) for name in parts[0]}


def near(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=0, atol=atol, msg=name)


def saved(size: int, steps: int = HALF, **options: Any) -> list[dict[str, Any]]:
    """What each rank saves after some steps: its model, its state, and all ranks' in one on rank 0."""

    def body(rank: int, model: nn.Module) -> dict[str, Any]:
        optimizer = started(model, **options)
        train(model, optimizer, rank, range(steps))
        optimizer.flush()
        found = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "base": base(optimizer),
            "carried": carried(optimizer),
        }
        return copy.deepcopy({**found, "gathered": agmerge.gather_state(optimizer)})

    return on_ranks(size, MODEL, body)


# -- the same ranks -------------------------------------------------------------------------------------------------


@pytest.mark.thin
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

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **options)
        model.load_state_dict(first[rank][0][0])
        optimizer.load_state_dict(first[rank][0][1])
        return train(model, optimizer, rank, range(HALF, STEPS)), digest(base(optimizer).values())

    resumed = on_ranks(2, MODEL, second)
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


# -- another rank's, or another number of them ----------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["apply", "hold, every 4", "outer"])
def test_rank_0s_file_alone_gives_all_ranks_what_they_had_in_common(cell: str) -> None:
    """Others' carried updates are dropped, with one warning on each of them."""
    kept = saved(3, **CELLS[cell])

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **CELLS[cell])
        model.load_state_dict(kept[0]["model"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.load_state_dict(copy.deepcopy(kept[0]["optimizer"]))
        texts = [str(warning.message) for warning in caught]
        found = digest(base(optimizer).values()), digest(model), digest(carried(optimizer).values())
        train(model, optimizer, rank, range(HALF, HALF + 4))
        return texts, *found, digest(base(optimizer).values())

    texts, bases, models, unsent, after = zip(*on_ranks(3, MODEL, body), strict=True)
    assert agreed(list(bases)) == digest(kept[0]["base"].values())
    assert models[1] == models[2] == bases[0] and models[0] == digest(kept[0]["model"].values())
    assert unsent[0] == digest(kept[0]["carried"].values()) != unsent[1] == unsent[2]
    agreed(list(after))
    assert texts[0] == []
    for rank in (1, 2):
        (text,) = texts[rank]
        assert text.startswith("the checkpoint's carried updates are rank 0's of 3, this is rank") and "dropped" in text


@pytest.mark.thin
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("cell", ["apply", "hold", "apply, every 4", "hold, every 4", "outer", "overlap", "int4"])
def test_another_number_of_ranks_loses_nothing(cell: str, sizes: tuple[int, int]) -> None:
    """The mean of what is carried stays, the shared parameters too; moments are those of rank r mod W."""
    before, now = sizes
    options = CELLS[cell]
    kept = saved(before, **options)
    whole = through_a_file(kept[0]["gathered"])

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
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

    bases, unsent, parameters, moments, steps, after = zip(*on_ranks(now, MODEL, body), strict=True)
    for rank in range(now):
        assert digest(bases[rank].values()) == digest(kept[0]["base"].values())
        assert torch.equal(moments[rank], kept[rank % before]["optimizer"]["state"][0]["exp_avg"])
        assert steps[rank] == HALF
    agreed(list(after))
    if now > 1:
        near(mean(list(unsent)), mean([one["carried"] for one in kept]))
    expected = {name: kept[0]["base"][name] - m for name, m in mean([one["carried"] for one in kept]).items()}
    near(mean(list(parameters)), expected)


# -- another sync, another carry, another model ----------------------------------------------------------------------


def test_a_checkpoint_of_updates_becomes_one_of_gradients_with_the_shared_parameters() -> None:
    kept = saved(2)

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, adamw(model), compression="topk", density=0.2)
        model.load_state_dict(kept[rank]["model"])
        with pytest.warns(UserWarning, match="is of another sync=: what was not sent of gradients is no update"):
            optimizer.load_state_dict(copy.deepcopy(kept[0]["optimizer"]))
        found = digest(model)
        return found, train(model, optimizer, rank, range(3))

    found = agreed(on_ranks(2, MODEL, body))
    assert found[0] == digest(kept[0]["base"].values())


def test_a_checkpoint_of_gradients_becomes_one_of_updates() -> None:
    def first(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, adamw(model), compression="topk", density=0.2)
        train(model, optimizer, rank, range(3))
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    kept = on_ranks(2, MODEL, first)

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        model.load_state_dict(kept[rank][0])
        with pytest.warns(UserWarning, match="is of another sync="):
            optimizer.load_state_dict(kept[rank][1])
        assert digest(model) == digest(kept[rank][0].values())
        train(model, optimizer, rank, range(3, 6))
        return digest(base(optimizer).values())

    agreed(on_ranks(2, MODEL, second))


def test_a_plain_optimizers_checkpoint_makes_the_parameters_the_shared_ones() -> None:
    inner = adamw(copy.deepcopy(MODEL))

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        train(model, optimizer, rank, range(3))
        model.load_state_dict(MODEL.state_dict())
        with pytest.warns(UserWarning, match="the checkpoint has no residuals"):
            optimizer.load_state_dict(inner.state_dict())
        assert digest(model) == digest(MODEL)
        return train(model, optimizer, rank, range(1)), digest(base(optimizer).values())

    agreed([shared for _, shared in on_ranks(2, MODEL, body)])


@pytest.mark.thin
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=r"parameter '4.weight' has shape \[10, 32\] in the checkpoint"):
                optimizer.load_state_dict(copy.deepcopy(kept[rank]["optimizer"]))

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
