# SPDX-License-Identifier: Apache-2.0
"""The quantised all-reduce against one thread that does the same by hand, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.gradient_exchange import Table, connected, copied, stepped, updates_of
from support.quantised import by_hand, plain
from torch import Tensor

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.step.config import is_small

# Rows of 256, 128, 64 and 96; a tail; a row of one block; small ones; an empty one would take no part.
SHAPES = {
    "wide": (9, 256),
    "middle": (17, 128),
    "narrow": (40, 64),
    "across": (21, 96),
    "kernel": (24, 5, 3, 3),
    "bias": (40,),
    "ten": (10,),
    "two": (2, 3),
}
PLANS = ("layerwise", "single", merging.get("threshold", bytes=9000))


def drawn(rank: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    tensors = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    tensors["wide"][3] = 0.0  # a row that nothing has touched
    tensors["middle"][2, 5] = 40.0  # a coordinate that is larger than all others of its block
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def expected(tensors: Sequence[Mapping[str, Tensor | None]], step: int, quantiser: sparsifiers.Quantiser) -> Any:
    """The updates of all tensors, by name."""
    found = {}
    for name in SHAPES:
        parts = [of_rank.get(name) for of_rank in tensors]
        like = next(part for part in parts if part is not None)
        small = is_small(name, like)
        found[name] = plain(parts) if small else by_hand(name, parts, step, quantiser)
    return found


def trained(size: int, plan: Any, compression: str = "eden", steps: int = 2, **more: Any) -> list[Any]:
    """The updates of some steps, on each rank."""
    dtype, arrive = more.pop("dtype", torch.float32), more.pop("inject", None)

    def body(rank: int) -> list[dict[str, Tensor | None]]:
        table = Table({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()})
        exchange = connected(table, compression=compression, merging=plan, **more)
        found = []
        for step in range(steps):
            found.append(stepped(exchange, drawn(rank, step, dtype)))
        exchange.close()
        return found

    return testing.run(size, body, inject=arrive)


def equal(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(a.values(), (b[name] for name in a), strict=True)
    )


@pytest.mark.parametrize("compression", ["eden-1", "eden-2", "eden-3", "eden-4"])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_updates_are_those_made_by_hand_whatever_the_merge_buffers(size: int, compression: str) -> None:
    quantiser = sparsifiers.quantiser(compression)
    wanted = [expected([drawn(rank, step) for rank in range(size)], step, quantiser) for step in range(2)]
    for plan in PLANS:
        for rank, updates in enumerate(trained(size, plan, compression)):
            for step in range(2):
                assert equal(updates[step], wanted[step]), (rank, step, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_16_bits(size: int, dtype: torch.dtype) -> None:
    wanted = expected([drawn(rank, 0, dtype) for rank in range(size)], 0, sparsifiers.quantiser("eden-4"))
    for updates in trained(size, "single", "eden-4", steps=1, dtype=dtype):
        assert equal(updates[0], wanted)


def test_rows_that_nobody_touched_stay_zero() -> None:
    for updates in trained(3, "single"):
        assert all(bool((step["wide"][3] == 0).all()) for step in updates)


def test_alone_updates_are_the_gradients() -> None:
    (updates,) = trained(1, "single")
    assert equal(updates[0], drawn(0, 0))


def test_sums() -> None:
    means, sums = (trained(4, "single", steps=1, op=op) for op in (agmerge.Average, agmerge.Sum))
    for name, mean in means[0][0].items():
        torch.testing.assert_close(sums[0][0][name], 4 * mean, rtol=0.6, atol=4.0)  # rounded once more, by other words


# -- residuals ------------------------------------------------------------------------------------------------------

ODD = {"a": (35, 33), "b": (5, 7, 33), "c": (2, 513), "d": (10, 1001), "e": (1025,), "f": (40, 64), "g": (1151,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_onebit_keeps_what_it_rounds_of_tensors_of_any_size(size: int, dtype: torch.dtype) -> None:
    """Nor do neighbours in a buffer get anything of the padding between them."""
    steps = 3

    def body(rank: int) -> tuple[list[Any], list[dict[str, Tensor]]]:
        options = {"compression": "onebit", "merging": "single", "dense": []}
        exchange = connected(Table({name: torch.zeros(shape, dtype=dtype) for name, shape in ODD.items()}), **options)
        updates, residuals = [], []
        for step in range(steps):
            source = torch.Generator().manual_seed(10 * step + rank)
            given = {name: torch.randn(shape, generator=source).to(dtype) for name, shape in ODD.items()}
            updates.append((given, stepped(exchange, given)))
            kept = exchange.agreed.current.tensors
            residuals.append({name: kept["residual", name].clone() for name in ODD})
        return updates, residuals

    seen = testing.run(size, body)
    for name in ODD:
        for step in range(steps):
            first = seen[0][0][step][1][name]
            assert first is not None
            assert all(torch.equal(first, updates[step][1][name]) for updates, _ in seen)
            if size == 2:  # of more ranks the sums are rounded, too
                owed = [
                    updates[step][0][name].float() + (residuals[step - 1][name] if step else 0.0)
                    for updates, residuals in seen
                ]
                left = torch.stack([residuals[step][name] for _, residuals in seen]).mean(0)
                tolerance = 1e-6 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(
                    first.float() + left, torch.stack(owed).mean(0), rtol=tolerance, atol=tolerance
                )


# -- memory ---------------------------------------------------------------------------------------------------------


def test_the_update_is_written_over_the_gradient() -> None:
    def body(rank: int) -> None:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="single")
        stepped(exchange, drawn(rank, 0))
        gradients = drawn(rank, 1)
        before = copied(gradients)
        for name, gradient in gradients.items():
            held = exchange.ready(name, gradient)
            assert held is gradient or is_small(name, gradient)
        assert all(torch.equal(gradients[name], before[name]) for name in gradients)  # until the round has ended
        updates = exchange.finish().updates
        for name, gradient in gradients.items():
            if not is_small(name, gradient):
                assert updates[name] is gradient and not torch.equal(gradient, before[name])
        exchange.commit()

    testing.run(3, body)


def test_gradients_of_other_layouts_are_left_alone() -> None:
    def body(rank: int) -> None:
        table = Table({"kernel": torch.zeros(24, 8, 3, 3)})
        exchange = connected(table, compression="eden", merging="single")
        source = torch.Generator().manual_seed(rank)
        for step in range(2):
            plain = torch.randn(24, 8, 3, 3, generator=source)
            strided = plain.clone().to(memory_format=torch.channels_last)
            update = stepped(exchange, {"kernel": strided})["kernel"]
            assert update is not None and torch.equal(strided, plain)
            assert step or torch.nn.functional.cosine_similarity(update.view(-1), plain.view(-1), 0) > 0.3

    testing.run(2, body)


# -- who has a gradient ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_without_a_gradient_counts_as_zero(size: int) -> None:
    quantiser = sparsifiers.quantiser("eden")
    tensors: list[dict[str, Tensor | None]] = [dict(drawn(rank, 1)) for rank in range(size)]
    tensors[1]["wide"] = tensors[0]["bias"] = None

    def body(rank: int) -> Any:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="single")
        stepped(exchange, drawn(rank, 0))
        own = {name: None if tensor is None else tensor.clone() for name, tensor in tensors[rank].items()}
        found = stepped(exchange, own)
        nobody = stepped(exchange, {**drawn(rank, 2), "across": None})
        assert nobody["across"] is None and nobody["wide"] is not None
        return found

    wanted = expected(tensors, 1, quantiser)
    for updates in testing.run(size, body):
        assert equal(updates, wanted)


# -- when messages travel -------------------------------------------------------------------------------------------


def test_ranks_make_the_same_calls_and_second_phases_have_a_communicator_of_their_own() -> None:
    def body(rank: int) -> list[tuple[str, str, int]]:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="layerwise")
        for step in range(3):
            tensors = drawn(rank, step)
            order = list(tensors) if rank != 1 else list(reversed(tensors))
            for name in order:
                exchange.ready(name, tensors[name])
            exchange.finish()
            exchange.commit()
        first = [call for call in testing.calls() if re.fullmatch(r"buffer \d+(\.\d+)?", call[1])]
        second = [call for call in testing.calls() if call[1].endswith("/sum")]
        return [*first, *second]  # by communicator: between the two there is no order

    results = testing.run(4, body, inject=testing.jitter(3, 2e-3))
    assert all(result == results[0] for result in results)
    numbers = [int(re.findall(r"\d+", name)[0]) for _, name, _ in results[0] if name.endswith("/sum")]
    assert (
        numbers
        and numbers == 3 * numbers[: len(numbers) // 3]
        and numbers[: len(numbers) // 3] == sorted(numbers[: len(numbers) // 3])
    )


def test_second_phases_begin_during_backward() -> None:
    def body(rank: int) -> int:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="layerwise")
        stepped(exchange, drawn(rank, 0))
        agmerge.barrier()
        began = 0
        for name, tensor in drawn(rank, 1).items():
            exchange.ready(name, tensor)
            agmerge.barrier()  # every rank has handed it over
            began = sum(call[1].endswith("/sum") for call in testing.calls())
        exchange.finish()
        exchange.commit()
        return began

    quantised = sum(not is_small(name, torch.zeros(shape)) for name, shape in SHAPES.items())
    assert min(testing.run(3, body)) >= 2 * quantised - 1  # of two steps: all, but perhaps that of the last gradient


# -- faults -----------------------------------------------------------------------------------------------------------


def damage(kind: str, name: str, place: int) -> Callable[[testing.Call], None]:
    """Flip one bit of what rank 1 sends in a call, once there is a second step."""
    seen = [0]

    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.kind == kind and call.name == name:
            seen[0] += 1
            if seen[0] == 2:
                call.tensor.view(-1)[place] ^= 4

    return inject


@pytest.mark.parametrize(
    ("size", "kind", "name"),
    [(2, "all_gather", "buffer 0"), (3, "all_to_all", "buffer 0"), (3, "all_gather", "buffer 0/sum")],
)
@pytest.mark.parametrize("place", [0, 40, 700, -20])
@pytest.mark.whole  # each kind of call with a place behind the header: else nothing tells of a damaged record
def test_a_flipped_bit_is_the_same_error_on_all_ranks(size: int, kind: str, name: str, place: int) -> None:
    def body(rank: int) -> None:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="single")
        for step in range(2):
            stepped(exchange, drawn(rank, step))

    results = testing.run(size, body, inject=damage(kind, name, place), return_errors=True)
    assert all(isinstance(result, agmerge.AGMergeError) for result in results), results
    texts = {str(result) for result in results}
    assert len(texts) == 1 and re.match(r"AGM50[13]: buffer 0: .* ranks \[1\] ", texts.pop())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_said_by_all(size: int, bad: float) -> None:
    def body(rank: int) -> Any:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="single")
        stepped(exchange, drawn(rank, 0))
        tensors = drawn(rank, 1)
        if rank == 1:
            tensors["across"][7, 9] = bad
        with pytest.raises(agmerge.NonFiniteError, match="rank 1: 'across'"):
            stepped(exchange, tensors)
        return stepped(exchange, drawn(rank, 1))  # and goes on, with the step that was not made

    wanted = expected([drawn(rank, 1) for rank in range(size)], 1, sparsifiers.quantiser("eden"))
    assert all(equal(updates, wanted) for updates in testing.run(size, body))


def test_an_attempt_that_comes_to_nothing_leaves_no_trace() -> None:
    def body(rank: int) -> Any:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="layerwise")
        stepped(exchange, drawn(rank, 0))
        for name, tensor in list(drawn(rank, 5).items())[:3]:
            exchange.ready(name, tensor)
        exchange.discard()
        table.tensors["new"] = torch.zeros(8, 256)  # ranks agree anew in the next step
        found = stepped(exchange, {**drawn(rank, 1), "new": torch.ones(8, 256)})
        assert found.pop("new") is not None
        return found

    wanted = expected([drawn(rank, 1) for rank in range(3)], 1, sparsifiers.quantiser("eden"))
    for updates in testing.run(3, body):
        assert equal(updates, wanted)


def test_updates_of_a_round_are_copied_by_who_wants_to_hold_them() -> None:
    def body(rank: int) -> None:
        table = Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})
        exchange = connected(table, compression="eden", merging="single")
        for name, tensor in drawn(rank, 0).items():
            exchange.ready(name, tensor)
        first = updates_of(exchange.finish())
        exchange.commit()
        stepped(exchange, drawn(rank, 1))
        assert all(update is not None for update in first.values())

    testing.run(2, body)
