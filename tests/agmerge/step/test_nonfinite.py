# SPDX-License-Identifier: Apache-2.0
"""Gradients that are infinite or NaN: all ranks do the same, and nothing of the step is kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import WIDTH, Parts, agreed, digest, loss_of, mlp, on_ranks, residuals, same_bits, seeded, sgd, wrap
from support.dear import dear
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.backends import topology
from agmerge.checkpoint import rank_state
from agmerge.exchanges.message.format import Flag
from agmerge.step import gradient_exchange
from agmerge.tensors.nonfinite import RAISE, SKIP, NonFiniteGuard, is_finite

MODEL = seeded(mlp)
PLACES = {"first": "4.weight", "middle": "2.weight", "middle, dense": "2.bias", "last": "0.weight"}
VALUES = (torch.nan, torch.inf, -torch.inf)
CELLS = [(place, value) for place in PLACES.values() for value in VALUES]
COMPRESSORS = [*sparsifiers.names(), *sparsifiers.low_rank_names(), "none", "eden", "fp16", "bf16"]
EXCHANGES = ["sparse", "oktopk", "masked", "two-level", "auto"]


@pytest.fixture(autouse=True)
def _nodes_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(topology.VARIABLE, "2")
    yield


def several(model: nn.Module, compression: str = "topk", **options: Any) -> agmerge.DistributedOptimizer:
    """Three merge buffers, each with tensors of the dense tensor class, two with one of the sparse tensor class."""
    inner = sgd(model, momentum=0.0 if compression == "dgc" else 0.9)
    options = {"density": 0.05, "merging": merging.Plan((2, 2, 2)), **options}
    return wrap(model, inner, compression=compression, **options)


def backward(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()


def broken(model: nn.Module, optimizer: Any, rank: int, step: int, name: str, value: float, on: int = 1) -> None:
    """A backward pass in which one element of one gradient of rank ``on`` is ``value``."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled.view(-1)[spoiled.numel() // 2] = value
        return spoiled

    handle = model.get_parameter(name).register_hook(spoil) if rank == on else None
    backward(model, optimizer, rank, step)
    if handle is not None:
        handle.remove()


def everything(model: nn.Module, optimizer: Any) -> list[Any]:
    """All that a step may change, in a form that compares."""
    state = optimizer.state_dict()
    own = state.pop("agmerge")
    kept = [own.pop(plural) for plural in rank_state.KINDS.values()]
    tensors = [*model.parameters(), *(tensor for kind in kept for tensor in kind.values())]
    for one in state.pop("state").values():
        tensors += [value for value in one.values() if isinstance(value, torch.Tensor)]
    return [digest(tensors), own, optimizer.stats()["steps"]]


def finite(optimizer: agmerge.DistributedOptimizer) -> bool:
    return all(tensor.isfinite().all() for tensor in optimizer._reducer.exchange.agreed.current.tensors.values())


# -- nothing of the step is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("policy", [RAISE, SKIP])
def test_a_bad_step_is_as_if_it_had_never_been(policy: str, compression: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        spoiled, twin = model, copy.deepcopy(model)
        ours = several(spoiled, compression, nonfinite=policy)
        reference = several(twin, compression)
        for step in range(len(CELLS) + 2):
            if 1 <= step <= len(CELLS):
                name, value = CELLS[step - 1]
                before = everything(spoiled, ours)
                broken(spoiled, ours, rank, 100, name, value)
                if policy == SKIP:
                    assert ours.step() is None
                else:
                    with pytest.raises(agmerge.NonFiniteError, match=f"rank 1: '{name}'") as raised:
                        ours.step()
                    assert "rank 0" not in str(raised.value)
                assert everything(spoiled, ours) == before
                assert finite(ours)
            for model, optimizer in ((spoiled, ours), (twin, reference)):
                backward(model, optimizer, rank, step)
                optimizer.step()
            assert everything(spoiled, ours) == everything(twin, reference)
        assert ours.stats()["steps_skipped"] == (len(CELLS) if policy == SKIP else 0)
        return digest(spoiled)

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("policy", [RAISE, SKIP])
def test_with_every_exchange_on_four_ranks(policy: str, exchange: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, int]:
        optimizer = several(model, "adtopk", exchange=exchange, nonfinite=policy)
        for step, (name, value) in enumerate(CELLS):
            before = everything(model, optimizer) if step else None
            broken(model, optimizer, rank, 100, name, value, on=step % 4)
            if policy == SKIP:
                optimizer.step()
            else:
                with pytest.raises(agmerge.NonFiniteError, match=f"rank {step % 4}: '{name}'"):
                    optimizer.step()
            if before is not None:
                assert everything(model, optimizer) == before
            else:
                assert digest(model) == digest(MODEL) and not any(r.any() for r in residuals(optimizer).values())
            backward(model, optimizer, rank, step)
            optimizer.step()
        assert finite(optimizer)
        calls = [call[:2] for call in testing.calls() if "/node" not in call[1]]  # sizes are a rank's own in oktopk
        return digest(model), hash(tuple(calls))

    agreed(on_ranks(4, MODEL, body))


@pytest.mark.parametrize("policy", [RAISE, SKIP])
def test_updates_that_belong_to_the_next_forward(policy: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = dear(model, nonfinite=policy)
        made = []
        for step in range(12):  # from then on there are several merge buffers
            backward(model, optimizer, rank, step)
            optimizer.step()
        for step, (name, value) in enumerate(CELLS):
            before = digest(model)
            broken(model, optimizer, rank, 100, name, value)
            optimizer.flush()
            before = digest(model)
            if policy == SKIP:
                optimizer.step()
            else:
                with pytest.raises(agmerge.NonFiniteError, match=f"rank 1: '{name}'"):
                    optimizer.step()
            optimizer.flush()
            assert digest(model) == before
            earlier = len(testing.calls())
            backward(model, optimizer, rank, step)
            optimizer.step()
            made.append([call[:2] for call in testing.calls()[earlier:]])
        optimizer.flush()
        for calls in made:  # nothing that the bad step has left goes out
            halves = [sum(kind == half for kind, _ in calls) for half in ("reduce_scatter", "all_gather")]
            assert halves[0] == halves[1] > 1
        assert digest(model) != before
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_skipped_gradients_are_infinite_everywhere_and_replaced_in_the_next_step() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = several(model, nonfinite=SKIP)
        broken(model, optimizer, rank, 0, "4.bias", torch.nan)
        optimizer.synchronize()
        assert all((p.grad == torch.inf).all() for p in model.parameters())
        with optimizer.skip_synchronize():
            optimizer.step()
        assert digest(model) == digest(MODEL)
        backward(model, optimizer, rank, 0)
        optimizer.step()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    on_ranks(2, MODEL, body)


def test_a_tensor_that_only_a_skipped_step_used_stays_unused() -> None:
    def body(rank: int, model: Parts) -> None:
        optimizer = wrap(model, nonfinite=SKIP)
        for step, use in enumerate(("a", "b", "ab")):
            optimizer.zero_grad()
            (model.loss(rank, step, use) * (torch.nan if use == "a" and rank == 1 else 1.0)).backward()
            optimizer.step()
            assert (model.a.weight.grad is None) is (use == "b")
            assert (model.b.weight.grad is None) is (use == "a")

    on_ranks(2, seeded(Parts), body)


def test_figures_of_selections_survive() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = several(model, nonfinite=SKIP)
        optimizer.measure_selection()
        for step in range(3):
            broken(model, optimizer, rank, step, "2.weight", torch.nan if step == 1 else 0.0)
            optimizer.step()
        assert all(math.isfinite(value) for value in optimizer.stats()["selection"].values() if value is not None)

    on_ranks(2, MODEL, body)


def test_a_closure_still_gives_its_loss() -> None:
    def body(rank: int, model: nn.Module) -> bool:
        optimizer = several(model, nonfinite=SKIP)

        def closure() -> Any:
            broken(model, optimizer, rank, 0, "0.weight", torch.nan)
            return 7.0

        return bool(optimizer.step(closure) == 7.0)

    assert agreed(on_ranks(2, MODEL, body))


def test_skipping_for_ever_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_exchange, "MOST_IN_A_ROW", 3)

    def body(rank: int, model: nn.Module) -> str:
        optimizer = several(model, nonfinite=SKIP)
        for turn in range(2):
            for step in range(2):
                broken(model, optimizer, rank, step, "0.weight", torch.nan)
                optimizer.step()
            if turn == 0:
                backward(model, optimizer, rank, 5)  # then it counts anew
                optimizer.step()
        broken(model, optimizer, rank, 9, "0.weight", torch.nan)
        with pytest.raises(
            agmerge.NonFiniteError, match=r"3 steps in a row were skipped.*rank 1: '0.weight'"
        ) as raised:
            optimizer.step()
        backward(model, optimizer, rank, 6)
        optimizer.step()
        assert optimizer.stats()["steps_skipped"] == 5 and optimizer.stats()["steps"] == 2
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))


def test_the_flag_is_in_messages_that_are_sent_anyway() -> None:
    def body(rank: int, model: nn.Module, bad: bool) -> list[tuple[str, str, int]]:
        optimizer = several(model, nonfinite=SKIP)
        backward(model, optimizer, rank, 0)
        optimizer.step()
        before = len(testing.calls())
        broken(model, optimizer, rank, 1, "0.weight", torch.nan if bad else 0.0)
        optimizer.step()
        return testing.calls()[before:]

    assert on_ranks(2, MODEL, lambda r, m: body(r, m, True)) == on_ranks(2, MODEL, lambda r, m: body(r, m, False))


def test_a_sum_with_the_residual_that_overflows_is_not_kept() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))

    def body(rank: int, model: nn.Sequential) -> None:
        optimizer = wrap(model, compression="topk", density=0.001)
        for turn in range(2):
            optimizer.zero_grad()
            (model(torch.ones(1, WIDTH)).sum() * (2e38 if rank == 0 else 0.0)).backward()
            if turn == 0:
                optimizer.step()
                before = residuals(optimizer)["0.weight"]
                continue
            with pytest.raises(agmerge.NonFiniteError, match="rank 0: '0.weight'"):
                optimizer.step()
            assert same_bits(before, residuals(optimizer)["0.weight"])

    on_ranks(2, seeded(lambda: model), body)


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_is_finite_is_exact(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    whole = torch.full((100,), most, dtype=dtype)  # its sum overflows
    assert is_finite(whole) and is_finite(whole[:0]) and is_finite(-whole)
    for value in VALUES:
        for place in (0, 63, 99):
            assert not is_finite(whole.index_fill(0, torch.tensor([place]), value))


def test_what_only_a_device_knows_travels_as_a_tensor() -> None:
    """The way of a device, on this one."""
    from agmerge.exchanges.dense import decode, tail_of
    from agmerge.exchanges.message.format import RoundHeader

    for bad in (False, True):
        control = RoundHeader(3, 4, 5, 0, (True, False), torch.tensor(not bad))
        tail = tail_of(control, torch.float16, torch.device("cpu"))
        assert decode((2 * tail).tolist(), control, "buffer 5").flags == (Flag.NONFINITE if bad else 0)
    assert NonFiniteGuard().finite_on(torch.device("cpu")) is None


def test_ranks_with_other_policies_hear_of_it() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(agmerge.RankMismatchError, match="nonfinite: raise on rank 0; skip on rank 1"):
            several(model, nonfinite=(RAISE, SKIP)[rank])

    on_ranks(2, MODEL, body)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["residuals", "momenta"])
def test_a_checkpoint_that_is_broken_is_an_error(kind: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = several(model, "dgc")
        backward(model, optimizer, rank, 0)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        state["agmerge"][kind]["2.weight"][1, 2] = torch.inf
        before = everything(model, optimizer)
        with pytest.raises(ValueError, match=r"of parameter '2.weight' in the checkpoint is infinite or NaN"):
            optimizer.load_state_dict(state)
        assert everything(model, optimizer) == before

    on_ranks(2, MODEL, body)
