# SPDX-License-Identifier: Apache-2.0
"""What ``compression="auto"``, the default, stands for; and swapping a compressor by name and nothing else."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, sgd, through_a_file, train, wrap
from torch import nn

import agmerge

MODEL = seeded(mlp)
Make = Callable[[nn.Module], torch.optim.Optimizer]


@contextmanager
def told() -> Iterator[list[str]]:
    """What is said inside, by all ranks."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(one.message) for one in heard]


class Own(torch.optim.AdamW):
    """A script's own: its step is not the one that was measured."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """A script's own that steps as its base does."""


class Shampoo(torch.optim.SGD):
    """By its name, one that mixes elements."""


TWO_GROUPS: Make = (  # noqa: E731  as the others in the table
    lambda model: torch.optim.SGD(
        [{"params": [*model[0].parameters()]}, {"params": [*model[2:].parameters()], "momentum": 0.5}], lr=0.1
    )
)
DAMPENED: Make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)  # noqa: E731
PLAIN: Make = lambda model: sgd(model, momentum=0.0)  # noqa: E731
DECAYED: Make = lambda model: sgd(model, weight_decay=1e-3)  # noqa: E731
DENSITY = {"density": 0.01}

# The optimizer, other arguments, the compressor and the memory that they lead to with exchange="sparse".
CHOICES: dict[str, tuple[Make, dict[str, Any], str, str]] = {
    "SGD": (sgd, {}, "eden-4", "none"),
    "SGD with decay": (DECAYED, {}, "eden-4", "none"),
    "AdamW": (lambda model: torch.optim.AdamW(model.parameters()), {}, "eden-2", "none"),
    "its step": (lambda model: Renamed(model.parameters()), {}, "eden-2", "none"),
    "another step": (lambda model: Own(model.parameters()), {}, "eden-4", "none"),
    "a mixing one": (lambda model: Shampoo(model.parameters(), lr=0.1), {}, "int8", "none"),
    "density, momentum": (sgd, DENSITY, "dgc", "dgc"),
    "density, momentum and decay": (DECAYED, DENSITY, "dgc", "dgc"),
    "density, no momentum": (PLAIN, DENSITY, "topk", "residual"),
    "density, one group of two": (TWO_GROUPS, DENSITY, "dgc", "dgc"),
    "density, dampening": (DAMPENED, DENSITY, "topk", "residual"),
    "density, AdamW": (lambda model: torch.optim.AdamW(model.parameters()), DENSITY, "topk", "residual"),
    "a residual is asked for": (sgd, {"memory": "residual"}, "topk", "residual"),
    "no memory is asked for": (sgd, {**DENSITY, "memory": "none"}, "topk", "none"),
    "a momentum is asked for": (PLAIN, {"memory": "dgc"}, "dgc", "dgc"),
    "bits of values": (sgd, {"wire": "int8"}, "dgc", "dgc"),
    "a warm-up": (PLAIN, {"warmup": 5}, "topk", "residual"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CHOICES)
def test_the_default_goes_by_the_optimizer(case: str) -> None:
    make, options, compressor, memory = CHOICES[case]

    def body(rank: int, model: nn.Module) -> tuple[str, str, list[str]]:
        optimizer = agmerge.DistributedOptimizer(
            make(model), model.named_parameters(), exchange="sparse", merging="threshold", **options
        )
        seen = train(model, optimizer, rank, range(3))
        other = copy.deepcopy(MODEL)
        by_name = wrap(other, make(other), compression=compressor, **options)
        assert train(other, by_name, rank, range(3)) == seen
        return optimizer.stats()["compressor"], optimizer._reducer.exchange.agreed.config.compression.memory.name, seen

    found = agreed(on_ranks(2, MODEL, body))
    assert found[:2] == (compressor, memory)


# The optimizer, other arguments, and among what training chooses.
CANDIDATES: dict[str, tuple[Make, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (sgd, {}, ("none", "int8", "eden-4")),
    "another step": (lambda model: Own(model.parameters()), {}, ("none", "int8", "eden-4")),
    "a mixing one": (lambda model: Shampoo(model.parameters(), lr=0.1), {}, ("none", "int8")),
    "between nodes": (sgd, {"exchange": "two-level"}, ("int8", "eden-4")),
    "updates": (sgd, {"sync": "updates"}, ("none", "int8", "eden-4", "eden-2", "eden-1")),
    "a list": (sgd, {"compression": ["eden", "none", "8bit"]}, ("none", "int8", "eden-2")),
}


@pytest.mark.parametrize("case", CANDIDATES)
def test_without_more_words_training_chooses(case: str) -> None:
    make, options, candidates = CANDIDATES[case]

    def body(rank: int, model: nn.Module) -> tuple[Any, ...]:
        optimizer = agmerge.DistributedOptimizer(make(model), model.named_parameters(), **options)
        train(model, optimizer, rank, range(2))
        config = optimizer._reducer.exchange.agreed.config
        first = "eden-4" if "eden-4" in candidates else candidates[1]
        assert config.compression.compressor.until_chosen == first and first in optimizer.stats()["wire"]
        assert config.compression.compressor.most_workers == ({"eden-1": 4} if options.get("sync") else {})
        return config.compression.compressor.candidates

    with told() as texts:
        assert agreed(on_ranks(2, MODEL, body)) == candidates
    assert texts == []


def test_a_choice_of_one_is_that_one() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression=["eden-1"])
        train(model, optimizer, rank, range(2))
        return optimizer.stats()["compressor"]

    assert agreed(on_ranks(2, MODEL, body)) == "eden-1"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ": expected at least one name"),
        (["none", "topk"], "got 'topk'"),
        (["none", "onebit"], "'onebit' needs error feedback"),
        (["none", 3], "got 3"),
    ],
)
def test_a_choice_is_among_what_needs_no_memory(names: list[Any], words: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=words):
            wrap(model, compression=names)

    on_ranks(1, MODEL, body)


def test_what_asks_for_selection_without_a_name_is_said_in_one_line() -> None:
    def body(rank: int, model: nn.Module) -> None:
        train(model, wrap(model, sgd(model, momentum=0.0), compression="auto", wire="int8"), rank, range(2))

    with told() as texts:
        on_ranks(2, MODEL, body)
    (text,) = [text for text in texts if "AGM705" not in text]
    assert "wire='int8' requires a sparsifier" in text and "compression='topk'" in text


def test_auto_is_the_default_and_is_resolved_once() -> None:
    """A copy, or a checkpoint, goes on with what was chosen, whatever becomes of the groups."""
    assert inspect.signature(agmerge.DistributedOptimizer).parameters["compression"].default == "auto"

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, sgd(model, momentum=0.0), compression="auto", density=0.01)
        train(model, optimizer, rank, range(2))
        optimizer.param_groups[0]["momentum"] = 0.9
        train(model, optimizer, rank, range(2, 4))
        assert optimizer.state  # its own momentum: nobody else applies it
        saved = through_a_file(optimizer.state_dict())
        assert saved["agmerge"]["compressor"][0].startswith("topk(")
        _, copied = copy.deepcopy((model, optimizer))
        optimizer.set_compressor("auto", density=0.02)
        found = [copied.stats()["compressor"], optimizer.stats()["compressor"]]
        optimizer.set_compressor("auto")  # nobody has named a density now
        return [*found, optimizer.stats()["compressor"]]

    assert agreed(on_ranks(2, MODEL, body)) == ["topk", "dgc", "eden-4"]


def test_ranks_for_which_auto_stands_for_different_things_are_told() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(agmerge.RankMismatchError, match="compression: dgc on rank 0; topk on rank 1"):
            wrap(model, sgd(model, momentum=0.0 if rank else 0.9), compression="auto", density=0.01)

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("exchange", ["auto", "sparse", "two-level"])
@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "topk"])
def test_the_density_and_the_exchange_may_stay_where_a_compressor_is_swapped(name: str, exchange: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression=name, density=0.01, exchange=exchange)
        train(model, optimizer, rank, range(2))
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_whoever_swaps_during_training_keeps_what_was_said_of_selection() -> None:
    """``set_compressor`` is one word too: what was given at construction waits for the next sparsifier."""
    given: dict[str, Any] = {"wire": "int8", "dense": [r".*bias", r"4\..*"], "sparsify": "ahead"}

    def body(rank: int, model: nn.Module) -> tuple[str, list[str]]:
        optimizer = wrap(model, compression="topk", density={".*": 0.05}, warmup=10, **given)
        train(model, optimizer, rank, range(2))
        optimizer.set_compressor("none")
        train(model, optimizer, rank, range(2, 4))
        copied_model, copied = copy.deepcopy((model, optimizer))
        assert train(copied_model, copied, rank, range(4, 5)) == train(model, optimizer, rank, range(4, 5))
        with pytest.raises(ValueError, match="warmup=5 has no effect"):
            optimizer.set_compressor("none", warmup=5)
        optimizer.set_compressor("topk")
        train(model, optimizer, rank, range(5, 7))
        config = optimizer._reducer.exchange.agreed.config
        return config.compression.wire, [pattern.pattern for pattern in config.compression.patterns]

    assert agreed(on_ranks(2, MODEL, body)) == ("int8", given["dense"])


@pytest.mark.parametrize("name", ["WFBP", "SyncEA", "MG-WFBP", "Threshold", "Layer_Wise"])
def test_planners_have_the_names_of_their_papers(name: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        train(model, wrap(model, merging=name), rank, range(2))
        return digest(model)

    agreed(on_ranks(2, MODEL, body))
