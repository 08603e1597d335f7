# SPDX-License-Identifier: Apache-2.0
"""Gradients that come in buckets, among ranks in memory: no DistributedDataParallel is needed for that."""

from __future__ import annotations

import copy

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, same_bits, seeded, sgd, wrap
from support.buckets import COMMON, NAMES, connected, kept, passed
from torch import nn

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)


@pytest.mark.parametrize("compression", ["none", "topk", "adtopk", "powersgd"])
def test_updates_are_those_of_the_wrapper(compression: str) -> None:
    options = {"compression": compression, **({} if compression != "none" else {"density": None})}

    def bucketed(rank: int, model: nn.Module) -> list[str]:
        inner, seen = sgd(model), []
        reducer = connected(model, compression=compression)
        for step in range(8):
            inner.zero_grad()
            backward(model, rank, step)
            passed(reducer, model)
            inner.step()
            seen.append(digest(model))
        return seen

    def wrapped(rank: int, model: nn.Module) -> list[str]:
        optimizer, seen = wrap(model, **{**COMMON, **options}), []
        for step in range(8):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            seen.append(digest(model))
        return seen

    assert agreed(on_ranks(2, MODEL, bucketed)) == agreed(on_ranks(2, MODEL, wrapped))


def test_messages_leave_before_the_last_bucket() -> None:
    """As soon as a merge buffer is complete: all but the last are on their way before the last tensor comes."""

    def body(rank: int, model: nn.Module) -> tuple[int, int]:
        reducer = connected(model, compression="topk", merging=merging.get("threshold", bytes=4096))
        backward(model, rank, 0)
        passed(reducer, model)
        begun = len(testing.calls())
        for name in NAMES[:-1]:
            parameter = model.get_parameter(name)
            reducer.hand_over(parameter, parameter.grad)
        early = len(testing.calls()) - begun
        parameter = model.get_parameter(NAMES[-1])
        reducer.hand_over(parameter, parameter.grad)
        reducer.combine()
        return early, len(reducer.exchange.agreed.current.plan.counts)

    early, buffers = agreed(on_ranks(2, MODEL, body))
    assert buffers > 1 and early >= buffers - 1


@pytest.mark.parametrize("memory", ["residual", "dgc"])
def test_what_no_rank_has_used_keeps_what_is_kept_of_it(memory: str) -> None:
    """In both tensor classes, residual and momentum; and its update is dropped, though something was sent of it."""

    def body(rank: int, model: nn.Module) -> None:
        inner = sgd(model)
        reducer = connected(model, inner, compression="topk", memory=memory)
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
            passed(reducer, model)
            inner.step()
        unused = ("2.weight", "2.bias")
        before = {name: kept(reducer, name) for name in unused}
        assert before["2.weight"]["residual"].abs().max() > 0
        model.zero_grad()
        backward(model, rank, 3)
        passed(reducer, model, unused)
        inner.step()
        for name in unused:
            after = kept(reducer, name)
            assert before[name].keys() == after.keys()
            assert all(same_bits(before[name][kind], after[kind]) for kind in after)
        backward(model, rank, 4)
        passed(reducer, model, unused[:1] if rank else ())  # one rank has one
        inner.step()
        assert not same_bits(before["2.weight"]["residual"], kept(reducer, "2.weight")["residual"])

    on_ranks(2, MODEL, body)


def test_what_cannot_be_done_in_a_pass_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        reducer = connected(model, compression="topk")
        parameter = model[0].weight
        reducer.hand_over(parameter, torch.zeros_like(parameter))
        with pytest.raises(agmerge.AGMergeError, match="in a backward pass"):
            reducer.check_idle("set_compressor()")
        reducer.discard()
        reducer.check_idle("set_compressor()")

    on_ranks(1, MODEL, body)


def test_an_infinite_gradient_is_the_same_error_on_all_ranks() -> None:
    def body(rank: int, model: nn.Module) -> str:
        reducer = connected(model, compression="topk")
        backward(model, rank, 0)
        model[2].weight.grad[rank, 0] = torch.nan if rank else 0.0
        with pytest.raises(agmerge.NonFiniteError, match="AGM106") as raised:
            passed(reducer, model)
        assert raised.value.where == "rank 1: '2.weight'"
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))


def test_a_scale_reaches_neither_residuals_nor_what_is_left_out() -> None:
    """Gradients with a scale come back with it; where one overflows on a rank, all updates do, and nothing is kept."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.ones(1))

    def body(rank: int, model: nn.Module) -> str:
        twin = copy.deepcopy(model)
        scaled, plain = connected(model, scaler=scalers[rank], compression="topk"), connected(twin, compression="topk")
        for step in range(3):
            for net in (model, twin):
                net.zero_grad()
                backward(net, rank, step)
            for parameter in model.parameters():
                parameter.grad *= 1024.0
            passed(scaled, model)
            passed(plain, twin)
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert same_bits(ours.grad, theirs.grad * 1024.0)
            for net in (model, twin):
                torch.optim.SGD(net.parameters(), lr=0.0).step()
        before = kept(scaled, "0.weight")["residual"]
        model[4].bias.grad[0] = torch.inf if rank else 0.0
        passed(scaled, model)
        assert all(parameter.grad.isinf().all() for parameter in model.parameters())
        assert same_bits(before, kept(scaled, "0.weight")["residual"])
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_the_momentum_must_be_that_of_what_is_exchanged() -> None:
    def body(rank: int, model: nn.Module) -> None:
        part = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(ValueError, match=r"AGM311: .* SGD, .*of shape \[\d+.*memory='residual'"):
            connected(model, part, compression="dgc")
        with pytest.raises(ValueError, match="Pass optimizer=, the optimizer that steps"):
            connected(model, compression="dgc")

    on_ranks(1, MODEL, body)
