# SPDX-License-Identifier: Apache-2.0
"""Every command line of the published projects, with the script's name changed alone: what it trains, or why not."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import jobs
import models
import options
import pytest
import synthetic_benchmark
import torch
import train
from support.published_lines import LINES, MODELS, Line, acpsgd
from training import options as train_options
from training import show

import merging

CONFIGURATION = {  # of the published base model; what makes no network may say anything
    "attention_probs_dropout_prob": 0.1,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the configurations of both models, where scripts for SQuAD look for them."""
    folder = tmp_path_factory.mktemp("bert")
    for size, place in MODELS.items():
        (folder / "pre-model" / place).mkdir(parents=True)
        text = json.dumps(CONFIGURATION | (LARGE if size == "large" else {}))
        (folder / "pre-model" / place / "bert_config.json").write_text(text, encoding="utf-8")
    return folder


def words(line: Line, bert: Path) -> list[str]:
    """Return what a script would see of the line."""
    return shlex.split(line.flags.replace("BERT/", f"{bert}/").replace("GOOGLE/", "/data/google/"))


def failed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error with which ``train.py`` ends before anything is trained."""
    with pytest.raises(SystemExit) as ended:
        train.main([*argv, "--dry-run"])
    assert ended.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def called(line: Line) -> str:
    return f"{line.source} {line.flags.split()[1] if line.source.startswith('OMGS') else ''}".strip()


OURS = [line for line in LINES if line.job]


@pytest.mark.slow
@pytest.mark.parametrize("line", OURS, ids=called)
def test_a_published_line_says_what_would_be_trained(
    line: Line, bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    train.main([line.script, *words(line, bert), "--dry-run"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"{line.job}: ")
    if line.told:  # the flags say it, too
        train.main([*words(line, bert), "--dry-run"])
        assert capsys.readouterr().out.startswith(f"{line.job}: ")
    else:
        assert line.job in failed(words(line, bert), capsys)
    said = dict(entry.partition(" ")[::2] for entry in line.flags.replace("=", " ").split(" --"))
    if "nworkers" in said:
        assert "  nworkers 4\n" in shown and "  nwpernode 4\n" in shown
    if "threshold" in said:
        assert "merging=threshold(bytes=32768)" in shown
    if "density" in said:
        assert f"density={float(said['density'])}" in shown
    if "init_checkpoint" in said:
        assert "  init_checkpoint /" in shown and "  vocab_file /" in shown


@pytest.mark.parametrize("line", [line for line in LINES if not line.job], ids=called)
def test_a_line_without_a_job_here_says_so(line: Line, bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = line.flags.split()[1]
    for argv in (words(line, bert), [line.script, *words(line, bert)]):
        error = failed(argv, capsys)
        assert error.startswith("there is no job for ") and f"--dnn {name} " in error
    if "--dataset imagenet" in line.flags:
        assert "there is resnet50-imagenet, " in error


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("../../run_squad_baseline_docker.py --bert_model bert-base-uncased", {"compression": "none"}),
        ("run_squad_allchanneltopk_docker.py --bert_model bert-base-uncased", {"compression": "allchanneltopk"}),
        ("run_squad.py --bert_model bert-large-uncased --compressor topk", {"compression": "topk"}),
        ("pytorch_mnist.py", {"compression": "acpsgd", "rank": 4}),
        ("pytorch_mnist.py --rank 2", {"compression": "acpsgd", "rank": 2}),
        ("pytorch_mnist.py --fp16-allreduce", {"compression": "fp16", "rank": None}),
        (
            "run_imagenet_no_trainer_hvd.py --train_dir /imagenet/train --model_name_or_path vit-large-x --density 0.1",
            {"compression": "dgc", "density": 0.1, "memory": "residual"},
        ),
        (
            "vit-large-imagenet --train_dir /imagenet/train --model_name_or_path vit-large-x --density 0.1 --memory=",
            {"compression": None, "density": 0.1, "memory": None},
        ),
    ],
)
def test_a_published_script_sends_what_its_code_says_where_the_line_does_not(line: str, sent: dict[str, Any]) -> None:
    assert sent.items() <= vars(train_options.arguments(shlex.split(line))).items()


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("--dnn resnet20", "resnet20-cifar10"),
        ("--model-net resnet50 --train-dir ~/cifar100/train --val-dir ~/cifar100/validation", "resnet50-cifar100"),
        ("--model-net bert_base", "bert-base-squad"),
        ("--model-net gpt_2 --data /texts/wikitext-2-raw-v1", "gpt2-wikitext2"),
        ("--dataset PennTreeBank", "lstm-ptb"),
        ("--bert_model bert-large-uncased", "bert-large-squad"),
        ("--dataset_name /w/wikitext-103-raw-v1 --model_name_or_path /m/gpt2-large", "gpt2-large-wikitext103"),
        ("--model_name_or_path /m/vit-large-patch16-224 --data /d/cifar-100-python", "vit-large-cifar100"),
        ("gpt2-large-wikitext103 --model_name_or_path /m/gpt2", "gpt2-large-wikitext103"),  # a folder's name is a hint
    ],
)
def test_the_job_is_told_by_flags_and_folders(line: str, job: str) -> None:
    assert train_options.arguments(line.split()).job == job


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("--dnn vgg16", "which job? --dnn vgg16 may be vgg16-cifar10, vgg16-cifar100, vgg16-imagenet"),
        ("--model-net resnet50", "which job? --model-net resnet50 may be resnet50-cifar100, resnet50-imagenet"),
        ("--dnn resnet20 --model-net resnet56", "there is no job for --dnn resnet20 with --model-net resnet56"),
        ("--model_name_or_path /m/gpt2-xl --data /d/wikitext2", "which job? "),
        ("--bert_model bert-base-cased", "no job for --bert_model bert-base-cased; for a part of it there is bert"),
        ("mnist --bert_model bert-base-uncased", "mnist is given, and --bert_model bert-base-uncased, which means"),
        ("mnist --dnn alexnet", "job: mnist is given, and --dnn alexnet, for which there is no job"),
        ("resnet20-cifar10 --init_checkpoint a.pt", "and --init_checkpoint, which means bert-base-squad or bert-large"),
        ("resnet20-cifar10 --vocab_file v.txt", "and --vocab_file, which means bert-base-squad or bert-large-squad"),
        ("bert-base-squad --config_file no_such.json", "no_such.json"),
        ("no_such.py", "no_such.py is no published script"),
        ("bert-base-squad --percent 5", "--percent 5: published scripts do not read it"),
        ("--epochs 3", "a job is missing, and nothing on the line says which: write one of digits, gpt-stdlib, "),
        ("--list --epics", "unrecognized arguments: --epics"),
        ("digits --epics", "unrecognized arguments: --epics"),
    ],
)
def test_what_is_not_told_or_contradicts_lists_the_jobs(
    line: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in failed(line.split(), capsys)


# -- the script under a published name -----------------------------------------------------------------------------


# -- ACP-SGD's benchmarks ------------------------------------------------------------------------------------------


def accepted(args: Namespace) -> dict[str, str]:
    """Return what the library makes of the benchmark's options."""
    model = show.outlined(lambda: models.build(args.model, 1, 32, 8).model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return show.settings_of(optimizer, model, options.given(args, model), None)


@pytest.mark.slow
@pytest.mark.parametrize("opt", ["ssgd", "powersgd", "acpsgd"])
def test_the_lines_of_acpsgds_benchmarks_are_taken(opt: str) -> None:
    pytest.importorskip("transformers")
    for line in acpsgd(opt):
        args = synthetic_benchmark.arguments(line.split())
        found = options.given(args, "the model")
        assert found["compression"] == {"ssgd": "none"}.get(opt, opt)
        assert found.get("rank") == (None if opt == "ssgd" else args.rank)
        assert found["merging"] == merging.get("threshold", bytes=round(args.threshold * 2**20))
    settings = accepted(synthetic_benchmark.arguments(acpsgd(opt)[0].split()))
    assert settings["compression"] == {"ssgd": "none"}.get(opt, opt) and settings.get("rank", "4") == "4"


@pytest.mark.parametrize("opt", ["ssgd", "powersgd", "acpsgd", "dear"])
def test_the_benchmark_trains_with_each(
    opt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"benchmark --no-cuda --model cnn --image-size 8 --batch-size 2 --num-iters 1 --rank 2 --opt {opt}"
    more = "--num-warmup-batches 1 --num-batches-per-iter 2 --threshold 25 --local_rank 0"
    monkeypatch.setattr("sys.argv", f"{line} {more}".split())
    synthetic_benchmark.main()
    shown = capsys.readouterr().out
    assert {"ssgd": "none", "dear": "none"}.get(opt, f"{opt}, rank 2, ") in shown.partition("Compression: ")[2]
    assert ("Plan: dear" if opt == "dear" else "Plan: threshold") in shown


def test_every_job_of_a_line_is_there() -> None:
    assert {line.job for line in OURS} <= set(jobs.JOBS)
