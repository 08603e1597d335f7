# SPDX-License-Identifier: Apache-2.0
"""The examples' command lines, models and images; ``tests/distributed`` runs the scripts under launchers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import launchers
import mnist
import models
import numpy as np
import pytest
import synthetic_benchmark
import torch
from data import idx

SCRIPTS = {"mnist": mnist.arguments, "synthetic_benchmark": synthetic_benchmark.arguments}
ROOT = Path(__file__).resolve().parents[1]
HOROVODS = {  # flag, and what it is without one
    "mnist": {
        "test_batch_size": 1000,
        "epochs": 10,
        "lr": 0.01,
        "momentum": 0.5,
        "no_cuda": False,
        "seed": 42,
        "log_interval": 10,
        "fp16_allreduce": False,
        "gradient_predivide_factor": 1.0,
    },
    "synthetic_benchmark": {
        "fp16_allreduce": False,
        "model": "resnet50",
        "batch_size": 32,
        "num_warmup_batches": 10,
        "num_batches_per_iter": 10,
        "num_iters": 10,
        "no_cuda": False,
    },
}


@pytest.mark.parametrize("script", HOROVODS)
def test_horovods_flags_have_horovods_defaults(script: str) -> None:
    assert HOROVODS[script].items() <= vars(SCRIPTS[script]([])).items()


@pytest.mark.parametrize(
    "script, line, words",
    [
        ("mnist", "--use-adasum", "does not combine gradients by Adasum"),
        ("mnist", "--fp16-allreduce --compression topk", "contradict"),
        ("synthetic_benchmark", "--use-adasum", "does not combine gradients by Adasum"),
        ("synthetic_benchmark", "--fp16-allreduce --compression topk", "contradict"),
        ("synthetic_benchmark", "--num-iters 0", "less than 1"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys: pytest.CaptureFixture[str], script: str, line: str, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        SCRIPTS[script](line.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, compression",
    [("", "none"), ("--fp16-allreduce", "fp16"), ("--fp16-allreduce --compression fp16", "fp16")],
)
def test_the_benchmark_is_dense_as_horovods_unless_told(line: str, compression: str) -> None:
    assert synthetic_benchmark.arguments(line.split()).compression == compression


@pytest.mark.parametrize(
    "env, above, launcher",
    [
        ({}, ["bash"], "alone"),
        ({"RANK": "0"}, ["bash"], "by hand"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["mpirun -np 2 -mca btl ^openib python a.py", "bash"], "mpirun"),
        (
            {"OMPI_COMM_WORLD_RANK": "0"},
            ["prterun", "/bin/sh -c mpirun --tag-output -np 2 -mca btl ^openib -x PATH python a.py"],
            "horovodrun",
        ),
        ({"PMI_RANK": "0"}, ["mpiexec"], "mpirun"),
        ({"HOROVOD_RANK": "0", "RANK": "0"}, ["python"], "horovodrun"),
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, ["python"], "torchrun"),
    ],
)
def test_the_launcher_is_known(env: dict[str, str], above: list[str], launcher: str) -> None:
    assert launchers.launcher(env, above) == launcher


# -- the benchmark, and make -----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["--merging dear", "--compression topk", "--compression topk --merging agtf"])
def test_the_benchmark_runs_alone_with_any_planner(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    line = "benchmark --no-cuda --model cnn --image-size 8 --batch-size 2 --num-warmup-batches 1"
    line += f" --num-batches-per-iter 1 --num-iters 2 --json {out} {more}"
    monkeypatch.setattr(sys, "argv", line.split())
    synthetic_benchmark.main()
    planner = more.split()[-1] if "merging" in more else "threshold"
    assert f"Plan: {planner}, 1 merge buffer\n" in capsys.readouterr().out
    assert json.loads(out.read_text())["settings"]["merging"] == planner


def test_make_train_passes_on_what_it_was_given_and_nothing_else() -> None:
    def told(*more: str) -> str:
        command = ["make", "-n", "--no-print-directory", f"PYTHON={sys.executable}", "train", *more]
        alone = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}  # nothing of a make around it
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True, env=alone)
        _, script, flags = done.stdout.partition("examples/")
        return " ".join((script + flags).replace("\\\n", " ").split()).removeprefix("examples/train.py ")

    assert told() == "examples/promise.py --workers 2"
    assert told("NP=3", "COMPRESSION=sidco") == "examples/promise.py --workers 3 --compression sidco"
    assert told("JOB=digits") == told("LAUNCHER=torchrun", "JOB=digits") == "digits"
    assert told("JOB=digits", "COMPRESSION=none") == "digits --compression none"
    assert told("MERGING=dear", "COMPRESSION=bf16", "EPOCHS=3") == "digits --compression bf16 --merging dear --epochs 3"
    assert told("DENSITY=0.1", "EXCHANGE=auto", "ARGS=--seed 1") == "digits --density 0.1 --exchange auto --seed 1"
    assert told("JOB=lstm-ptb", "DATA=/data").endswith("lstm-ptb --data /data")


# -- MNIST's own files -----------------------------------------------------------------------------------------

SIDE = 6


def packed(values: np.ndarray) -> bytes:
    """An idx file of bytes."""
    head = bytes((0, 0, 8, values.ndim)) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return head + values.astype(np.uint8).tobytes()


def written(folder: Path, mark: str = "-", gzipped: bool = False) -> dict[str, np.ndarray]:
    """Four files in ``folder``, and what is in them by part of the name."""
    source, found = np.random.default_rng(0), {}
    for part, count in (("train", 40), ("t10k", 10)):
        for kind, shape in (("images", (count, SIDE, SIDE)), ("labels", (count,))):
            values = source.integers(0, 256 if kind == "images" else 10, shape)
            content = packed(values)
            name = f"{part}-{kind}{mark}idx{values.ndim}-ubyte" + (".gz" if gzipped else "")
            (folder / name).write_bytes(gzip.compress(content) if gzipped else content)
            found[f"{part}-{kind}"] = values
    return found


@pytest.mark.parametrize("mark", "-.")
@pytest.mark.parametrize("gzipped", [False, True])
def test_mnists_files_are_read_as_they_come(tmp_path: Path, mark: str, gzipped: bool) -> None:
    expected = written(tmp_path, mark, gzipped)
    for got, values in zip(idx.load(tmp_path), expected.values(), strict=True):
        assert got.dtype == np.uint8 and np.array_equal(got, values)


HEAD = bytes((0, 0, 8, 3))  # of images
LABELS = gzip.compress(packed(np.zeros(40)))
BROKEN = {  # file, its content, and the words of the error
    "labels for images": ("train-images-idx3-ubyte", packed(np.zeros(40)), "begins with 00 00 08 01, .* 00 00 08 03"),
    "a web page": ("train-images-idx3-ubyte", b"<html>", "begins with 3c 68 74 6d"),
    "empty": ("t10k-labels-idx1-ubyte", b"", "begins with nothing"),
    "floats": ("train-images-idx3-ubyte", bytes((0, 0, 13, 3)) + bytes(12), "begins with 00 00 0d 03"),
    "half a header": ("train-images-idx3-ubyte", HEAD + bytes(5), "ends inside its header, after 9 of 16 bytes"),
    "cut off": ("train-images-idx3-ubyte", packed(np.zeros((40, 6, 6)))[:-1], r"cut off: .*6, 6\), 1440 bytes.*1439"),
    "too long": ("train-labels-idx1-ubyte", packed(np.zeros(40)) + b"x", "is too long.*40 bytes, and 41 follow"),
    "a gzip cut off": ("train-labels-idx1-ubyte", LABELS[:-6], "gzip file is broken or cut"),
    "a gzip of noise": ("train-labels-idx1-ubyte", b"\x1f\x8b\x08" + bytes(range(40)), "gzip file is broken or cut"),
    "fewer labels": ("train-labels-idx1-ubyte", packed(np.zeros(39)), "40 images in the train set, but 39 labels"),
    "another size": ("t10k-images-idx3-ubyte", packed(np.zeros((10, 6, 7))), "differ in size: 6 x 6 and 6 x 7"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(case: str, tmp_path: Path) -> None:
    name, content, words = BROKEN[case]
    written(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        idx.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_mnist_example_trains_alone_on_either_images_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    for more, batch, told in ((["--data-dir", str(tmp_path)], 40, 0), ([], 1437, 1)):
        monkeypatch.setattr(sys, "argv", ["mnist.py", "--no-cuda", "--epochs", "1", "--compression", "topk", *more])
        mnist.main()
        out = capsys.readouterr().out
        assert f"Train Epoch: 1 [0/{batch} (0%)]" in out and "Test set: Average loss: " in out
        assert out.count("Images: scikit-learn's digits") == told
    assert mnist.arguments([]).batch_size == 16 and mnist.arguments(["--data-dir", "x"]).batch_size == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parameters, unit",
    [("resnet50", 25_557_032, "img"), ("cnn", 606_472, "img"), ("gpt2", 13_842_432, "sequences")],
)
def test_a_model_has_its_size_and_learns(name: str, parameters: int, unit: str) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers")
    work = models.build(name, batch_size=2, image_size=64).to(torch.device("cpu"))
    assert sum(parameter.numel() for parameter in work.model.parameters()) == parameters
    assert work.unit == unit and len(work.x) == 2
    loss = work.loss()
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in work.model.parameters())
