# SPDX-License-Identifier: Apache-2.0
"""Steps that are skipped, discarded, repeated, accumulated or resumed leave what they should: to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, wrap
from support.gradient_exchange import Table, connected, stepped
from support.low_rank_steps import (
    MATRICES,
    NAMES,
    SHAPES,
    Step,
    accumulated,
    distance,
    drawn,
    made,
    mean,
    opened,
    steps_of,
)
from torch import Tensor, nn

import agmerge
from agmerge import testing
from agmerge.step.gradient_exchange import GradientExchange

both = pytest.mark.parametrize("name", NAMES)
MODEL = seeded(mlp)


def single(rank: int, step: int) -> dict[str, Tensor]:
    return drawn(rank, step, torch.float32)


def new(name: str, **options: Any) -> GradientExchange:
    return opened({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()}, name, **options)


def kept_bits(exchange: GradientExchange) -> dict[tuple[str, str], str]:
    """All that is kept, by kind and name: residuals, bases and their sides."""
    return {key: digest([tensor]) for key, tensor in exchange.agreed.current.tensors.items()}


def bits(step: Step) -> list[str]:
    return [
        digest(update for update in step.updates.values() if update is not None),
        digest(step.residuals.values()),
        digest(basis for _, basis in step.bases.values()),
        *(side for side, _ in step.bases.values()),
    ]


# -- steps that come to nothing -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids="step {}".format)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_skipped_step_changes_no_bit_of_what_is_kept(name: str, at: int, value: float) -> None:
    """In each phase; one rank has an element that is not finite. Later steps are as if it had not been."""

    def body(rank: int, skips: bool) -> list[list[str]]:
        exchange, seen = new(name, nonfinite="skip", merging="layerwise"), []
        exchange.agree()
        for step in range(5):
            if step == at and skips:
                before, gradients = kept_bits(exchange), single(rank, 100)
                if rank == 1:
                    gradients["wide"][3, 4] = value
                known = len(testing.calls())
                for tensor, gradient in gradients.items():
                    exchange.ready(tensor, gradient)
                assert exchange.finish().skipped
                second = [call for _, call, _ in testing.calls()[known:] if "second" in call]
                assert second in ([], ["buffer 0/second"])  # those behind it say that nothing will come of the step
                exchange.discard()
                assert kept_bits(exchange) == before
            seen.append(bits(made(exchange, single(rank, step))))
        return seen

    assert testing.run(2, lambda rank: body(rank, True)) == testing.run(2, lambda rank: body(rank, False))


@both
@pytest.mark.parametrize("when", ["some are ready", "all are ready", "finished"])
def test_a_discarded_round_changes_no_bit_of_what_is_kept(name: str, when: str) -> None:
    def body(rank: int, discards: bool) -> list[list[str]]:
        exchange, seen = new(name, merging="single"), []
        for step in range(4):
            if step and discards:
                before = kept_bits(exchange)
                for tensor, gradient in list(single(rank, 50 + step).items())[
                    : 2 if when == "some are ready" else None
                ]:
                    exchange.ready(tensor, gradient)
                if when == "finished":
                    exchange.finish()
                elif when == "all are ready":
                    exchange.start(lambda tensor: None)
                    exchange.finish()
                exchange.discard()
                assert kept_bits(exchange) == before
            seen.append(bits(made(exchange, single(rank, step))))
        return seen

    assert testing.run(2, lambda rank: body(rank, True)) == testing.run(2, lambda rank: body(rank, False))


@both
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_round_that_is_repeated_keeps_bases_and_residuals(name: str, at: int) -> None:
    """One rank's tensors change between steps: the others hear of it in the middle of a round, which all repeat."""

    def body(rank: int, changes: bool) -> list[tuple[Tensor, ...]]:
        table = Table({tensor: torch.zeros(shape) for tensor, shape in SHAPES.items()})
        exchange = connected(table, compression=name, dense=[], merging="threshold")
        seen = []
        for step in range(5):
            gradients = single(rank, step)
            if changes and step == at:
                table.tensors["wide"] = torch.zeros_like(table.tensors["wide"])  # another one of the same name
            for tensor, gradient in gradients.items():
                if not (changes and step == at and rank == 1):
                    exchange.ready(tensor, gradient)
            updates = exchange.finish(gradients.__getitem__).updates
            seen.append(tuple(update.clone() for update in updates.values() if update is not None))
            exchange.commit()
        return [digest(of_step) for of_step in seen]

    assert testing.run(2, lambda rank: body(rank, True)) == testing.run(2, lambda rank: body(rank, False))


@both
def test_a_loss_that_overflows_leaves_nothing_behind_with_a_scaler(name: str) -> None:
    """GradScaler skips the step, and halves the scale; then everything is as in a training without it."""

    def body(rank: int, model: nn.Module, overflows: bool) -> list[str]:
        inner, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(model, inner, compression=name, scaler=scaler)
        seen = []
        for step in range(4):
            for repeated in [True, False] if overflows and step in (1, 2) else [False]:
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                scaler.scale(loss * torch.inf if repeated and rank == 1 else loss).backward()
                before = digest(residuals(optimizer).values()), digest(model)
                scaler.step(optimizer)
                scaler.update()
                if repeated:
                    assert before == (digest(residuals(optimizer).values()), digest(model))
            seen.append(digest(model) + digest(residuals(optimizer).values()))
        return seen

    assert on_ranks(2, MODEL, lambda rank, model: body(rank, model, True)) == on_ranks(
        2, MODEL, lambda rank, model: body(rank, model, False)
    )


@both
def test_a_gradient_whose_factor_overflows_counts_as_one_that_is_not_finite(name: str) -> None:
    """All of its elements are finite. The step comes to nothing on all ranks, and names the tensor."""

    def body(rank: int) -> tuple[str, list[bool]]:
        exchange = new(name)
        for step in range(3):
            stepped(exchange, single(rank, step))
        before = kept_bits(exchange)
        huge = {tensor: torch.full(shape, 3e38 if rank else 1.0) for tensor, shape in SHAPES.items()}
        with pytest.raises(agmerge.NonFiniteError) as caught:
            exchange.finish(huge.__getitem__)
        assert kept_bits(exchange) == before
        update = stepped(exchange, single(rank, 4))
        return str(caught.value), [bool(torch.isfinite(tensor).all()) for tensor in update.values()]

    text, finite = agreed(testing.run(2, body))
    assert "rank 1: 'conv'" in text and "rank 0" not in text  # whose elements a basis does not cancel
    assert all(finite)


# -- gradients that are not there -------------------------------------------------------------------------------------


@both
def test_a_tensor_that_no_rank_has_has_no_update(name: str) -> None:
    """From the first step on; and once it is there it is as a new one's."""

    def late(rank: int, step: int) -> dict[str, Tensor | None]:
        return {**single(rank, step), "tall": None if step < 3 else single(rank, step)["tall"]}

    def body(rank: int) -> list[Step]:
        exchange = new(name)
        return [made(exchange, late(rank, step)) for step in range(6)]

    seen = testing.run(2, body)[0]
    new_one = steps_of(2, lambda rank, step: single(rank, step + 3), 3, compression=name)[0]
    for step in range(3):
        assert seen[step].updates["tall"] is None and not seen[step].residuals["tall"].any()
    assert torch.equal(seen[3].update("tall"), new_one[0].update("tall"))


@both
def test_what_is_left_of_a_tensor_is_sent_while_no_rank_has_it(name: str) -> None:
    """Its update is of residuals alone: they shrink, and nothing is lost."""

    def once(rank: int, step: int) -> dict[str, Tensor | None]:
        return {**single(rank, step), "tall": single(rank, step)["tall"] if step == 0 else None}

    def body(rank: int) -> list[Step]:
        exchange = new(name)
        return [made(exchange, once(rank, step)) for step in range(40)]

    seen = testing.run(2, body)
    whole = mean([of_rank[0].gradients["tall"] for of_rank in seen])
    updates = sum(one.update("tall").double() for one in seen[0])
    rest = mean([of_rank[-1].residuals["tall"] for of_rank in seen])
    assert distance(updates + rest, whole) < 1e-5
    assert rest.norm() < 0.2 * whole.norm() and all(one.update("tall").any() for one in seen[0])


@both
def test_a_rank_without_a_tensor_counts_as_one_with_zeros(name: str) -> None:
    def lacking(rank: int, step: int, zeros: bool) -> dict[str, Tensor | None]:
        given: dict[str, Tensor | None] = dict(single(rank, step))
        if rank == step % 3:
            given["wide"] = torch.zeros(SHAPES["wide"]) if zeros else None
        return given

    def body(rank: int, zeros: bool) -> list[list[str]]:
        exchange = new(name)
        return [bits(made(exchange, lacking(rank, step, zeros))) for step in range(4)]

    assert testing.run(3, lambda rank: body(rank, True)) == testing.run(3, lambda rank: body(rank, False))


@both
def test_a_tensor_is_not_stuck_with_a_basis_beside_its_gradient(name: str) -> None:
    """Which once had other rows and columns, and nothing else: all products with the old bases are 0."""

    def elsewhere(rank: int, step: int) -> dict[str, Tensor]:
        gradient = torch.zeros(40, 30)
        gradient[(0, 0) if step < 4 else (20, 15)] = 1.0 + rank + step
        return {"a": gradient}

    seen = steps_of(2, elsewhere, 10, compression=name)
    for step in range(5, 10):
        assert (
            distance(
                seen[0][step].update("a") + mean([of_rank[step].residuals["a"] for of_rank in seen]),
                mean([accumulated(of_rank, step, "a") for of_rank in seen]),
            )
            < 1e-6
        )
    total = sum(one.update("a").double() for one in seen[0])
    exact = sum(mean([of_rank[step].gradients["a"] for of_rank in seen]) for step in range(10))
    assert distance(total, exact) < 1e-6


@both
def test_a_gradient_moves_to_where_its_update_will_be(name: str) -> None:
    """As with any other compressor: so its memory is free for those that follow in the same backward pass."""

    def body(rank: int) -> None:
        exchange = new(name)
        stepped(exchange, single(rank, 0))
        for step in range(1, 4):
            gradients = single(rank, step)
            held = {tensor: exchange.ready(tensor, gradient) for tensor, gradient in gradients.items()}
            for tensor, gradient in gradients.items():
                assert torch.equal(held[tensor], gradient)
            updates = exchange.finish().updates
            exchange.commit()
            for tensor in MATRICES:
                assert held[tensor].data_ptr() == updates[tensor].data_ptr() != gradients[tensor].data_ptr()

    testing.run(2, body)


# -- several passes ---------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "no_sync"])
def test_several_passes_are_one_step_of_their_sum(name: str, counted: bool) -> None:
    def summed(model: nn.Module, rank: int, step: int) -> Tensor:
        return loss_of(model, rank, 3 * step) + loss_of(model, rank, 3 * step + 1) + loss_of(model, rank, 3 * step + 2)

    def body(rank: int, model: nn.Module, accumulates: bool) -> list[tuple[Tensor, ...]]:
        optimizer, seen = (
            wrap(model, compression=name, backward_passes_per_step=3 if accumulates and counted else 1),
            [],
        )
        for step in range(4):
            optimizer.zero_grad()
            if not accumulates:
                summed(model, rank, step).backward()
            for number in range(3) if accumulates else ():
                loss = loss_of(model, rank, 3 * step + number)
                if counted or number == 2:
                    loss.backward()
                else:
                    with optimizer.no_sync():
                        loss.backward()
            optimizer.step()
            seen.append(tuple(p.detach().clone() for p in model.parameters()))
        return seen

    once = on_ranks(2, MODEL, lambda rank, model: body(rank, model, False))[0]
    several = on_ranks(2, MODEL, lambda rank, model: body(rank, model, True))
    assert agreed([[digest(of_step) for of_step in of_rank] for of_rank in several])
    for step in range(4):
        for a, b in zip(several[0][step], once[step], strict=True):
            assert distance(a, b) < 1e-4  # added up in another order
