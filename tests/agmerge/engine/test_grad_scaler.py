# SPDX-License-Identifier: Apache-2.0
"""GradScaler: both recipes, to the bit those of scale 1, and one decision about every overflow."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, wrap
from support.dear import dear
from torch import nn

import agmerge
import merging
from agmerge.backends import topology
from agmerge.engine import grad_scaler
from agmerge.errors import TWICE

MODEL = seeded(mlp)
RECIPES = ["horovod", "plain", "plain, clipped"]
OPTIONS: list[dict[str, Any]] = [
    {"compression": "topk"},
    {"compression": "adtopk", "exchange": "oktopk"},
    {"compression": "topk", "exchange": "masked"},
    {"compression": "topk", "exchange": "oktopk", "wire": "int8"},
    {"compression": "topk", "exchange": "two-level"},
    {"compression": "none"},
    {"compression": "dgc"},
    {"compression": "powersgd"},
    {"compression": "acpsgd"},
]


@pytest.fixture(autouse=True)
def _nodes_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")


def scaler_of(scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def several(model: nn.Module, **options: Any) -> agmerge.DistributedOptimizer:
    inner = sgd(model, momentum=0.0 if options.get("compression") == "dgc" else 0.9)
    return wrap(model, inner, **{"compression": "topk", "density": 0.05, "merging": merging.Plan((2, 2, 2)), **options})


def clip(optimizer: Any, model: nn.Module) -> None:
    """Clip by the norm, unless gradients are velocities, which nobody may change."""
    if not optimizer._reducer.exchange.agreed.config.compression.memory.has_momentum:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def finish(recipe: str, optimizer: Any, model: nn.Module, scaler: Any) -> None:
    """From ``backward()`` to the end of the step."""
    if recipe == "horovod":
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        clip(optimizer, model)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        if recipe == "plain, clipped":
            scaler.unscale_(optimizer)
            clip(optimizer, model)
        scaler.step(optimizer)
    scaler.update()


def unscaled(recipe: str, optimizer: Any, model: nn.Module) -> None:
    """The same without a scaler."""
    optimizer.synchronize()
    if recipe != "plain":
        clip(optimizer, model)
    with optimizer.skip_synchronize():
        optimizer.step()


def state(model: nn.Module, optimizer: agmerge.DistributedOptimizer) -> list[Any]:
    momenta = [one["momentum_buffer"] for one in optimizer.state.values() if "momentum_buffer" in one]
    return [digest(model), digest(residuals(optimizer).values()), digest(momenta), optimizer.stats()["steps"]]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_scale_is_scale_one_and_an_overflow_has_never_been(recipe: str, options: dict[str, Any], size: int) -> None:
    """The scale grows every two steps, and falls where one rank overflows: at the first step and at a later one."""

    def body(rank: int, model: nn.Module) -> str:
        twin = copy.deepcopy(model)
        scaler = scaler_of(2.0**12, growth_interval=2)
        ours, reference = several(model, scaler=scaler, **options), several(twin, **options)
        scales = []
        for step in range(5):
            if step in (0, 3):
                before, scale = state(model, ours), scaler.get_scale()
                ours.zero_grad()
                scaler.scale(loss_of(model, rank, 50 + step) * (torch.inf if rank == size - 1 else 1.0)).backward()
                finish(recipe, ours, model, scaler)
                scale = scaler.get_scale() / scale
                assert scale == 0.5
                if step:
                    assert state(model, ours) == before
            ours.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            finish(recipe, ours, model, scaler)
            reference.zero_grad()
            loss_of(twin, rank, step).backward()
            unscaled(recipe, reference, twin)
            assert state(model, ours) == state(twin, reference)
            scales.append(scaler.get_scale())
        assert scales == [2.0**11, 2.0**12, 2.0**12, 2.0**11, 2.0**12]
        assert ours.stats()["steps_skipped"] == 2
        return digest(model) + str(scales)

    agreed(on_ranks(size, MODEL, body))


def test_accumulation_and_no_sync() -> None:
    def body(rank: int, model: nn.Module, scale: float | None, paused: bool) -> str:
        scaler = scaler_of(scale) if scale else torch.amp.GradScaler("cpu", enabled=False)
        optimizer = several(model, scaler=scaler, backward_passes_per_step=1 if paused else 2)
        for step in range(3):
            optimizer.zero_grad()
            if paused:
                with optimizer.no_sync():
                    scaler.scale(loss_of(model, rank, 2 * step)).backward()
            else:
                scaler.scale(loss_of(model, rank, 2 * step)).backward()
            scaler.scale(loss_of(model, rank, 2 * step + 1)).backward()
            if scale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return digest(model) + digest(residuals(optimizer).values())

    found = [
        on_ranks(2, MODEL, lambda rank, model, scale=scale, paused=paused: body(rank, model, scale, paused))
        for scale in (None, 2.0**14)
        for paused in (False, True)
    ]
    assert all(one == found[0] for one in found)  # rank by rank


def test_a_round_that_is_repeated_divides_once() -> None:
    """A rank that has loaded a checkpoint makes all discard their messages and begin anew."""

    def body(rank: int, model: nn.Module, scale: float) -> str:
        scaler = scaler_of(scale)
        optimizer = several(model, scaler=scaler)
        for step in range(3):
            if step == 1 and rank == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
            finish("plain", optimizer, model, scaler)
        return digest(model) + digest(residuals(optimizer).values())

    one, other = (on_ranks(2, MODEL, lambda r, m, s=s: body(r, m, s)) for s in (1.0, 4096.0))
    assert one == other


def test_attached_later_it_is_the_same() -> None:
    def body(rank: int, model: nn.Module, late: bool) -> str:
        scaler = scaler_of()
        optimizer = several(model) if late else several(model, scaler=scaler)
        if late:
            optimizer.attach_scaler(scaler)
            optimizer.attach_scaler(scaler)  # once more changes nothing
        for step, factor in enumerate((1.0, torch.nan, 1.0)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step) * (factor if rank == 0 else 1.0)).backward()
            finish("plain", optimizer, model, scaler)
        assert optimizer.stats()["steps_skipped"] == 1
        return digest(model) + str(scaler.get_scale())

    found = [agreed(on_ranks(2, MODEL, lambda r, m, late=late: body(r, m, late))) for late in (True, False)]
    assert found[0] == found[1]


def test_two_optimizers_share_a_scaler() -> None:
    def body(rank: int, model: nn.Module) -> str:
        other, scaler = copy.deepcopy(model), scaler_of()
        both = [(model, several(model, scaler=scaler)), (other, several(other, compression="none", scaler=scaler))]
        for step in range(3):
            for network, optimizer in both:
                optimizer.zero_grad()
                scaler.scale(loss_of(network, rank, step)).backward()
            for _, optimizer in both:
                scaler.step(optimizer)
            scaler.update()
        return digest(model) + digest(other)

    def alone(rank: int, model: nn.Module) -> str:
        other = copy.deepcopy(model)
        for network, options in ((model, {}), (other, {"compression": "none"})):
            optimizer = several(network, **options)
            for step in range(3):
                optimizer.zero_grad()
                loss_of(network, rank, step).backward()
                optimizer.step()
        return digest(model) + digest(other)

    assert agreed(on_ranks(2, MODEL, body)) == agreed(on_ranks(2, MODEL, alone))


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_step_that_passes_the_scaler_by_is_an_error() -> None:
    def body(rank: int, model: nn.Module) -> None:
        scaler, other = scaler_of(), scaler_of()
        optimizer = several(model, scaler=scaler)
        scaler.scale(loss_of(model, rank, 0)).backward()
        with pytest.raises(agmerge.AGMergeError, match="AGM115"):
            optimizer.step()
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: loss_of(model, rank, 0))
        with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError, match="AGM110"):
            scaler.step(optimizer)
        other.scale(torch.ones(()))
        optimizer.synchronize()
        with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError, match="AGM115"):
            other.step(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)  # none of it has broken anything
        assert digest(model) != digest(MODEL)

    on_ranks(2, MODEL, body)


def test_what_does_not_go_together_is_refused() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(TypeError, match="scaler=3"):
            several(model, scaler=3)
        with pytest.raises(ValueError, match="merging='dear'.*scaler"):
            dear(model, scaler=scaler_of())
        with pytest.raises(ValueError, match="'0.weight' is torch.float16"):
            several(copy.deepcopy(model).half(), scaler=scaler_of())
        optimizer = several(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(agmerge.AGMergeError, match=r"attach_scaler\(\) was called between backward"):
            optimizer.attach_scaler(scaler_of())

    on_ranks(1, MODEL, body)


def test_a_rank_without_the_scaler_is_found() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(agmerge.RankMismatchError, match="scaler: None on rank 0; attached on rank 1"):
            several(model, nonfinite="skip", scaler=scaler_of() if rank else None)

    on_ranks(2, MODEL, body)


def test_with_raise_an_overflow_is_an_error_and_the_scaler_goes_on() -> None:
    def body(rank: int, model: nn.Module) -> None:
        scaler = scaler_of()
        optimizer = several(model, scaler=scaler, nonfinite="raise")
        scaler.scale(loss_of(model, rank, 0) * (torch.inf if rank else 1.0)).backward()
        with pytest.raises(agmerge.NonFiniteError, match="rank 1"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, 0)).backward()
        finish("plain", optimizer, model, scaler)
        assert optimizer.stats()["steps"] == 1

    on_ranks(2, MODEL, body)


def test_the_plain_recipe_does_not_warn_and_horovods_without_skip_synchronize_does() -> None:
    def body(rank: int, model: nn.Module) -> None:
        scaler = scaler_of()
        optimizer = several(model, scaler=scaler)
        for told in (False, True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, 0)).backward()
            if told:
                optimizer.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                scaler.step(optimizer)
            assert [str(one.message) for one in caught if str(one.message) == TWICE] == [TWICE] * told
            scaler.update()

    on_ranks(1, MODEL, body)


def test_scaler_and_optimizer_are_copied() -> None:
    def body(rank: int, model: nn.Module) -> None:
        scaler = scaler_of()
        optimizer = several(model, scaler=scaler)
        scaler.scale(loss_of(model, rank, 0)).backward()
        finish("plain", optimizer, model, scaler)
        for one in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
            inner = sgd(model)
            one.scale(loss_of(model, rank, 1)).backward()
            one.unscale_(inner)  # no optimizer of ours has to do with it
            assert one.get_scale() == scaler.get_scale()
            assert one._per_optimizer_states[id(inner)]["stage"].name == "UNSCALED"
            optimizer.synchronize()
            optimizer.zero_grad()
        other, copied = pickle.loads(pickle.dumps((model, optimizer)))
        other_scaler = copied._options.scaler
        other_scaler.scale(loss_of(other, rank, 1)).backward()
        finish("plain", copied, other, other_scaler)
        assert copied.stats()["steps"] == 2

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fused", [True, False])  # these unscale by themselves, and are stepped by another way
def test_a_scaler_that_was_not_given_is_seen_in_the_first_step(enabled: bool, fused: bool) -> None:
    """Of an optimizer that stays plain, under DistributedDataParallel."""
    model = seeded(mlp)
    plain = torch.optim.AdamW(model.parameters(), fused=fused)
    grad_scaler.refuse_unknown(plain)
    before, scaler = digest(model), scaler_of(enabled=enabled)
    for _ in range(2):
        scaler.scale(loss_of(model, 0, 0)).backward()
        if enabled:
            with pytest.raises(agmerge.AGMergeError, match="scaler=scaler"):
                scaler.step(plain)
            assert digest(model) == before
            scaler = scaler_of(enabled=enabled)
        else:
            scaler.step(plain)
        plain.zero_grad()
    if not enabled:
        assert digest(model) != before


def test_who_steps_without_a_scaler_is_asked_once() -> None:
    model = seeded(mlp)
    plain = sgd(model)
    end = grad_scaler.refuse_unknown(plain)
    loss_of(model, 0, 0).backward()
    plain.step()
    scaler_of().scale(loss_of(model, 0, 0)).backward()
    end()
    assert not plain._optimizer_step_pre_hooks
