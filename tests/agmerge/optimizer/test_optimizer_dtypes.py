# SPDX-License-Identifier: Apache-2.0
"""Dtypes, memory formats and layouts of parameters and gradients."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support import WIDTH, agreed, digest, gradients, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from torch import Tensor, nn

import agmerge

COMPRESSIONS = ["none", "topk", "eden", "fp16", "bf16", "powersgd", "acpsgd"]
DTYPES = [torch.float16, torch.bfloat16, torch.float64]


def convolutions() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 2), nn.Flatten())
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def images(rank: int, step: int) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, 4, 4, generator=source).contiguous(memory_format=torch.channels_last)


def train_images(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int, set_to_none: bool = True
) -> list[str]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(images(rank, step)).square().mean().backward()
        optimizer.step()
        seen.append(digest(model))
    return seen


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_models_of_any_real_dtype_stay_in_sync(size: int, dtype: torch.dtype, compression: str) -> None:
    model = seeded(mlp).to(dtype)

    def body(rank: int, model: nn.Module) -> tuple[list[str], set[torch.dtype]]:
        optimizer = wrap(model, sgd(model, lr=0.05), compression=compression)
        seen = train(model, optimizer, rank, range(10))
        assert all(p.grad.dtype == dtype for p in model.parameters())
        assert all(torch.isfinite(p).all() for p in model.parameters())
        return seen, {kept.dtype for kept in residuals(optimizer).values()}

    seen, kept = agreed(on_ranks(size, model, body))
    assert len(set(seen)) == 10
    storage = torch.float64 if dtype == torch.float64 else torch.float32
    assert kept == (set() if compression in ("none", "eden") else {storage})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_density_one_of_sixteen_bits_rounds_once(dtype: torch.dtype) -> None:
    """Contributions are added in float32 (64), so the update is the mean, rounded."""
    model = seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False)).to(dtype)

    def body(rank: int, model: nn.Module) -> tuple[Tensor, Tensor]:
        optimizer = wrap(model, density=1.0)
        loss_of(model, rank, 0).backward()
        mine = model.weight.grad.clone()
        optimizer.synchronize()
        return mine, model.weight.grad

    found = on_ranks(4, model, body)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    mean = sum(mine.to(wide) / 4 for mine, _ in found).to(dtype)
    assert all(torch.equal(update, mean) for _, update in found)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_channels_last_models_stay_in_sync(size: int, compression: str) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        return train_images(model, wrap(model, compression=compression), rank, 8)

    assert len(set(agreed(on_ranks(size, seeded(convolutions), body)))) == 8


@pytest.mark.parametrize(
    "inner",
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),  # fused kernels read parameter and gradient flat
        (torch.optim.Adam, {"fused": True}),
    ],
    ids=["sgd", "sgd foreach", "adam foreach", "sgd fused", "adam fused"],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_channels_last_on_one_rank_is_the_plain_optimizer(
    inner: tuple[type, dict[str, Any]], set_to_none: bool
) -> None:
    make, options = inner
    twin = seeded(convolutions)
    expected = train_images(twin, make(twin.parameters(), lr=0.01, **options), 0, 5)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, make(model.parameters(), lr=0.01, **options), compression="none")
        seen = train_images(model, optimizer, rank, 5, set_to_none)
        assert all(p.grad.stride() == p.stride() for p in model.parameters())
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # autograd complains of gradients in other strides than their parameters'
        assert on_ranks(1, seeded(convolutions), body) == [expected]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_gradients_of_any_strides_are_read_in_order(compression: str) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def body(rank: int, model: nn.Linear, how: str) -> list[str]:
        optimizer, seen = wrap(model, compression=compression), []
        for step in range(4):
            source = torch.Generator().manual_seed(10 * step + rank)
            values = torch.randn(WIDTH, WIDTH, generator=source)
            wide = torch.zeros(WIDTH, 2 * WIDTH)
            wide[:, ::2] = values
            gradient = {"dense": values, "transposed": values.t().contiguous().t(), "sliced": wide[:, ::2]}[how]
            model.weight.grad = gradient
            optimizer.step()
            seen.append(digest(model))
        return seen

    dense, transposed, sliced = (
        agreed(on_ranks(2, model, lambda r, m, h=how: body(r, m, h))) for how in ("dense", "transposed", "sliced")
    )
    assert dense == transposed == sliced


def test_an_expanded_gradient_is_read_element_by_element() -> None:
    def body(rank: int, model: nn.Linear) -> Tensor:
        optimizer = wrap(model, density=1.0)
        model.weight.sum().backward()  # autograd hands out one element, expanded
        optimizer.synchronize()
        return model.weight.grad

    for gradient in on_ranks(2, nn.Linear(WIDTH, WIDTH, bias=False), body):
        assert torch.equal(gradient, torch.ones(WIDTH, WIDTH))


class Words(nn.Module):
    """An embedding whose gradients have the sparse layout, and a layer after it."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH, sparse=sparse)
        self.out = nn.Linear(WIDTH, 10)

    def loss(self, rank: int, step: int) -> Tensor:
        source = torch.Generator().manual_seed(10 * step + rank)
        return self.out(self.words(torch.randint(64, (8,), generator=source))).square().mean()


@pytest.mark.parametrize("step", [0, 2])
def test_a_gradient_of_sparse_layout_is_refused_by_name(step: int) -> None:
    model = Words()

    def body(rank: int, model: Words) -> str:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for i in range(step):
            optimizer.zero_grad()
            model.words.sparse = False
            model.loss(rank, i).backward()
            optimizer.step()
        optimizer.zero_grad()
        model.words.sparse = True
        with pytest.raises(ValueError) as raised:  # by backward()
            model.loss(rank, step).backward()
            optimizer.step()
        with pytest.raises(agmerge.AGMergeError, match="error ended this exchange: parameter 'words.weight'"):
            optimizer.step()
        return str(raised.value)

    text = agreed(on_ranks(2, model, body))
    assert "'words.weight'" in text and "sparse_as_dense=True" in text


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_as_dense_trains_like_a_dense_embedding(passes: int, compression: str) -> None:
    def body(rank: int, model: Words) -> list[str]:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(model, inner, compression=compression, sparse_as_dense=True, backward_passes_per_step=passes)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            for i in range(passes):
                model.loss(rank, 10 * step + i).backward()
            optimizer.step()
            seen.append(digest(model))
        return seen

    model = seeded(Words)
    dense = copy.deepcopy(model)
    dense.words.sparse = False
    assert agreed(on_ranks(2, model, body)) == agreed(on_ranks(2, dense, body))


def test_complex_parameters_travel_whole_or_are_refused_by_name() -> None:
    model = seeded(lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex64))

    def body(rank: int, model: nn.Linear) -> tuple[Tensor, Tensor]:
        for compression in ("topk", "fp16", "bf16"):
            with pytest.raises(ValueError, match="'weight' is torch.complex64"):
                wrap(model, compression=compression)
        optimizer = wrap(model, compression="none")
        model(torch.full((2, WIDTH), 1j * (rank + 1), dtype=torch.complex64)).abs().sum().backward()
        mine = model.weight.grad.clone()
        optimizer.synchronize()
        return mine, model.weight.grad

    found = on_ranks(2, model, body)
    for _, update in found:
        torch.testing.assert_close(update, (found[0][0] + found[1][0]) / 2)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_parameters_without_elements_or_dimensions(compression: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(3, 0))
            self.one = nn.Parameter(torch.tensor(2.0))

    def body(rank: int, model: Odd) -> list[str]:
        optimizer, seen = wrap(model, compression=compression), []
        for _ in range(3):
            optimizer.zero_grad()
            (model.empty.sum() + (rank + 1) * model.one).backward()
            optimizer.step()
            seen.append(digest(model))
        assert model.one.grad == 1.5 and model.one.grad.shape == ()
        return seen

    assert len(set(agreed(on_ranks(2, Odd(), body)))) == 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_cast_saturates_and_the_rest_stays(size: int) -> None:
    def body(rank: int, model: nn.Linear) -> tuple[Tensor, Tensor]:
        optimizer = wrap(model, compression="fp16")
        (1e6 * model.weight.sum()).backward()
        optimizer.synchronize()
        sent = model.weight.grad.clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        return sent, residuals(optimizer)["weight"]

    for sent, kept in on_ranks(size, nn.Linear(WIDTH, WIDTH, bias=False), body):
        assert torch.isfinite(sent).all() and (sent > 1e3).all()
        torch.testing.assert_close(sent + kept, torch.full_like(kept, 1e6))


def test_gradients_are_views_of_the_update_and_take_no_memory_of_their_own() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(1))
        places = {name: p.grad.data_ptr() for name, p in model.named_parameters()}
        train(model, optimizer, rank, range(1, 4))
        assert {name: p.grad.data_ptr() for name, p in model.named_parameters()} == places
        assert gradients(model).keys() == places.keys()

    on_ranks(2, seeded(mlp), body)


def test_all_frozen_is_an_error_that_says_so() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        with pytest.raises(ValueError, match="no parameter requires a gradient, so there is"):
            optimizer.step()

    model = seeded(mlp).requires_grad_(False)
    on_ranks(2, model, body)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("options", [*({"compression": name} for name in COMPRESSIONS), {"sync": "updates"}], ids=str)
def test_gradients_wider_than_their_parameters_are_exchanged_as_they_are(options: dict[str, Any]) -> None:
    """`grad_dtype` keeps gradients of 16-bit parameters in 32 bits; plain SGD steps with them."""
    model = seeded(mlp).to(torch.bfloat16)

    def body(rank: int, model: nn.Module) -> tuple[str, list[Tensor]]:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        inner = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
        optimizer = wrap(model, inner, **options)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            local = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.close()
        return digest(model), [*local, *(p.grad for p in model.parameters() if p.grad is not None)]

    ranks = on_ranks(2, model, body)
    assert ranks[0][0] == ranks[1][0]
    if options == {"compression": "none"}:
        count = len(ranks[0][1]) // 2
        for i in range(count):
            assert torch.equal(ranks[0][1][count + i], (ranks[0][1][i] + ranks[1][1][i]) / 2)
