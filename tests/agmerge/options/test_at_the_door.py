# SPDX-License-Identifier: Apache-2.0
"""What cannot be is refused with ValueError or TypeError where it is said, on all ranks, before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from torch import nn

import agmerge
import merging
from agmerge import testing
from agmerge.backends import timeouts

MODEL = seeded(mlp)

SAID: list[tuple[dict[str, Any], list[str]]] = [
    ({"compression": "topk", "dense": ["("]}, ["dense: '(' is not a pattern"]),
    ({"compression": "topk", "dense": [3]}, ["dense: 3 is not a pattern"]),
    ({"timeout": "5"}, ["timeout must be a number of seconds > 0", "'5'"]),
    ({"timeout": True}, ["timeout", "True"]),
    ({"timeout": 1e300}, ["at most 1e+09", "1e+300"]),
    ({"gradient_predivide_factor": None}, ["gradient_predivide_factor must be > 0", "None"]),
    ({"gradient_predivide_factor": "2"}, ["gradient_predivide_factor", "'2'"]),
    ({"gradient_predivide_factor": float("inf")}, ["gradient_predivide_factor", "inf"]),
    ({"sparse_as_dense": "no"}, ["sparse_as_dense='no'"]),
    ({"check_every": True}, ["check_every", "True"]),
    ({"merging": merging.Plan((3,))}, ["the plan covers 3 tensors, but the model has 6"]),
    ({"merging": merging.Plan((3,)), "sync": "updates"}, ["the plan covers 3 tensors, but the model has 6"]),
]


@pytest.mark.parametrize(("options", "words"), SAID, ids=lambda one: str(one)[:50])
def test_what_is_said_is_judged_where_it_is_said(options: dict[str, Any], words: list[str]) -> None:
    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(ValueError) as raised:
            wrap(model, **options)
        assert all(word in str(raised.value) for word in words), str(raised.value)
        assert testing.calls() == []
        wrap(model).close()  # the parameters are free
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))


def test_the_longest_time_out_is_waited_with(monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(2, MODEL, lambda rank, model: train(model, wrap(model, timeout=timeouts.LONGEST), rank, range(2)))
    monkeypatch.setenv(timeouts.VARIABLE, "1e300")
    with pytest.raises(ValueError, match="AGMERGE_TIMEOUT='1e300': expected a number of seconds > 0, and at most 1e"):
        on_ranks(1, MODEL, lambda rank, model: wrap(model))


@pytest.mark.parametrize(
    "named",
    [lambda m: list(enumerate(m.parameters())), lambda m: [(name, None) for name, _ in m.named_parameters()]],
    ids=["numbers", "no parameters"],
)
def test_names_are_strings_of_parameters(named: Callable[[nn.Module], Any]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="is not a pair of a name"):
            agmerge.DistributedOptimizer(sgd(model), named(model))
        assert testing.calls() == []

    on_ranks(2, MODEL, body)


def float8() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    weight = model[0].weight
    model[0].weight = nn.Parameter(weight.detach().to(torch.float8_e4m3fn))
    return model


def inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Sequential(nn.Linear(4, 4))


def computed() -> nn.Module:
    """Return a model whose weight has a history, as for an optimizer with ``differentiable=True``."""
    model = nn.Sequential(nn.Linear(4, 4))
    weight = model[0].weight
    del model[0]._parameters["weight"]
    model[0]._parameters["weight"] = weight.clone()
    return model


def step_of(parameters: Any) -> torch.optim.Optimizer:
    """Return an SGD that takes any tensors, as torch's do with ``differentiable=True``."""
    return torch.optim.SGD(parameters, lr=0.1, differentiable=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "float8": (float8, "is torch.float8_e4m3fn, in which gradients cannot be summed"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "Run a forward pass before you wrap the"),
    "inference": (inference, "Create the model outside inference mode"),
    "meta": (lambda: nn.Sequential(nn.Linear(4, 4, device="meta")), "is on the meta device"),
    "computed": (computed, "Pass leaf tensors to the optimizer, such as"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("options", [{}, {"compression": "topk"}, {"sync": "updates"}], ids=str)
@pytest.mark.parametrize("workers", [1, 2])
def test_parameters_that_nobody_can_train_are_named(workers: int, kind: str, options: dict[str, Any]) -> None:
    make, words = MODELS[kind]

    def body(rank: int, _: nn.Module) -> None:
        model = make()
        with pytest.raises(ValueError, match=f"parameter '0.weight' .*{words}"):
            agmerge.DistributedOptimizer(step_of(model.parameters()), model.named_parameters(), **options)
        assert testing.calls() == []

    on_ranks(workers, MODEL, body)


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    def body(rank: int, model: nn.Module) -> None:
        frozen = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
        optimizer = torch.optim.SGD([*model.parameters(), frozen], lr=0.1)
        named = [*model.named_parameters(), ("frozen", frozen)]
        train(model, agmerge.DistributedOptimizer(optimizer, named), rank, range(1))

    on_ranks(2, MODEL, body)


def test_a_step_in_inference_mode_is_refused_and_training_goes_on() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model)
        loss_of(model, rank, 0).backward()
        with torch.inference_mode(), pytest.raises(ValueError, match=r"step\(\) in torch.inference_mode\(\)"):
            optimizer.step()
        with torch.no_grad():
            optimizer.step()
        optimizer.zero_grad()
        return [digest(model), *train(model, optimizer, rank, range(1, 3))]

    def plain(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model)
        return train(model, optimizer, rank, range(3))

    assert agreed(on_ranks(2, MODEL, body)) == agreed(on_ranks(2, MODEL, plain))


@pytest.mark.parametrize(
    "options",
    [{"compression": "topk"}, {"compression": "powersgd"}, {"sync": "updates"}, {"sync": "updates", "carry": "hold"}],
    ids=str,
)
def test_a_parameter_that_has_another_shape_now_is_named_on_all_ranks(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        train(model, optimizer, rank, range(2))
        weight = model[0].weight
        weight.data, weight.grad = torch.zeros(60, 60), None
        optimizer.zero_grad()
        weight.sum().backward()
        with pytest.raises(ValueError, match=r"'0.weight' changed its shape from \[48, 32\] to \[60, 60\]") as raised:
            optimizer.step()
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))


# -- checkpoints ---------------------------------------------------------------------------------------------------

BREAK: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no steps": lambda section: section.pop("steps"),
    "no version": lambda section: section.pop("version"),
    "no rank": lambda section: section.pop("rank"),
    "no plan": lambda section: section.pop("plan"),
    "steps of text": lambda section: section.update(steps="x"),
    "a negative step": lambda section: section.update(steps=-1),
    "no updates": lambda section: section.update(updates={}),
    "residuals of text": lambda section: section.update(residuals={"0.weight": "x"}),
    "residuals in a list": lambda section: section.update(residuals=[1]),
    "a window of numbers": lambda section: section.update(window={"0.weight": 3}),
    "another's rank": lambda section: section.update(rank=7),
    "no ranks": lambda section: section.update(ranks=[]),
    "a rank of text": lambda section: section.update(ranks=["x"]),
    "a foreign plan": lambda section: section.update(plan="{}"),
}


@pytest.mark.parametrize("options", [{"compression": "topk"}, {"sync": "updates", "carry": "hold"}], ids=str)
@pytest.mark.parametrize("broken", BREAK)
def test_a_damaged_section_changes_nothing(broken: str, options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, **options)
        train(model, optimizer, rank, range(2))
        state = optimizer.state_dict()
        section = copy.deepcopy(state["agmerge"])
        BREAK[broken](section)
        before = {name: kept.clone() for name, kept in residuals(optimizer).items()}, optimizer.stats()["steps"]
        with pytest.raises(ValueError, match="damaged|foreign|plan"):
            optimizer.load_state_dict({**state, "agmerge": section})
        after = residuals(optimizer), optimizer.stats()["steps"]
        assert before[0].keys() == after[0].keys() and before[1] == after[1]
        assert all(torch.equal(kept, after[0][name]) for name, kept in before[0].items())
        optimizer.load_state_dict(state)
        train(model, optimizer, rank, range(2, 3))

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda state: state.pop("param_groups"), "has no 'param_groups'"),
        (lambda state: state.pop("state"), "has no 'state'"),
        (lambda state: state["param_groups"].append(state["param_groups"][0]), "has 2 parameter groups"),
        (lambda state: state["param_groups"][0]["params"].pop(), "has 5 parameters in group 0"),
    ],
    ids=["groups", "state", "too many", "too few"],
)
def test_a_damaged_state_of_the_optimizer_changes_nothing(change: Callable[[Any], Any], words: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression="topk")
        train(model, optimizer, rank, range(2))
        before = {name: kept.clone() for name, kept in residuals(optimizer).items()}
        state = copy.deepcopy(optimizer.state_dict())
        change(state)
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(state)
        assert all(torch.equal(kept, residuals(optimizer)[name]) for name, kept in before.items())
        train(model, optimizer, rank, range(2, 3))

    on_ranks(2, MODEL, body)
