# SPDX-License-Identifier: Apache-2.0
"""``exchange="masked"`` in whole steps: replicas, conservation, what is sent, and changes on the way."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from support import AwkwardModel, Sent, agreed, assert_conserved, mlp, on_ranks, residuals, seeded, wrap
from support import train as plain
from support.awkward_training import backward, wrapped_awkward
from torch import Tensor

import agmerge
from agmerge import testing

MODEL, SMALL = seeded(AwkwardModel, 7), seeded(mlp, 3)
wrapped = functools.partial(wrapped_awkward, exchange="masked")


@pytest.mark.parametrize("compression", ["topk", "randomk", "adtopk", "sidco-e"])
@pytest.mark.parametrize("size, sparsify", [(1, "behind"), (2, "ahead"), (3, "behind"), (5, "ahead")])
def test_replicas_are_equal_to_the_bit_after_every_step(size: int, sparsify: str, compression: str) -> None:
    def body(rank: int, model: AwkwardModel) -> tuple[list[str], list[tuple[str, str, int]]]:
        optimizer = wrapped(model, compression=compression, sparsify=sparsify)
        seen = plain(model, optimizer, rank, range(12), backward)
        return seen, testing.calls()

    seen, _ = agreed(on_ranks(size, MODEL, body, inject=testing.jitter(size, 2e-4)))  # the same calls too
    assert len(set(seen)) == 12


@pytest.mark.parametrize("compression", ["topk", "randomk"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_is_sent_and_what_is_kept_is_what_was_there(
    size: int, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(monkeypatch)

    def body(rank: int, model: AwkwardModel) -> int:
        optimizer = wrapped(model, compression=compression)
        checked = 0
        old: dict[str, Tensor] = {}
        for step in range(12):
            sent.of.setdefault(rank, {}).clear()
            optimizer.zero_grad()
            backward(model, rank, step)
            gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.synchronize()
            mine = {name: one.clone() for name, one in sent.of[rank].items()}
            agmerge.barrier()
            for name, p in model.named_parameters():  # the update is the mean of what all ranks have sent
                if name in mine and p.grad is not None:
                    parts = [sent.of[other][name] for other in range(size)]
                    total = parts[0].to(p.dtype)
                    for part in parts[1:]:
                        total = total + part.to(p.dtype)
                    assert torch.equal(p.grad, total * (1 / size)), name
            agmerge.barrier()
            with optimizer.skip_synchronize():
                optimizer.step()
            new = residuals(optimizer)
            assert_conserved(step, old, gradient, mine, new)
            for name, kept in new.items():
                checked += int(kept.count_nonzero()) + int(mine[name].count_nonzero())
            old = new
        return checked

    assert min(on_ranks(size, MODEL, body)) > 20_000


@pytest.mark.parametrize(
    "compression, dense_sum, expected",
    [
        ("randomk", "native", [("all_reduce", "buffer 0")]),
        ("randomk", "ordered", [("all_to_all", "buffer 0"), ("all_gather", "buffer 0/sum")]),
        ("topk", "native", [("all_gather", "buffer 0"), ("all_reduce", "buffer 0/values")]),
        (
            "topk",
            "ordered",
            [
                ("all_gather", "buffer 0"),
                ("all_to_all", "buffer 0/values"),
                ("all_gather", "buffer 0/values/sum"),
            ],
        ),
    ],
)
def test_what_draws_does_not_vote_and_sums_are_as_asked_for(
    compression: str, dense_sum: str, expected: list[tuple[str, str]]
) -> None:
    def body(rank: int, model: torch.nn.Module) -> list[tuple[str, str]]:
        optimizer = wrap(model, compression=compression, exchange="masked", density=0.1, dense_sum=dense_sum)
        plain(model, optimizer, rank, range(2))
        last = [(kind, name) for kind, name, _ in testing.calls() if name.split("/")[0] == "buffer 0"]
        return last[len(last) // 2 :]

    assert agreed(on_ranks(2, SMALL, body)) == expected


def test_one_rank_that_starts_anew_makes_all_repeat_the_step() -> None:
    def body(rank: int, model: torch.nn.Module, disturb: bool, compression: str) -> list[str]:
        optimizer = wrap(model, compression=compression, exchange="masked", density=0.1)
        seen = plain(model, optimizer, rank, range(3))
        if disturb and rank == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        return seen + plain(model, optimizer, rank, range(3, 6))

    for compression in ("topk", "randomk"):
        runs = [
            agreed(on_ranks(3, SMALL, lambda r, m, d=disturb, c=compression: body(r, m, d, c)))
            for disturb in (False, True)
        ]
        assert runs[0] == runs[1]


def test_what_costs_are_probed_with_leaves_no_trace() -> None:
    def body(rank: int, model: torch.nn.Module) -> list[str]:
        optimizer = wrap(model, compression="topk", exchange="masked", density=0.1, merging="agmerge")
        return plain(model, optimizer, rank, range(13))

    assert len(set(agreed(on_ranks(3, SMALL, body)))) == 13


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    def body(rank: int, model: torch.nn.Module) -> tuple[str, str]:
        optimizer = wrap(model, compression="topk", density=0.1, exchange="masked")
        plain(model, optimizer, rank, range(3))
        twin = copy.deepcopy(model)
        saved = copy.deepcopy(optimizer.state_dict())
        went_on = plain(model, optimizer, rank, range(3, 6))[-1]
        again = wrap(twin, compression="topk", density=0.1, exchange="masked")
        again.load_state_dict(saved)
        return went_on, plain(twin, again, rank, range(3, 6))[-1]

    went_on, resumed = agreed(on_ranks(3, SMALL, body))
    assert went_on == resumed
