# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` in scripts that clip, schedule, scale and fail: invariant 9, and what is not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, backward, batch, digest, loss_of, mlp, on_ranks, seeded, sgd
from support.updates import assert_common, assert_kept, base_of, reducer_of, updating, watched
from torch import nn

import agmerge

MODEL = seeded(mlp)
WHEN: list[dict[str, Any]] = [
    {},
    {"carry": "hold"},
    {"every": 3},
    {"every": 2, "fragments": 2, "merging": "layerwise"},
    {"overlap": 1},
    {"compression": "none"},
]


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


# -- what scripts do ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", WHEN, ids=described)
def test_groups_schedules_clipping_and_closures(options: dict[str, Any]) -> None:
    """Each of them acts on this worker's own step, as in a script without the library; nothing is lost."""

    def body(rank: int, model: nn.Module) -> Any:
        first, *others = model.parameters()
        inner = torch.optim.AdamW([{"params": [first], "lr": 0.03}, {"params": others}], lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(inner, step_size=2, gamma=0.5)
        optimizer, norms, seen = updating(model, inner, **options), [], []
        inner.register_step_pre_hook(
            lambda *_: norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        )

        def learn(model: nn.Module, rank: int, step: int) -> None:
            loss = loss_of(model, rank, step) * 1e3
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            learn(model, rank, 77)
            return torch.tensor(3.0)

        for step in range(6):
            seen += watched(rank, model, optimizer, [step], learn)
            schedule.step()
        assert optimizer.step(closure) == 3.0
        assert [group["lr"] for group in optimizer.param_groups] == [0.03 / 8, 0.01 / 8]
        assert len(norms) == 7 and all(norm == pytest.approx(0.5, rel=1e-4) for norm in norms)
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(2, MODEL, body), strict=True)
    agreed(list(digests))
    assert_kept(seen)


def test_a_group_with_other_steps_is_sent_by_its_own_measure() -> None:
    """Displacements are in the parameters' own units: two learning rates, and x of each goes on as its own."""

    def body(rank: int, model: nn.Module) -> dict[str, float]:
        by_name = dict(model.named_parameters())
        slow = [by_name["2.weight"]]
        fast = [p for name, p in by_name.items() if name != "2.weight"]
        inner = torch.optim.SGD([{"params": slow, "lr": 1e-4}, {"params": fast, "lr": 0.1}])
        optimizer = updating(model, inner, sparsify="ahead", density=0.05)
        watched(rank, model, optimizer, range(3))
        return {n: float((base_of(optimizer)[n] - MODEL.state_dict()[n]).abs().max()) for n in ("0.weight", "2.weight")}

    moved = agreed(on_ranks(2, MODEL, body))
    assert 0 < moved["2.weight"] < moved["0.weight"] / 50


# -- a scaler ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True], ids=["plain", "unscaled and clipped"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("options", WHEN[:3], ids=described)
def test_a_scaler_that_skips_on_one_rank_holds_up_nobody(options: dict[str, Any], fused: bool, clips: bool) -> None:
    """That rank does not step, and sends what it carries; the others' steps are as ever, to the bit."""

    def body(rank: int, model: nn.Module) -> Any:
        scale = 2.0**10
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused or None)
        optimizer, seen, carried = updating(model, inner, **options), [], []
        for step in range(4):
            optimizer.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            infinite = rank == 1 and step == 2
            scaler.scale(loss_of(model, rank, step) * (torch.inf if infinite else 1.0)).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            if infinite and step + 1 < options.get("every", 1):
                assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            seen.append(digest(base_of(optimizer).values()))
            carried.append(sum(float(t.abs().sum()) for t in reducer_of(optimizer).replica.unsent().values()))
        assert optimizer.stats()["steps"] == 4
        assert optimizer.stats()["steps_skipped"] == int(rank == 1)
        assert scaler.get_scale() == scale / (2 if rank == 1 else 1)
        assert [int(state["step"]) for state in inner.state.values()] == [3 if rank == 1 else 4] * 6
        if not options:
            assert (carried[2] < carried[1]) == (rank == 1)  # it has sent, and done nothing
        assert_common(optimizer)
        return seen, optimizer.stats()["bytes_sent"]

    bits, _ = agreed(on_ranks(2, MODEL, body))
    assert len(set(bits)) > 1


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", ""])
def test_around_a_plain_optimizer_a_step_is_left_out_on_one_rank_likewise(scaled: bool) -> None:
    def body(rank: int, model: nn.Module) -> str:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        with agmerge.LocalSync(model, inner, every=2, nonfinite="skip") as sync:
            for step in range(4):
                inner.zero_grad()
                infinite = rank == 1 and step == 2
                scaler.scale(loss_of(model, rank, step) * (torch.inf if infinite else 1.0)).backward()
                scaler.step(inner)
                scaler.update()
            assert sync.stats()["exchanges"] == 2 and sync.stats()["steps_skipped"] == int(rank == 1)
            sync.consolidate()
        assert [int(state["step"]) for state in inner.state.values()] == [3 if rank == 1 else 4] * 6
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


# -- what is not finite -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", WHEN, ids=described)
def test_with_raise_all_ranks_raise_the_same_at_the_next_exchange(options: dict[str, Any], bad: float) -> None:
    """That rank has not stepped, ``base`` is as it was before, and all go on without it."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, texts, seen = updating(model, sgd(model), **options), [], []
        for step in range(8):
            optimizer.zero_grad()
            backward(model, rank, step)
            if (rank, step) == (1, 2):
                model[2].weight.grad[3, 4] = bad
                own = digest(model)
            base = digest(base_of(optimizer).values())
            try:
                optimizer.step()
            except agmerge.NonFiniteError as error:
                texts.append((step, str(error)))
                assert digest(base_of(optimizer).values()) == base
            if (rank, step) == (1, 2) and options.get("every") == 3:
                assert digest(model) == own
            seen.append(digest(base_of(optimizer).values()))
        assert_common(optimizer)
        return seen, texts, digest(model)

    seen, texts, _ = agreed(on_ranks(2, MODEL, body))
    assert len(texts) == 1 and "rank 1: " in texts[0][1] and "2.weight" in texts[0][1]
    assert texts[0][0] == (3 if "overlap" in options else 2)
    assert len(set(seen[3:])) > 1


@pytest.mark.parametrize("options", WHEN, ids=described)
def test_with_skip_that_rank_leaves_its_step_out(options: dict[str, Any]) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, nonfinite="skip", **options)
        stepped: list[int] = []
        optimizer.optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            backward(model, rank, step)
            if (rank, step) in ((1, 2), (0, 3)):
                next(model.parameters()).grad[0, 0] = torch.nan
            optimizer.step()
            seen.append(digest(base_of(optimizer).values()))
        assert len(stepped) == 5 and optimizer.stats()["steps_skipped"] == 1
        assert_common(optimizer)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return seen, digest(model)

    agreed(on_ranks(2, MODEL, body))


@pytest.mark.parametrize("options", WHEN, ids=described)
def test_what_an_optimizer_has_made_infinite_is_an_error_everywhere(options: dict[str, Any]) -> None:
    """A learning rate that is infinite on one rank: the shared parameters stay finite, and as they were."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, sgd(model, momentum=0.0), **options)
        watched(rank, model, optimizer, range(2))
        if rank == 1:
            optimizer.param_groups[0]["lr"] = torch.inf
        with pytest.raises(agmerge.NonFiniteError, match="AGM106") as raised:
            for step in range(2, 6):
                optimizer.zero_grad()
                backward(model, 0, step) if rank == 0 else model(batch(1, 0)[0]).sum().backward()
                optimizer.step()
        assert all(base.isfinite().all() for base in base_of(optimizer).values())
        return str(raised.value), digest(base_of(optimizer).values())

    text, _ = agreed(on_ranks(2, MODEL, body))
    assert "rank 1: " in text


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused, with a scaler"])
def test_gradients_that_are_never_finite_end_the_run(fused: bool) -> None:
    """After a hundred in a row: with ``"skip"``, and where a scaler and a fused optimizer find them."""

    def body(rank: int, model: nn.Module) -> int:
        inner = torch.optim.AdamW(model.parameters(), fused=True) if fused else sgd(model)
        optimizer, steps = updating(model, inner, nonfinite="skip"), 0
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=fused)
        with pytest.raises(agmerge.NonFiniteError):
            while steps < 200:
                optimizer.zero_grad()
                scaler.scale(torch.ones(1))
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.nan if rank else 0.0)
                scaler.step(optimizer)
                scaler.update()
                steps += 1
        return steps

    assert agreed(on_ranks(2, MODEL, body)) == 99
