# SPDX-License-Identifier: Apache-2.0
"""G1: what must be the same on every rank is compared before it is used, and the error says what differs and where."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge import testing

MODEL = seeded(mlp)

# The odd rank's argument, everybody else's, and what the error says of each.
ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "density": ({"density": 0.02}, {}, ("density", "0.02", "0.01")),
    "compressor": ({"compression": "none"}, {"density": 1.0}, ("compression", "none", "topk")),
    "cast": ({"compression": "bf16"}, {"compression": "fp16"}, ("compression", "bf16", "fp16")),
    "sparsifier": (
        {"compression": sparsifiers.get("topk", 0.01)},
        {"compression": "none"},
        ("compression", "topk", "none"),
    ),
    "memory": ({"memory": "none"}, {}, ("memory", "none()", "residual()")),
    "planner": ({"merging": "single"}, {}, ("merging", "single()", repr(merging.get("threshold")))),
    "planner's option": (
        {"merging": merging.get("threshold", bytes=8)},
        {},
        ("merging", "threshold(bytes=8)", "threshold(bytes=26214400)"),
    ),
    "op": ({"op": agmerge.Sum}, {}, ("op", "sum", "average")),
    "passes": ({"backward_passes_per_step": 2}, {}, ("backward_passes_per_step", "2", "1")),
    "predivide": ({"gradient_predivide_factor": 2.0}, {}, ("gradient_predivide_factor", "2.0", "1.0")),
    "sparse_as_dense": ({"sparse_as_dense": True}, {}, ("sparse_as_dense", "True", "False")),
    "dense_sum": ({"dense_sum": "ordered"}, {}, ("dense_sum", "ordered", "native")),
    "check_every": ({"check_every": 5}, {}, ("check_every", "5", "100")),
    "unused": ({"unused": "zero"}, {}, ("unused", "zero", "none")),
    "dense rule": (
        {"dense": [r"2\..*"]},
        {"dense": [r"0\..*"]},
        ("tensor 0", "0.weight float32[48, 32] cpu sparse", "0.weight float32[48, 32] cpu dense"),
    ),
}


def parameters(**changes: Any) -> Callable[[], nn.Module]:
    """A builder of one model or its odd sister: keywords are the layers."""

    def build() -> nn.Module:
        return nn.ModuleDict({name: make() for name, make in changes.items()})

    return build


def layer(rows: int = 4, bias: bool = True, **options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(4, rows, bias=bias, **options)


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


# The odd rank's model and everybody else's, and words of the error.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[str, str, str]]] = {
    "shape": (
        parameters(a=layer(), b=layer(5)),
        parameters(a=layer(), b=layer()),
        ("tensor 2", "b.weight float32[5, 4]", "b.weight float32[4, 4]"),
    ),
    "dtype": (
        parameters(a=layer(dtype=torch.float64)),
        parameters(a=layer()),
        ("tensor 0", "a.weight float64[4, 4]", "a.weight float32[4, 4]"),
    ),
    "name": (
        parameters(a=layer(), c=layer()),
        parameters(a=layer(), b=layer()),
        ("tensor 2", "c.weight float32", "b.weight float32"),
    ),
    "order": (
        parameters(b=layer(), a=layer()),
        parameters(a=layer(), b=layer()),
        ("tensor 0", "b.weight", "a.weight"),
    ),
    "extra layer": (
        parameters(a=layer(), b=layer()),
        parameters(a=layer()),
        ("tensor 2", "b.weight float32[4, 4]", "nothing"),
    ),
    "frozen layer": (
        parameters(a=layer(), b=frozen),
        parameters(a=layer(), b=layer()),
        ("tensor 2", "nothing", "b.weight float32[4, 4]"),
    ),
    "bias": (
        parameters(a=layer(bias=False)),
        parameters(a=layer()),
        ("tensor 1", "nothing", "a.bias float32[4]"),
    ),
}


def text_of(found: list[Any]) -> str:
    """The text of the error that every rank raised."""
    assert all(type(error) is agmerge.RankMismatchError for error in found), found
    return agreed([str(error) for error in found])


def says(text: str, field: str, odd: str, others: str, size: int, rank: int) -> bool:
    """Whether ``text`` names the field, ``odd`` with its rank, and ``others`` with all other ranks."""
    rest = ", ".join(str(r) for r in range(size) if r != rank)
    places = ((odd, f"rank {rank}"), (others, f"ranks {rest}" if size > 2 else f"rank {rest}"))
    return f"ranks disagree on {field}: " in text and all(
        re.search(rf"{re.escape(value)}[^;]* on {place}\b", text) for value, place in places
    )


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 1), (4, 3)])
@pytest.mark.parametrize("field", ARGUMENTS)
def test_an_argument_that_differs_is_the_same_error_everywhere(field: str, size: int, rank: int) -> None:
    odd, others, words = ARGUMENTS[field]

    def body(here: int, model: nn.Module) -> None:
        wrap(model, **(odd if here == rank else others))

    text = text_of(on_ranks(size, MODEL, body, return_errors=True))
    assert says(text, *words, size, rank), text
    assert text.startswith("AGM101: DistributedOptimizer: ") and text.endswith(
        "Use the same model and the same arguments on every rank."
    )


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (3, 1), (4, 3)])
@pytest.mark.parametrize("difference", MODELS)
def test_a_model_that_differs_is_the_same_error_everywhere(difference: str, size: int, rank: int) -> None:
    odd, others, words = MODELS[difference]
    models = [seeded(odd if here == rank else others) for here in range(size)]
    text = text_of(testing.run(size, lambda here: wrap(models[here]), return_errors=True))
    assert says(text, *words, size, rank), text


@pytest.mark.parametrize("difference", ["extra layer", "frozen layer", "bias"])
def test_a_tensor_that_one_rank_has_more_is_named(difference: str) -> None:
    odd, others, _ = MODELS[difference]
    models = [seeded(odd if here == 1 else others) for here in range(3)]
    text = text_of(testing.run(3, lambda here: wrap(models[here]), return_errors=True))
    assert ("a.bias" if difference == "bias" else "b.weight") in text


@pytest.mark.parametrize("saved_on", [0, 1])
def test_a_saved_plan_on_one_rank_only_is_an_error(saved_on: int, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    merging.Plan((2, 4)).save(path)

    def body(rank: int, model: nn.Module) -> None:
        wrap(model, merging=str(path) if rank == saved_on else "threshold")

    text = text_of(on_ranks(3, MODEL, body, return_errors=True))
    assert f"plan {merging.Plan((2, 4)).digest()} on rank {saved_on}" in text


def test_two_plans_that_differ_in_one_buffer_are_an_error() -> None:
    def body(rank: int, model: nn.Module) -> None:
        wrap(model, merging=merging.Plan((2, 4) if rank == 2 else (3, 3)))

    text = text_of(on_ranks(3, MODEL, body, return_errors=True))
    assert "merging" in text and "on ranks 0, 1" in text and "on rank 2" in text


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (merging.Plan((2, 3)), "the plan covers 5 tensors, but the model has 6"),
        (merging.Plan((6,), names=tuple("abcdef")), "tensors that only one of them has: 0.bias"),
    ],
    ids=["count", "names"],
)
def test_a_plan_that_does_not_fit_the_model_is_the_same_error_everywhere(plan: merging.Plan, words: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        train(model, wrap(model, merging=plan), rank, range(1))

    found = on_ranks(3, MODEL, body, return_errors=True)
    assert all(isinstance(error, ValueError) for error in found), found
    assert words in agreed([str(error) for error in found])


def test_several_differences_and_several_parties_are_told_in_one_text() -> None:
    def body(rank: int, model: nn.Module) -> None:
        wrap(model, density=[0.1, 0.2, 0.1, 0.3][rank], check_every=rank)

    text = text_of(on_ranks(4, MODEL, body, return_errors=True))
    assert "density: 0.1 on ranks 0, 2; 0.2 on rank 1; 0.3 on rank 3" in text


def test_what_may_differ_may_differ() -> None:
    """Deadlines and learning rates are each rank's own affair, and so are options of equal meaning."""

    def body(rank: int, model: nn.Module) -> str:
        compression = sparsifiers.get("topk", 0.01) if rank else "topk"
        optimizer = wrap(model, compression=compression, timeout=100.0 + rank)
        return train(model, optimizer, rank, range(2))[-1]

    agreed(on_ranks(2, MODEL, body))


def test_after_a_refusal_the_parameters_are_free_again() -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner = sgd(model)
        try:
            wrap(model, inner, density=0.1 * (rank + 1))
        except agmerge.RankMismatchError:
            return train(model, wrap(model, inner), rank, range(2))[-1]
        return "no error"

    assert agreed(on_ranks(2, MODEL, body)) not in ("no error", digest(MODEL))
