# SPDX-License-Identifier: Apache-2.0
"""Rounds on a device that are repeated, skipped or refused end as they do on the host, and the one wait has an end."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pretend.device import Device
from pretend.tensors import PLACE
from pretend.training import on_devices
from support.device_training import Given, gradient, host, plain_step, same_residuals, train, wrapped
from support.host_streams import HostStreams

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.exchanges import InFlight
from agmerge.exchanges.base import announced_on_host
from agmerge.step import round
from sparsifiers import Selection
from sparsifiers.base import Request

OPTIONS: dict[str, dict[str, Any]] = {
    "sparse": {"compression": "topk", "exchange": "sparse"},
    "dense": {"compression": "none"},
    "in rank order": {"compression": "none", "dense_sum": "ordered"},
    "cast": {"compression": "fp16"},
    "momentum": {"compression": "dgc", "exchange": "sparse"},
    "kernels": {"compression": "topk", "exchange": "sparse", "kernels": True},
    "kernels, rows": {"compression": "adtopk", "exchange": "sparse", "kernels": True},
    "kernels, momentum": {"compression": "dgc", "exchange": "sparse", "kernels": True},
    "kernels, whole": {"compression": "none", "kernels": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["None", "views of the last updates"])
@pytest.mark.parametrize("loads", [0, 1])
def test_a_round_that_is_repeated_finds_the_gradients_as_they_were(
    loads: int, set_to_none: bool, options: dict[str, Any]
) -> None:
    """The device has written the updates of the first attempt by the time the host reads that it came to nothing."""

    def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        if step == 2 and rank == loads:
            optimizer.load_state_dict(optimizer.state_dict())  # this rank needs a new agreement, the other does not
        model(rank, step).backward()
        optimizer.step()

    ours, theirs = (train(2, place, each=step_of, **options) for place in (PLACE, "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))
        assert same_residuals(one, other)
        assert [race for books in one.books for race in books.races] == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("set_to_none", [True, False])
def test_all_ranks_hear_whose_gradient_is_not_finite(number: int, set_to_none: bool, options: dict[str, Any]) -> None:
    def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        model(rank, step).backward()
        if step != 2:
            optimizer.step()
            return
        before = [host(p).clone() for p in model.parameters()]
        with pytest.raises(agmerge.NonFiniteError, match=f"AGM106: .*: rank 1: 'given.{number}'[.] "):
            optimizer.step()
        assert all(torch.equal(host(p), q) for p, q in zip(model.parameters(), before, strict=True))

    def broken(optimizer: Any, model: Given, rank: int, step: int) -> None:
        handle = model.given[number].register_hook(lambda g: g * torch.inf if (rank, step) == (1, 2) else g)
        step_of(optimizer, model, rank, step)
        handle.remove()

    for one, other in zip(*(train(2, place, each=broken, **options) for place in (PLACE, "cpu")), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))


def test_a_step_that_is_skipped_leaves_the_next_one_as_it_was() -> None:
    def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
        handle = model.given[2].register_hook(lambda g: g * torch.nan if (rank, step) == (0, 1) else g)
        plain_step(optimizer, model, rank, step)
        handle.remove()
        assert optimizer.stats()["steps_skipped"] == (step >= 1)

    options = {**OPTIONS["sparse"], "nonfinite": "skip"}
    for one, other in zip(*(train(2, place, each=step_of, **options) for place in (PLACE, "cpu")), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters, other.parameters, strict=True))


@pytest.mark.parametrize("compression", ["topk", "none"])
@pytest.mark.parametrize("bad", [None, 0, 3])
def test_a_model_may_lie_on_the_host_and_on_a_device(compression: str, bad: int | None) -> None:
    """What only the device knows is not told in a message of the host, which would read it before it is there."""

    def body(rank: int, device: Device | None = None, place: str = PLACE) -> list[torch.Tensor]:
        model = Given("cpu")
        for number in (0, 1):
            model.given[number] = torch.nn.Parameter(model.given[number].detach().to(place))
        optimizer = wrapped(model, compression=compression)
        for step in range(4):
            optimizer.zero_grad()
            losses = [(p * torch.full_like(p, (rank + 1) * (step + 1.0))).sum() for p in model.given]
            for number, one in enumerate(losses):
                (one * (torch.inf if (rank, step, number) == (1, 2, bad) else 1.0)).backward()
            if step == 2 and bad is not None:
                with pytest.raises(agmerge.NonFiniteError, match=f"AGM106: .*: rank 1: 'given.{bad}'[.] "):
                    optimizer.step()
            else:
                optimizer.step()
        return [host(p) for p in model.parameters()]

    ours, theirs = on_devices(2, body), testing.run(2, functools.partial(body, place="cpu"))
    assert all(
        torch.equal(p, q) for one, other in zip(ours, theirs, strict=True) for p, q in zip(one, other, strict=True)
    )


class Slow(HostStreams):
    """Streams that have not got anywhere before they were asked ``looks`` times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def has_ended(self, event: None) -> bool:
        self.looks -= 1
        return self.looks < 0


def messages(*done: bool) -> list[tuple[InFlight, list[torch.Tensor]]]:
    """Messages under way, of which the collectives have ended or not, and what their ranks announce."""
    made = [
        SimpleNamespace(
            name=f"buffer {number}",
            message=torch.zeros(4),
            handle=SimpleNamespace(done=lambda has_ended=has_ended: has_ended),
        )
        for number, has_ended in enumerate(done)
    ]
    return [
        (cast(InFlight, one), [torch.arange(6).view(2, 3)[:, :2], torch.tensor([number], dtype=torch.float16)])
        for number, one in enumerate(made)
    ]


def test_what_ranks_say_comes_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agmerge.exchanges.base.streams_of", lambda device: Slow(3))
    under_way = messages(True, True)
    said = announced_on_host(under_way, 20.0)
    for number, (one, _) in enumerate(under_way):
        headers, flag = said[id(one)]
        assert headers.tolist() == [[0, 1], [3, 4]] and flag.tolist() == [number] and flag.dtype == torch.float16
    assert announced_on_host([], 20.0) == {}


@pytest.mark.parametrize(
    "done, name", [((True, False, False), "buffer 1"), ((True, True), "buffer 1"), ((False,), "buffer 0")]
)
def test_the_one_wait_ends_and_names_the_first_message_that_is_missing(
    done: tuple[bool, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agmerge.exchanges.base.streams_of", lambda device: Slow(10**9))
    with pytest.raises(agmerge.CollectiveTimeout, match=f"AGM201: {name}: .* 0.05 s"):
        announced_on_host(messages(*done), 0.05)


class Reversed(sparsifiers.Sparsifier):
    """Select the first k coordinates; on a rank that is told so, in the wrong order."""

    name = "reversed"

    def __init__(self, is_wrong: bool) -> None:
        super().__init__(0.05)
        self._is_wrong = is_wrong

    def _select(self, vector: torch.Tensor, request: Request) -> Selection:
        indices = torch.arange(request.k, dtype=torch.int32, device=vector.device)
        return Selection(indices.flip(0) if self._is_wrong else indices, request.k)


@pytest.mark.parametrize("way", ["beside low rank", "without streams", "queued"])
def test_a_device_refuses_indices_that_are_not_in_order(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its messages are waited for one by one, so that their updates are written behind their checks."""
    if way == "without streams":
        monkeypatch.setattr(InFlight, "has_streams", False)
    queued: list[int] = []  # how many messages are, each time that their headers are read together

    def read(messages: list[Any], timeout: float) -> dict[int, list[torch.Tensor]]:
        queued.append(len(messages))
        return announced_on_host(messages, timeout)

    monkeypatch.setattr(round, "announced_on_host", read)

    def body(rank: int, device: Device) -> str:
        model, selected = Given(PLACE), Reversed(rank == 1)
        both = {"given.0": selected, "given.2": sparsifiers.low_rank("powersgd", rank=2)}
        optimizer = wrapped(
            model,
            compression=both if way == "beside low rank" else selected,
            density=None,
            merging=merging.Plan((4,)),
            exchange="sparse",
        )
        with pytest.raises(agmerge.MessageError, match="indices of rank 1 are not ascending") as raised:
            plain_step(optimizer, model, rank, 0)
        assert not any(host(parameter).count_nonzero() for parameter in model.parameters())
        return str(raised.value)

    assert len({*on_devices(2, body)}) == 1
    assert any(queued) == (way == "queued")


def test_low_rank_leaves_out_rows_that_are_zero_on_all_ranks() -> None:
    def step_of(optimizer: Any, model: Given, rank: int, step: int) -> None:
        optimizer.zero_grad()
        terms = []
        for number, p in enumerate(model.given):
            rows = torch.arange(len(p)) % 3 != step % 3
            own = gradient(rank, step, number) * rows.view(-1, *[1] * (p.dim() - 1))
            terms.append((p * own.to(p.device)).sum())
        before = [host(p).clone() for p in model.given]
        torch.stack(terms).sum().backward()
        optimizer.step()
        for p, old in zip(model.given, before, strict=True):
            unused = torch.arange(len(old)) % 3 == step % 3
            assert torch.equal(host(p)[unused], old[unused])
            assert not torch.equal(host(p), old)

    options = {"compression": "acpsgd", "exchange": "sparse", "memory": "none", "density": None}
    ours, theirs = (train(2, place, each=step_of, **options) for place in (PLACE, "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        for p, q in zip(one.parameters, other.parameters, strict=True):
            torch.testing.assert_close(p, q)
    assert all(torch.equal(p, q) for p, q in zip(ours[0].parameters, ours[1].parameters, strict=True))
