# SPDX-License-Identifier: Apache-2.0
"""Several backward passes a step: counted, or in ``no_sync()``."""

from __future__ import annotations

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
    wrap,
)
from torch import Tensor, nn

import agmerge

MODEL = seeded(mlp)
COMPRESSIONS = ["none", "topk", "eden", "fp16", "bf16", "powersgd", "acpsgd"]
SIZES = [1, 2, 3, 4]


def accumulate(model: nn.Module, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()


@pytest.mark.parametrize("size", SIZES)
def test_passes_are_summed_and_not_averaged(size: int) -> None:
    def body(rank: int, model: nn.Module) -> list[Tensor]:
        optimizer = wrap(model, compression="none", backward_passes_per_step=3)
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                (float(rank + 1) * sum(p.sum() for p in model.parameters())).backward()
            optimizer.synchronize()
            found += [p.grad.clone() for p in model.parameters()]
            with optimizer.skip_synchronize():
                optimizer.step()
        return found

    mean = sum(range(1, size + 1)) / size
    for gradient in [one for found in on_ranks(size, MODEL, body) for one in found]:
        torch.testing.assert_close(gradient, torch.full_like(gradient, 3 * mean))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [1, 3])
def test_no_sync_and_counted_passes_give_the_same_bits(size: int, compression: str) -> None:
    def body(rank: int, model: nn.Module, counted: bool) -> list[str]:
        optimizer = wrap(model, compression=compression, backward_passes_per_step=4 if counted else 1)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            if counted:
                accumulate(model, rank, range(4 * step, 4 * step + 4))
            else:
                with optimizer.no_sync():
                    accumulate(model, rank, range(4 * step, 4 * step + 3))
                accumulate(model, rank, range(4 * step + 3, 4 * step + 4))
            optimizer.step()
            seen += [digest(model), digest(residuals(optimizer).values()) if size == 1 else ""]
        return seen

    found = [agreed(on_ranks(size, MODEL, lambda r, m, c=c: body(r, m, c))) for c in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_step_before_the_last_pass_takes_what_is_there(compression: str) -> None:
    def body(rank: int, model: nn.Module, passes: int) -> list[str]:
        optimizer = wrap(model, compression=compression, backward_passes_per_step=passes)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            # Windows of 3, 1, 2, 3, 1, 2 passes; one counts to 3, the other leaves every step to step().
            accumulate(model, rank, range(10 * step, 10 * step + (3, 1, 2)[step % 3]))
            optimizer.step()
            seen.append(digest(model))
        return seen

    three, four = (agreed(on_ranks(2, MODEL, lambda r, m, n=n: body(r, m, n))) for n in (3, 4))
    assert three == four and len(set(three)) == 6


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_number_of_passes_can_change_between_steps(compression: str) -> None:
    def body(rank: int, model: nn.Module, change: bool) -> list[str]:
        optimizer = wrap(model, compression=compression, backward_passes_per_step=1 if change else 9)
        seen = []
        for step, passes in enumerate([1, 3, 2, 1]):
            if change:
                optimizer.set_backward_passes_per_step(passes)
            optimizer.zero_grad()
            accumulate(model, rank, range(10 * step, 10 * step + passes))
            optimizer.step()
            seen.append(digest(model))
        return seen

    changed, flushed = (agreed(on_ranks(2, MODEL, lambda r, m, c=c: body(r, m, c))) for c in (True, False))
    assert changed == flushed


def test_the_number_of_passes_cannot_change_within_a_step() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, backward_passes_per_step=2)
        accumulate(model, rank, range(1))
        with pytest.raises(agmerge.AGMergeError, match=r"set_backward_passes_per_step\(\) was called between"):
            optimizer.set_backward_passes_per_step(3)
        for passes, words in ((0, "> 0"), (-1, "> 0"), (1.5, "a whole number > 0, got 1.5")):
            with pytest.raises(ValueError, match=f"backward_passes_per_step must be {words}"):
                optimizer.set_backward_passes_per_step(passes)  # type: ignore[arg-type]
        accumulate(model, rank, range(1, 2))
        optimizer.step()

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_every_parameter_is_counted_by_itself(compression: str) -> None:
    """The first layer sees one pass of two, on rank 0 the first one and on rank 1 the second one."""

    def body(rank: int, model: nn.Sequential) -> dict[str, Tensor | None]:
        optimizer = wrap(model, compression=compression, density=1.0, backward_passes_per_step=2)
        for _ in range(3):
            optimizer.zero_grad()
            for i in range(2):
                whole = i == rank
                layers = model if whole else model[2:]
                layers(torch.ones(1, model[0 if whole else 2].in_features)).sum().backward()
            mine = gradients(model)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        return {**{f"mine {name}": g for name, g in mine.items()}, **gradients(model)}

    found = on_ranks(2, MODEL, body)
    for name in dict(MODEL.named_parameters()):
        expected = found[0][f"mine {name}"] / 2 + found[1][f"mine {name}"] / 2
        assert all(torch.equal(one[name], expected) for one in found), name


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_too_many_passes_are_an_error_that_changes_nothing(passes: int, first: bool) -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str]]:
        seen: tuple[list[str], list[str]] = ([], [])
        twin = mlp()
        twin.load_state_dict(model.state_dict())
        for which, each in enumerate((model, twin)):
            optimizer = wrap(each, compression="topk", backward_passes_per_step=passes)
            if not first:
                accumulate(each, rank, range(passes))
                optimizer.step()
                optimizer.zero_grad()
            before = {name: kept.clone() for name, kept in residuals(optimizer).items()}
            accumulate(each, rank, range(10, 10 + passes))
            if which == 0:
                with pytest.raises(AssertionError) as raised:
                    accumulate(each, rank, range(20, 21))
                text = str(raised.value)
                assert text.startswith(
                    "AGM104: Gradients were computed more than backward_passes_per_step times before call to step(). "
                    "Increase backward_passes_per_step to accumulate gradients locally."
                )
                assert "'4.bias'" in text and f"gradient number {passes + 1}" in text
                assert residuals(optimizer).keys() == before.keys()
                assert all(same_bits(kept, before[name]) for name, kept in residuals(optimizer).items())
                optimizer.zero_grad()  # without the gradients of that step, it goes on
                accumulate(each, rank, range(10, 10 + passes))
            optimizer.step()
            seen[which].extend([digest(each), digest(residuals(optimizer).values())])
        return seen

    for once_too_often, twin in on_ranks(2, MODEL, body):
        assert once_too_often == twin


def test_one_process_counts_passes_like_many_and_may_drop_them() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        accumulate(model, rank, range(1))
        with pytest.raises(AssertionError, match="Gradients were computed more than"):
            accumulate(model, rank, range(1))
        optimizer.zero_grad()
        accumulate(model, rank, range(1))
        optimizer.zero_grad()  # nobody waits for it: as in torch
        accumulate(model, rank, range(1))

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("compression", ["none", "topk"])
def test_a_pass_in_no_sync_after_the_last_one_is_refused(compression: str) -> None:
    """Its gradient would come too late for messages that have left."""

    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model, compression=compression)
        for step in range(2):
            optimizer.zero_grad()
            accumulate(model, rank, range(step, step + 1))
            with optimizer.no_sync(), pytest.raises(AssertionError, match=r"no_sync\(\).*'4.bias'"):
                accumulate(model, rank, range(9, 10))
            with pytest.raises(agmerge.AGMergeError, match="AGM103: .*'4.bias'"):
                optimizer.step()
            optimizer.zero_grad()
            accumulate(model, rank, range(step, step + 1))
            optimizer.step()

    on_ranks(2, MODEL, body)


def test_a_pass_in_no_sync_after_synchronize_begins_another_step() -> None:
    """Without that, its local gradient would go straight into the inner optimizer, on every rank another one."""

    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="none")
        accumulate(model, rank, range(1))
        optimizer.synchronize()
        with optimizer.no_sync():
            accumulate(model, rank, range(1, 2))
        with optimizer.skip_synchronize(), pytest.raises(agmerge.AGMergeError, match="AGM110"):
            optimizer.step()
        optimizer.step()
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_no_sync_restores_itself_when_it_is_nested_or_left_by_an_error() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="none")
        with pytest.raises(KeyError), optimizer.no_sync():
            with optimizer.no_sync():
                accumulate(model, rank, range(1))
            accumulate(model, rank, range(1, 2))
            raise KeyError
        accumulate(model, rank, range(2, 3))
        optimizer.step()
        return digest(model)

    agreed(on_ranks(2, MODEL, body))
