# SPDX-License-Identifier: Apache-2.0
"""What becomes of momentum that is there already, in an optimizer or a checkpoint, under DGC's memory."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, through_a_file, train, wrap
from torch import Tensor, nn

import agmerge
import sparsifiers

MODEL = seeded(mlp)
LR = 0.05


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Plain steps on the average gradient of two ranks."""
    for step in steps:
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) for rank in range(2)).div(2).backward()  # type: ignore[union-attr]
        optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("op", [agmerge.Average, agmerge.Sum])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_model_that_has_trained_before_keeps_its_momentum(op: agmerge.ReduceOp, nesterov: bool) -> None:
    """The buffers of the SGD are taken over: training goes on as if it had not been wrapped."""
    exact = sparsifiers.memory("dgc", masking=False)
    scale = 1 if op is agmerge.Average else 2
    trained, options = copy.deepcopy(MODEL), {"momentum": 0.9, "nesterov": nesterov}
    before = torch.optim.SGD(trained.parameters(), LR, **options)
    averaged(trained, before, range(4))
    expected = copy.deepcopy(trained)
    goes_on = torch.optim.SGD(expected.parameters(), LR, **options)
    goes_on.load_state_dict(copy.deepcopy(before.state_dict()))
    averaged(expected, goes_on, range(4, 9))
    for state in before.state.values():
        state["momentum_buffer"] *= scale  # as if it had been of sums

    def body(rank: int, model: nn.Module, late: bool) -> Tensor:
        inner = torch.optim.SGD(model.parameters(), LR, **options)
        saved = copy.deepcopy(before.state_dict())
        if not late:
            inner.load_state_dict(saved)
        optimizer = wrap(model, inner, op=op, compression="dgc", density=1.0, memory=exact)
        if late:
            optimizer.load_state_dict(saved)  # warns: no residuals in it
        for group in optimizer.param_groups:
            group["lr"] = LR / scale
        train(model, optimizer, rank, range(4, 9))
        assert not inner.state
        return flat(model)

    for late in (False, True):
        for found in on_ranks(2, trained, lambda rank, model, late=late: body(rank, model, late)):
            torch.testing.assert_close(found, flat(expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_a_resumed_run_has_the_same_bits_and_its_groups_say_what_they_said(how: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        other: Any = copy.deepcopy(model)
        one = wrap(model, sgd(model), compression="dgc", density=0.05)
        train(model, one, rank, range(4))
        if how == "state_dict":
            saved = through_a_file((model.state_dict(), one.state_dict()))
            assert saved[1]["param_groups"][0]["momentum"] == 0.9
            two = wrap(other, sgd(other), compression="dgc", density=0.05)
            other.load_state_dict(saved[0])
            two.load_state_dict(saved[1])
        else:
            pair = (model, one)
            other, two = pickle.loads(pickle.dumps(pair)) if how == "pickle" else copy.deepcopy(pair)
        train(model, one, rank, range(4, 8))
        train(other, two, rank, range(4, 8))
        assert two.param_groups[0]["momentum"] == 0.9
        return digest(model), digest(other)

    first, second = agreed(on_ranks(2, MODEL, body))
    assert first == second


def test_a_checkpoint_from_when_the_memory_had_to_be_told_goes_on() -> None:
    """Its groups have no momentum, so the memory's own applies, and one rank says so; also in a script of today."""

    def body(rank: int, model: nn.Module) -> list[str]:
        memory = sparsifiers.memory("dgc", momentum=0.9)
        others = [copy.deepcopy(model) for _ in range(2)]
        one = wrap(model, sgd(model, momentum=0.0), compression="dgc", memory=memory)
        train(model, one, rank, range(4))
        saved = through_a_file((model.state_dict(), one.state_dict()))
        train(model, one, rank, range(4, 8))
        found = [digest(model)]
        for other, options in zip(others, [{"memory": memory}, {}], strict=True):
            inner = sgd(other, momentum=0.0 if options else 0.9)
            two = wrap(other, inner, compression="dgc", **options)
            other.load_state_dict(saved[0])
            two.load_state_dict(saved[1])
            train(other, two, rank, range(4, 8))
            found.append(digest(other))
        return found

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert len(set(agreed(on_ranks(2, MODEL, body)))) == 1
    assert len([one for one in told if "AGM405" in str(one.message)]) == 1


def test_a_checkpoint_whose_groups_have_a_momentum_is_refused_where_the_memory_says_one() -> None:
    def body(rank: int, model: nn.Module) -> None:
        saved = wrap(model, sgd(model), compression="dgc")
        train(model, saved, rank, range(2))
        state = copy.deepcopy(saved.state_dict())
        saved.close()
        memory = sparsifiers.memory("dgc", momentum=0.9)
        optimizer = wrap(model, sgd(model, momentum=0.0), compression="dgc", memory=memory)
        with pytest.raises(ValueError, match="momentum=0.9 too. Set momentum in one place"):
            optimizer.load_state_dict(state)
        train(model, optimizer, rank, range(2))  # as it was
        assert optimizer.stats()["steps"] == 2

    on_ranks(1, MODEL, body)
