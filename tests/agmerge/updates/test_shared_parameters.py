# SPDX-License-Identifier: Apache-2.0
"""Test what all workers have in common, and what one has done beyond it: in the parameters, or beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest
from support.gradient_exchange import Table, config_of, connected
from torch import Tensor, nn

import agmerge
import sparsifiers
from agmerge import testing
from agmerge.step.gradient_exchange import Combined
from agmerge.updates.shared_parameters import SharedParameters, UnsentInParameters, UnsentInResidual, wide
from sparsifiers.memories import HandBack

SHAPES = {"large": (48, 32), "small": (7,)}


@pytest.mark.parametrize(
    "dtype, expected",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
    ids=str,
)
def test_differences_are_in_float32_or_wider(dtype: torch.dtype, expected: torch.dtype) -> None:
    assert wide(dtype) == expected


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(shape, generator=source).to(dtype)) for n, shape in SHAPES.items()}


def opened(kind: str, shown: dict[str, Tensor], **options: Any) -> tuple[SharedParameters, Callable[[], Combined]]:
    """Return shared parameters of ``shown``, and what exchanges deltas. ``kind``: "apply", "hold", "apply, beside"."""
    outer = options.pop("outer", None)
    memory = HandBack() if kind == "apply" else sparsifiers.memory("residual")
    options = {"compression": "topk", "density": 0.05, **options}
    config = config_of(**options).changed(memory=memory)
    deltas = {name: torch.empty(tensor.shape, dtype=wide(tensor.dtype)) for name, tensor in shown.items()}
    exchange = connected(Table(deltas), config)
    shared: SharedParameters = UnsentInParameters(exchange, outer, overlap=False)
    if kind != "apply":
        shared = UnsentInResidual(exchange, outer, applied=kind != "hold", overlap=False)
    shared.admit(shown)

    @torch.no_grad()
    def take() -> Combined:
        combined = exchange.finish(shared.delta)
        exchange.commit()
        shared.apply(combined)
        return combined

    return shared, take


def moved(rank: int, step: int, shown: dict[str, Tensor]) -> None:
    """Make a step of this worker's own."""
    source = torch.Generator().manual_seed(100 * step + rank)
    for tensor in shown.values():
        tensor.data -= 0.1 * torch.randn(tensor.shape, generator=source).to(tensor.dtype)


KINDS = ["apply", "hold", "apply, beside"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unsent_and_what_is_common_are_all_there_is(kind: str, dtype: torch.dtype) -> None:
    """Between exchanges and after them: ``base - unsent`` is what an exchange keeps."""
    if kind == "apply" and dtype == torch.bfloat16:
        kind = "apply, beside"  # 16 bits could not hold it

    def body(rank: int) -> Any:
        shown = parameters(dtype)
        shared, take = opened(kind, shown)
        sums = []
        for step in range(4):
            moved(rank, step, shown)
            before = {name: shared.base[name] - shared.unsent(name) for name in SHAPES}
            assert all(delta.dtype == wide(dtype) for delta in before.values())
            take()
            after = {name: shared.base[name] - shared.unsent(name) for name in SHAPES}
            sums.append({name: (after[name] - before[name]).double() for name in SHAPES})
            for name, tensor in shown.items():
                if kind != "apply":
                    assert not shared.displacement(name).any()
                if kind == "hold":
                    assert torch.equal(tensor.detach(), shared.base[name].to(dtype))
        return sums, digest(shared.base.values())

    results = testing.run(3, body)
    agreed([bits for _, bits in results])
    for step in range(4):
        for name in SHAPES:
            assert sum(sums[step][name] for sums, _ in results).abs().max() < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_delta_is_the_displacement(kind: str) -> None:
    """It is written by the exchange; so it is where a caller asks for it."""

    def body(rank: int) -> None:
        shown = parameters()
        shared, take = opened(kind, shown)
        for step in range(2):
            moved(rank, step, shown)
            out = torch.empty(SHAPES["large"])
            shared.delta("large").write(out)
            assert torch.equal(out, shared.displacement("large"))
            assert torch.equal(shared.delta("large").tensor(), out)
            take()

    testing.run(2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_restored_to_the_bit(kind: str) -> None:
    """Into parameters that are anywhere. Where only displacements are known it is to rounding."""

    def body(rank: int) -> None:
        shown = parameters()
        shared, take = opened(kind, shown)
        for step in range(3):
            moved(rank, step, shown)
            take()
        moved(rank, 3, shown)
        base = {name: tensor.clone() for name, tensor in shared.base.items()}
        own = {name: tensor.detach().clone() for name, tensor in shown.items()}
        displaced = {name: shared.displacement(name) for name in SHAPES}
        bits = digest(shown.values())
        moved(rank, 4, shown)
        shared.base["small"].zero_()
        with torch.no_grad():
            shared.restore(base, own, {})
            assert digest(shown.values()) == bits and digest(shared.base.values()) == digest(base.values())
            shared.restore(base, {}, displaced)
            for name in SHAPES:
                torch.testing.assert_close(shared.displacement(name), displaced[name], rtol=0, atol=1e-6)
            shared.restore(base, {}, {})  # nothing of it is known: what is common
            for name, tensor in shown.items():
                assert torch.equal(tensor, shared.expected(name))

    testing.run(2, body)


def test_of_another_number_of_workers_it_carries_more_or_less() -> None:
    def body(rank: int) -> None:
        shown = parameters()
        shared, _ = opened("apply", shown)
        moved(rank, 0, shown)
        before = {name: shared.unsent(name) for name in SHAPES}
        with torch.no_grad():
            shared.put({name: 2 * delta for name, delta in before.items()})
        for name in SHAPES:
            torch.testing.assert_close(shared.unsent(name), 2 * before[name], rtol=1e-5, atol=1e-6)

    testing.run(2, body)


@pytest.mark.parametrize("kind", KINDS)
def test_newcomers_begin_as_they_are_and_an_outer_momentum_goes_on(kind: str) -> None:
    def body(rank: int) -> str:
        shown = parameters()
        shared, take = opened(kind, shown, outer=agmerge.Nesterov(), compression="none")
        moved(rank, 0, shown)
        take()
        state = shared.outer_state()
        assert state is not None and len(state["state"]) == 2
        newcomer = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        shared.admit({**shown, "new": newcomer})
        newcomer.data.fill_(5.0)
        assert shared.base["new"].dtype == torch.float32 and torch.equal(shared.base["new"], torch.ones(3))
        assert set(shared.own) == {*SHAPES, "new"}
        again = shared.outer_state()
        assert again is not None and len(again["state"]) == 2 and len(again["param_groups"][0]["params"]) == 3
        heir = opened(kind, parameters(seed=5))[0]
        heir.adopt(shared)
        assert heir.base is shared.base and heir.outer_state() == again
        return digest(shared.base.values())

    agreed(testing.run(2, body))
