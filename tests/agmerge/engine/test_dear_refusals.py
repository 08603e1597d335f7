# SPDX-License-Identifier: Apache-2.0
"""What DeAR cannot do is refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import digest, loss_of, mlp, on_ranks, seeded, sgd
from support.dear import MODEL, dear
from torch import nn

import agmerge
from agmerge import testing


class Keeps(torch.optim.SGD):
    """Counts its steps in its group, as some fused optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"model": None}, ValueError, ["requires model=, because it applies updates", "the next forward"]),
    ({"model": "mlp"}, TypeError, ["model='mlp'", "torch.nn.Module"]),
    ({"model": nn.Linear(2, 2)}, ValueError, ["model=Linear", "parameter 0 of group 0", "[48, 32]"]),
    ({"merging": "threshold"}, ValueError, ["model=", "model= is supported with merging="]),
    ({"compression": "topk"}, ValueError, ["merging='dear'", "topk", "compression='none'"]),
    ({"memory": "dgc"}, ValueError, ["memory='dgc'"]),
    ({"groups": 2}, ValueError, ["groups", "one of them"]),
    ({"num_groups": 2}, ValueError, ["groups", "one of them"]),
    ({"scaler": torch.amp.GradScaler("cpu")}, ValueError, ["merging='dear'", "scaler="]),
]


@pytest.mark.parametrize(
    "options, kind, words", REFUSED, ids=[str(next(iter(r[0].items()))).split(" at 0x")[0] for r in REFUSED]
)
def test_arguments(options: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    model = seeded(mlp)
    given = {"compression": "none", "merging": "dear", "model": model, **options}

    def body(rank: int) -> None:
        with pytest.raises(kind) as caught:
            agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **given)
        assert all(word in str(caught.value) for word in words), caught.value

    testing.run(1, body)


def test_calls_that_need_the_combined_gradient() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(ValueError, match=r"^synchronize\(\): .*merging='dear'"):
            optimizer.synchronize()
        with (
            pytest.raises(ValueError, match=r"skip_synchronize\(\): .*merging='dear'"),
            optimizer.skip_synchronize(),
        ):
            optimizer.step()
        with pytest.raises(ValueError, match=r"step\(closure\) .*merging='dear'.* before step\(\)"):
            optimizer.step(lambda: loss_of(model, rank, 0))
        optimizer.step()  # nothing has happened

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_the_optimizers_step(late: bool) -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner = sgd(model)
        hook = None if late else inner.register_step_pre_hook(lambda *_: None)
        if late:
            optimizer = dear(model, inner)
            hook = optimizer.register_step_post_hook(lambda *_: None)
            loss_of(model, rank, 0).backward()
        with pytest.raises(ValueError, match="step hooks of SGD.*Remove the hooks"):
            optimizer.step() if late else dear(model, inner)
        assert hook is not None
        hook.remove()
        optimizer.step() if late else dear(model, inner)

    on_ranks(2, MODEL, body)


def test_an_optimizer_that_keeps_state_in_its_groups() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model, Keeps(model.parameters(), lr=0.1))
        loss_of(model, rank, 0).backward()
        optimizer.step()
        with pytest.raises(agmerge.AGMergeError, match="Keeps.step.. changed 'step' of its param group"):
            optimizer.flush()

    on_ranks(2, MODEL, body)


def test_sparse_gradients_need_their_own_argument_and_are_right_with_it() -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3)))

    def body(rank: int, model: nn.Module, wrapped: bool, asked: bool) -> list[float]:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"model": model, "merging": "dear"} if wrapped else {}
        optimizer = agmerge.DistributedOptimizer(inner, compression="none", sparse_as_dense=asked, **options)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[step, rank + step]])).sum().backward()
            optimizer.step()
        optimizer.flush()
        return model[0].weight.flatten().tolist()

    usual = on_ranks(2, model, lambda r, m: body(r, m, False, True))
    assert on_ranks(2, model, lambda r, m: body(r, m, True, True)) == usual
    with pytest.raises(ValueError, match="'0.weight' has a gradient of layout torch.sparse_coo"):
        on_ranks(2, model, lambda r, m: body(r, m, True, False))


def test_flush_of_any_other_merging_does_nothing() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters())
        seen = [digest(model)]
        for call in (optimizer.flush, optimizer.step, optimizer.flush):
            if call == optimizer.step:
                loss_of(model, rank, 0).backward()
            call()
            seen.append(digest(model))
        assert seen[0] == seen[1] != seen[2] == seen[3]

    on_ranks(2, MODEL, body)
