# SPDX-License-Identifier: Apache-2.0
"""What the examples have of the ACP-SGD project: its flags, its models, its merge buffers, and the sweep."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import mnist
import models
import numpy as np
import options
import pytest
import synthetic_benchmark
import torch
import torch.distributed as dist
from digits import DigitsCNN
from torch import Size

import agmerge
import merging
from agmerge.testing import run

MB = 2**20
SMALL = "benchmark --no-cuda --model cnn --image-size 8 --batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 2"


# -- flags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [mnist.arguments, synthetic_benchmark.arguments])
def test_rank_and_threshold_are_passed_on(arguments: object) -> None:
    args = arguments("--compression acpsgd --rank 8 --threshold 0.5".split())  # type: ignore[operator]
    expected = {"compression": "acpsgd", "rank": 8, "exchange": "sparse"}
    assert options.given(args, "the model") == expected | {"merging": merging.get("threshold", bytes=MB // 2)}


@pytest.mark.parametrize(
    "line, words",
    [
        ("--threshold 25 --merging single", "not allowed with argument"),
        ("--threshold=-1", "no number of MB"),
        ("--threshold inf", "--merging single"),
        ("--rank four", "invalid int value"),
        ("--each s-sgd acpsgd --compression topk", "--each names compressors"),
        ("--each s-sgd --fp16-allreduce", "--each names compressors"),
        ("--each ,", "--each: no name"),
    ],
)
def test_what_contradicts_is_refused(capsys: pytest.CaptureFixture[str], line: str, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        synthetic_benchmark.arguments(line.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


# -- models ----------------------------------------------------------------------------------------------------

SIZES = {  # model: tensors, elements
    "resnet50": (161, 25_557_032),
    "resnet152": (467, 60_192_808),
    "bert_base": (206, 110_111_042),
    "bert_large": (398, 336_232_258),
}


@functools.cache
def shapes(name: str) -> list[Size]:
    """The shapes of a model's parameters, the last one first, as backward makes them ready. Takes no memory."""
    if name in models.BERTS:
        pytest.importorskip("transformers")
    with torch.device("meta"):
        return [parameter.shape for parameter in models.build(name, 1, 64).model.parameters()][::-1]


@pytest.mark.parametrize("name", SIZES)
def test_the_published_models_have_their_sizes(name: str) -> None:
    found = shapes(name)
    assert (len(found), sum(shape.numel() for shape in found)) == SIZES[name]


# -- merge buffers ---------------------------------------------------------------------------------------------


def ours(name: str, megabytes: float) -> list[int]:
    """Tensors per merge buffer of ``--threshold megabytes``."""
    numel = [shape.numel() for shape in shapes(name)]
    profile = merging.Profile([str(i) for i in range(len(numel))], numel, [0.0] * len(numel))
    planner = merging.get("threshold", bytes=round(megabytes * MB))
    free = np.zeros_like  # it goes by sizes
    return list(planner.plan(profile, merging.Costs(free, free)).counts)


def of_ddp(name: str, megabytes: float) -> list[int]:
    """Tensors per bucket of PyTorch DDP with ``bucket_cap_mb=megabytes``, by its own function."""
    tensors = [torch.empty(shape) for shape in shapes(name)]  # nothing is written to them
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [round(megabytes * MB)])
    return [len(bucket) for bucket in buckets]


def published(name: str, rank: int, side: int, megabytes: float) -> list[int]:
    """Tensors per buffer of the ACP-SGD project's rule, for factors of n x r (side 0) or m x r (side 1).

    It counts compressed elements, scales the threshold by their share, and closes before the tensor that would cross.
    """
    sizes = []
    for shape in shapes(name):
        matrix = (shape[0], shape[1:].numel())
        sizes.append(matrix[side] * min(rank, *matrix) if len(shape) > 1 else shape.numel())
    limit = megabytes * MB / 4 * sum(sizes) / sum(shape.numel() for shape in shapes(name))
    counts, held = [0], 0
    for size in sizes:
        if held and held + size > limit:
            counts, held = [*counts, 0], 0
        counts[-1], held = counts[-1] + 1, held + size
    return counts


@pytest.mark.parametrize(
    "name, rank, messages, theirs",
    [
        ("resnet50", 4, 4, [4, 4]),
        ("resnet152", 4, 9, [10, 10]),
        ("bert_base", 32, 13, [15, 25]),
        ("bert_large", 32, 37, [73, 73]),
    ],
)
def test_a_threshold_gives_ddps_buckets(name: str, rank: int, messages: int, theirs: list[int]) -> None:
    assert ours(name, 25) == of_ddp(name, 25)
    assert len(ours(name, 25)) == messages
    assert [len(published(name, rank, side, 25)) for side in (0, 1)] == theirs


def test_a_threshold_gives_as_many_messages_of_resnet_50_as_the_published_rule() -> None:
    factors = [published("resnet50", 4, side, 25) for side in (0, 1)]
    assert factors == [[20, 23, 38, 80], [18, 28, 34, 81]]  # as the published code has them
    assert [published("resnet50", 1, side, 25) for side in (0, 1)] == [[20, 21, 38, 82], [19, 23, 37, 82]]
    assert ours("resnet50", 25) == [14, 12, 39, 96]  # one rule for both factors; the same number
    assert len(ours("resnet50", 0)) == len(published("resnet50", 4, 0, 0)) == 161


# -- the sweep -------------------------------------------------------------------------------------------------


def swept(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    """The rows of the table of a sweep of one worker, and all that was printed."""
    monkeypatch.setattr(sys, "argv", [*SMALL.split(), *line.split()])
    synthetic_benchmark.main()
    out = capsys.readouterr().out
    return out[out.rindex("compressor ") :].splitlines()[1:], out


def test_a_sweep_trains_with_each_and_writes_the_figures_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    line = f"--num-iters 2 --density 0.05 --rank 4 --each s-sgd,topk fp16 --threshold 1 --json {out}"
    rows, printed = swept(line, monkeypatch, capsys)
    assert [row.split()[0] for row in rows] == ["s-sgd", "topk", "fp16"]
    assert printed.count("Iter #1: ") == 3 and "Compression: topk, density 0.05, " in printed
    runs = json.loads(out.read_text())
    assert [figures["settings"]["compression"] for figures in runs] == ["none", "topk", "fp16"]
    assert {figures["settings"]["merging"] for figures in runs} == {"threshold(bytes=1048576)"}
    assert {figures["buffers"] for figures in runs} == {2}


def test_the_published_sweep_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows, printed = swept("--num-iters 1 --rank 2 --each s-sgd powersgd acpsgd", monkeypatch, capsys)
    sent = {name: int(row.split()[-3]) for row in rows if (name := row.split()[0])}
    assert list(sent) == ["s-sgd", "powersgd", "acpsgd"]
    assert "Compression: powersgd, rank 2, " in printed and "Compression: acpsgd, rank 2, " in printed
    assert sent["acpsgd"] < sent["powersgd"] < sent["s-sgd"] / 10


# -- docs/low_rank.md: its recipe, and names others use --------------------------------------------------------


def trained(model: torch.nn.Module, optimizer: agmerge.DistributedOptimizer, rank: int, steps: int = 3) -> torch.Tensor:
    """All parameters after some steps on batches of this rank's own."""
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 1, 8, 8, generator=source)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_recipe_for_a_script_of_acpsgd_keeps_replicas_equal() -> None:
    def body(rank: int) -> tuple[torch.Tensor, dict[str, str]]:
        agmerge.init()
        model = DigitsCNN()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        agmerge.broadcast_parameters(model.state_dict(), root_rank=0)
        threshold = merging.get("threshold", bytes=25 * 2**20)
        options = {"compression": "acpsgd", "rank": 4, "exchange": "sparse", "merging": threshold}
        optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        return trained(model, optimizer, rank), optimizer.settings

    (first, settings), (second, _) = run(2, body)
    assert torch.equal(first, second)
    assert (settings["compression"], settings["rank"], settings["exchange"]) == ("acpsgd", "4", "sparse")
