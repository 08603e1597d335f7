# SPDX-License-Identifier: Apache-2.0
"""Gradients of every kind in few bits: how they lie, whose memory they share, what is held of them, and their mean."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import agreed, digest, on_ranks, residuals, seeded, sgd, wrap
from support.quantised import Net, Step, assert_by_hand, by_hand, draws, exchanged
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import sparsifiers
from agmerge.exchanges.quantised.exchange import contraction
from agmerge.step.config import is_small
from sparsifiers.quantising import base
from sparsifiers.quantising.base import block_size, blocks_in

MODEL = seeded(Net, 3)
SIDE = 64


def drawn(rank: int, step: int, *shape: int, number: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(100_000 * number + 1000 * step + rank)
    return torch.randn(shape, generator=source).to(dtype)


class Several(nn.Module):
    """Parameters whose gradients a test gives, or makes of views; the last one is a transposed matrix."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(drawn(0, 0, SIDE, SIDE, dtype=dtype))
        self.b = nn.Parameter(drawn(0, 1, 2 * SIDE, SIDE // 2, dtype=dtype))
        self.c = nn.Parameter(drawn(0, 2, SIDE, SIDE, dtype=dtype).t())

    def give(self, rank: int, step: int) -> None:
        """Gradients as autograd would not lay them out."""
        a = drawn(rank, step, 1, SIDE, number=1, dtype=self.a.dtype)
        self.a.grad = a.expand(SIDE, SIDE) if step % 2 else a.expand(SIDE, SIDE).t()
        self.b.grad = drawn(rank, step, 2 * SIDE, SIDE, number=2, dtype=self.a.dtype)[:, : SIDE // 2]
        c = drawn(rank, step, SIDE, SIDE, number=3, dtype=self.a.dtype)
        self.c.grad = c if step % 2 else c.t()

    def shared(self, rank: int, step: int) -> Tensor:
        """A loss of which autograd gives one tensor to ``a`` and ``b``; on rank 1 not."""
        x = drawn(rank, step, SIDE, 4, number=4)
        flat = self.a.view(-1) + self.b.view(-1) if rank != 1 else 1.0 * self.a.view(-1) + 2.0 * self.b.view(-1)
        return torch.tanh(flat.view(SIDE, SIDE).matmul(x)).sum() + self.c.matmul(x).sum()


def stepped(model: Any, optimizer: Any, rank: int, passes: Callable[[int], object], steps: int = 3) -> list[Step]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        seen.append(exchanged(model, optimizer, lambda step=step: passes(step)))
    return seen


# -- how they lie -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_expanded_transposed_and_of_any_real_dtype(dtype: torch.dtype, size: int) -> None:
    def body(rank: int, model: Several) -> list[Step]:
        optimizer = wrap(model, sgd(model, lr=0.01), compression="eden-4", merging="layerwise", check_every=1)
        return stepped(model, optimizer, rank, lambda step: model.give(rank, step))

    assert assert_by_hand(on_ranks(size, Several(dtype), body), "eden-4") == 9


def test_complex_parameters_are_refused_by_name_or_sent_whole() -> None:
    model = nn.ParameterDict({"complex": torch.ones(SIDE, SIDE, dtype=torch.complex64), "real": torch.ones(SIDE, SIDE)})

    def body(rank: int, model: nn.ParameterDict) -> list[Tensor]:
        with pytest.raises(ValueError, match="parameter 'complex' is torch.complex64"):
            wrap(model, compression="eden")
        optimizer = wrap(model, compression="eden", dense=["complex"])
        for parameter in model.parameters():
            parameter.grad = (rank + 1) * torch.ones_like(parameter)
        optimizer.synchronize()
        return [parameter.grad for parameter in model.parameters()]

    for found in on_ranks(2, model, body):
        assert torch.equal(found[0], torch.full((SIDE, SIDE), 1.5 + 0j)) and found[1].mean() > 0.5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("plan", ["single", "layerwise"])
def test_two_parameters_that_share_a_gradient_get_each_its_own_update(plan: str, size: int) -> None:
    def body(rank: int, model: Several) -> tuple[list[Step], bool]:
        model.shared(rank, 9).backward()
        assert model.a.grad is not None and model.b.grad is not None
        together = model.a.grad.data_ptr() == model.b.grad.data_ptr()
        optimizer = wrap(model, sgd(model, lr=0.01), compression="eden-4", merging=plan, check_every=1)
        return stepped(model, optimizer, rank, lambda step: model.shared(rank, step).backward()), together

    found = on_ranks(size, Several(), body)
    assert [together for _, together in found] == [rank != 1 for rank in range(size)]  # or this tests nothing
    assert assert_by_hand([steps for steps, _ in found], "eden-4") == 9


def test_gradients_that_have_a_graph_keep_it() -> None:
    def body(rank: int, model: Several) -> list[Step]:
        optimizer = wrap(model, sgd(model, lr=0.01), compression="eden-4")
        return stepped(model, optimizer, rank, lambda step: model.shared(rank, step).backward(create_graph=True))

    assert_by_hand(on_ranks(3, Several(), body), "eden-4")


def test_sparse_gradients_are_made_dense_and_rows_that_nobody_read_stay_zero() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(40, SIDE, sparse=True), nn.Linear(SIDE, SIDE)

    def body(rank: int, model: Words) -> list[Step]:
        optimizer = wrap(model, compression="eden", sparse_as_dense=True)
        read = torch.tensor([2 * rank, 3 * rank + 1])
        return stepped(model, optimizer, rank, lambda _: model.head(model.words(read)).square().sum().backward())

    found = on_ranks(3, seeded(Words), body)
    for step in found[0]:
        update = step.updates["words.weight"]
        assert update is not None and update.any(dim=1).nonzero().view(-1).tolist() == [0, 1, 2, 4, 7]
    for steps in found:
        steps[:] = [replace(step, gradients={n: g.to_dense() for n, g in step.gradients.items()}) for step in steps]
    assert_by_hand(found, "eden")


# -- and a loss scale -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_a_scale_of_any_power_of_two_changes_no_bit_and_an_overflow_has_never_been(size: int) -> None:
    def body(rank: int, model: Net, scale: float | None) -> list[str]:
        optimizer = wrap(model, compression="eden", merging="layerwise", check_every=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=100, enabled=scale is not None)
        if scale is not None:
            optimizer.attach_scaler(scaler)
        seen = []
        for step in (0, 1, 1, 2):
            overflow = len(seen) == 1
            if overflow and scale is None:
                seen.append(seen[-1])
                continue
            optimizer.zero_grad()
            loss = model.loss(rank, step) * (torch.inf if overflow and rank == size - 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(digest(model))
        return seen

    plain = agreed(on_ranks(size, MODEL, lambda r, m: body(r, m, None)))
    for scale in (2.0**12, 0.5):
        assert agreed(on_ranks(size, MODEL, lambda r, m, scale=scale: body(r, m, scale))) == plain


# -- what is held -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_updates_take_the_gradients_memory_and_nobody_holds_it_after_the_step(size: int) -> None:
    def body(rank: int, model: Net) -> None:
        optimizer = wrap(model, compression="eden")
        for step in range(3):
            optimizer.zero_grad()
            model.loss(rank, step).backward()
            own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            optimizer.synchronize()
            for name, p in model.named_parameters():
                if name in own and not is_small(name, p):
                    assert p.grad.data_ptr() == own[name].data_ptr() and p.grad.stride() == p.stride(), name
            with optimizer.skip_synchronize():
                optimizer.step()
            quantised = [weakref.ref(p.grad) for n, p in model.named_parameters() if n in own and not is_small(n, p)]
            own.clear()
            optimizer.zero_grad()
            assert all(gradient() is None for gradient in quantised)

    gc.collect()
    on_ranks(size, MODEL, body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_allocates_nothing_of_a_tensors_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of 0.5 MB, which the codec reads in parts; messages and flat memory are there by then."""
    side = 360
    monkeypatch.setattr(base, "PART", 64)  # blocks: 0.13 MB of random words

    def body(rank: int, model: nn.Linear) -> int:
        optimizer = wrap(model, compression="eden")

        def step(number: int) -> None:
            model.weight.grad = given[number]
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()

        given = [drawn(rank, number, side, side) for number in range(3)]
        step(0)
        step(1)
        if rank != 0:
            step(2)
            return 0
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            step(2)
        return max(event.cpu_memory_usage for event in recorded.events())

    model = nn.Linear(side, side, bias=False)
    assert 0 < on_ranks(size, model, body)[0] <= 4 * side * side // 3


# -- their mean -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_of_many_updates_is_the_mean_gradient(size: int) -> None:
    """Parameters stand still. Errors of steps are independent: their mean shrinks as the root of their number."""
    count = 64

    def body(rank: int, model: nn.Linear) -> tuple[Tensor, float]:
        optimizer = wrap(model, sgd(model, lr=0.0, momentum=0.0), compression="eden")
        own = [drawn(other, 0, SIDE, SIDE) for other in range(size)]
        mean, total, single = torch.stack(own).mean(dim=0), torch.zeros(SIDE, SIDE), 0.0
        for _ in range(count):
            model.weight.grad = own[rank].clone()
            optimizer.step()
            total += model.weight.grad
            single += float((model.weight.grad - mean).norm() / mean.norm()) / count
        return (total / count - mean).norm() / mean.norm(), single

    for left, single in on_ranks(size, nn.Linear(SIDE, SIDE, bias=False), body):
        noise = sparsifiers.quantiser("eden").noise
        assert 0.7 * noise**0.5 < single < 2.0 * noise**0.5
        assert left < 1.25 * single / count**0.5


# -- error feedback, where a script asks for it -----------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["eden", {"up.*": "eden", ".*": "topk"}], ids=["eden", "beside top-k"])
@pytest.mark.parametrize("size", [2, 3])
def test_what_rounding_leaves_is_kept_on_request(size: int, compression: Any) -> None:
    """Messages are gathered then. What a rank has sent is what others read of it, and the rest is its residual."""
    quantiser, quantised = sparsifiers.quantiser("eden"), ["up.weight", "down.weight", "conv.weight"]
    names, factor = quantised if compression == "eden" else quantised[:1], contraction(quantiser)

    def body(rank: int, model: Net) -> list[tuple[dict[str, Tensor], Step]]:
        optimizer = wrap(model, compression=compression, memory="residual", check_every=1)
        seen = []
        for number in range(3):
            before = {name: rest.clone() for name, rest in residuals(optimizer).items()}
            optimizer.zero_grad()
            step = exchanged(model, optimizer, lambda number=number: model.loss(rank, number).backward())
            there = {name: step.gradients[name] + before.get(name, 0.0) for name in names}
            for name in names:
                own, size_ = there[name].reshape(-1), block_size(there[name].shape)
                message = torch.zeros(blocks_in(own.numel(), size_) * quantiser.record_bytes(size_), dtype=torch.uint8)
                read = torch.empty_like(own)
                quantiser.encode(own, size_, draws(name, step.number, 0, rank), message)
                quantiser.decode_sum([message], [draws(name, step.number, 0, rank)], size_, factor, read)
                assert torch.equal(residuals(optimizer)[name].reshape(-1), own - read), name
            seen.append((there, step))
        return seen

    for steps in zip(*on_ranks(size, MODEL, body), strict=True):
        for name in names:
            tensors = [there[name] for there, _ in steps]
            wanted = by_hand(name, tensors, steps[0][1].number, quantiser, gathered=True, factor=factor)
            assert all(torch.equal(step.updates[name], wanted) for _, step in steps), name
