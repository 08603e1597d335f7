# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/with_pytorch.md and docs/from_horovod.md, against one process that sees all batches."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, batch, digest, loss_of, mlp, on_ranks, seeded, sgd, wrap
from torch import nn
from torch.nn import functional as F

import agmerge
from agmerge import testing

MODEL = seeded(mlp, 31)
RANKS = 3


def joint(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [batch(rank, step) for rank in range(RANKS)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def single(steps: int, backward: Callable[[nn.Module, torch.optim.Optimizer, int], None]) -> list[torch.Tensor]:
    """Parameters after steps of one process."""
    model = copy.deepcopy(MODEL)
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, optimizer, step)
        optimizer.step()
    return list(model.parameters())


def assert_trained_as(expected: list[torch.Tensor], found: list[nn.Module]) -> None:
    agreed([digest(model) for model in found])
    for p, other in zip(found[0].parameters(), expected, strict=True):
        assert torch.allclose(p, other, rtol=1e-5, atol=1e-6)


def test_clipping() -> None:
    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        x, y = joint(step)
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def body(rank: int, model: nn.Module) -> nn.Module:
        optimizer = wrap(model, compression="none")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        return model

    assert_trained_as(single(4, clipped), on_ranks(RANKS, MODEL, body))


@pytest.mark.parametrize("how", ["backward_passes_per_step", "no_sync"])
def test_accumulation_adds_so_the_loss_is_divided(how: str) -> None:
    def halves(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for half in range(2):
            x, y = joint(2 * step + half)
            (F.cross_entropy(model(x), y) / 2).backward()

    def body(rank: int, model: nn.Module) -> nn.Module:
        passes = {"backward_passes_per_step": 2} if how == "backward_passes_per_step" else {}
        optimizer = wrap(model, compression="none", **passes)
        for step in range(3):
            optimizer.zero_grad()
            if how == "no_sync":
                with optimizer.no_sync():
                    (loss_of(model, rank, 2 * step) / 2).backward()
            else:
                (loss_of(model, rank, 2 * step) / 2).backward()
            (loss_of(model, rank, 2 * step + 1) / 2).backward()
            optimizer.step()
        return model

    assert_trained_as(single(3, halves), on_ranks(RANKS, MODEL, body))


def adversaries() -> nn.ModuleDict:
    return nn.ModuleDict({"g": nn.Linear(8, 32), "d": nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))})


def test_two_models_against_each_other() -> None:
    """One of two backward passes of D is accumulated, and G's goes through D without counting."""

    def losses(pair: Any, noise: torch.Tensor, real: torch.Tensor) -> Any:
        fake = pair["g"](noise)
        yield F.softplus(-pair["d"](real)).mean()
        yield F.softplus(pair["d"](fake.detach())).mean()
        yield F.softplus(-pair["d"](fake)).mean()

    def inputs(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(4, 8, generator=source), torch.randn(4, 32, generator=source)

    start = seeded(adversaries)
    alone: Any = copy.deepcopy(start)
    plain_d, plain_g = sgd(alone["d"]), sgd(alone["g"])
    for step in range(3):
        parts = [inputs(rank, step) for rank in range(RANKS)]
        noise, real = torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])
        steps = losses(alone, noise, real)
        plain_d.zero_grad()
        next(steps).backward()
        next(steps).backward()
        plain_d.step()
        plain_g.zero_grad()
        next(steps).backward()
        plain_g.step()

    def body(rank: int, pair: Any) -> nn.Module:
        d_optimizer = wrap(pair["d"], sgd(pair["d"]), compression="none", backward_passes_per_step=2)
        g_optimizer = wrap(pair["g"], sgd(pair["g"]), compression="none")
        for step in range(3):
            steps = losses(pair, *inputs(rank, step))
            d_optimizer.zero_grad()
            next(steps).backward()
            next(steps).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            with d_optimizer.no_sync():
                next(steps).backward()
            g_optimizer.step()
        return pair  # type: ignore[no-any-return]

    assert_trained_as(list(alone.parameters()), on_ranks(RANKS, start, body))


def test_a_checkpoint_by_rank_resumes_to_the_bit() -> None:
    def steps(model: nn.Module, optimizer: Any, rank: int, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        twin = copy.deepcopy(model)
        optimizer, file = wrap(model, compression="topk"), io.BytesIO()
        steps(model, optimizer, rank, range(3))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        steps(model, optimizer, rank, range(3, 6))
        optimizer.close()
        file.seek(0)
        saved, again = torch.load(file, weights_only=True), wrap(twin, compression="topk")
        twin.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
        steps(twin, again, rank, range(3, 6))
        return digest(model), digest(twin)

    for whole, resumed in on_ranks(RANKS, MODEL, body):
        assert whole == resumed


@pytest.mark.parametrize("given", ["object", "name"])
def test_a_script_that_was_horovods_is_told_once_that_it_sends_everything(given: str) -> None:
    """All of Horovod's examples pass ``hvd.Compression.none``."""

    def body(rank: int) -> list[str]:
        model = copy.deepcopy(MODEL)
        wrap(model, compression=agmerge.Compression.none if given == "object" else "none")
        return []

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        testing.run(2, body)
    told = [str(one.message) for one in seen if "AGM704" in str(one.message)]
    assert len(told) == (1 if given == "object" else 0)


def test_what_only_horovod_has_says_where_to_look() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nccl_built': it belongs to Horovod. Instead: backend_name"):
        agmerge.nccl_built  # noqa: B018
    for name in ("is_homogeneous", "mpi_threads_supported", "rocm_built", "cross_rank", "start_timeline"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': it belongs to Horovod. Instead: "):
            getattr(agmerge, name)
    with pytest.raises(AttributeError, match="it belongs to Horovod. With horovodrun, use horovod.torch.elastic"):
        agmerge.elastic.run  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        agmerge.nothing  # noqa: B018
