# SPDX-License-Identifier: Apache-2.0
"""``clip_grad_norm_()``: as torch clips averaged gradients, to the bit, in one exchange a step; local for updates."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import (
    agreed,
    backward,
    digest,
    gradients,
    loss_of,
    mlp,
    on_ranks,
    same_bits,
    seeded,
    sgd,
    strict_warnings,
    wrap,
)
from support.buckets import connected, passed
from support.dear import dear
from support.several_optimizers import average, both
from support.updates import updating
from test_gathered import MODEL as BAG
from test_gathered import loss_of as loss_of_bag
from test_gathered import pair as pair_of_bag
from torch import nn

import agmerge
from agmerge.engine.gradient_clipping import clip, clipping_as_mean
from agmerge.engine.update_reducer import UpdateReducer

MODEL = seeded(mlp)
BOUND = 0.05
KINDS: dict[str, dict[str, Any]] = {
    "none": {"compression": "none"},
    "topk": {"compression": "topk", "density": 0.05},
    "eden-2": {"compression": "eden-2"},
    "two passes": {"compression": "topk", "density": 0.05, "backward_passes_per_step": 2},
    "sum": {"compression": "eden-2", "op": agmerge.Sum},
}
Clip = Callable[[Any, nn.Module], Any]


@pytest.fixture
def _noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of gradients with a quarter of the energy of one of them."""
    monkeypatch.setattr(UpdateReducer, "norm_ratio", property(lambda self: 0.5))


def ours(optimizer: Any, model: nn.Module) -> Any:
    return optimizer.clip_grad_norm_(BOUND)


def recipe(optimizer: Any, model: nn.Module) -> torch.Tensor:
    """What a script wrote for it before."""
    optimizer.synchronize()
    return nn.utils.clip_grad_norm_(model.parameters(), BOUND)


def run(size: int, options: dict[str, Any], clips: Clip, passes: int = 1, model: nn.Module = MODEL) -> Any:
    """The norms and digests of some steps, and what has been sent; the same on all ranks."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, seen = wrap(model, **options), []
        for step in range(5):
            optimizer.zero_grad()
            for number in range(passes):
                backward(model, rank, passes * step + number)
            norm = clips(optimizer, model)
            with optimizer.skip_synchronize() if clips is recipe else nullcontext():
                optimizer.step()
            seen.append((float(norm), digest(model)))
        figures = optimizer.stats()
        return seen, figures["steps"], figures["buffers"], figures["bytes_sent"]

    return agreed(on_ranks(size, model, body))


@pytest.mark.parametrize("size", [2, 1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_torchs_clipping_of_combined_gradients_in_one_exchange_a_step(name: str, size: int) -> None:
    """To the bit, and without the warnings that torch's function gets after ``synchronize()``."""
    options = KINDS[name]
    passes = options.get("backward_passes_per_step", 1)
    with strict_warnings():
        found = run(size, options, ours, passes)
    seen, steps, *_ = found
    assert steps == 5 and min(norm for norm, _ in seen) > BOUND and len({bits for _, bits in seen}) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # AGM125, of sparsifiers
        assert found == run(size, options, recipe, passes)


@pytest.mark.parametrize("size", [2, 4])
def test_uncompressed_it_is_what_one_process_does_with_the_averages(size: int) -> None:
    seen, *_ = run(size, {"compression": "none", "dense_sum": "ordered"}, ours)
    twin = copy.deepcopy(MODEL)
    plain = sgd(twin)
    for step, (norm, bits) in enumerate(seen):
        average(twin, size, step)
        assert float(nn.utils.clip_grad_norm_(twin.parameters(), BOUND)) == norm
        plain.step()
        assert digest(twin) == bits


def test_a_bound_that_does_not_bind_changes_no_bit() -> None:
    def measured(optimizer: Any, model: nn.Module) -> Any:
        return optimizer.clip_grad_norm_(math.inf)

    def nothing(optimizer: Any, model: nn.Module) -> torch.Tensor:
        return torch.zeros(())

    clipped, plain = (run(2, {"compression": "eden-2"}, clips) for clips in (measured, nothing))
    assert [bits for _, bits in clipped[0]] == [bits for _, bits in plain[0]] and clipped[1:] == plain[1:]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_norms_and_narrow_gradients_are_as_with_torch(norm_type: float, dtype: torch.dtype) -> None:
    def other(optimizer: Any, model: nn.Module) -> Any:
        return optimizer.clip_grad_norm_(BOUND, norm_type=norm_type)

    def torchs(optimizer: Any, model: nn.Module) -> torch.Tensor:
        optimizer.synchronize()
        return nn.utils.clip_grad_norm_(model.parameters(), BOUND, norm_type)

    options, model = {"compression": "none"}, copy.deepcopy(MODEL).to(dtype)
    found = run(2, options, other, model=model)
    with pytest.warns(UserWarning, match="AGM105"):
        assert found == run(2, options, torchs, model=model)


def test_several_optimizers_are_clipped_together() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        twin = copy.deepcopy(model)
        one, other = both(model, compression="none", density=None), both(twin, compression="none", density=None)
        for step in range(3):
            for each, optimizer in ((model, one), (twin, other)):
                optimizer.zero_grad()
                backward(each, rank, step)
            norm = one.clip_grad_norm_(BOUND)
            one.step()
            other.synchronize()
            parameters = [parameter for group in other.param_groups for parameter in group["params"]]
            assert same_bits(norm, nn.utils.clip_grad_norm_(parameters, BOUND))
            with other.skip_synchronize():
                other.step()
        assert digest(model) == digest(twin)
        return digest(model)

    with strict_warnings():
        agreed(on_ranks(2, MODEL, body))


def test_a_step_that_is_dropped_after_clipping_leaves_nothing_behind() -> None:
    """The next one is exchanged, and may use the older recipe."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrap(model, compression="none")
        backward(model, rank, 0)
        optimizer.clip_grad_norm_(BOUND)
        optimizer.zero_grad()
        backward(model, rank, 1)
        optimizer.synchronize()
        optimizer.step()
        return digest(model)

    with pytest.warns(UserWarning, match="AGM105"):
        agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("options", [{"compression": "none"}, {"compression": "topk", "density": 0.05}], ids=str)
def test_an_attached_scaler_unscales_first(options: dict[str, Any], unscales: bool) -> None:
    """Here or by the script: to the bit what there is without a scaler; and an overflow is skipped on all ranks."""

    def body(rank: int, model: nn.Module) -> Any:
        twin, start = copy.deepcopy(model), digest(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled, plain = wrap(model, scaler=scaler, **options), wrap(twin, **options)
        for step in range(3):
            for each, optimizer in ((model, scaled), (twin, plain)):
                optimizer.zero_grad()

                loss = loss_of(each, rank, step)
                (scaler.scale(loss) if optimizer is scaled else loss).backward()
            if unscales:
                scaler.unscale_(scaled)
            norm = scaled.clip_grad_norm_(BOUND)
            assert same_bits(norm, plain.clip_grad_norm_(BOUND)) and norm > BOUND
            scaler.step(scaled)
            scaler.update()
            plain.step()
            assert digest(model) == digest(twin) != start
        scaled.zero_grad()
        scaler.scale(loss_of(model, rank, 3) * (math.inf if rank == 0 else 1.0)).backward()
        assert not math.isfinite(scaled.clip_grad_norm_(BOUND))
        scaler.step(scaled)
        scaler.update()
        assert digest(model) == digest(twin) and scaler.get_scale() == 512.0
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


# -- what cannot be clipped -----------------------------------------------------------------------------------------


def test_a_velocity_is_refused_on_every_rank_before_anything_is_sent() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="dgc", density=0.05)
        backward(model, rank, 0)
        with pytest.raises(ValueError, match=r"AGM125: clip_grad_norm_\(\) .* velocity") as caught:
            optimizer.clip_grad_norm_(BOUND)
        optimizer.step()  # which goes on
        assert optimizer.stats()["steps"] == 1
        return f"{caught.value} {digest(model)}"

    said = agreed(on_ranks(2, MODEL, body))
    for way_out in ("sparsifiers.memory('dgc', clipping=", "compression='eden'", "memory='residual'"):
        assert way_out in said


def test_dear_is_refused_and_goes_on() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = dear(model)
        backward(model, rank, 0)
        with pytest.raises(ValueError, match=r"clip_grad_norm_\(\): not supported with merging='dear'"):
            optimizer.clip_grad_norm_(BOUND)
        optimizer.step()
        optimizer.flush()
        return digest(model)

    assert agreed(on_ranks(2, MODEL, body)) != digest(MODEL)


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_bound_that_is_none_is_refused(bound: float) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression="none")
        with pytest.raises(ValueError, match="max_norm=.*not negative"):
            optimizer.clip_grad_norm_(bound)

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("sync", ["gradients", "updates"])
def test_without_gradients_the_norm_is_zero_as_with_torch(sync: str) -> None:
    def body(rank: int, model: nn.Module) -> float:
        optimizer = wrap(model, compression="none", sync=sync)
        return float(optimizer.clip_grad_norm_(BOUND))

    with pytest.warns(UserWarning, match="AGM112") if sync == "gradients" else nullcontext():
        assert agreed(on_ranks(2, MODEL, body)) == 0.0


def test_a_norm_that_is_not_finite_is_the_same_error_on_all_ranks() -> None:
    def body(rank: int, model: nn.Module) -> str:
        before = digest(model)
        optimizer = wrap(model, compression="none", nonfinite="skip")
        backward(model, rank, 0)
        optimizer.synchronize()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.inf)
        with pytest.raises(RuntimeError, match="non-finite") as caught:
            optimizer.clip_grad_norm_(BOUND, error_if_nonfinite=True)
        assert not math.isfinite(optimizer.clip_grad_norm_(BOUND))
        optimizer.zero_grad()
        assert digest(model) == before
        return str(caught.value)

    agreed(on_ranks(2, MODEL, body))


# -- sparse gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sync": "updates"}], ids=str)
def test_sparse_gradients_count_and_are_scaled(options: dict[str, Any]) -> None:
    """Those with duplicate indices too: their norm is that of the sum."""

    def body(rank: int, model: Any) -> None:
        inner: Any = pair_of_bag(model)
        if options:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = wrap(model, inner, compression="none", **options)
        loss_of_bag(model, rank, 0).backward()
        if not options:
            optimizer.synchronize()
        dense = [parameter.grad.to_dense().clone() for parameter in model.parameters()]
        exact = torch.cat([gradient.reshape(-1) for gradient in dense]).double().norm()
        norm = optimizer.clip_grad_norm_(float(exact) / 4)
        assert float(norm) == pytest.approx(float(exact), rel=1e-6)
        for parameter, before in zip(model.parameters(), dense, strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), before / 4, rtol=1e-4, atol=0.0)
        assert model.words.weight.grad.is_sparse
        optimizer.step()

    on_ranks(2, BAG, body)


# -- sync="updates" -------------------------------------------------------------------------------------------------


def test_updates_are_clipped_locally_as_torch_does() -> None:
    """Only rank 0 calls it, and no rank waits."""

    def body(rank: int, model: nn.Module) -> None:
        twin = copy.deepcopy(model)
        optimizer = updating(model)
        for each in (model, twin):
            backward(each, rank, 0)
        if rank == 0:
            norm = optimizer.clip_grad_norm_(BOUND)
            assert same_bits(norm, nn.utils.clip_grad_norm_(twin.parameters(), BOUND)) and norm > BOUND
        ours, theirs = gradients(model), gradients(twin)
        assert all(same_bits(one, theirs[name]) for name, one in ours.items())  # type: ignore[arg-type]
        optimizer.step()

    with strict_warnings():
        on_ranks(2, MODEL, body)


Holder = Callable[[nn.Module], Any]


def local_sync(model: nn.Module) -> Any:
    return agmerge.LocalSync(model, torch.optim.AdamW(model.parameters()), every=2)


def local_optimizer(model: nn.Module) -> Any:
    return agmerge.LocalOptimizer(torch.optim.AdamW(model.parameters()), model.named_parameters(), every=2)


@pytest.mark.usefixtures("_noisy")
@pytest.mark.parametrize("holder", [updating, local_sync, local_optimizer])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 2.0])
def test_the_bound_is_of_the_means_norm(holder: Holder, share: float) -> None:
    """Which is half of the own gradient's: a bound of three quarters of that does not bind."""

    def body(rank: int, model: nn.Module) -> None:
        with holder(model) if holder is local_sync else nullcontext(holder(model)) as exchanging:
            backward(model, rank, 0)
            before = [one.clone() for one in gradients(model).values() if one is not None]
            exact = float(torch.cat([one.reshape(-1) for one in before]).double().norm())
            norm = exchanging.clip_grad_norm_(share * exact)
            assert float(norm) == pytest.approx(0.5 * exact, rel=1e-6)
            for parameter, gradient in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(parameter.grad, gradient * min(1.0, 2 * share), rtol=1e-4, atol=0.0)

    on_ranks(2, MODEL, body)


def test_an_infinite_gradient_of_a_worker_leaves_out_its_step() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer, before = updating(model, nonfinite="skip"), digest(model)
        backward(model, rank, 0)
        if rank == 0:
            parameter = next(model.parameters())
            parameter.grad = torch.full_like(parameter, math.inf)
        optimizer.clip_grad_norm_(BOUND)
        optimizer.register_step_pre_hook(lambda *_: pytest.fail("stepped") if rank == 0 else None)
        optimizer.step()
        assert digest(model) != before  # by what the other has sent

    on_ranks(2, MODEL, body)


# -- models in DistributedDataParallel, and frameworks --------------------------------------------------------------


@pytest.mark.usefixtures("_noisy")
def test_a_frameworks_clipping_bounds_the_means_norm_of_this_models_parameters_alone() -> None:
    (reducer,) = on_ranks(1, MODEL, lambda rank, model: updating(model)._reducer)
    parameters = reducer.members.name_all()
    stranger = nn.Linear(3, 3)
    seen: list[Any] = []

    def framework(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        seen.append((list(parameters), max_norm, norm_type))
        return torch.tensor(8.0)

    def no_norm(parameters: Any, max_norm: float) -> None: ...

    clipped = clipping_as_mean(framework, lambda: reducer)
    assert float(clipped(iter(parameters), 1.0, norm_type=3)) == 4.0
    assert float(clipped(stranger.weight, 1.0)) == 8.0
    assert float(clipping_as_mean(framework, lambda: None)(parameters, 1.0)) == 8.0
    assert [bound for _, bound, _ in seen] == [2.0, 1.0, 1.0] and seen[0][2] == 3
    assert all(one is other for one, other in zip(seen[0][0], parameters, strict=True))
    assert clipping_as_mean(no_norm, lambda: reducer)(parameters, max_norm=1.0) is None


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_buckets_are_clipped_as_they_are(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        reducer = connected(model, compression=compression)
        backward(model, rank, 0)
        passed(reducer, model)
        twin = copy.deepcopy(model)
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = None if parameter.grad is None else parameter.grad.clone()
        reducer.prepare_clipping(None)
        norm = clip(reducer.members.name_all(), BOUND)
        assert same_bits(norm, nn.utils.clip_grad_norm_(twin.parameters(), BOUND))
        return digest(one for one in gradients(model).values() if one is not None)

    agreed(on_ranks(2, MODEL, body))


def test_buckets_with_a_scaler_need_its_optimizer() -> None:
    def body(rank: int, model: nn.Module) -> None:
        reducer = connected(model, compression="none", scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(ValueError, match="requires optimizer="):
            reducer.prepare_clipping(None)

    on_ranks(2, MODEL, body)
