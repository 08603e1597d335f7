# SPDX-License-Identifier: Apache-2.0
"""``synchronize``, ``skip_synchronize``, ``zero_grad``, closures, and what happens when a step does not happen."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from support import (
    agreed,
    digest,
    gradients,
    loss_of,
    mlp,
    on_ranks,
    residuals,
    same_bits,
    seeded,
    sgd,
    train,
    trained,
    wrap,
)
from torch import Tensor, nn

import agmerge

MODEL = seeded(mlp)
COMPRESSIONS = ["none", "topk", "eden", "fp16", "bf16", "powersgd", "acpsgd"]
ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
TWICE = (
    "AGM105: optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "The gradients are averaged already, so step() uses them unchanged. To avoid this warning, step inside `with "
    "optimizer.skip_synchronize():`."
)


class Clumsy(torch.optim.SGD):
    """Raises in ``step`` when it is told to."""

    fail = False

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if self.fail:
            raise ArithmeticError("clumsy")
        super().step(closure)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_clipping_after_synchronize_equals_clipping_in_one_process(size: int) -> None:
    twin = copy.deepcopy(MODEL)
    single, norms = sgd(twin), []
    for step in range(10):
        single.zero_grad()
        (sum(loss_of(twin, rank, step) for rank in range(size)) / size).backward()
        norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), 0.1)))
        single.step()

    def body(rank: int, model: nn.Module) -> tuple[nn.Module, list[float]]:
        optimizer, norms = wrap(model, compression="none"), []
        for step in range(10):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            with optimizer.skip_synchronize():
                optimizer.step()
        return model, norms

    found = on_ranks(size, MODEL, body)
    agreed([(digest(model), norms) for model, norms in found])
    assert min(norms) > 0.1  # it clips
    assert found[0][1] == pytest.approx(norms, rel=1e-5)
    for a, b in zip(found[0][0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_synchronizing_first_and_skipping_then_is_a_plain_step(compression: str) -> None:
    def body(rank: int, model: nn.Module, apart: bool) -> list[str]:
        optimizer, seen = wrap(model, compression=compression), []
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if apart:
                optimizer.synchronize()
                optimizer.synchronize()  # nothing new: does nothing
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            seen.append(digest(model))
        return seen

    one, two = (agreed(on_ranks(3, MODEL, lambda r, m, a=a: body(r, m, a))) for a in (True, False))
    assert one == two


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_a_step_that_synchronizes_twice_warns_and_steps_once(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression=compression)
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        optimizer.step()
        return digest(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = agreed(on_ranks(2, MODEL, body))
    caught = [warning for warning in caught if "AGM705" not in str(warning.message)]  # what topk cost
    assert [str(warning.message) for warning in caught] == [TWICE] * 2
    assert caught[0].filename == __file__  # it points at the script, not into the library
    assert [found] == trained(2, MODEL, 1, compression=compression)


def test_a_step_after_synchronize_uses_gradients_as_the_script_has_changed_them() -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        optimizer, before = wrap(model), digest(model)
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return before, digest(model)

    with pytest.warns(UserWarning, match="AGM105: .* uses them unchanged"):
        found = on_ranks(2, MODEL, body)
    assert all(before == after for before, after in found)


def test_skip_synchronize_of_an_object_that_shares_our_attributes_reaches_our_step() -> None:
    """Lightning's optimizers are of a class made of ours, with our attributes, around ours."""

    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model)
        double = object.__new__(type("Double", (type(optimizer),), {}))
        vars(double).update(vars(optimizer))
        loss_of(model, rank, 0).backward()
        double.synchronize()
        with double.skip_synchronize():
            optimizer.step()
        return digest(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = agreed(on_ranks(2, MODEL, body))
    assert [found] == trained(2, MODEL, 1)


def test_skipping_what_never_happened_is_an_error() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError, match="AGM110"):
                optimizer.step()
            optimizer.step()  # nothing was lost
            with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError, match="AGM110"):
                optimizer.step()  # not twice with the same gradients either
        return digest(model)

    assert agreed(on_ranks(2, MODEL, body)) == trained(2, MODEL, 2)[-1]


def test_a_backward_after_synchronize_makes_its_result_out_of_date() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        loss_of(model, rank, 0).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError, match="AGM110"):
            optimizer.step()
        optimizer.step()

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("start", [0, 3], ids=["first step", "later step"])
def test_synchronize_without_step_leaves_no_trace(compression: str, start: int) -> None:
    def body(rank: int, model: nn.Module, stray: bool) -> list[str]:
        optimizer = wrap(model, compression=compression)
        train(model, optimizer, rank, range(start))
        if stray:
            before = residuals(optimizer)
            for step in (50, 51):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.synchronize()
                for name, kept in residuals(optimizer).items():
                    assert same_bits(kept, before.get(name, torch.zeros_like(kept))), name
        seen = train(model, optimizer, rank, range(start, start + 3))
        assert optimizer.stats()["steps"] == start + 3
        return [*seen, digest(residuals(optimizer).values())]

    with_it, without = (on_ranks(2, MODEL, lambda r, m, s=s: body(r, m, s)) for s in (True, False))
    assert with_it == without


def test_a_rank_without_a_backward_pass_forgets_a_discarded_update_too() -> None:
    """Else it would step with nothing and exchange nothing, while the others wait for it."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression="topk", timeout=10.0)
        train(model, optimizer, rank, range(1))
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        if rank == 0:
            loss_of(model, rank, 2).backward()
        optimizer.step()
        assert optimizer.stats()["steps"] == 2
        return train(model, optimizer, rank, range(3, 5))

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("start", [0, 2], ids=["first step", "later step"])
def test_zero_grad_while_gradients_travel_is_an_error_that_changes_nothing(start: int) -> None:
    def body(rank: int, model: nn.Module, stray: bool) -> list[str]:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(start))
        optimizer.zero_grad()
        loss_of(model, rank, start).backward()
        if stray:
            before, held = residuals(optimizer), gradients(model)
            for set_to_none in (True, False):
                with pytest.raises(AssertionError) as raised:
                    optimizer.zero_grad(set_to_none=set_to_none)
                assert str(raised.value).startswith(ZERO_GRAD)
            now = residuals(optimizer)
            assert now.keys() == before.keys() and all(same_bits(now[name], before[name]) for name in now)
            assert all(same_bits(p.grad, held[name]) for name, p in model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
        return [digest(model), digest(residuals(optimizer).values())]

    assert on_ranks(2, MODEL, lambda r, m: body(r, m, True)) == on_ranks(2, MODEL, lambda r, m: body(r, m, False))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_both_ways_to_zero_gradients_train_alike(compression: str) -> None:
    def body(rank: int, model: nn.Module, set_to_none: bool) -> list[str]:
        optimizer, seen = wrap(model, compression=compression), []
        for step in range(10):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) if set_to_none or not step else not p.grad.any() for p in model.parameters())
            loss_of(model, rank, step).backward()
            optimizer.step()
            seen.append(digest(model))
        return seen

    none, zero = (agreed(on_ranks(3, MODEL, lambda r, m, s=s: body(r, m, s))) for s in (True, False))
    assert none == zero


@pytest.mark.parametrize("compression", ["topk", "fp16"])
@pytest.mark.parametrize("where", ["inner step", "closure", "closure after backward"])
def test_an_exception_leaves_residuals_as_they_were(compression: str, where: str) -> None:
    def body(rank: int, model: nn.Module, stray: bool) -> list[str]:
        inner = Clumsy(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = wrap(model, inner, compression=compression)
        train(model, optimizer, rank, range(3))
        optimizer.zero_grad()

        def closure() -> Tensor:
            if where == "closure":
                raise ArithmeticError("clumsy")
            loss_of(model, rank, 70).backward()
            raise ArithmeticError("clumsy")

        if stray:
            before = residuals(optimizer)
            with pytest.raises(ArithmeticError, match="clumsy"):
                if where == "inner step":
                    inner.fail = True
                    loss_of(model, rank, 70).backward()
                    optimizer.step()
                else:
                    optimizer.step(closure)
            inner.fail = False
            assert all(same_bits(kept, before[name]) for name, kept in residuals(optimizer).items())
            if where == "closure after backward":
                optimizer.synchronize()  # its messages are on their way: take them, and go on without a step
        optimizer.zero_grad()
        seen = train(model, optimizer, rank, range(3, 6))
        return [*seen, digest(residuals(optimizer).values())]

    assert on_ranks(2, MODEL, lambda r, m: body(r, m, True)) == on_ranks(2, MODEL, lambda r, m: body(r, m, False))


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_a_closure_runs_once_and_its_gradients_are_combined(inner: type[torch.optim.Optimizer]) -> None:
    def body(rank: int, model: nn.Module, use_closure: bool) -> list[str]:
        optimizer = wrap(model, inner(model.parameters(), lr=0.01), compression="topk")  # type: ignore[call-arg]
        seen, calls = [], []
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                calls.append(step)
                optimizer.zero_grad()
                loss = loss_of(model, rank, step)
                loss.backward()
                return loss

            expected = loss_of(model, rank, step).item()
            if use_closure:
                with torch.no_grad():  # as a script may; the closure gets gradients all the same
                    assert optimizer.step(closure).item() == expected
            else:
                closure()
                assert optimizer.step() is None
            seen.append(digest(model))
        assert calls == [0, 1, 2, 3]
        return seen

    one, two = (agreed(on_ranks(2, MODEL, lambda r, m, c=c: body(r, m, c))) for c in (True, False))
    assert one == two


def test_a_closure_inside_skip_synchronize_is_refused_before_it_runs() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        with optimizer.skip_synchronize(), pytest.raises(ValueError, match="is not supported inside skip_synchronize"):
            optimizer.step(lambda: pytest.fail("the closure ran"))

    on_ranks(2, MODEL, body)


def test_a_step_without_any_backward_says_so() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="none")
        optimizer.step()
        return digest(model)

    with pytest.warns(UserWarning, match="AGM112"):
        assert agreed(on_ranks(2, MODEL, body)) == digest(MODEL)
