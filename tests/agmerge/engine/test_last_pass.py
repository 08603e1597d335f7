# SPDX-License-Identifier: Apache-2.0
"""What becomes of a pass in buckets: an optimizer steps with it, or the script throws it away, or adds the next one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, same_bits, seeded, sgd
from support.buckets import connected, kept, passed
from torch import nn

import agmerge
from agmerge.engine import bucket_reducer
from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.optimizer_group import followed
from agmerge.engine.step_hooks import withhold
from agmerge.script.averaged_steps import AveragedModel

MODEL = seeded(mlp)
TOPK: dict[str, Any] = {"compression": "topk"}
NAME = "2.weight"


def residual(reducer: BucketReducer) -> torch.Tensor:
    """A copy of one."""
    return kept(reducer, NAME)["residual"]


def run(reducer: BucketReducer, model: nn.Module, rank: int, step: int) -> None:
    """A pass, to which gradients of earlier ones belong unless they are zeroed before."""
    backward(model, rank, step)
    passed(reducer, model)


def test_a_thrown_pass_leaves_no_trace_whether_gradients_are_dropped_or_zeroed() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        found = []
        for thrown in (None, True, False):
            net = copy.deepcopy(model)
            inner = sgd(net)
            reducer = connected(net, inner, **TOPK)
            for step in range(4):
                inner.zero_grad()
                run(reducer, net, rank, step)
                inner.step()
                if thrown is not None:
                    for _ in range(2):  # they add up, and all of it is thrown away
                        run(reducer, net, rank, 50 + step)
                    inner.zero_grad(set_to_none=thrown)
            inner.zero_grad()
            run(reducer, net, rank, 9)
            inner.step()
            found.append(digest(net))
            reducer.close()
        return found

    found = agreed(on_ranks(2, MODEL, body))
    assert len(set(found)) == 1


def test_residuals_are_as_before_until_the_optimizer_steps() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = sgd(model)
        reducer = connected(model, inner, **TOPK)
        run(reducer, model, rank, 0)
        assert not residual(reducer).any()
        inner.step()
        moved = residual(reducer)
        assert moved.any()
        inner.zero_grad()
        run(reducer, model, rank, 1)
        assert same_bits(moved, residual(reducer))
        inner.step()
        assert not same_bits(moved, residual(reducer))
        reducer.close()

    on_ranks(2, MODEL, body)


def test_of_two_optimizers_each_moves_its_own_residuals() -> None:
    def body(rank: int, model: nn.Module) -> None:
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)
        reducer = connected(model, **TOPK)
        for step in range(3):
            model.zero_grad()
            run(reducer, model, rank, step)
            first.step()
            second.step()
        before = {name: kept(reducer, name)["residual"] for name in ("0.weight", NAME)}
        model.zero_grad()
        run(reducer, model, rank, 3)
        first.step()
        assert not same_bits(before["0.weight"], kept(reducer, "0.weight")["residual"])
        assert same_bits(before[NAME], residual(reducer))
        moved = kept(reducer, "0.weight")["residual"]
        second.zero_grad()  # what is its own alone
        run(reducer, model, rank, 4)
        assert same_bits(moved, kept(reducer, "0.weight")["residual"])
        assert same_bits(before[NAME], residual(reducer))
        second.step()
        assert not same_bits(before[NAME], residual(reducer))
        reducer.close()

    on_ranks(2, MODEL, body)


def test_gradients_added_to_a_velocity_are_an_error_on_all_ranks() -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner = sgd(model)
        reducer = connected(model, inner, compression="dgc")
        run(reducer, model, rank, 0)
        inner.step()
        inner.zero_grad()
        run(reducer, model, rank, 1)
        with pytest.raises(agmerge.AGMergeError, match=r"model\.no_sync\(\)") as raised:
            run(reducer, model, rank, 2)
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))


def test_a_velocity_of_passes_in_a_closure_has_the_momentum() -> None:
    """As frameworks step: the momentum of the groups is hidden from the arithmetic, not from the backward pass."""

    def body(rank: int, model: nn.Module) -> list[str]:
        found = []
        for in_closure in (False, True):
            net = copy.deepcopy(model)
            inner = sgd(net)
            reducer = connected(net, inner, compression="dgc")
            end = withhold(reducer.exchange, inner)
            for step in range(4):

                def closure(step: int = step, net: nn.Module = net, reducer: BucketReducer = reducer) -> None:
                    net.zero_grad()
                    run(reducer, net, rank, step)

                if in_closure:
                    inner.step(closure)
                else:
                    closure()
                    inner.step()
            found.append(digest(net))
            end()
            reducer.close()
        return found

    plain, closed = agreed(on_ranks(2, MODEL, body))
    assert plain == closed


class Lookahead(torch.optim.Optimizer):
    """One that does not call ``Optimizer.__init__``, as many do not."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Step the other one."""
        return self.base.step(closure)


class Foreign:
    """Of another library, which writes behind autograd's back."""

    def __init__(self, parameters: Any) -> None:
        self.param_lists = [list(parameters)]

    def step(self) -> None:
        """Step."""
        for parameter in self.param_lists[0]:
            parameter.data.add_(parameter.grad, alpha=-0.1)


@pytest.mark.parametrize(
    "make", [lambda net: Lookahead(torch.optim.SGD(net.parameters(), lr=0.1)), lambda net: Foreign(net.parameters())]
)
def test_any_object_with_a_step_moves_residuals(make: Callable[[nn.Module], Any]) -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        found = []
        for build in (lambda net: torch.optim.SGD(net.parameters(), lr=0.1), make):
            net = copy.deepcopy(model)
            inner = build(net)
            reducer = connected(net, followed(inner), **TOPK)
            assert followed(inner) is followed(inner)
            for step in range(3):
                net.zero_grad()
                run(reducer, net, rank, step)
                inner.step()
            assert residual(reducer).any()
            found.append(digest(net))
            reducer.close()
        return found

    expected, seen = agreed(on_ranks(2, MODEL, body))
    assert seen == expected


def test_an_object_without_a_step_that_can_be_followed_is_refused_by_name() -> None:
    class Slotted:
        __slots__ = ("param_groups",)

        def step(self) -> None:
            """Step."""

    slotted = Slotted()
    slotted.param_groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    for given, why in ((object(), "no step"), (slotted, "cannot be replaced")):
        with pytest.raises(TypeError, match=rf"{type(given).__name__}.*{why}.*Remove optimizer="):
            followed(given)


def test_writes_to_parameters_count_as_steps_where_nothing_else_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop by hand; and where nothing shows a step, it is said once that passes are dropped."""
    monkeypatch.setattr(bucket_reducer, "PATIENCE", 5)

    def body(rank: int, model: nn.Module) -> list[str]:
        reducer = connected(model, **TOPK)
        for hidden in (False, True):
            for step in range(bucket_reducer.PATIENCE + 2):
                model.zero_grad()
                run(reducer, model, rank, step)
                for parameter in model.parameters():
                    (parameter.data if hidden else parameter.detach()).add_(parameter.grad, alpha=-0.1)
            if not hidden:
                assert residual(reducer).any()
        reducer.close()
        return [digest(model)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreed(on_ranks(2, MODEL, body))
    assert sum("AGM132" in str(one.message) for one in caught) == 1


def test_check_every_compares_frozen_parameters_of_the_model_and_not_those_of_each_rank() -> None:
    def body(rank: int, model: nn.Module) -> str:
        for frozen in (False, True):
            net, apart = copy.deepcopy(model), nn.Parameter(torch.full((3,), float(rank)))
            inner = torch.optim.SGD([*net.parameters(), apart], lr=0.1)
            around = AveragedModel(lambda apart=apart, frozen=frozen: [("frozen", apart)] if frozen else [])
            reducer = connected(net, inner, around=around, check_every=2, compression="none", density=None)

            def steps(inner: Any = inner, reducer: BucketReducer = reducer, net: nn.Module = net) -> None:
                for step in range(4):
                    inner.zero_grad()
                    run(reducer, net, rank, step)
                    inner.step()

            if not frozen:
                steps()
                reducer.close()
                continue
            with pytest.raises(agmerge.DivergenceError, match="does not average") as raised:
                steps()
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))
