# SPDX-License-Identifier: Apache-2.0
"""Densities by step and by parameter, and another compressor in the middle of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import agreed, digest, loss_of, mlp, on_ranks, residuals, seeded, sgd, train, wrap
from torch import nn

import agmerge
from agmerge.options.compressors import ladder, parse_warmup

MODEL = seeded(mlp)
NUMEL = {"0.weight": 48 * 32, "2.weight": 32 * 48}


def sent_by_step(steps: int, **options: Any) -> list[int]:
    """Elements that the sparse tensor class sends in each step."""

    def body(rank: int, model: nn.Module) -> list[int]:
        optimizer = wrap(model, **options)
        found, before = [], 0
        for step in range(steps):
            train(model, optimizer, rank, range(step, step + 1))
            found.append(int(optimizer.stats()["elements_sent"]) - before)
            before += found[-1]
        return found

    whole = sum(p.numel() for name, p in MODEL.named_parameters() if name not in NUMEL)
    return [sent - whole for sent in agreed(on_ranks(2, MODEL, body))]


def test_the_papers_ladder() -> None:
    assert [ladder(3)(step) for step in range(0, 18, 3)] == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    schedule = parse_warmup("dgc", False)
    assert schedule is not None
    found = [schedule(step, 0.01) for step in (0, 199, 200, 400, 600, 5000)]
    assert found == [0.25, 0.25, 0.0625, 0.015625, 0.01, 0.01]
    with pytest.raises(ValueError, match="steps of a rung"):
        ladder(0)


def test_a_number_of_steps_is_geometric_and_ends_at_the_density() -> None:
    schedule = parse_warmup(4, False)
    assert schedule is not None
    found = [schedule(step, 0.0625 * 0.25) for step in range(6)]
    assert found == pytest.approx([0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.015625])
    assert schedule(0, 0.5) == 0.5  # nothing to warm up to


def test_warmup_decides_what_is_sent_in_each_step() -> None:
    numel = sum(NUMEL.values())
    assert sent_by_step(4, warmup=2, density=0.01) == [-(-numel // 4), 154, 31, 31]  # 0.25, 0.05, 0.01
    assert sent_by_step(3, warmup=lambda step: 1.0 if step == 1 else 0.5) == [numel // 2, numel, numel // 2]


def test_ranks_with_other_schedules_are_told() -> None:
    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(agmerge.RankMismatchError) as raised:
            wrap(model, warmup=lambda step: 0.5 - 0.1 * rank)
        return str(raised.value)

    assert "warmup: callable: 0.5 at 0" in agreed(on_ranks(2, MODEL, body))


def test_densities_by_pattern() -> None:
    by_name = {r"0\..*": 0.5, r".*": 0.1}
    assert sent_by_step(2, density=by_name) == [768 + 154] * 2  # one segment a density, in one message
    assert sent_by_step(2, density={r"2\.weight": 0.25}) == [384 + 16] * 2  # the other has the default
    assert sent_by_step(3, density=by_name, warmup=2)[0] == 768 + 384


def test_the_message_of_densities_by_pattern_is_one() -> None:
    def body(rank: int, model: nn.Module) -> tuple[int, bool]:
        optimizer = wrap(model, density={r"0\..*": 0.5, r".*": 0.1})
        train(model, optimizer, rank, range(3))
        kept = {name: float(r.abs().sum()) for name, r in residuals(optimizer).items()}
        return optimizer.stats()["buffers"], all(kept[name] > 0 for name in NUMEL)

    assert agreed(on_ranks(2, MODEL, body)) == (1, True)


SWITCHES = [
    [("topk", {"density": 0.05}), ("adtopk", {}), ("randomk", {"density": 0.2}), ("none", {}), ("sidco-gp", {})],
    [("none", {}), ("dgc", {"memory": "residual", "density": 0.02}), ("gaussiank", {}), ("topk", {"density": 1.0})],
]


@pytest.mark.parametrize("switches", SWITCHES)
def test_another_compressor_takes_the_residuals_over(switches: list[tuple[str, dict[str, Any]]]) -> None:
    """Nothing is lost on the way: what was applied and what is kept is the sum of all gradients."""

    def body(rank: int, model: nn.Module) -> tuple[str, dict[str, torch.Tensor]]:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), compression="topk", density=0.01)
        books = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
        for number, (name, options) in enumerate(switches):
            optimizer.set_compressor(name, **options)
            for step in range(10 * number, 10 * number + 3):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                for key, p in model.named_parameters():
                    books[key] += p.grad.double()  # this rank's gradient
                optimizer.synchronize()
                for key, p in model.named_parameters():
                    books[key] -= p.grad.double()  # the average, for all ranks
                with optimizer.skip_synchronize():
                    optimizer.step()
        for key, kept in residuals(optimizer).items():
            books[key] -= kept.double()
        return digest(model), books

    found = on_ranks(2, MODEL, body)
    for name in found[0][1]:
        assert float((found[0][1][name] + found[1][1][name]).abs().max()) < 2e-6, name


def test_a_lossless_compressor_sends_what_was_kept_at_once() -> None:
    def body(rank: int, model: nn.Module) -> tuple[float, float]:
        optimizer = wrap(model, density=0.01)
        train(model, optimizer, rank, range(3))
        before = optimizer.stats()["residual_norm"]
        optimizer.set_compressor("none")
        train(model, optimizer, rank, range(3, 4))
        return before, optimizer.stats()["residual_norm"]

    for before, after in on_ranks(2, MODEL, body):
        assert before > 0 and after == 0


def test_the_plan_stays_and_replicas_agree() -> None:
    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, merging="layerwise", compression="adtopk", density=0.1)
        seen = train(model, optimizer, rank, range(2))
        plan = optimizer.plan
        optimizer.set_compressor("gaussiank", density=0.05)
        seen += train(model, optimizer, rank, range(2, 4))
        assert optimizer.plan == plan and optimizer.stats()["steps"] == 4
        return seen

    assert len(set(agreed(on_ranks(3, MODEL, body)))) == 4


def test_ranks_that_switch_differently_are_told_and_go_on_as_before() -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        with pytest.raises(agmerge.RankMismatchError, match="compression: adtopk on rank 0; dgc on rank 1") as raised:
            optimizer.set_compressor("dgc" if rank else "adtopk", memory="residual")
        train(model, optimizer, rank, range(2, 4))
        return str(raised.value), digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_not_in_the_middle_of_a_step() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        loss_of(model, rank, 0).backward()
        with pytest.raises(agmerge.AGMergeError, match=r"set_compressor\(\) was called between backward\(\) and step"):
            optimizer.set_compressor("none")

    on_ranks(1, MODEL, body)


def test_options_of_the_sparsifier_pass_through() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, sgd(model))
        optimizer.set_compressor("randomk", density=0.1, seed=5)
        train(model, optimizer, rank, range(1))
        return repr(optimizer._reducer.exchange.agreed.config.compression.compressor)

    assert agreed(on_ranks(1, MODEL, body)) == "randomk(density=0.1, seed=5)"


def test_the_report_says_what_happens_to_each_tensor() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, density={r"0\..*": 0.5, r".*": 0.1})
        with pytest.raises(agmerge.AGMergeError, match="no plan yet"):
            optimizer.compression_report()
        train(model, optimizer, rank, range(1))
        return optimizer.compression_report()

    lines = agreed(on_ranks(1, MODEL, body)).splitlines()
    assert lines[0].split() == ["buffer", "tensor", "shape", "class", "sent", "density", "elements"]
    treated = {row.split()[1]: row.split()[2:] for row in lines[1:-1]}
    assert treated["0.weight"] == ["48x32", "sparse", "adtopk", "0.5", "1536"]
    assert treated["4.bias"] == ["10", "dense", "uncompressed", "1", "10"]
    assert lines[-1] == "adtopk(density=0.01, reuse=True): 3072 of 3482 elements (88.2%) are selected from"


@pytest.mark.parametrize(
    ("compression", "end"), [("eden-4", "eden-4(): 3072 of 3482 elements (88.2%) are quantized"),
                             ("none", "none(): 3482 of 3482 elements (100.0%) are dense")],
)  # fmt: skip
def test_reports_of_what_selects_nothing_do_not_speak_of_a_selection(compression: str, end: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[str, str, str]:
        optimizer = wrap(model, compression=compression)
        train(model, optimizer, rank, range(1))
        stats = optimizer.stats()
        return optimizer.compression_report(), stats["values_why"], stats["exchange_why"]

    report, values_why, exchange_why = agreed(on_ranks(2, MODEL, body))
    assert report.splitlines()[-1] == end
    assert values_why == exchange_why == "no sparsifier is in use"
