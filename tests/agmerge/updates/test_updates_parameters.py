# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` with parameters of every kind: invariants 1 to 3 hold for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import (
    WIDTH,
    AwkwardModel,
    Parts,
    agreed,
    awkward_batch,
    awkward_groups,
    digest,
    mlp,
    on_ranks,
    seeded,
    sgd,
)
from support.updates import assert_common, assert_kept, base_of, reducer_of, updating, watched
from torch import Tensor, nn

import agmerge
from agmerge.updates.shared_parameters import UnsentInParameters, UnsentInResidual

OPTIONS: list[dict[str, Any]] = [
    {"exchange": "sparse"},
    {"exchange": "sparse", "carry": "hold"},
    {"exchange": "sparse", "wire": "sign", "merging": "single"},
    {"exchange": "oktopk", "sparsify": "ahead"},
    {"exchange": "oktopk", "wire": "sign"},
    {"exchange": "masked", "merging": "layerwise"},
    {"exchange": "masked", "wire": "int4"},
    {"exchange": "auto", "compression": "none"},
    {"exchange": "sparse", "every": 3, "fragments": 2, "merging": "layerwise"},
]


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


# -- everything that is awkward -----------------------------------------------------------------------------------


def backward_of_awkward(model: AwkwardModel, rank: int, step: int) -> None:
    if step == 3:
        model.unfreeze()
    model.loss(awkward_batch(rank, step), rank, step).backward()


@pytest.mark.parametrize("half", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=described)
def test_awkward_models_lose_nothing(options: dict[str, Any], half: torch.dtype) -> None:
    """Tied, unused, of one rank only, alternating, unfrozen, channels_last, of no elements, of 0 to 4 dimensions."""
    narrow = half != torch.float32

    def body(rank: int, model: AwkwardModel) -> Any:
        inner = torch.optim.SGD(awkward_groups(model), lr=0.05, momentum=0.9)
        optimizer = updating(model, inner, density=0.05, **options)
        shared = reducer_of(optimizer).replica.shared
        seen = watched(rank, model, optimizer, range(6), backward_of_awkward)
        assert type(shared) is (UnsentInResidual if narrow or "carry" in options else UnsentInParameters)
        assert "late.weight" in base_of(optimizer) and "frozen.weight" not in base_of(optimizer)
        assert all(base.dtype.itemsize >= 4 for base in base_of(optimizer).values())
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(3, seeded(lambda: AwkwardModel(half)), body), strict=True)
    agreed(list(digests))
    assert_kept(seen, equal=options.get("carry") == "hold", roundings=4.0)


@pytest.mark.parametrize("carry", ["apply", "hold"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_models_of_another_dtype_lose_nothing(dtype: torch.dtype, carry: str) -> None:
    """With 16 bits, what is carried is kept beside parameters, and they show it, rounded, where it is applied."""

    def body(rank: int, model: nn.Module) -> Any:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = updating(model, inner, carry=carry, exchange="sparse", density=0.05)
        seen = watched(rank, model, optimizer, range(5))
        for name, parameter in model.named_parameters():
            base, exchange = base_of(optimizer)[name], reducer_of(optimizer).exchange
            residual = exchange.agreed.residual_of(name)
            if dtype == torch.float64:
                assert base.dtype == torch.float64
            elif carry == "apply" and residual is not None:
                assert torch.equal(parameter, (base - residual).to(dtype))
            else:
                assert torch.equal(parameter, base.to(dtype))
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(3, seeded(mlp).to(dtype), body), strict=True)
    agreed(list(digests))
    assert_kept(seen, equal=carry == "hold")
    assert seen[0][-1].carried > 0


# -- strides, and complex numbers -------------------------------------------------------------------------------------


class Strided(nn.Module):
    """Parameters that are not in C order: a transposed one, every other column of one, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(64, WIDTH).t())
        self.columns = nn.Parameter(torch.randn(64, 2 * WIDTH) / 8)  # every other one, see `thinned`
        self.small = nn.Parameter(torch.randn(8, 64).t())
        self.conv = nn.Conv2d(8, 16, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wave = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def thinned(self) -> Strided:
        """Leave out every other column: a copy of the model would close the gaps."""
        self.columns = nn.Parameter(self.columns.detach()[:, ::2])
        return self

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x.view(-1, 8, 2, 2)).mean(dim=(1, 2, 3))
        x = torch.tanh(x @ self.transposed) @ self.columns
        x = torch.tanh(torch.cat([x, x], dim=1)) @ self.small
        return torch.cat([(x * self.wave).abs(), seen[:, None] + x[:, :2]], dim=1)


@pytest.mark.parametrize("options", [*OPTIONS, {"exchange": "sparse", "overlap": 1}], ids=described)
def test_strided_and_complex_parameters_lose_nothing(options: dict[str, Any]) -> None:
    def body(rank: int, model: Strided) -> Any:
        inner = torch.optim.SGD(model.thinned().parameters(), lr=0.05, momentum=0.9)
        strides = [p.stride() for p in model.parameters()]
        optimizer = updating(model, inner, density=0.05, **options)
        seen = watched(rank, model, optimizer, range(6))
        assert [p.stride() for p in model.parameters()] == strides
        assert not model.transposed.is_contiguous() and not model.columns.is_contiguous()
        assert_common(optimizer)
        return seen, digest(p.resolve_conj() for p in model.parameters())

    seen, digests = zip(*on_ranks(2, seeded(Strided), body), strict=True)
    agreed(list(digests))
    assert_kept(seen, equal=options.get("carry") == "hold", roundings=4.0)
    assert seen[0][-1].base != seen[0][1].base


# -- parameters that come later ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"carry": "hold"}, {"overlap": 1}, {"every": 2}], ids=described)
def test_groups_that_are_added_begin_with_what_is_common(options: dict[str, Any]) -> None:
    """``a`` is unfrozen, ``b`` added as a group, ``trunk`` frozen for two steps; ``b`` is used by rank 1 alone."""

    def learn(model: Parts, rank: int, step: int) -> None:
        use = ("a" if step >= 2 else "") + ("b" if rank == 1 and step >= 4 else "")
        model.loss(rank, step, use).backward()

    def body(rank: int, model: Parts) -> Any:
        model.a.requires_grad_(False)
        first = [p for name, p in model.named_parameters() if not name.startswith("b")]
        inner = torch.optim.AdamW(first, lr=0.01)
        optimizer = updating(model, inner, density=0.05, **options)
        seen = []
        for step in range(8):
            if step == 2:
                model.a.requires_grad_()
            if step == 4:
                optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.02})
            model.trunk.requires_grad_(step not in (5, 6))
            seen += watched(rank, model, optimizer, [step], learn)
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(2, seeded(Parts), body), strict=True)
    agreed(list(digests))
    assert_kept(seen, equal=options.get("carry") == "hold")


@pytest.mark.parametrize("change", ["frozen", "unfrozen"])
def test_an_outer_momentum_goes_on_where_parameters_come_and_go(change: str) -> None:
    """To the bit as if nothing had happened: ``b`` is of no use."""

    def body(rank: int, model: Parts, changes: bool) -> str:
        model.b.requires_grad_(not changes or change == "frozen")
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = updating(model, inner, carry="hold", compression="none", outer=agmerge.Nesterov(), every=2)
        for step in range(8):
            if step == 3 and changes:
                model.b.requires_grad_(change == "unfrozen")
            optimizer.zero_grad()
            model.loss(rank, step, "a").backward()
            optimizer.step()
        return digest([*model.trunk.parameters(), *model.a.parameters(), *model.head.parameters()])

    model = seeded(Parts)
    runs = [agreed(on_ranks(2, model, lambda rank, m, c=c: body(rank, m, c))) for c in (False, True)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("carry", ["apply", "hold"])
def test_what_was_frozen_is_shared_saved_consolidated_and_goes_on(carry: str) -> None:
    """``trunk`` is frozen after three steps, with something carried of it; after a restart it is unfrozen again."""

    def body(rank: int, model: Parts) -> list[Any]:
        def wrapped() -> Any:
            return updating(model, torch.optim.SGD(model.parameters(), lr=0.1), carry=carry, density=0.02)

        def steps(*numbers: int) -> None:
            for step in numbers:
                optimizer.zero_grad()
                model.loss(rank, step, "a").backward()
                optimizer.step()

        optimizer = wrapped()
        steps(0, 1, 2)
        model.trunk.requires_grad_(False)
        steps(3, 4)
        optimizer.stats()
        with optimizer.shared():
            seen = [digest(model)]
        bits, state = digest(model), optimizer.state_dict()
        optimizer.close()
        optimizer = wrapped()
        optimizer.load_state_dict(state)
        assert digest(model) == bits
        with optimizer.shared():
            assert digest(model) == seen[0]
        optimizer.consolidate()
        seen.append(digest(model))
        model.trunk.requires_grad_()
        steps(5, 6)
        seen.append(digest(base_of(optimizer).values()))
        return seen

    seen = agreed(on_ranks(2, seeded(Parts), body))
    assert len(set(seen)) == 3


CHANGES = [("topk", "randomk"), ("topk", "none"), ("none", "topk"), ("fp16", "topk"), ("topk", "fp16")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("carry", ["apply", "hold"])
@pytest.mark.parametrize("first, second", CHANGES, ids=lambda name: name)
def test_another_compressor_goes_on_with_what_is_carried(
    first: str, second: str, carry: str, dtype: torch.dtype
) -> None:
    """Also where that is kept elsewhere then, and where parameters are frozen after it."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, sgd(model, momentum=0.0), compression=first, carry=carry)
        seen = watched(rank, model, optimizer, range(3))
        optimizer.set_compressor(second, density=0.05 if second in ("topk", "randomk") else None)
        model[4].bias.requires_grad_(False)
        seen += watched(rank, model, optimizer, range(3, 6))
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(2, seeded(mlp).to(dtype), body), strict=True)
    agreed(list(digests))
    rounding = 2.0**13 if "fp16" in (first, second) else 1.0  # a sum in 16 bits is rounded for all alike
    assert_kept(seen, roundings=4.0 * rounding)
