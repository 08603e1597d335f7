# SPDX-License-Identifier: Apache-2.0
"""Whatever a script passes is read once, at the door: iterators are lists from there on, and lists are our own."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
import merging
from agmerge.options.typed import _MEANT, KNOWN, Options, refuse_unknown

MODEL = seeded(mlp)

# Of an argument, by name, a list and another way to give it. Each is asked for twice: when it is made, and in a swap.
GIVEN: dict[str, Callable[[nn.Module], list[Any]]] = {
    "dense": lambda model: ["0.weight", "2.*"],
    "groups": lambda model: [list(model[:3].parameters()), list(model[3:].parameters())],
    "process_set": lambda model: [0, 1],
    "compression": lambda model: ["none", "int8"],
}


def once(values: list[Any]) -> Iterator[Any]:
    """Give the values, lists among them likewise, to whoever asks first."""
    return (once(value) if isinstance(value, list) else value for value in values)


@pytest.mark.parametrize("name", GIVEN)
def test_an_iterator_is_a_list_from_there_on(name: str) -> None:
    def trained(rank: int, model: nn.Module, given: Callable[[list[Any]], Any]) -> tuple[list[Any], list[str]]:
        own = given(GIVEN[name](model))
        optimizer = wrap(model, **{"compression": "topk", name: own})
        classes = optimizer._reducer.exchange.agreed.config.facts()
        seen = train(model, optimizer, rank, range(2))
        optimizer.set_compressor("adtopk", density=0.1)
        if isinstance(own, list):
            own.clear()  # the script's own
        seen += train(model, optimizer, rank, range(2, 4))
        plan = optimizer.plan
        return [*classes, plan.counts, optimizer.stats()["elements_sent"]], seen

    expected = on_ranks(2, MODEL, lambda rank, model: trained(rank, model, copy.copy))
    assert on_ranks(2, MODEL, lambda rank, model: trained(rank, model, once)) == expected
    agreed([seen for _, seen in expected])


def test_a_pattern_of_an_iterator_that_matches_nothing_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        for patterns in (["no such name"], iter(["no such name"])):
            with pytest.raises(ValueError, match="dense: the pattern 'no such name' matches no parameter"):
                wrap(model, compression="topk", dense=patterns)

    on_ranks(2, MODEL, body)


def test_named_parameters_may_be_read_once() -> None:
    def body(rank: int, model: nn.Module) -> str:
        for make in (
            lambda: agmerge.DistributedOptimizer(sgd(model), iter(list(model.named_parameters())), "topk"),
            lambda: agmerge.LocalOptimizer(sgd(model), iter(list(model.named_parameters()))),
        ):
            optimizer = make()
            train(model, optimizer, rank, range(2))
            optimizer.close()
        return digest(model)

    on_ranks(2, MODEL, body)


def test_what_the_script_changes_later_changes_nothing() -> None:
    density, groups = {"0.weight": 0.5}, [[MODEL[0].weight]]
    options = Options(density=density, groups=groups, dense=itertools.chain(["a"], ["b"]))
    density["2.weight"] = 0.1
    groups[0].append(MODEL[0].bias)
    assert options.density == {"0.weight": 0.5} and options.dense == ["a", "b"]
    assert len(options.groups[0]) == 1 and options.groups[0][0] is MODEL[0].weight


# -- keywords of other projects --------------------------------------------------------------------------------------

LINES: list[tuple[dict[str, Any], str]] = [
    ({"rank": 4, "threshold": 25}, 'merging=merging.get("threshold", bytes=25 * 2**20)'),
    ({"fusion_threshold": 67108864}, 'merging=merging.get("threshold", bytes=67108864)'),
    ({"bucket_cap_mb": 25}, 'merging=merging.get("threshold", bytes=25 * 2**20)'),
    ({"comm_params": {"compressor": "topk"}}, "pass **agmerge.from_params(comm_params)"),
    ({"compress_ratio": 0.01}, "pass density=0.01"),
    ({"compressor": "topk"}, "pass compression='topk'"),
    ({"norm_clip": 1.0}, "call optimizer.clip_grad_norm_(max_norm)"),
    ({"layerwise_times": [1.0]}, "leave it out: agmerge measures times"),
    ({"densty": 0.1}, "did you mean 'density'?"),
    ({"exchnage": "sparse"}, "did you mean 'exchange'?"),
]


@pytest.mark.parametrize(("given", "line"), LINES, ids=lambda one: str(one)[:40])
def test_keywords_of_others_get_the_line_to_write(given: dict[str, Any], line: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        for make in (
            lambda: agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **given),
            lambda: agmerge.LocalOptimizer(sgd(model), model.named_parameters(), **given),
            lambda: agmerge.LocalSync(model, sgd(model), **given),
        ):
            with pytest.raises(TypeError, match=r"\w+\(\) got an unexpected keyword argument '") as raised:
                make()
            assert line in str(raised.value)
        with pytest.raises(TypeError, match=r"ddp.compress\(\) got an unexpected keyword argument") as raised:
            refuse_unknown("ddp.compress", given)
        assert line in str(raised.value)
        wrap(model).close()  # and the parameters are free

    on_ranks(1, MODEL, body)


def test_lines_about_planners_make_planners() -> None:
    made = []
    for name in _MEANT:
        with pytest.raises(TypeError) as raised:
            refuse_unknown("f", {name: 25})
        made += [eval(call) for call in re.findall(r"merging=(merging\.get\(.*?\))", str(raised.value))]
    assert len(made) >= 6 and all(isinstance(planner, merging.Planner) for planner in made)


def test_what_is_like_nothing_gets_no_hint() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'$"):
        refuse_unknown("f", {"xyz": torch.ones(1)})
    refuse_unknown("f", dict.fromkeys(KNOWN))
