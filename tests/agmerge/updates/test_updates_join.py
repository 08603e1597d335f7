# SPDX-License-Identifier: Apache-2.0
"""``join()`` with ``sync="updates"``: a rank without batches sends what it carries until no rank has any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, mlp, on_ranks, seeded, train, wrap
from torch import Tensor, nn

import agmerge
import merging
from agmerge import testing

MODEL = seeded(mlp)
SMALL = merging.get("threshold", bytes=4096)
CELLS: dict[str, dict[str, Any]] = {
    "apply": {},
    "hold": {"carry": "hold"},
    "apply, every 4": {"every": 4},
    "hold, every 4": {"carry": "hold", "every": 4},
    "fragments": {"every": 4, "fragments": 2},
    "fragments without merge buffers": {"every": 4, "fragments": 4, "merging": "single"},
    "overlap": {"overlap": 1},
    "overlap, fragments": {"every": 4, "fragments": 2, "overlap": 2},
    "outer": {"every": 3, "outer": agmerge.Nesterov()},
    "none": {"compression": "none", "every": 4},
    "two-level": {"exchange": "two-level", "carry": "hold"},
    "powersgd": {"compression": "powersgd"},
    "acpsgd": {"compression": "acpsgd", "every": 2},
    "oktopk": {"exchange": "oktopk"},
    "by times": {"exchange": "auto", "merging": "agmerge"},
}
# By size: how many steps each rank makes. Every rank is the last one once; of two it is the higher one.
STOPS = [(3, 9), (9, 3), (5, 5), (0, 6), (2, 7, 5), (7, 1, 7)]


def started(model: nn.Module, **options: Any) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return wrap(model, inner, **{"sync": "updates", "compression": "topk", "merging": SMALL, **options})


def where(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """This rank's part of the mean that no exchange moves: the shared parameters, less all that it has not sent.

    Not with two-level exchanges, where ranks keep shards.
    """
    unsent = testing.inspect(optimizer).residuals
    with optimizer.shared():
        return {
            name: (p.detach() - unsent[name] if name in unsent else p.detach().clone()).double()
            for name, p in model.named_parameters()
        }


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_all_end_at_the_same_parameters_and_nothing_is_lost(cell: str, stops: tuple[int, ...]) -> None:
    """A rank that waits does not step: the mean of all moves by the others' steps, and by nothing else."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **CELLS[cell])
        moved = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        names, before = {p: name for name, p in model.named_parameters()}, {}

        def note(*_: Any) -> None:
            before.update({name: p.detach().double() for name, p in model.named_parameters()})

        def add(*_: Any) -> None:
            for p, name in names.items():
                moved[name] += p.detach().double() - before[name]

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(add)
        train(model, optimizer, rank, range(stops[rank]))
        last = optimizer.join()
        assert not any(kept.any() for kept in testing.inspect(optimizer).residuals.values())
        after = digest(model)
        steps = optimizer.stats()["steps"]
        train(model, optimizer, rank, range(20, 24))  # all have batches again
        optimizer.consolidate()
        return last, after, steps, moved, {n: p.detach().clone() for n, p in model.named_parameters()}

    lasts, after, steps, moved, models = zip(*on_ranks(len(stops), MODEL, body), strict=True)
    agreed(list(after))
    agreed(list(steps))
    assert agreed(list(lasts)) == max(rank for rank, stop in enumerate(stops) if stop == max(stops))
    agreed([digest(model.values()) for model in models])
    if "outer" not in CELLS[cell]:  # that one does not take the mean
        for name, start in MODEL.named_parameters():
            mean = torch.stack([part[name] for part in moved]).mean(0)
            torch.testing.assert_close(models[0][name].double(), start.detach() + mean, rtol=0, atol=2e-6, msg=name)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in ("outer", "two-level")])
def test_consolidating_moves_the_mean_nowhere(cell: str) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, **CELLS[cell])
        train(model, optimizer, rank, range(6))
        optimizer.flush()
        before = where(model, optimizer)
        optimizer.consolidate()
        return before, {name: p.detach().double() for name, p in model.named_parameters()}, digest(model)

    before, after, digests = zip(*on_ranks(2, MODEL, body), strict=True)
    agreed(list(digests))
    for name in before[0]:
        mean = torch.stack([part[name] for part in before]).mean(0)
        torch.testing.assert_close(after[0][name], mean, rtol=0, atol=1e-6, msg=name)


def test_ranks_outside_of_the_process_set_step_by_themselves() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = started(model, process_set=[0, 2], every=2)
        train(model, optimizer, rank, range((5, 3, 8)[rank]))
        if rank == 1:
            alone = seeded(mlp)
            train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), rank, range(3))
            assert digest(alone) == digest(model)
            with optimizer.shared():
                assert digest(alone) == digest(model)
            optimizer.consolidate()
            assert digest(alone) == digest(model)
        return optimizer.join(), digest(model)

    found = on_ranks(3, MODEL, body)
    assert found[0] == found[2] != found[1] and found[0][0] == 2 and found[1][0] == 1


def test_one_worker_alone_returns_at_once() -> None:
    def body(rank: int, model: nn.Module) -> int:
        optimizer = started(model)
        seen = train(model, optimizer, rank, range(3))
        last = optimizer.join()
        assert digest(model) == seen[-1]
        return int(last)

    assert on_ranks(1, MODEL, body) == [0]


@pytest.mark.parametrize("stops", [(4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("options", [{"fragments": 4, "every": 4, "merging": "single"}, {"every": 4}, {"overlap": 1}])
def test_what_is_not_finite_is_all_ranks_error_though_one_has_joined(
    options: dict[str, Any], stops: tuple[int, int]
) -> None:
    """Also where the fragment that is due next has no merge buffer."""

    def body(rank: int, model: nn.Module) -> str:
        optimizer = started(model, **options)
        with pytest.raises(agmerge.NonFiniteError) as raised:
            for step in range(stops[rank]):
                optimizer.zero_grad()
                (model(torch.ones(2, 32)).sum() * (float("nan") if step == 5 else 1.0)).backward()
                optimizer.step()
            optimizer.join()
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))
