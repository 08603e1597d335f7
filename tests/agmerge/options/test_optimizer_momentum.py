# SPDX-License-Identifier: Apache-2.0
"""The momentum of SGD's groups under DGC's memory: applied before selection, once, and shown as the script gave it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, seeded, sgd, train, wrap
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

import agmerge
import sparsifiers

MODEL = seeded(mlp)
LR = 0.05
EXACT: dict[str, Any] = {  # dense momentum SGD in another way
    "compression": "dgc",
    "density": 1.0,
    "memory": sparsifiers.memory("dgc", masking=False),
}
Groups = Callable[[nn.Module], Any]


def plain(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, **options)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def averaged(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, schedule: LRScheduler | None = None
) -> None:
    """Plain steps on the average gradient of two ranks."""
    for step in steps:
        optimizer.zero_grad()
        sum(loss_of(model, rank, step) for rank in range(2)).div(2).backward()  # type: ignore[union-attr]
        optimizer.step()
        if schedule is not None:
            schedule.step()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}, {"nesterov": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("options", [{}, {"compression": "topk", "memory": "dgc"}, {"density": 0.05}])
def test_swapping_in_dgc_is_one_word(kind: dict[str, Any], options: dict[str, Any]) -> None:
    """To the bit what SGD without momentum gives, and a memory that is told the momentum."""
    nesterov = kind.get("nesterov", False)
    apart = {key: value for key, value in kind.items() if key != "nesterov"}
    told = sparsifiers.memory("dgc", momentum=0.9, nesterov=nesterov)
    options = {"compression": "dgc", **options}

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str]]:
        other = copy.deepcopy(model)
        one = wrap(model, plain(model, momentum=0.9, **kind), **options)
        two = wrap(other, plain(other, **apart), **{**options, "memory": told})
        return train(model, one, rank, range(5)), train(other, two, rank, range(5))

    one, two = agreed(on_ranks(2, MODEL, body))
    assert one == two


@pytest.mark.parametrize("exchange", ["two-level", "oktopk", "masked"])
def test_it_does_not_depend_on_the_exchange(exchange: str) -> None:
    def body(rank: int, model: nn.Module, momentum: float, memory: Any) -> list[str]:
        inner = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
        optimizer = wrap(model, inner, compression="dgc", density=0.05, exchange=exchange, memory=memory)
        return train(model, optimizer, rank, range(4))

    told = sparsifiers.memory("dgc", momentum=0.9)
    one, two = (on_ranks(2, MODEL, lambda r, m, g=g: body(r, m, *g)) for g in ((0.9, None), (0.0, told)))
    assert agreed(one) == agreed(two)


@pytest.mark.parametrize("name", [*sparsifiers.names(), "none", "fp16", "bf16", "Auto", "TopK", "SIDCo_E", "BF16"])
def test_the_ten_lines_work_with_every_name_and_nothing_else_changed(name: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[str], int]:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = agmerge.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=name, density=0.01, exchange="sparse"
        )
        assert isinstance(optimizer.stats()["compressor"], str)
        seen = train(model, optimizer, rank, range(3))
        assert [group["momentum"] for group in optimizer.param_groups] == [0.9]
        return seen, optimizer.stats()["steps"]

    seen, steps = agreed(on_ranks(2, MODEL, body))
    assert len(set(seen)) == steps == 3


def of_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Every momentum in both tensor classes: weights of layers 0 and 2 are sparse, everything else is dense."""
    p = dict(model.named_parameters())
    return [
        {"params": [p["0.weight"], p["0.bias"]], "momentum": 0.9, "nesterov": True},
        {"params": [p["2.weight"], p["2.bias"]], "momentum": 0.5},
        {"params": [p["4.weight"], p["4.bias"]], "momentum": 0.0, "lr": 0.1},
    ]


def test_every_group_has_the_momentum_that_it_says() -> None:
    expected = copy.deepcopy(MODEL)
    averaged(expected, torch.optim.SGD(of_groups(expected), lr=LR), range(8))

    def body(rank: int, model: nn.Module) -> Tensor:
        train(model, wrap(model, torch.optim.SGD(of_groups(model), lr=LR), **EXACT), rank, range(8))
        return flat(model)

    for found in on_ranks(2, MODEL, body):
        close(found, flat(expected))


def test_a_group_that_comes_later_has_its_own_too() -> None:
    def groups(model: nn.Module) -> tuple[torch.optim.SGD, dict[str, Any]]:
        first, *more = of_groups(model)
        return torch.optim.SGD([first], lr=LR), {"params": more[0]["params"] + more[1]["params"], "momentum": 0.3}

    expected = copy.deepcopy(MODEL)
    optimizer, late = groups(expected)
    averaged(expected, optimizer, range(4))
    optimizer.add_param_group(late)
    expected.zero_grad()
    averaged(expected, optimizer, range(4, 8))

    def body(rank: int, model: nn.Module) -> Tensor:
        inner, late = groups(model)
        optimizer = wrap(model, inner, **EXACT)
        train(model, optimizer, rank, range(4))
        optimizer.add_param_group(late)
        model.zero_grad()
        train(model, optimizer, rank, range(4, 8))
        return flat(model)

    for found in on_ranks(2, MODEL, body):
        close(found, flat(expected))


SCHEDULES: dict[str, Callable[[Any], LRScheduler]] = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=LR, total_steps=12),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, base_lr=LR / 5, max_lr=LR, step_size_up=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_cycle_momentum_are_followed(name: str) -> None:
    expected = copy.deepcopy(MODEL)
    reference = plain(expected, momentum=0.9)
    averaged(expected, reference, range(9), SCHEDULES[name](reference))

    def body(rank: int, model: nn.Module) -> tuple[Tensor, list[float]]:
        optimizer = wrap(model, plain(model, momentum=0.9), **EXACT)
        schedule, seen = SCHEDULES[name](optimizer), []
        for step in range(9):
            train(model, optimizer, rank, [step])
            schedule.step()
            seen.append(optimizer.param_groups[0]["momentum"])
        return flat(model), seen

    for found, seen in on_ranks(2, MODEL, body):
        close(found, flat(expected))
        assert len(set(seen)) > 3 and seen[-1] == reference.param_groups[0]["momentum"]


def test_hooks_of_the_step_and_errors_in_it_see_and_leave_the_momentum_of_the_script() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = plain(model, momentum=0.9, nesterov=True)
        seen: list[tuple[str, float, bool]] = []

        def look(name: str) -> Callable[..., None]:
            def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                seen.append((name, *map(optimizer.param_groups[0].get, ("momentum", "nesterov"))))

            return hook

        inner.register_step_pre_hook(look("early"))
        inner.register_step_post_hook(look("late"))
        optimizer = wrap(model, inner, compression="dgc")
        optimizer.register_step_pre_hook(look("early"))
        optimizer.register_step_post_hook(look("late"))
        train(model, optimizer, rank, range(2))
        assert (
            seen
            == [("early", 0.9, True)] * 2
            + [("late", 0.9, True)] * 2
            + [("early", 0.9, True)] * 2
            + [("late", 0.9, True)] * 2
        )

        # What a hook sets after the step stays.
        handle = optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0].update(momentum=0.8))
        train(model, optimizer, rank, range(2, 3))
        handle.remove()
        assert optimizer.param_groups[0]["momentum"] == 0.8

        loss_of(model, rank, 3).backward()
        inner.param_groups[0]["lr"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        assert optimizer.param_groups[0]["momentum"] == 0.8 and optimizer.param_groups[0]["nesterov"] is True

    on_ranks(1, MODEL, body)


def test_compressors_may_come_and_go_and_momentum_is_applied_once_each_time() -> None:
    """At density 1 without masking, all of them train as SGD with momentum does; its own begins at zero again."""
    expected = copy.deepcopy(MODEL)
    reference = plain(expected, momentum=0.9)
    averaged(expected, reference, range(4))  # topk, then dgc, which takes the buffers over
    averaged(expected, reference, range(4, 8))
    reference.state.clear()
    averaged(expected, reference, range(8, 12))

    def body(rank: int, model: nn.Module) -> Tensor:
        optimizer = wrap(model, plain(model, momentum=0.9), compression="topk", density=1.0)
        train(model, optimizer, rank, range(4))
        optimizer.set_compressor("dgc", memory=EXACT["memory"])
        train(model, optimizer, rank, range(4, 8))
        assert not optimizer.state
        optimizer.set_compressor("none")
        train(model, optimizer, rank, range(8, 12))
        assert all("momentum_buffer" in state for state in optimizer.state.values())
        assert optimizer.param_groups[0]["momentum"] == 0.9
        return flat(model)

    for found in on_ranks(2, MODEL, body):
        close(found, flat(expected))


class LARS(torch.optim.SGD):
    """Another step, and so another momentum."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(torch.optim.SGD):
    """The same step."""


def test_momentum_that_is_not_that_of_sgd_is_not_taken() -> None:
    def body(rank: int, model: nn.Module) -> None:
        for make in (torch.optim.RMSprop, LARS):
            with pytest.raises(
                ValueError, match=f"of {make.__name__} has momentum=0.9 too. Only the momentum of torch"
            ):
                wrap(model, make(model.parameters(), lr=0.1, momentum=0.9), compression="dgc", memory="dgc")
        for options in ({"dampening": 0.5}, {"dampening": 1.0}):
            with pytest.raises(ValueError, match="group 0 has dampening="):
                wrap(model, plain(model, momentum=0.9, **options), compression="dgc", memory="dgc")
        optimizer = wrap(model, Named(model.parameters(), lr=0.1, momentum=0.9), compression="dgc")
        train(model, optimizer, rank, range(2))
        optimizer.param_groups[0]["dampening"] = 0.5
        with pytest.raises(ValueError, match="group 0 has dampening=0.5"):
            train(model, optimizer, rank, range(2, 3))

    on_ranks(1, MODEL, body)


def test_a_momentum_that_comes_late_is_not_applied_twice() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, sgd(model, momentum=0.0), compression="dgc")
        train(model, optimizer, rank, range(2))
        optimizer.param_groups[0]["momentum"] = 0.5
        with pytest.raises(ValueError, match=r"now has a momentum.*call set_compressor\('dgc'\) on every rank"):
            train(model, optimizer, rank, range(2, 3))
        optimizer.zero_grad()
        optimizer.set_compressor("dgc")
        train(model, optimizer, rank, range(3, 5))
        assert not optimizer.state
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_ranks_that_differ_in_who_applies_momentum_are_told() -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(agmerge.RankMismatchError, match="momentum before selection: the optimizer's on rank 0"):
            wrap(model, sgd(model, momentum=0.0 if rank else 0.9), compression="dgc")

    on_ranks(2, MODEL, body)


def test_a_momentum_that_goes_is_gone_and_one_rank_says_so() -> None:
    """As a loader that writes into the groups leaves it, or a schedule that means it."""

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        other = copy.deepcopy(model)
        optimizer = wrap(model, sgd(model), **{**EXACT, "compression": "topk"})
        optimizer.param_groups[0]["momentum"] = 0.0
        train(model, optimizer, rank, range(3))
        train(other, wrap(other, sgd(other, momentum=0.0), compression="topk", density=1.0), rank, range(3))
        return digest(model), digest(other)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        one, other = agreed(on_ranks(2, MODEL, body))
    assert one == other
    assert len([one for one in told if "AGM405" in str(one.message)]) == 1


def test_who_steps_by_itself_applies_its_momentum_itself() -> None:
    alone = copy.deepcopy(MODEL)
    train(alone, sgd(alone), 1, range(4))

    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, sgd(model), compression="dgc", process_set=[0])
        train(model, optimizer, rank, range(4))
        return digest(model)

    assert on_ranks(2, MODEL, body)[1] == digest(alone)


def test_it_is_said_once_and_on_one_rank() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compression="dgc")
        train(model, optimizer, rank, range(3))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        on_ranks(3, MODEL, body)
    (one,) = [one for one in told if "AGM705" not in str(one.message)]
    assert str(one.message).startswith("AGM707: memory='dgc' applies the momentum of SGD (0.9)")
    assert "SGD(momentum=0)" in str(one.message) and "1 - m times" in str(one.message)
