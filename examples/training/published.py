# SPDX-License-Identifier: Apache-2.0
"""Accept the flags of published projects (OMGS-SGD, FGBuff, ADTopk, ACP-SGD, Horovod) as other names of ours."""

from __future__ import annotations

import argparse
from argparse import SUPPRESS, ArgumentParser, Namespace
from ast import literal_eval
from pathlib import Path
from typing import Any

import torch

import agmerge
import merging
from training import published_jobs

ALIASES: dict[str, tuple[str, ...]] = {  # by our flag, which is Horovod's where Horovod has one
    "--data": ("--data-dir", "--dataset_name"),
    "--batch-size": ("--batch_size", "--train_batch_size", "--per_device_train_batch_size"),
    "--epochs": ("--max-epochs", "--num_train_epochs"),
    "--max-steps": ("--max_steps", "--max_train_steps"),
    "--base-lr": ("--lr", "--learning_rate"),
    "--wd": ("--weight_decay",),
    "--batches-per-allreduce": ("--nsteps-update", "--gradient_accumulation_steps"),
    "--compression": ("--compressor",),
    "--checkpoint-dir": ("--output_dir",),
    "--weights": ("--model_name_or_path",),
    "--tokenizer": ("--tokenizer_name",),
    "--no-cuda": ("--no_cuda",),
}
ANY = ""  # the value of a flag in NEEDLESS that may be anything
NEEDLESS: dict[str, str | None] = {  # what is so anyway: the value that it has to have; None: the flag has no value
    **dict.fromkeys(("--do_train", "--do_predict", "--do_eval", "--do_lower_case", "--with_tracking", "--cuda"), None),
    **{"--max_seq_length": "384", "--doc_stride": "128"},
    **{"--image_column_name": "image", "--label_column_name": "label", "--dataset_config_name": "default"},
    # Of an evaluation, whose figures do not depend on how it is cut into batches, and are the library's own.
    **dict.fromkeys(("--val-batch-size", "--test-batch-size", "--predict_batch_size"), ANY),
    **dict.fromkeys(("--per_device_eval_batch_size", "--metric_accuracy", "--eval_script"), ANY),
    **dict.fromkeys(("--local_rank", "--local-rank"), ANY),  # torch.distributed.launch says it in the environment, too
}
_NONE = "it is of another experiment with BERT than SQuAD, for which there is no job here"
_JOB = "the name of the job says it: train.py --list"
REFUSED = {  # by flag: what to do instead
    "--use-adasum": "what is kept back is sent later, which with Adasum would be another update; leave it out",
    "--rdma": "costs are measured here instead of looked up; launch.py --interface IF chooses the network",
    "--nstreams": "set HOROVOD_NUM_NCCL_STREAMS in the environment, which launch.py hands on",
    **dict.fromkeys(("--model", "--net", "--model_type"), _JOB),
    "--model-path": "--checkpoint-dir FOLDER --resume evaluates a checkpoint of train.py that has come to its end",
    **dict.fromkeys(("--task_name", "--data_dir", "--input_dir"), _NONE),  # GLUE, SWAG, pre-training
    "--pretrain": "--checkpoint-dir FOLDER --resume goes on from a checkpoint of train.py",
    "--resume_from_checkpoint": "--checkpoint-dir FOLDER --resume goes on from there",
    "--checkpoint-format": "--checkpoint-dir FOLDER is where checkpoints go",
    "--num_warmup_steps": "--warmup-epochs takes a number of epochs, --warmup_proportion a part of them all",
    "--lr_scheduler_type": "the schedule is that of the job's recipe",
    **dict.fromkeys(("--bptt", "--num-steps", "--block_size"), "the length of a sequence is that of the job's recipe"),
    "--sigma-scale": "gaussiank corrects its threshold by counting; leave it out",
    "--opt": "--compression none, powersgd or acpsgd; with random data: synthetic_benchmark.py",
    "--gradient-predivide-factor": "it is against overflow of sums in 16 bits; leave it out",
}
DATA_PARTS = {
    "train_part": ("--train-dir", "--train_dir", "--train_file"),
    "val_part": ("--val-dir", "--validation_dir", "--validation_file", "--predict_file"),
}


def aliases(flag: str) -> list[str]:
    """Return all names of our ``flag``, its own first: the positional arguments of ``add_argument``."""
    return [flag, *ALIASES.get(flag, ())]


def whole(text: str) -> int:
    """Read a number of epochs or steps, also as 3.0, as scripts for BERT say it; argparse's error for another."""
    value = float(text)
    if not value.is_integer() or value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(value)


def limit(text: str) -> int | None:
    """Read a number of steps; a negative one, which is the published scripts' word for no limit, is None."""
    return None if text.startswith("-") else whole(text)


class _Refuse(argparse.Action):
    """End with what to do instead of a published flag that cannot be."""

    def __call__(self, parser: ArgumentParser, args: Namespace, values: Any, option: str | None = None) -> None:
        parser.error(f"{option}: {REFUSED[str(option)]}")


class _Agree(argparse.Action):
    """Take a published flag that says what is so anyway; remember it if it says otherwise, until the job is known."""

    def __call__(self, parser: ArgumentParser, args: Namespace, values: Any, option: str | None = None) -> None:
        only = NEEDLESS[str(option)]
        if only and values != only:
            args.otherwise = f"{option} {values}: it is {only} here, and cannot be changed"


def add_refused(parser: ArgumentParser) -> None:
    """Add the published flags that cannot be: each ends the script with a sentence that says what to do instead."""
    for flag in REFUSED:
        parser.add_argument(flag, action=_Refuse, nargs="?", default=SUPPRESS, help=SUPPRESS)


def add_translated(parser: ArgumentParser) -> None:
    """Add the published flags that :func:`translated` turns into others, and those that say what is so anyway."""
    add = parser.add_argument_group("published flags, in other words of ours").add_argument
    add("--threshold", type=int, metavar="ELEMENTS", help="--merging threshold:bytes=4*ELEMENTS")
    add("--mgwfbp", action="store_true", help="--merging mgwfbp")
    add("--asc", action="store_true", help="--merging mgwfbp:asc=True")
    add("--fp16", "--use-mixed-precision", action="store_true", help="--amp fp16")
    add("--fp16-allreduce", action="store_true", help="--compression fp16")
    add("--warmup_proportion", type=float, help="--warmup-epochs, as a part of all epochs")
    add("--dnn", metavar="MODEL", help="of the job MODEL-DATA")
    add("--model-net", metavar="MODEL", help="--dnn")
    add("--dataset", metavar="DATA", help="of the job MODEL-DATA")
    add("--bert_model", metavar="NAME", help="bert-base-uncased or bert-large-uncased: the job BERT-squad")
    add("--config_file", type=Path, metavar="FILE", help="such as bert_config.json: the job BERT-squad")
    add("--init_checkpoint", type=Path, metavar="FILE", help="begin with NVIDIA's checkpoint of the job's BERT")
    add("--vocab_file", type=Path, metavar="FILE", help="BERT's word pieces; without it vocab.txt beside the data")
    add("--nworkers", type=whole, metavar="N", help="an error if the launcher has started others")
    add("--nwpernode", type=whole, metavar="N", help="the same, of the machine with the most workers")
    add("--percent", type=float, help="0, which the published scripts pass and do not read")
    for name, flags in DATA_PARTS.items():
        add(*flags, dest=name, metavar="PATH", help="--data, where the folder above has both parts")
    for flag, only in NEEDLESS.items():
        parser.add_argument(flag, action=_Agree, nargs=0 if only is None else None, default=SUPPRESS, help=SUPPRESS)


def translated(args: Namespace, script: str | None = None) -> Namespace:
    """Return the flags of ``args`` with what :func:`add_translated` has added put into our words.

    ``job``, ``data``, ``merging``, ``amp`` and ``compression`` are what the flags say together, None where they say
    nothing. ``warmup_proportion`` stays: see :func:`warmup_epochs`; so do the numbers of workers: see
    :func:`check_workers`. script: see :func:`published_jobs.job_of`. Raises ``ValueError`` where two flags contradict
    each other, ``OSError`` where a file is missing.
    """
    found = {**vars(args), **published_jobs.sent(args, script), "job": published_jobs.job_of(args, script)}
    for name in ("dnn", "model_net", "dataset", "bert_model", "config_file"):
        found.pop(name)
    if otherwise := found.pop("otherwise", ""):
        raise ValueError(otherwise)
    if percent := found.pop("percent"):
        raise ValueError(f"--percent {percent:g}: published scripts do not read it; what is meant is --dense partial")
    found["memory"] = found.get("memory") or None  # a published script passes --memory= with nothing in it
    train, val = found.pop("train_part"), found.pop("val_part")
    elements, mgwfbp, asc = found.pop("threshold"), found.pop("mgwfbp"), found.pop("asc")
    rule = "mgwfbp:asc=True" if asc else "mgwfbp" if mgwfbp else None
    if elements is not None and rule is None:  # the published scripts read it without --mgwfbp alone
        rule = f"threshold:bytes={4 * elements}"
    amp = "fp16" if found.pop("fp16") else None
    cast = "fp16" if found.pop("fp16_allreduce") else None
    for name, value in (("merging", rule), ("amp", amp), ("compression", cast)):
        found[name] = _agreed(name, found.get(name), value)
    found["data"] = _agreed("data", found.get("data"), folder(train, val))
    return Namespace(**found)


def _agreed(name: str, ours: Any, theirs: Any) -> Any:
    """Return the one that is given of a flag of ours and a published one; ``ValueError`` where they differ."""
    if None not in (ours, theirs) and str(ours) != str(theirs):
        raise ValueError(f"{name}: {ours} is given, and {theirs} by a published flag; give one of them")
    return theirs if ours is None else ours


def folder(train: str | None, val: str | None) -> Path | None:
    """Return the folder in which both parts of the data lie; None where no part is given. ``ValueError`` if in two."""
    above = {Path(part).parent for part in (train, val) if part is not None}
    if len(above) > 1:
        raise ValueError(f"{train} and {val} lie in two folders: put links to both into one, and say --data FOLDER")
    return above.pop() if above else None


def check_workers(args: Namespace) -> None:
    """Collective. Compare the workers with ``--nworkers`` and ``--nwpernode``; ``ValueError`` on all where they differ.

    A machine that has room for more workers than there are is right, and so is one that has fewer than another.
    """
    size = agmerge.size()
    if args.nworkers not in (None, size):
        raise ValueError(f"--nworkers {args.nworkers}, and the launcher has started {size}: the two must be equal")
    if args.nwpernode is not None:
        most = int(agmerge.allreduce(torch.tensor(agmerge.local_size()), op=agmerge.Max))
        if most != min(args.nwpernode, size):
            raise ValueError(
                f"--nwpernode {args.nwpernode}, and the launcher has started {most} of {size} workers on one machine"
            )


def warmup_epochs(args: Namespace, epochs: float) -> float | None:
    """Return how long the learning rate grows: ``--warmup-epochs``, or ``--warmup_proportion`` of all ``epochs``.

    None where neither is given; ``ValueError`` where both are.
    """
    if args.warmup_proportion is None:
        return args.warmup_epochs
    if args.warmup_epochs is not None:
        raise ValueError("--warmup-epochs and --warmup_proportion say the same: give one of them")
    return args.warmup_proportion * epochs


def planner(text: str) -> merging.Planner | str:
    """Return the planner that ``--merging NAME[:option=value,...]`` names, or the path of a saved plan as it is.

    A value is a number, True, False, None or a word. ``ValueError`` or ``TypeError``, with what there is, for an
    unknown name or option.
    """
    if text.endswith(".json"):
        return text
    name, _, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if missing := [option for option, equals, _ in pairs if not equals]:
        raise ValueError(f"--merging {text}: {missing[0]} has no value; write NAME:option=value,option=value")
    return merging.get(name, **{option.strip(): _value(value.strip()) for option, _, value in pairs})


def _value(text: str) -> Any:
    """Return the number, True, False or None that this is, else the word itself."""
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text
