# SPDX-License-Identifier: Apache-2.0
"""What a script has not said disagrees with nothing, and what it has said counts or is refused, wherever it is said."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import support
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
import sparsifiers
from agmerge.step.config import Config

MODEL = seeded(mlp)
Make = Callable[..., Config]


def distributed(model: nn.Module, **options: Any) -> Config:
    return wrap(model, **options)._reducer.exchange.agreed.config


def of_updates(model: nn.Module, **options: Any) -> Config:
    return wrap(model, sync="updates", **options)._reducer.exchange.agreed.config


def local(model: nn.Module, **options: Any) -> Config:
    return agmerge.LocalOptimizer(sgd(model), model.named_parameters(), **options)._reducer.exchange.agreed.config


def local_sync(model: nn.Module, **options: Any) -> Config:
    return agmerge.LocalSync(model, sgd(model), **options)._reducer.exchange.agreed.config


def swapped(model: nn.Module, **options: Any) -> Config:
    optimizer = wrap(model, compression="topk", density=0.125)
    optimizer.set_compressor(options.pop("compression"), **options)
    return optimizer._reducer.exchange.agreed.config


EVERYWHERE = [distributed, of_updates, local, local_sync, swapped]
WAYS = [lambda made: made, lambda made: {".*": made}]


@pytest.mark.parametrize("by_pattern", WAYS, ids=["object", "pattern"])
@pytest.mark.parametrize("make", EVERYWHERE)
def test_a_density_that_nobody_gave_is_the_objects_own(make: Make, by_pattern: Callable[[Any], Any]) -> None:
    def body(rank: int, model: nn.Module) -> tuple[float, float]:
        config = make(model, compression=by_pattern(sparsifiers.get("topk", 0.05)))
        part = config.compression.compressor.part(sparsifiers.Kind.SPARSE)
        assert isinstance(part, sparsifiers.Sparsifier)
        return config.compression.density.target, part.density

    assert agreed(on_ranks(2, MODEL, body)) == (0.05, 0.05)


@pytest.mark.parametrize("by_pattern", WAYS, ids=["object", "pattern"])
@pytest.mark.parametrize("density", [0.01, 0.05, 1.0, {"0.weight": 0.5}], ids=str)
@pytest.mark.parametrize("make", EVERYWHERE)
def test_two_densities_are_an_error_whatever_the_defaults_are(
    make: Make, density: Any, by_pattern: Callable[[Any], Any]
) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"compression=.*topk\(density=0.2\)") as raised:
            make(model, compression=by_pattern(sparsifiers.get("topk", 0.2)), density=density)
        assert str(raised.value).startswith(f"density={density} ")
        config = make(model, compression=by_pattern(sparsifiers.get("topk", 0.2)), density=0.2)
        assert config.compression.density.target == 0.2

    on_ranks(1, MODEL, body)


def test_the_defaults_of_those_that_say_nothing() -> None:
    def body(rank: int, model: nn.Module) -> list[float]:
        return [make(model, compression="topk").compression.density.target for make in EVERYWHERE]

    assert agreed(on_ranks(1, MODEL, body)) == [0.01, 0.05, 1.0, 1.0, 0.125]


def test_a_density_in_use_goes_on_and_an_objects_own_takes_its_place() -> None:
    def body(rank: int, model: nn.Module) -> list[float]:
        optimizer, seen = wrap(model, compression="topk", density=0.125), []
        for name in ("none", "adtopk", sparsifiers.get("topk", 0.5), "adtopk", {".*": sparsifiers.get("topk", 0.25)}):
            optimizer.set_compressor(name)
            seen.append(optimizer._reducer.exchange.agreed.config.compression.density.target)
        optimizer.set_compressor("topk")
        return [*seen[1:], optimizer._reducer.exchange.agreed.config.compression.density.target]

    assert agreed(on_ranks(1, MODEL, body)) == [0.125, 0.5, 0.5, 0.25, 0.25]


# -- a rank --------------------------------------------------------------------------------------------------------


def test_a_rank_stays_with_those_that_have_none_between() -> None:
    def body(rank: int, model: nn.Module) -> list[Any]:
        optimizer, seen = wrap(model, compression="powersgd", rank=3), []
        for name in ("topk", "acpsgd", "none", "eden", "powersgd"):
            optimizer.set_compressor(name, **({"memory": "residual"} if name == "topk" else {}))
            train(model, optimizer, rank, range(len(seen), len(seen) + 1))
            part = optimizer._reducer.exchange.agreed.config.compression.compressor.part(sparsifiers.Kind.LOW_RANK)
            seen.append(None if part is None else part.rank)
        for name in ("topk", "none", "eden"):
            with pytest.raises(ValueError, match=f"rank=2 .*compression='{name}'.*'powersgd' or 'acpsgd'"):
                optimizer.set_compressor(name, rank=2)
        return [*seen, copy.deepcopy(optimizer)._reducer.exchange.agreed.config.compression.compressor.rank]

    assert agreed(on_ranks(2, MODEL, body)) == [None, 3, None, None, 3, 3]


# -- dgc beside a momentum of the optimizer's own ----------------------------------------------------------------------

OWN: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
}


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "AGM707" in str(one.message)]


@pytest.mark.parametrize("kind", OWN)
def test_dgc_trains_beside_a_momentum_of_the_optimizers_own(kind: str) -> None:
    def trained(rank: int, model: nn.Module, **options: Any) -> str:
        optimizer = wrap(model, OWN[kind](model), compression="dgc", density=0.1, **options)
        assert optimizer._reducer.exchange.agreed.config.compression.memory.name == "residual"
        train(model, optimizer, rank, range(4))
        return digest(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = agreed(on_ranks(2, MODEL, trained))
    lines = told(caught)
    assert len(lines) == 1 and f"cannot apply the momentum of {kind}" in lines[0]
    assert {one.filename for one in caught if "AGM707" in str(one.message)} == {support.__file__}  # which called us
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert agreed(on_ranks(2, MODEL, lambda r, m: trained(r, m, memory="residual"))) == seen
    assert told(caught) == []


def test_swapping_dgc_in_is_one_word_with_adamw_too() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, OWN["AdamW"](model))
        train(model, optimizer, rank, range(2))
        optimizer.set_compressor("dgc", density=0.1)
        assert optimizer._reducer.exchange.agreed.config.compression.memory.name == "residual"
        again = copy.deepcopy(optimizer)._reducer.exchange.agreed.config
        assert again.compression.memory.name == "residual"
        train(model, optimizer, rank, range(2, 4))
        return digest(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreed(on_ranks(2, MODEL, body))
    assert len(told(caught)) == 1


def test_its_memory_by_name_is_still_refused_and_updates_need_no_word() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="AdamW has its own .*Pass memory='residual'"):
            wrap(model, OWN["AdamW"](model), compression="dgc", memory="dgc")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap(model, OWN["AdamW"](model), compression="dgc", sync="updates")
        assert told(caught) == []

    on_ranks(1, MODEL, body)


# -- warnings that are errors ----------------------------------------------------------------------------------------


def test_where_warnings_are_errors_no_rank_is_left_alone() -> None:
    """All ranks of the job have the same ``-W error``, so all of them raise what one would have said."""

    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(UserWarning) as raised:
            wrap(model, OWN["AdamW"](model), compression="dgc")
        with pytest.raises(UserWarning, match="AGM705: compression='topk'"):  # said when ranks have agreed already
            wrap(model, OWN["AdamW"](model), compression="topk")
        optimizer = wrap(model, OWN["AdamW"](model), compression="eden")
        loss_of(model, rank, 0).backward()
        optimizer.step()
        return str(raised.value)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "memory='residual'" in agreed(on_ranks(3, MODEL, body))
