# SPDX-License-Identifier: Apache-2.0
"""`grad_norm()` and `norm_inflation`: against the norm of the exact mean, and what the noise should make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.gradient_exchange import connected, copied, table
from support.gradient_exchange import stepped as exchange_step
from torch import nn

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.options.resolve import resolve
from agmerge.options.typed import Options
from agmerge.tensors.parameters import ParameterTable

SHAPES = ((256, 256), (300, 64), (7,))
DRAWS = 12  # steps, each with other random words
# One step's estimate of the square is off by the noise of 330 blocks: by 2 % at 1 bit, by less with more bits. What the
# noise of small blocks and of 16-bit scales differs from `Quantiser.noise` makes up to 0.4 % more.
NEAR = 0.02
QUANTISERS = ("eden-1", "eden-2", "eden-4", "int8")


def gradients(workers: int, alike: bool) -> list[list[torch.Tensor]]:
    """By rank: the same ones, or ones that have nothing in common."""
    source = torch.Generator().manual_seed(1)
    drawn = [[torch.randn(shape, generator=source) for shape in SHAPES] for _ in range(workers)]
    return [drawn[0]] * workers if alike else drawn


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def mean_of(given: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(parts).double().mean(dim=0) for parts in zip(*given, strict=True)]


def stepped(
    given: list[list[torch.Tensor]], look: Callable[[Any, list[nn.Parameter]], Any], steps: int = DRAWS, **options: Any
) -> list[list[Any]]:
    """By rank and step: what ``look(optimizer, parameters)`` finds between synchronize() and step()."""

    def body(rank: int) -> list[Any]:
        parameters = [nn.Parameter(torch.zeros(part.shape, dtype=part.dtype)) for part in given[rank]]
        named = [(f"tensor {number}", parameter) for number, parameter in enumerate(parameters)]
        optimizer = agmerge.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named, **options)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            for parameter, part in zip(parameters, given[rank], strict=True):
                (parameter * part).sum().backward()
            optimizer.synchronize()
            found.append(look(optimizer, parameters))
            with optimizer.skip_synchronize():
                optimizer.step()
        return found

    return testing.run(len(given), body)


def both(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[float, float, float]:
    read = norm_of([parameter.grad for parameter in parameters if parameter.grad is not None])
    return optimizer.grad_norm(), optimizer.stats()["norm_inflation"], read


def expected_inflation(name: str, workers: int, alike: bool, given: list[list[torch.Tensor]]) -> float:
    """By the formula of the spec, of which the tensor of one dimension has no part: it travels whole."""
    noise = sparsifiers.quantiser(name).noise
    square, whole = norm_of(mean_of(given)[:2]) ** 2, norm_of(mean_of(given)[2:]) ** 2
    spread = 1 / workers if alike else sum(norm_of(own[:2]) ** 2 for own in given) / workers**2 / square
    noisy = square * (1 + noise * spread) * (1 + noise if workers > 2 else 1)
    return math.sqrt((noisy + whole) / (square + whole))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", QUANTISERS)
def test_the_norm_is_that_of_the_mean_and_the_inflation_that_of_theory(name: str, workers: int, alike: bool) -> None:
    given = gradients(workers, alike)
    found = stepped(given, both, compression=name)
    assert all(rank == found[0] for rank in found)  # to the bit
    true = norm_of(mean_of(given))
    expected = 1.0 if workers == 1 else expected_inflation(name, workers, alike, given)
    for norm, inflation, read in found[0]:
        assert norm == pytest.approx(true, rel=NEAR)
        assert inflation == pytest.approx(expected, rel=NEAR)
        assert norm * inflation == pytest.approx(read, rel=1e-6)
    mean = sum(norm**2 for norm, _, _ in found[0]) / len(found[0])
    assert math.sqrt(mean) == pytest.approx(true, rel=NEAR / 4)
    if workers > 1 and name == "eden-1":
        assert found[0][0][2] > 1.1 * true  # what is read is not it
        assert found[0][0] != found[0][1]  # and each step draws anew


@pytest.mark.parametrize("options", [{"compression": "none"}, {"compression": "none", "op": agmerge.Sum}])
def test_it_is_exact_where_nothing_is_quantised(options: dict[str, Any]) -> None:
    given = gradients(3, alike=False)
    true = norm_of(mean_of(given)) * (3 if "op" in options else 1)
    for norm, inflation, read in stepped(given, both, steps=2, **options)[1]:
        assert norm == pytest.approx(true, rel=1e-6) and inflation == 1.0
        assert norm == pytest.approx(read, rel=1e-12)


def test_a_sum_of_quantised_gradients_has_the_norm_of_the_sum() -> None:
    given = gradients(3, alike=False)
    (norm, *_), *_ = stepped(given, both, steps=1, compression="eden", op=agmerge.Sum)[0]
    assert norm == pytest.approx(3 * norm_of(mean_of(given)), rel=NEAR)


@pytest.mark.whole
@pytest.mark.parametrize("workers", [2, 4, 6])
def test_nodes_have_the_norm_of_all_shards(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")
    given = gradients(workers, alike=False)
    found = stepped(given, both, steps=2, compression="eden-1", exchange="two-level")
    assert all(rank == found[0] for rank in found)
    norm, inflation, read = found[0][0]
    assert norm == pytest.approx(norm_of(mean_of(given)), rel=NEAR)
    assert norm * inflation == pytest.approx(read, rel=1e-6) and (inflation > 1.1) is (workers > 2)


@pytest.mark.parametrize("options", [{"compression": "topk", "density": 0.1}, {"compression": "onebit"}])
def test_with_error_feedback_it_is_the_norm_of_what_is_read(options: dict[str, Any]) -> None:
    for norm, inflation, read in stepped(gradients(2, alike=False), both, steps=2, **options)[0]:
        assert norm == pytest.approx(read, rel=1e-12) and inflation == 1.0


def test_what_goes_dense_by_the_plan_has_no_noise() -> None:
    given = gradients(3, alike=False)

    def look(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[float, float, float]:
        return both(optimizer, parameters)

    (norm, inflation, read), *_ = stepped(given, look, steps=1, compression="eden", dense=[r"tensor \d"])[0]
    assert norm == pytest.approx(read, rel=1e-12) and inflation == 1.0
    assert norm == pytest.approx(norm_of(mean_of(given)), rel=1e-6)


@pytest.mark.parametrize(("size", "compression"), [(1, "eden"), (2, "eden"), (2, "none")])
def test_gradients_of_the_script_are_not_held(size: int, compression: str) -> None:
    """Else they would stay until the next backward pass has ended, beside those that it makes."""

    def look(optimizer: Any, parameters: list[nn.Parameter]) -> bool:
        unread = optimizer._reducer.exchange.norm._unread
        held = () if unread is None else unread()
        return any(gradient.data_ptr() == parameter.grad.data_ptr() for gradient in held for parameter in parameters)

    for holds in stepped(gradients(size, alike=False), look, steps=2, compression=compression)[0]:
        assert holds is (compression == "none")


def test_clipping_changes_nothing_and_it_stays_after_the_step() -> None:
    """Where nothing is quantised that holds from the first time that somebody has asked: till then nothing is read."""

    def look(optimizer: Any, parameters: list[nn.Parameter]) -> tuple[float, float]:
        torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
        return optimizer.grad_norm(), optimizer.stats()["norm_inflation"]

    for name in ("none", "eden"):
        given = gradients(2, alike=False)
        first, *later = stepped(given, look, steps=3, compression=name)[0]
        assert first[0] == pytest.approx(1e-3 if name == "none" else norm_of(mean_of(given)), rel=NEAR)
        for norm, inflation in later:
            assert norm == pytest.approx(norm_of(mean_of(given)), rel=NEAR)
            assert (inflation == 1.0) is (name == "none")


def test_narrow_gradients_and_those_that_no_rank_has() -> None:
    given = [[part.bfloat16() for part in own] for own in gradients(2, alike=False)]

    def body(rank: int) -> tuple[float, int]:
        parameters = [nn.Parameter(torch.zeros_like(part)) for part in given[rank]]
        unused = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
        named = [(f"tensor {number}", parameter) for number, parameter in enumerate([*parameters, unused])]
        inner = torch.optim.SGD([*parameters, unused], lr=0.0)
        optimizer = agmerge.DistributedOptimizer(inner, named, compression="eden-4")
        for parameter, part in zip(parameters, given[rank], strict=True):
            (parameter * part).sum().backward()
        optimizer.step()
        assert unused.grad is None
        return optimizer.grad_norm(), len(optimizer.plan.names)

    found = testing.run(2, body)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(norm_of(mean_of(given)), rel=NEAR)


def test_gradients_that_cancel_are_noise_alone() -> None:
    given = gradients(2, alike=True)[:1]
    given.append([-part for part in given[0]])
    (norm, inflation, read), *_ = stepped(given, both, steps=1, compression="eden-1")[0]
    assert norm < 0.2 * read and inflation > 5


def test_zeros_have_no_norm_and_no_inflation() -> None:
    given = [[torch.zeros(shape) for shape in SHAPES]] * 3
    assert stepped(given, both, steps=1, compression="eden")[0] == [(0.0, 1.0, 0.0)]


def test_where_none_is_there_it_says_so() -> None:
    def body(rank: int) -> None:
        parameter = nn.Parameter(torch.zeros(8, 8))
        named = [("tensor", parameter)]

        def made(**options: Any) -> Any:
            return agmerge.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), named, **options)

        optimizer = made(compression="eden")
        with pytest.raises(agmerge.AGMergeError, match=r"AGM701: .*optimizer\.step\(\)"):
            optimizer.grad_norm()
        assert optimizer.stats()["norm_inflation"] == 1.0
        optimizer.close()
        updates = made(sync="updates")
        parameter.grad = torch.ones(8, 8)
        updates.step()
        with pytest.raises(agmerge.AGMergeError, match="AGM\\d+: .*sync='updates'"):
            updates.grad_norm()
        assert updates.stats()["norm_inflation"] == 1.0
        updates.close()
        model = nn.Linear(3, 3)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        dear = agmerge.DistributedOptimizer(
            inner, model.named_parameters(), compression="none", merging="dear", model=model
        )
        with pytest.raises(agmerge.AGMergeError, match="AGM\\d+: .*merging='dear'"):
            dear.grad_norm()

    testing.run(1, body)


def test_buckets_of_another_owner_have_it_from_the_end_of_backward() -> None:
    given = gradients(2, alike=False)

    def body(rank: int) -> float:
        parameters = [nn.Parameter(torch.zeros_like(part)) for part in given[rank]]
        named = [(f"tensor {number}", parameter) for number, parameter in enumerate(parameters)]
        table = ParameterTable(torch.optim.SGD(parameters, lr=0.1), named)
        reducer = BucketReducer(table, resolve(Options(compression=sparsifiers.quantiser("eden"))))
        reducer.connect()
        parts = [part.clone() for part in given[rank]]
        for parameter, part in zip(parameters, parts, strict=True):
            reducer.hand_over(parameter, part)
        reducer.combine()
        return reducer.exchange.norm.norm()

    first, second = testing.run(2, body)
    assert first == second == pytest.approx(norm_of(mean_of(given)), rel=NEAR)


def test_what_a_round_that_was_given_up_has_quantised_is_not_counted() -> None:
    given = gradients(2, alike=False)

    def body(rank: int, given_up: bool) -> float:
        tensors = {f"tensor {number}": part for number, part in enumerate(given[rank])}
        shapes = {name: tuple(part.shape) for name, part in tensors.items()}
        exchange = connected(table(shapes), compression="eden", merging="single")
        exchange_step(exchange, copied(tensors))  # ranks have agreed
        if given_up:
            exchange.ready("tensor 0", given[rank][0].clone())
            exchange.discard()
        exchange_step(exchange, copied(tensors))
        return exchange.norm.norm()

    usual, again = (testing.run(2, lambda rank, given_up=up: body(rank, given_up)) for up in (False, True))
    assert again == usual and usual[0] > 0
