# SPDX-License-Identifier: Apache-2.0
"""DeAR in the engine: calls, plans, membership, checkpoints and copies."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from support import WIDTH, Blocks, agreed, batch, digest, loss_of, on_ranks, same_bits, seeded, sgd
from support.dear import MODEL, PARTS, SMALL, adamw, dear, plain, same, train
from torch import nn
from torch.nn import functional as F

import agmerge
from agmerge import testing
from agmerge.exchanges.dense import _pieces

# -- calls and plans ----------------------------------------------------------------------------------------------


class Crossing(nn.Module):
    """Rank 1 runs its branches in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, turned: bool) -> torch.Tensor:
        branches = list(self.branches)
        outputs = {branch: torch.tanh(branch(x)) for branch in (branches[::-1] if turned else branches)}
        return self.head(sum(outputs[branch] for branch in branches))


def test_calls_are_the_same_though_forward_runs_in_another_order() -> None:
    def body(rank: int, model: Crossing) -> tuple[str, list[Any]]:
        optimizer = dear(model, merging=SMALL)
        for step in range(14):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x, rank == 1), y).backward()
            optimizer.step()
        calls = testing.calls()
        optimizer.flush()
        assert testing.calls() == calls  # a flush starts nothing
        assert optimizer.plan.counts == (2,) * 5
        names = [(kind, name) for kind, name, _ in calls[-10:]]
        assert names[:5] == [("reduce_scatter", f"buffer {i}") for i in range(5)]
        assert names[5:] == [("all_gather", f"buffer {i}/gather") for i in reversed(range(5))]
        return digest(model), calls

    agreed(on_ranks(2, seeded(Crossing), body, inject=testing.jitter(2)))


def test_the_plan_is_made_for_both_halves() -> None:
    def body(rank: int, model: nn.Module) -> tuple[Any, ...]:
        optimizer, moved = dear(model, merging="dear"), []
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            before = digest(model)
            optimizer.step()
            moved.append(digest(model) != before)
        assert moved == [step == 9 for step in range(12)]  # nothing is in flight while exchanges are timed
        measured = optimizer.measurements
        assert (measured.profile.forward > 0).all() and "buffer" in optimizer.merge_report()
        return measured.modes, measured.dumps(), optimizer.plan.counts, optimizer.stats()["steps"]

    assert agreed(on_ranks(2, MODEL, body))[0] == ("dear",)


def test_what_pads_the_shards_is_zero() -> None:
    for length, workers in ((32, 5), (32, 31), (64, 2), (96, 40)):
        shard = -(-length // workers)
        rows = torch.full((workers, shard + 7), 9.0)
        for part, row in _pieces(torch.arange(1.0, length + 1), rows[:, :shard]):
            row.copy_(part)
        laid = rows[:, :shard].flatten().tolist()
        assert laid == [*range(1, length + 1), *[0.0] * (workers * shard - length)]
        assert (rows[:, shard:] == 9.0).all()


# -- membership, checkpoints, copies ------------------------------------------------------------------------------


def test_freezing_and_new_groups_between_steps() -> None:
    def body(rank: int, model: Any, wrap: Any) -> list[str]:
        optimizer = wrap(model, sgd(model.trunk))
        seen = []
        for step in range(12):
            optimizer.zero_grad()
            if step == 2:
                optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.3})
            if step == 3:
                optimizer.add_param_group({"params": list(model.a.parameters())})
            if step in (5, 8):
                model.trunk.requires_grad_(step == 8)
            model.loss(rank, step, "a").backward()
            optimizer.step()
            if step % 3 == 1:
                optimizer.flush()
                seen.append(digest(model))
        return [*seen, str(sum(optimizer.plan.counts))]

    assert same(2, PARTS, body)[-1] == "6"


def test_a_parameter_of_another_model_is_not_admitted() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        train(model, optimizer, rank, range(2))
        with pytest.raises(ValueError, match=r"parameter 0 of group 1, torch.float32 \[3\]"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        train(model, optimizer, rank, range(2, 4))

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize("how", ["checkpoint", "pickle", "deepcopy"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_goes_on_to_the_bit(size: int, how: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = dear(model, adamw(model))
        train(model, optimizer, rank, range(5))
        if how == "checkpoint":
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            train(model, optimizer, rank, range(50, 53))  # and forgotten
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        else:
            move = copy.deepcopy if how == "deepcopy" else lambda both: pickle.loads(pickle.dumps(both))
            both = move((optimizer, model))  # in this order the model is copied after the flush
            train(model, optimizer, rank, range(50, 53))
            optimizer, model = both
        train(model, optimizer, rank, range(5, 14))
        optimizer.flush()
        return digest(model)

    def straight(rank: int, model: nn.Module) -> str:
        optimizer = plain(model, adamw(model))
        train(model, optimizer, rank, range(14))
        return digest(model)

    assert agreed(on_ranks(size, MODEL, body)) == agreed(on_ranks(size, MODEL, straight))


def test_a_copy_of_the_model_does_not_touch_the_training() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        average = copy.deepcopy(model)
        train(model, optimizer, rank, range(2))
        before = digest(model)
        average(batch(rank, 0)[0])
        average.state_dict()
        assert digest(model) == before
        optimizer.flush()
        assert digest(model) != before

    on_ranks(2, MODEL, body)


def test_hooks_are_gone_after_close_and_with_the_optimizer() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        train(model, optimizer, rank, range(2))
        optimizer.close()
        left = [m for m in model.modules() if m._forward_pre_hooks or m._state_dict_pre_hooks]
        assert left == [] and not any(m._load_state_dict_pre_hooks for m in model.modules())
        optimizer = dear(model)
        train(model, optimizer, rank, range(1))
        before = digest(model)
        del optimizer
        loss_of(model, rank, 1).backward()
        assert digest(model) == before

    on_ranks(2, MODEL, body)


def test_replicas_are_compared_after_their_updates() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer, seen = dear(model, check_every=2), [digest(model)]
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            seen.append(digest(model))
            optimizer.step()
            seen.append(digest(model))
        assert [a != b for a, b in zip(seen, seen[1:], strict=False)] == [False, False, True, True, False, False]
        optimizer.flush()
        if rank == 1:
            with torch.no_grad():
                model[2].bias += 1e-3
        with pytest.raises(agmerge.DivergenceError, match="'2.bias'"):
            train(model, optimizer, rank, range(3, 4))
        return digest([model[0].weight])

    agreed(on_ranks(2, MODEL, body))


def test_compressors_change_between_steps() -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> str:
        optimizer = wrap(model)
        for start, compression in enumerate(("bf16", "none", "fp16")):
            optimizer.set_compressor(compression)
            train(model, optimizer, rank, range(4 * start, 4 * start + 4))
        optimizer.flush()
        return digest(model)

    same(2, MODEL, body)


@pytest.mark.long
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager"])
def test_compiled_models(backend: str) -> None:
    compiling = threading.Lock()  # the compiler belongs to the process; nothing waits for another rank in here

    def body(rank: int, model: nn.Module, wrap: Any) -> str:
        optimizer = wrap(model)
        forward = torch.compile(model, backend=backend) if wrap is dear else model
        for step in range(4):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            with compiling:
                F.cross_entropy(forward(x), y).backward()
            optimizer.step()
        optimizer.flush()
        return digest(model)

    torch.compiler.reset()
    same(2, seeded(Blocks), body)


def test_a_damaged_message_is_found_in_step() -> None:
    def damage(call: testing.Call) -> None:
        if call.kind == "reduce_scatter" and call.rank == 1:
            call.tensor.fill_(7.0)

    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(agmerge.MessageError, match=r"AGM502: buffer 0: .*steps \[0, .* buffers \[0, "):
            optimizer.step()
        with pytest.raises(agmerge.AGMergeError, match="AGM124: .*AGM502: buffer 0: "):
            optimizer.step()

    on_ranks(2, MODEL, body, inject=damage)


class Turning(torch.optim.SGD):
    """Multiplies matrices in its step, as Muon does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    p.grad = p.grad @ p.grad.T @ p.grad
        return super().step(closure)


def test_updates_are_not_in_the_precision_of_forward() -> None:
    def body(rank: int, model: nn.Module, wrap: Any) -> str:
        optimizer = wrap(model, Turning(model.parameters(), lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu"):
                loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step()
        optimizer.flush()
        return digest(model)

    same(2, MODEL, body)


def test_the_gradient_of_a_step_is_left_to_the_script() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        loss_of(model, rank, 0).backward()
        mine = {p: p.grad for p in model.parameters()}
        optimizer.step()
        optimizer.flush()
        assert all(p.grad is gradient for p, gradient in mine.items())
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert not same_bits(model[0].weight, MODEL[0].weight)

    on_ranks(2, MODEL, body)
