# SPDX-License-Identifier: Apache-2.0
"""density="importance": tensors send by the energy of their gradients, and merged ones keep their sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import agmerge
import merging
from agmerge.planning.replanner import FIRST
from agmerge.step.density_policy import SPREAD
from tests.support import agreed, on_ranks


def model() -> nn.Module:
    """Three matrices in a row."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))


def trained(rank: int, net: nn.Module, steps: int, **options: Any) -> agmerge.DistributedOptimizer:
    """Some steps on data of this rank's own; the gradient of the matrix in the middle is made loud."""
    net.get_parameter("1.weight").register_hook(lambda gradient: 30 * gradient)
    options = {"compression": "topk", "density": "importance", "merging": "single", "exchange": "sparse", **options}
    inner = torch.optim.SGD(net.parameters(), lr=1e-4)
    optimizer = agmerge.DistributedOptimizer(inner, net.named_parameters(), **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
    return optimizer


def shares(optimizer: agmerge.DistributedOptimizer) -> dict[str, int]:
    """Elements to send by name."""
    session = optimizer._reducer.exchange.agreed.buffers
    assert session is not None
    return {
        slot.name: session.budgets.of_tensor(slot, optimizer._reducer.exchange.agreed.steps)
        for slot in session.layout.slots
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_loud_tensors_send_more_and_all_together_what_the_density_says(size: int) -> None:
    found = agreed(on_ranks(size, model(), lambda rank, net: shares(trained(rank, net, FIRST))))
    assert found["1.weight"] > 4 * max(found["0.weight"], found["2.weight"])
    assert abs(sum(found.values()) - 0.01 * 3 * 4096) <= 3
    assert all(0.01 / SPREAD * 4096 - 1 <= share <= 0.01 * SPREAD * 4096 for share in found.values())


def test_until_energies_are_known_all_send_alike() -> None:
    found = agreed(on_ranks(2, model(), lambda rank, net: shares(trained(rank, net, FIRST - 1))))
    assert set(found.values()) == {41}


@pytest.mark.parametrize("sparsify", ["ahead", "behind"])
def test_ahead_each_tensor_sends_its_share_and_merged_they_send_the_sum(sparsify: str) -> None:
    def body(rank: int, net: nn.Module) -> tuple[int, int]:
        optimizer = trained(rank, net, FIRST, sparsify=sparsify)
        before, budget = optimizer.stats()["elements_sent"], sum(shares(optimizer).values())
        net(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return int(optimizer.stats()["elements_sent"] - before), budget

    for sent, budget in on_ranks(2, model(), body):
        assert sent == budget


def test_a_warm_up_multiplies_every_share() -> None:
    def body(rank: int, net: nn.Module) -> dict[str, int]:
        return shares(trained(rank, net, FIRST, warmup=lambda step: 0.02))

    twice = agreed(on_ranks(2, model(), body))
    once = agreed(on_ranks(2, model(), lambda rank, net: shares(trained(rank, net, FIRST))))
    assert all(abs(twice[name] - 2 * once[name]) <= 0.02 * twice[name] + 2 for name in once)


def test_another_compressor_measures_anew() -> None:
    def body(rank: int, net: nn.Module) -> set[int]:
        optimizer = trained(rank, net, FIRST)
        optimizer.set_compressor("threshold", tau=0.5)
        net(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        session = optimizer._reducer.exchange.agreed.buffers
        assert session is not None and session.budgets.energy is not None
        return set(shares(optimizer).values())

    assert agreed(on_ranks(2, model(), body)) == {41}


def test_agtf_plans_by_shares_and_by_measured_noise() -> None:
    def body(rank: int, net: nn.Module) -> tuple[tuple[int, ...], bool]:
        optimizer = trained(rank, net, FIRST, merging="agtf", sparsify="behind")
        measured = optimizer.measurements
        assert measured.profile.noise is not None
        by_name = dict(zip(measured.profile.names, measured.profile.load.tolist(), strict=True))
        assert by_name == shares(optimizer)
        return optimizer.plan.counts, merging.best(merging.get("agtf"), measured)[0].counts == optimizer.plan.counts

    assert agreed(on_ranks(2, model(), body))[1]


def test_where_energies_are_not_finite_all_send_alike() -> None:
    def body(rank: int, net: nn.Module) -> dict[str, int]:
        for parameter in net.parameters():  # finite, but their squares are not; both ranks choose alike, and cancel
            parameter.register_hook(lambda gradient: torch.full_like(gradient, 1e25 if rank else -1e25))
        return shares(trained(rank, net, FIRST))

    assert set(agreed(on_ranks(2, model(), body)).values()) == {40}
