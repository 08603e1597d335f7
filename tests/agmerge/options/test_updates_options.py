# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``sync="updates"``: what has no meaning is refused with the reason, and ranks must give the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge.step.config import Updates

MODEL = seeded(mlp)
DGC = sparsifiers.memory("dgc", momentum=0.9)

# Arguments, and words of the ValueError that sync="updates" raises.
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"op": agmerge.Sum}, ["op=", "sync='updates'", "averaged"]),
    ({"backward_passes_per_step": 2}, ["backward_passes_per_step=2", "Accumulate gradients in the script, then call"]),
    ({"gradient_predivide_factor": 2.0}, ["gradient_predivide_factor=2.0", "Remove it"]),
    ({"sparse_as_dense": True}, ["sparse_as_dense=True", "the optimizer receives sparse gradients"]),
    ({"unused": "zero"}, ["unused='zero'", "p.grad stays this worker's own"]),
    ({"memory": "none"}, ["memory='none'", "always kept"]),
    ({"memory": "dgc"}, ["memory='dgc'", "residuals are always kept, and the optimizer"]),
    ({"memory": DGC}, ["memory=", "residuals are always kept, and the optimizer"]),
    ({"model": MODEL}, ["merging=", "overlap=1"]),
    ({"merging": "dear"}, ["merging='dear'", "overlap=1"]),
    ({"merging": merging.get("dear"), "model": MODEL}, ["merging=", "overlap=1"]),
    ({"carry": "aply"}, ["carry='aply'", "unknown", "'apply', 'hold'"]),
    ({"carry": True}, ["carry=True", "unknown"]),
    ({"every": 0}, ["every=0", "whole number >= 1"]),
    ({"every": -4}, ["every=-4", "whole number >= 1"]),
    ({"every": 2.0}, ["every=2.0", "whole number >= 1"]),
    ({"every": True}, ["every=True", "whole number >= 1"]),
    ({"every": "4"}, ["every='4'", "whole number >= 1"]),
    ({"fragments": 0}, ["fragments=0", "whole number >= 1"]),
    ({"fragments": 1.5}, ["fragments=1.5", "whole number >= 1"]),
    ({"overlap": -1}, ["overlap=-1", "whole number >= 0"]),
    ({"overlap": True}, ["overlap=True", "whole number >= 0"]),
    ({"decay": 0.0, "carry": "hold"}, ["decay=0.0", "(0, 1]"]),
    ({"decay": 1.5, "carry": "hold"}, ["decay=1.5", "(0, 1]"]),
    ({"decay": float("nan"), "carry": "hold"}, ["decay=nan", "(0, 1]"]),
    ({"decay": "0.9", "carry": "hold"}, ["decay='0.9'", "(0, 1]"]),
    ({"decay": None, "carry": "hold"}, ["decay=None", "(0, 1]"]),
    ({"decay": True, "carry": "hold"}, ["decay=True", "(0, 1]"]),
    ({"fragments": 2}, ["fragments=2", "every=1"]),
    ({"every": 1, "fragments": 2}, ["fragments=2", "every=1"]),
    ({"fragments": 5, "every": 4}, ["fragments=5", "every=4"]),
    ({"overlap": 2}, ["overlap=2", "at most 1 steps", "every=2 / fragments=2"]),
    ({"overlap": 3, "every": 4, "fragments": 2}, ["overlap=3", "at most 2 steps", "every=4 / fragments=2"]),
    ({"overlap": 1, "carry": "hold"}, ["overlap", "carry='hold'", "Pass carry='apply'"]),
    ({"decay": 0.9}, ["decay", "carry='apply'", "Pass carry='hold'"]),
    ({"decay": 0.9, "carry": "apply"}, ["decay", "carry='apply'", "Pass carry='hold'"]),
    ({"decay": 0.9, "carry": "hold", "compression": "none"}, ["compression='none'", "decay=0.9"]),
    ({"exchange": "two-level"}, ["exchange='two-level'", "carry='apply'", "Pass carry='hold'"]),
    ({"exchange": "two-level", "carry": "hold", "fragments": 2, "every": 4}, ["two-level", "Remove fragments="]),
    (
        {"wire": "sign", "exchange": "masked"},
        ["wire='sign'", "exchange='masked'", "'sparse', 'oktopk', 'two-level' or 'auto'"],
    ),
    ({"wire": "sign", "compression": "none"}, ["wire='sign'", "compression='none'"]),
    ({"nonfinite": "ignore"}, ["nonfinite='ignore'", "unknown"]),
]


def refused(error: type[Exception], words: list[str], **options: Any) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(error) as raised:
            agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_means_nothing_is_refused_with_its_reason(options: dict[str, Any], words: list[str]) -> None:
    refused(ValueError, words, sync="updates", **options)


@pytest.mark.parametrize("outer", [torch.optim.SGD(MODEL.parameters(), lr=0.1), "nesterov", 0.7])
def test_outer_is_a_function_of_parameters(outer: Any) -> None:
    refused(
        TypeError, ["outer=", "agmerge.Nesterov()", ", or a function that returns a torch"], sync="updates", outer=outer
    )


def test_an_outer_that_makes_no_optimizer_is_refused_before_anything_is_exchanged() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(TypeError, match="outer=.*returned None.*torch.optim.Optimizer"):
            wrap(model, sync="updates", outer=lambda parameters: None)
        with pytest.raises(TypeError, match="outer=.*returned None.*torch.optim.Optimizer"):
            agmerge.LocalSync(model, sgd(model), outer=lambda parameters: None)
        wrap(model).close()  # and the parameters are free

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("carry", "hold"),
        ("every", 4),
        ("fragments", 2),
        ("overlap", 1),
        ("decay", 0.9),
        ("outer", agmerge.Nesterov()),
    ],
)
def test_with_gradients_its_arguments_are_refused(name: str, value: Any) -> None:
    refused(ValueError, [f"{name}=", "requires sync="], **{name: value})


@pytest.mark.parametrize("sync", ["update", "Updates", None, True])
def test_an_unknown_sync_is_refused(sync: Any) -> None:
    refused(ValueError, [f"sync={sync!r} is unknown. Choose from: 'gradients', 'updates'"], sync=sync)


@pytest.mark.parametrize("values", [{"lr": 0.0}, {"lr": -1.0}, {"momentum": 1.0}, {"momentum": -0.1}], ids=str)
def test_nesterov_refuses_what_diverges(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"Nesterov: {next(iter(values))} must"):
        agmerge.Nesterov(**values)


# -- calls ----------------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any], Any]] = {
    "synchronize()": lambda optimizer: optimizer.synchronize(),
    "skip_synchronize()": lambda optimizer: optimizer.skip_synchronize().__enter__(),
    "no_sync()": lambda optimizer: optimizer.no_sync().__enter__(),
    "set_backward_passes_per_step(2)": lambda optimizer: optimizer.set_backward_passes_per_step(2),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_about_combined_gradients_are_refused_and_training_goes_on(call: str) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer, plain = wrap(model, sync="updates", compression="none"), copy.deepcopy(model)
        with pytest.raises(ValueError) as raised:
            CALLS[call](optimizer)
        text = str(raised.value)
        assert text.startswith(f"{call}") and "gradients are never combined" in text and "backward()" in text
        optimizer.set_backward_passes_per_step(1)
        seen = train(model, optimizer, rank, range(3))
        other = wrap(plain, sync="updates", compression="none")
        assert train(plain, other, rank, range(3)) == seen
        return seen

    agreed(on_ranks(2, MODEL, body))


def test_local_optimizers_have_no_sync_argument() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(TypeError, match="sync= is not supported: local steps always"):
            agmerge.LocalOptimizer(sgd(model), model.named_parameters(), sync="gradients")
        with pytest.raises(TypeError, match="sync= is not supported: local steps always"):
            agmerge.LocalSync(model, sgd(model), sync="updates")
        with pytest.raises(ValueError, match="every=0: expected a whole number"):
            agmerge.LocalSync(model, sgd(model), sync_every=0)
        with pytest.raises(ValueError, match="outer_optimizer is another name of outer"):
            agmerge.LocalSync(model, sgd(model), outer=agmerge.Nesterov(), outer_optimizer=sgd(model))
        with pytest.raises(ValueError, match="fragment_sync_delay is another name of overlap"):
            agmerge.LocalSync(model, sgd(model), overlap=1, fragment_sync_delay=2)
        with pytest.raises(ValueError, match="sync_every is another name of every"):
            agmerge.LocalSync(model, sgd(model), 8, sync_every=2)
        with pytest.raises(TypeError, match="optimizer is already a DistributedOptimizer"):
            agmerge.LocalSync(model, wrap(model))

    on_ranks(2, MODEL, body)


def test_a_local_sync_is_entered_once_at_a_time() -> None:
    def body(rank: int, model: nn.Module) -> None:
        sync = agmerge.LocalSync(model, sgd(model), 2)
        for _ in range(2):
            with sync, pytest.raises(ValueError, match="this LocalSync is already entered, so each"):
                sync.__enter__()

    on_ranks(2, MODEL, body)


# -- ranks that differ ----------------------------------------------------------------------------------------------

# The odd rank's arguments, the others', and words of the error: the argument, and both values.
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "sync": ({}, {"sync": "gradients"}, ["sync", "updates", "gradients"]),
    "carry": ({"carry": "hold"}, {}, ["carry", "hold", "apply"]),
    "every": ({"every": 2}, {"every": 4}, ["every", "2", "4"]),
    "fragments": ({"every": 4, "fragments": 2}, {"every": 4}, ["fragments", "2", "1"]),
    "overlap": ({"overlap": 1}, {}, ["overlap", "1", "0"]),
    "decay": ({"carry": "hold", "decay": 0.9}, {"carry": "hold"}, ["decay", "0.9", "1.0"]),
    "outer": ({"outer": agmerge.Nesterov()}, {}, ["outer", "Nesterov(lr=0.7, momentum=0.9)", "None"]),
    "outer's values": (
        {"outer": agmerge.Nesterov(lr=0.5)},
        {"outer": agmerge.Nesterov()},
        ["outer", "lr=0.5", "lr=0.7"],
    ),
    "outer's class": (
        {"outer": functools.partial(torch.optim.SGD, lr=0.7)},
        {"outer": functools.partial(torch.optim.Adam, lr=0.7)},
        ["outer", "SGD", "Adam"],
    ),
    "density": ({"density": 0.1}, {}, ["density", "0.1", "0.05"]),
    "wire": ({"wire": "int4"}, {}, ["wire", "int4", "sign"]),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_all_told_in_what(what: str, odd: int) -> None:
    strange, usual, words = DIFFERENT[what]

    def body(rank: int, model: nn.Module) -> str:
        options = {"sync": "updates", "compression": "topk", **(strange if rank == odd else usual)}
        with pytest.raises(agmerge.RankMismatchError) as raised:
            wrap(model, **options)
        return str(raised.value)

    text = agreed(on_ranks(3, MODEL, body))
    assert all(word in text for word in words), text


class Outer:
    """A function of parameters whose repr has an address."""

    def __call__(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.7)


def momentum(parameters: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("make", [Outer, lambda: functools.partial(momentum, lr=0.7)], ids=["object", "partial"])
def test_where_a_function_lies_in_memory_is_no_difference(make: Callable[[], Any]) -> None:
    """Real workers have it at different addresses."""
    updates = [
        Updates(carry="apply", every=1, fragments=1, overlap=0, decay=1.0, outer=make()) for _ in range(3)
    ]  # all alive
    texts = {dict(one.facts())["outer"] for one in updates}
    assert len(texts) == 1 and "0x" not in texts.pop()

    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, sync="updates", compression="none", outer=make())
        train(model, optimizer, rank, range(3))
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_outers_that_look_alike_and_are_not_are_found_after_the_first_exchange() -> None:
    def body(rank: int, model: nn.Module) -> str:
        lr = 0.5 + 0.1 * rank
        optimizer = wrap(model, sync="updates", outer=lambda parameters: torch.optim.SGD(parameters, lr=lr))
        with pytest.raises(agmerge.DivergenceError, match="replicas differ, first in parameter '0.weight'") as raised:
            train(model, optimizer, rank, range(1))
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))
