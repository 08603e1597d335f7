# SPDX-License-Identifier: Apache-2.0
"""Command lines of published projects, with the script's name changed, and what is refused of them."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import jobs
import pytest
from training import published

import merging
from sparsifiers import catalogue

COMMANDS = Path(__file__).parents[1] / "examples" / "README.md"
NUMBERS = {"--batch-size": int, "--epochs": published.whole, "--max-steps": published.limit, "--base-lr": float}


def read(line: str) -> Namespace:
    """Read a command line with a parser of our flags and the published ones, as a training script does."""
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("job", nargs="?")
    parser.add_argument(*published.aliases("--data"), type=Path)
    for flag, kind in (NUMBERS | {"--wd": float, "--batches-per-allreduce": int, "--warmup-epochs": float}).items():
        parser.add_argument(*published.aliases(flag), type=kind)
    for flag in ("--compression", "--memory", "--checkpoint-dir", "--weights", "--tokenizer", "--merging", "--amp"):
        parser.add_argument(*published.aliases(flag))
    parser.add_argument("--density", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument(*published.aliases("--no-cuda"), action="store_true")
    published.add_translated(parser)
    published.add_refused(parser)
    return published.translated(parser.parse_args(shlex.split(line)))


LINES: list[tuple[str, dict[str, Any]]] = [
    (  # OMGS-SGD: dnn=resnet20 nworkers=4 ./horovod_mpi.sh; tests/support/published_lines.py has them all, in full
        "--dnn resnet20 --dataset cifar10 --max-epochs 141 --batch-size 32 --data-dir ./data --lr 0.1 "
        "--nsteps-update 1 --density 0.001 --compressor topk --threshold 8192 --nworkers 4 --nwpernode 2",
        {
            "job": "resnet20-cifar10",
            "epochs": 141,
            "batch_size": 32,
            "data": Path("data"),
            "base_lr": 0.1,
            "batches_per_allreduce": 1,
            "density": 0.001,
            "compression": "topk",
            "merging": "threshold:bytes=32768",
            "nworkers": 4,
            "nwpernode": 2,
        },
    ),
    ("--dnn vgg16i --dataset imagenet --lr 0.01", {"job": "vgg16-imagenet", "base_lr": 0.01, "merging": None}),
    (  # FGBuff: run_cifar100_resnet50.sh
        "resnet50-cifar100 --epochs 80 --density 0.05 --compressor gaussian --threshold 8192",
        {"job": "resnet50-cifar100", "epochs": 80, "compression": "gaussian", "merging": "threshold:bytes=32768"},
    ),
    (  # FGBuff and ADTopk: run_squad_bert.sh, run_squad_compress_large.sh
        "--bert_model=bert-large-uncased --init_checkpoint=a.pt --vocab_file v.txt "
        "--density=0.05 --compressor=gaussian --do_train --train_file=/nlp/squad/train-v1.1.json "
        "--train_batch_size=4 --do_predict --predict_file=/nlp/squad/dev-v1.1.json --predict_batch_size=4 "
        "--eval_script=/nlp/squad/evaluate-v1.1.py --do_eval --do_lower_case --learning_rate=3e-5 "
        "--warmup_proportion=0.1 --seed=1 --num_train_epochs=3.0 --max_seq_length=384 --doc_stride=128 "
        "--output_dir=out --max_steps=-1 --fp16",
        {
            "job": "bert-large-squad",
            "init_checkpoint": Path("a.pt"),
            "vocab_file": Path("v.txt"),
            "data": Path("/nlp/squad"),
            "batch_size": 4,
            "base_lr": 3e-5,
            "warmup_proportion": 0.1,
            "seed": 1,
            "epochs": 3,
            "checkpoint_dir": "out",
            "max_steps": None,
            "amp": "fp16",
        },
    ),
    (  # ADTopk: run_clm_no_trainer_hvd_103.sh
        "gpt2-large-wikitext103 --dataset_name /nlp/wikitext-103-raw-v1 --dataset_config_name default "
        "--model_name_or_path /nlp/gpt2 --num_train_epochs=30 --density=0.1 --compressor=dgc --memory=residual "
        "--per_device_train_batch_size=2",
        {"data": Path("/nlp/wikitext-103-raw-v1"), "weights": "/nlp/gpt2", "memory": "residual", "batch_size": 2},
    ),
    (  # ADTopk: run_imagenet_no_trainer_hvd_large.sh
        "vit-large-imagenet --image_column_name image --num_train_epochs=80 --train_dir /data/imagenet/train "
        "--validation_dir /data/imagenet/val --model_name_or_path /data/vit --per_device_train_batch_size 32 "
        "--per_device_eval_batch_size 32 --metric_accuracy /data/accuracy --with_tracking --output_dir out",
        {"data": Path("/data/imagenet"), "weights": "/data/vit", "checkpoint_dir": "out", "epochs": 80},
    ),
    (  # ACP-SGD: the MNIST of mnist.sh
        "mnist --batch-size 64 --epochs 10 --lr 0.01 --data-dir /datasets --use-mixed-precision --no-cuda",
        {"base_lr": 0.01, "amp": "fp16", "no_cuda": True, "data": Path("/datasets")},
    ),
    ("mnist --fp16-allreduce", {"compression": "fp16"}),
    ("mnist --mgwfbp", {"merging": "mgwfbp"}),
    ("mnist --mgwfbp --asc --threshold 100", {"merging": "mgwfbp:asc=True"}),
    ("mnist --amp fp16 --fp16 --merging mgwfbp --mgwfbp", {"amp": "fp16", "merging": "mgwfbp"}),
]


@pytest.mark.parametrize("line, flags", LINES)
def test_published_command_lines_are_read(line: str, flags: dict[str, Any]) -> None:
    args = vars(read(line))
    assert flags.items() <= args.items()
    assert not {"model_net", "bert_model", "config_file", "percent"} & set(args)
    assert not {"threshold", "mgwfbp", "asc", "fp16", "fp16_allreduce", "dnn", "dataset", "train_part"} & set(args)


@pytest.mark.parametrize("flag", published.REFUSED)
@pytest.mark.parametrize("form", ["{}", "{} 3", "{}=3"])
def test_what_cannot_be_says_what_to_do(flag: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        read("mnist " + form.format(flag))
    assert f"error: {flag}: {published.REFUSED[flag]}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, words",
    [
        ("mnist --dnn resnet20 --dataset cifar10", "mnist is given, and --dnn resnet20, which means resnet20-cifar10"),
        ("mnist --percent 5", "--percent 5: published scripts do not read it; what is meant is --dense partial"),
        ("mnist --merging fgbuff --threshold 8192", "merging: fgbuff is given, and threshold:bytes=32768 by"),
        ("mnist --amp bf16 --fp16", "amp: bf16 is given, and fp16 by"),
        ("mnist --compression topk --fp16-allreduce", "compression: topk is given, and fp16 by"),
        ("mnist --data c --train-dir a/train --val-dir a/val", "data: c is given, and a by"),
        ("mnist --train-dir a/train --val-dir b/val", "a/train and b/val lie in two folders: put links to both"),
    ],
)
def test_flags_that_contradict_each_other(line: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        read(line)
    assert words in str(error.value)


def test_aliases_begin_with_ours_and_no_flag_has_two_meanings() -> None:
    assert published.aliases("--data") == ["--data", "--data-dir", "--dataset_name"]
    assert published.aliases("--density") == ["--density"]
    names = [flag for ours in published.ALIASES for flag in published.aliases(ours)]
    names += [*published.REFUSED, *published.NEEDLESS, *(f for flags in published.DATA_PARTS.values() for f in flags)]
    assert len(set(names)) == len(names)


def test_the_page_of_experiments_names_what_there_is() -> None:
    text = COMMANDS.read_text(encoding="utf-8")
    planners = set(re.findall(r"--merging ([a-z]+)", text))
    assert len(planners) >= 4 and all(merging.get(name) for name in planners)
    compressors = set(re.findall(r"--compression ([a-z]+)", text)) - {"none", "fp"}
    assert len(compressors) >= 7
    assert all(catalogue.canonical(name) for name in compressors)


@pytest.mark.parametrize(
    ("script", "model"),
    [
        ("run_imagenet_resnet152.sh", "resnet152"),
        ("run_squad_bert.sh", "bert-large"),
        ("run_clm_no_trainer_hvd_103.sh", "gpt2-large"),
    ],
)
def test_each_of_agmerges_own_scripts_has_a_line_of_ours(script: str, model: str) -> None:
    _, _, rest = COMMANDS.read_text(encoding="utf-8").partition("\n### AGMerge\n")
    section, _, _ = rest.partition("\n### ")
    (row,) = (line for line in section.splitlines() if f"/{script}`" in line)
    args = read(row.split("|")[2].strip().strip("`"))
    assert jobs.get(args.job) and args.job.startswith(model)
    assert merging.get(args.merging) == merging.get("agmerge") and catalogue.canonical(args.compression)


@pytest.mark.parametrize("flag", [*published.ALIASES, "--density", "--rank", "--exchange", "--merging", "--tiny"])
def test_the_page_of_experiments_says_what_flags_are_for(flag: str) -> None:
    assert f"`{flag}" in COMMANDS.read_text(encoding="utf-8")
