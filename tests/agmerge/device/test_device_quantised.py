# SPDX-License-Identifier: Apache-2.0
"""Quantised all-reduces on devices: the host's bits, no wait in hooks and one in synchronize(), and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretend.books import HOOK, SYNCHRONIZE
from pretend.device import Device
from pretend.tensors import PLACE
from pretend.training import on_devices
from support.device_training import Given, Trained, host, plain_step, train, wrapped

import agmerge
import merging
from agmerge.exchanges.message.format import FIXED, MAGIC
from agmerge.testing import Call

OPTIONS: dict[str, dict[str, Any]] = {
    "eden": {"compression": "eden", "kernels": True},
    "eden-4, torch": {"compression": "eden-4"},
    "int8": {"compression": "int8"},
    "a buffer for each tensor": {"compression": "eden", "kernels": True, "merging": merging.Plan((1, 1, 1, 1))},
    "with feedback": {"compression": "onebit"},  # messages are gathered, whatever the number of ranks
}
SIZES = [2, 3, 5]  # of two ranks messages are gathered


def both(size: int, options: dict[str, Any], **more: Any) -> tuple[list[Trained], list[Trained]]:
    """The same training on devices and on the host."""
    given = {"density": None, **options, **more}
    ours, theirs = (train(size, place, **given) for place in (PLACE, "cpu"))
    return ours, theirs


def assert_alike(ours: list[Trained], theirs: list[Trained]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))
        assert [race for books in one.books for race in books.races] == []
    assert any(p.any() for p in ours[0].parameters)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_devices_have_the_bits_of_the_host_and_wait_once(options: dict[str, Any], size: int) -> None:
    ours, theirs = both(size, options)
    assert_alike(ours, theirs)
    for books in ours[0].books[2:]:
        assert not books.waits_in(HOOK)
        assert len(books.waits_in(SYNCHRONIZE)) == 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_round_that_is_repeated_finds_the_gradients_as_they_were(options: dict[str, Any], size: int) -> None:
    """Updates are written over gradients, so none may be written of a round that comes to nothing."""

    def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
        if step == 2 and rank == 1:
            optimizer.load_state_dict(optimizer.state_dict())  # this rank needs a new agreement, others do not
        plain_step(optimizer, model, rank, step)

    assert_alike(*both(size, options, each=step_of))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_all_ranks_hear_whose_gradient_is_not_finite(options: dict[str, Any], size: int) -> None:
    def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
        handle = model.given[2].register_hook(lambda g: g * torch.inf if (rank, step) == (1, 2) else g)
        optimizer.zero_grad()
        model(rank, step).backward()
        handle.remove()
        if step != 2:
            optimizer.step()
            return
        before = [host(p).clone() for p in model.parameters()]
        with pytest.raises(agmerge.NonFiniteError, match="AGM106: .*: rank 1: 'given.2'[.] "):
            optimizer.step()
        assert all(torch.equal(host(p), q) for p, q in zip(model.parameters(), before, strict=True))

    assert_alike(*both(size, options, each=step_of))


@pytest.mark.long
@pytest.mark.parametrize("size", [3, 5])
def test_the_clipping_watch_knows_the_noise_of_what_devices_have_read(size: int) -> None:
    def norms(place: str) -> list[float]:
        found: list[float] = []

        def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
            plain_step(optimizer, model, rank, step)
            found.append(float(optimizer.grad_norm()))

        train(size, place, each=step_of, compression="eden", density=None, kernels=True)
        return sorted(found)

    assert norms(PLACE) == pytest.approx(norms("cpu"), rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("bad", [0, 2])
def test_a_header_of_another_step_is_the_same_error_on_all_ranks(bad: int) -> None:
    def inject(call: Call) -> None:
        if call.kind == "all_to_all" and call.rank == bad and call.name.startswith("buffer"):
            words = call.tensor.view(torch.int32)
            places = (words == MAGIC).nonzero().flatten().tolist()
            words[places[1] + FIXED.index("step")] += 7  # of the shard of rank 1, which tells the others

    def body(rank: int, device: Device) -> str:
        model = Given(PLACE)
        optimizer = wrapped(model, compression="eden", density=None)
        with pytest.raises(agmerge.MessageError) as caught:
            plain_step(optimizer, model, rank, 0)
        return str(caught.value)

    told = on_devices(3, body, own_thread=True, inject=inject)
    assert all(one == told[0] for one in told) and told[0].startswith("AGM501: ") and f" ranks [{bad}] " in told[0]
