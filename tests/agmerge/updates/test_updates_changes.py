# SPDX-License-Identifier: Apache-2.0
"""What changes while updates are exchanged: the compressor, the number of workers, parameters. Nothing is lost."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded, train, wrap
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)
SMALL = merging.get("threshold", bytes=4096)


def started(model: nn.Module, inner: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    inner = inner or torch.optim.AdamW(model.parameters(), lr=0.01)
    return wrap(model, inner, **{"sync": "updates", "compression": "topk", "merging": SMALL, **options})


class Steps:
    """What the optimizer's own steps add up to, in float64, by name."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.start = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        self.moved = {name: torch.zeros_like(start) for name, start in self.start.items()}
        self._model, self._before = model, dict[str, Tensor]()
        optimizer.register_step_pre_hook(lambda *_: self._before.update(self._now()))
        optimizer.register_step_post_hook(lambda *_: self._add())

    def _now(self) -> dict[str, Tensor]:
        return {name: p.detach().double() for name, p in self._model.named_parameters()}

    def _add(self) -> None:
        for name, p in self._now().items():
            self.moved[name] += p - self._before[name]


def assert_mean(models: list[dict[str, Tensor]], steps: list[Steps], atol: float = 2e-6) -> None:
    """After consolidate(): all have what they began with and the mean of all steps."""
    agreed([digest(model.values()) for model in models])
    for name, p in models[0].items():
        expected = steps[0].start[name] + torch.stack([one.moved[name] for one in steps]).mean(0)
        torch.testing.assert_close(p.double(), expected, rtol=0, atol=atol, msg=name)


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -- the compressor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["topk", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"carry": "hold"}, {"every": 3}, {"every": 3, "carry": "hold"}], ids=str)
def test_another_compressor_sends_what_was_left(options: dict[str, Any], dtype: torch.dtype, first: str) -> None:
    """sparse -> none -> sparse, and the other way round: what is carried is neither lost nor counted twice."""

    def body(rank: int, model: nn.Module) -> Any:
        model.to(dtype)
        optimizer = started(model, torch.optim.SGD(model.parameters(), lr=0.25), compression=first, **options)
        steps = Steps(model, optimizer)
        train(model, optimizer, rank, range(4))
        for step, compression in enumerate(("none", "topk", "none", "redsync", "topk")):
            optimizer.set_compressor(compression)
            train(model, optimizer, rank, range(4 + 2 * step, 6 + 2 * step))
        unsent = testing.inspect(optimizer).residuals
        assert any(kept.any() for kept in unsent.values())
        optimizer.consolidate()
        with torch.no_grad():
            base = {
                name: tensor.clone() for name, tensor in optimizer.state_dict()["agmerge"]["updates"]["base"].items()
            }
        return named(model), steps, base

    models, steps, bases = zip(*on_ranks(2, MODEL, body), strict=True)
    agreed([digest(model.values()) for model in models])
    if dtype is torch.float32:
        assert_mean(list(models), list(steps))
    else:  # the optimizer's own steps are rounded to 16 bits; what is exchanged of them is not
        assert_mean(list(bases), list(steps), atol=2e-2 if options.get("carry") == "hold" else 1e-2)


def test_with_overlap_what_is_under_way_arrives_first() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, overlap=1)
        steps = Steps(model, optimizer)
        train(model, optimizer, rank, range(4))
        optimizer.set_compressor("none")
        train(model, optimizer, rank, range(4, 6))
        optimizer.set_compressor("adtopk", density=0.2)
        train(model, optimizer, rank, range(6, 9))
        optimizer.consolidate()
        return named(model), steps

    models, steps = zip(*on_ranks(3, MODEL, body), strict=True)
    assert_mean(list(models), list(steps))


def test_another_compressor_brings_its_own_schedule_and_moments() -> None:
    """Quantized updates are late, with moments in the scale of the mean; others are neither. Nothing is lost."""

    def kept(optimizer: Any) -> tuple[int, str, bool]:
        updates = optimizer._reducer.exchange.agreed.config.sync.updates
        names = [slot.name for slot in optimizer._reducer.exchange.agreed.buffers.layout.slots]
        measures = any(name.startswith("agmerge: measured") for name in names)
        return updates.overlap, optimizer.stats()["moments"]["kept"], measures

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, compression="auto", exchange="sparse", merging="agmerge")
        steps, found = Steps(model, optimizer), list[Any]()
        for number, compression in enumerate((None, "topk", "eden-2", "none")):
            if compression is not None:
                optimizer.set_compressor(compression)
            train(model, optimizer, rank, range(4 * number, 4 * number + 4))
            found.append(kept(optimizer))
        optimizer.consolidate()
        return named(model), steps, found

    models, steps, found = zip(*on_ranks(2, MODEL, body), strict=True)
    quantized, other = (1, "mean", True), (0, "own", False)
    assert found[0] == found[1] == [quantized, other, quantized, other]
    assert_mean(list(models), list(steps))


def test_a_compressor_that_ranks_disagree_on_is_refused_and_nothing_has_changed() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        steps = Steps(model, optimizer)
        train(model, optimizer, rank, range(3))
        with pytest.raises(agmerge.RankMismatchError, match="density: 0.1 on rank 0; 0.2 on rank 1"):
            optimizer.set_compressor("topk", density=0.1 * (rank + 1))
        with pytest.raises(ValueError, match="memory='dgc' .*sync='updates'.*Remove it"):
            optimizer.set_compressor("topk", memory="dgc")
        train(model, optimizer, rank, range(3, 5))
        optimizer.consolidate()
        return named(model), steps

    models, steps = zip(*on_ranks(2, MODEL, body), strict=True)
    assert_mean(list(models), list(steps))


# -- another number of workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"carry": "hold"}, {"every": 4}, {"overlap": 1}], ids=str)
@pytest.mark.parametrize("sizes", [(3, 2), (2, 1)], ids=str)
def test_survivors_carry_more_or_less_after_init(
    sizes: tuple[int, int], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """W'/W times as much: its part of the mean is what it was."""
    before, now = sizes
    models = [copy.deepcopy(MODEL).to(dtype) for _ in range(before)]
    kept: dict[int, Any] = {}

    def first(rank: int) -> Any:
        optimizer = kept[rank] = started(models[rank], **options)
        train(models[rank], optimizer, rank, range(6))
        return {name: tensor.clone() for name, tensor in testing.inspect(optimizer).residuals.items()}

    def second(rank: int) -> Any:
        optimizer = kept[rank]
        base = {name: t.clone() for name, t in optimizer.state_dict()["agmerge"]["updates"]["base"].items()}
        with torch.no_grad():
            optimizer._reducer.before_step()  # connects
        found = dict(testing.inspect(optimizer).residuals)
        optimizer.consolidate()
        after = named(models[rank])
        return base, found, after, train(models[rank], optimizer, rank, range(6, 9))[-1]

    unsent = testing.run(before, first)
    bases, found, after, _ = zip(*testing.run(now, second), strict=True)
    for rank in range(now):
        for name, carried in unsent[rank].items():
            if now > 1:
                atol = 1e-6 if dtype is torch.float32 else 2e-3  # of the parameters
                torch.testing.assert_close(found[rank][name], carried * now / before, rtol=2e-3, atol=atol, msg=name)
    agreed([digest(model.values()) for model in after])
    for name, p in after[0].items():
        expected = bases[0][name].double() - sum(unsent[rank][name].double() for rank in range(now)) / before
        atol = 2e-6 if dtype is torch.float32 else 4e-3
        torch.testing.assert_close(p.double(), expected, rtol=0, atol=atol, msg=name)


def test_reset_forgets_the_group_and_keeps_what_is_carried() -> None:
    def body(rank: int, model: nn.Module, again: bool) -> Any:
        optimizer = started(model, overlap=1, every=2)
        steps = Steps(model, optimizer)
        train(model, optimizer, rank, range(4))  # messages are under way
        if again:
            optimizer.reset()
        train(model, optimizer, rank, range(4, 9))
        optimizer.consolidate()
        return named(model), steps

    for again in (False, True):
        models, steps = zip(*on_ranks(2, MODEL, lambda r, m, again=again: body(r, m, again)), strict=True)
        assert_mean(list(models), list(steps))


# -- scaler and parameters ------------------------------------------------------------------------------------------


def test_a_scaler_that_is_attached_changes_no_bit() -> None:
    def body(rank: int, model: nn.Module, attach: bool) -> list[str]:
        optimizer = started(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for step in range(6):
            if step == 3 and attach:
                optimizer.attach_scaler(scaler)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.full((2, 32), step + 1.0 + rank)), torch.tensor([rank, 1]))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(digest(model))
        return seen

    plain = on_ranks(2, MODEL, lambda rank, model: body(rank, model, False))
    assert plain == on_ranks(2, MODEL, lambda rank, model: body(rank, model, True))


@pytest.mark.parametrize(
    "options",
    [{}, {"carry": "hold"}, {"overlap": 1}, {"every": 4, "fragments": 2}, {"every": 2, "outer": agmerge.Nesterov()}],
    ids=str,
)
def test_a_group_that_is_added_takes_part(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        late = [model[4].weight, model[4].bias]
        early = [p for p in model.parameters() if all(p is not one for one in late)]
        optimizer = started(model, torch.optim.AdamW(early, lr=0.01), **options)
        steps = Steps(model, optimizer)
        train(model, optimizer, rank, range(5))
        assert digest(late) == digest([MODEL[4].weight, MODEL[4].bias])
        optimizer.add_param_group({"params": late, "lr": 0.02})
        train(model, optimizer, rank, range(5, 10))
        optimizer.consolidate()
        assert digest(late) != digest([MODEL[4].weight, MODEL[4].bias])
        return named(model), steps

    models, steps = zip(*on_ranks(2, MODEL, body), strict=True)
    if "outer" not in options:
        assert_mean(list(models), list(steps))
    agreed([digest(model.values()) for model in models])


@pytest.mark.parametrize("change", ["freeze", "thaw"])
def test_an_outer_optimizer_keeps_its_momentum_when_parameters_change(change: str) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        model[4].weight.requires_grad_(change == "freeze")
        optimizer = started(model, outer=agmerge.Nesterov())
        train(model, optimizer, rank, range(3))
        before = copy.deepcopy(optimizer.state_dict()["agmerge"]["updates"]["outer"]["state"])
        model[4].weight.requires_grad_(change == "thaw")
        optimizer._reducer.before_step()
        after = optimizer.state_dict()["agmerge"]["updates"]["outer"]["state"]
        assert before and all(torch.equal(before[i]["momentum"], after[i]["momentum"]) for i in before)
        train(model, optimizer, rank, range(3, 6))
        return digest(optimizer.state_dict()["agmerge"]["updates"]["base"].values())

    agreed(on_ranks(2, MODEL, body))


def test_a_parameter_that_is_frozen_is_shared_all_the_same() -> None:
    """It goes on sending what was carried of it."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model)
        train(model, optimizer, rank, range(4))
        model[0].weight.requires_grad_(False)
        train(model, optimizer, rank, range(4, 6))
        with optimizer.shared():
            found = digest(model)
        optimizer.consolidate()
        return found, digest(model)

    found = on_ranks(2, MODEL, body)
    agreed([shared for shared, _ in found])
    agreed([after for _, after in found])


def test_adamw_gets_no_advice_about_sparse_gradients() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = started(model)
        backward(model, rank, 0)
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(2, MODEL, body)
