# SPDX-License-Identifier: Apache-2.0
"""Read the command line of ``train.py``: flags of a recipe, of the library, and of what a run leaves behind.

Flags are Horovod's where it has them; :mod:`published` knows what else other projects call them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
from jobs.base import Job, Recipe
from jobs.schedules import Linear, Steps
from options import count, given
from torch import nn

from training import published

EXTRA = {"memory": "memory", "warmup_density": "warmup", "dense": "dense"}  # flags, and the library's arguments


MISSING = (
    "a job is missing, and nothing on the line says which: write one of {}, or the published script's own name, such "
    "as wiki2_lstm_topk.py, behind train.py"
)


def arguments(argv: Sequence[str] | None = None, script: str | None = None) -> Namespace:
    """Read the command line; ``argparse`` ends the process where it has no meaning.

    argv: without it the process's. script: the name that this script was started by.
    """
    parser = make_parser()
    args, others = parser.parse_known_args(argv)
    unknown = f"unrecognized arguments: {' '.join(others)}" if others else ""
    if args.list and not unknown:
        return args
    try:
        args = published.translated(args, script)
        job = jobs.get(args.job) if args.job else None
        if args.merging is not None and ":" in args.merging:
            args.merging = published.planner(args.merging)
    except (OSError, TypeError, ValueError) as error:  # what is wrong with the job, first: flags may be of another's
        parser.error("; ".join(filter(None, (str(error), unknown))))
    if unknown:
        parser.error(unknown)
    if job is None:
        parser.error(MISSING.format(", ".join(jobs.JOBS)))
    if args.resume and args.checkpoint_dir is None:
        parser.error("--resume goes on from --checkpoint-dir, which is missing")
    if args.portable and args.checkpoint_dir is None:
        parser.error("--portable is about --checkpoint-dir, which is missing")
    if args.stop_at_target and args.target is None:
        parser.error("--stop-at-target needs --target")
    if args.local_steps is not None and args.sync is not None:
        parser.error("--local-steps exchanges updates: leave --sync out")
    return args


def make_parser() -> ArgumentParser:
    """Return the parser of all flags, published ones among them."""
    parser = ArgumentParser(
        usage="train.py MODEL-DATA [flag ...]; train.py --list; train.py --help",
        description="Train a published experiment with workers that exchange compressed gradients, or updates",
    )
    parser.add_argument("job", nargs="?", metavar="MODEL-DATA", help="see --list")
    _add_recipe(parser.add_argument_group("the recipe; what is not given is as published"))
    _add_library(parser.add_argument_group("the exchange; what is not given is left to the library"))
    _add_run(parser.add_argument_group("the run"))
    published.add_translated(parser)
    published.add_refused(parser)
    return parser


def _add_recipe(group: Any) -> None:
    add = _adder(group)
    add("--batch-size", type=count, help="samples per worker and backward pass")
    add("--epochs", type=published.whole)
    add("--base-lr", type=float, help="for one worker, where the recipe's rate grows with their number")
    add("--warmup-epochs", type=float, help="of a rate that is divided at epochs")
    add("--momentum", type=float)
    add("--wd", type=float, help="weight decay")
    add("--clip", type=float, help="the largest norm of a step's gradients")
    add("--seed", type=int, default=0, help="of the weights and of the samples' order; without it 0")
    add("--batches-per-allreduce", type=count, default=1, help="backward passes a step; without it 1")
    add("--amp", choices=("bf16", "fp16"), help="compute in 16 bits; fp16 with a GradScaler")
    add("--tiny", action="store_true", help="the same code on a network of some thousand parameters: about a minute")


def _add_library(group: Any) -> None:
    add = _adder(group)
    add("--compression", help="a compressor's name, none, fp16, bf16, or auto; without it the job's, mostly topk")
    add("--density", type=float, help="elements sent / elements, of a sparsifier")
    add("--rank", type=count, help="number of columns of the factors, for powersgd and acpsgd")
    add("--memory", help="what keeps what is not sent: residual, none, dgc, residualgtopk")
    add("--warmup-density", metavar="dgc|STEPS", help="denser first: the ladder of DGC's paper, or so many steps")
    add(
        "--dense",
        metavar="PATTERN",
        nargs="+",
        help="parameters that are never compressed, as regular expressions for full names; or partial",
    )
    add("--exchange", help="how messages are combined; without it sparse: always compressed")
    add("--merging", metavar="NAME[:OPTION=VALUE,...]", help="a planner, or a saved plan; dear sends all elements")
    add("--sync", choices=("gradients", "updates"), help="what is exchanged; without it the job's, mostly gradients")
    add("--local-steps", type=count, metavar="H", help="exchange updates every H steps: agmerge.LocalOptimizer")
    add("--wire", help="the codec of values: fp32, fp16, bf16, int8, int4, 2bit, sign")
    add("--carry", choices=("apply", "hold"), help="where a worker keeps what it has not sent of updates")
    add("--every", type=count, help="steps from one exchange of updates to the next")
    add("--overlap", type=int, help="steps that messages of updates may take")
    add("--fragments", type=count, help="groups of parameters that take turns")


def _add_run(group: Any) -> None:
    add = _adder(group)
    add("--data", type=Path, metavar="DIR", help="where the data set lies: see examples/README.md")
    add("--weights", type=Path, metavar="FOLDER", help="begin with what save_pretrained has written there")
    add("--tokenizer", type=Path, metavar="FOLDER", help="for gpt2; without it what lies with --weights, or bytes")
    add("--uneven", action="store_true", help="take all samples, though some workers then have more than others")
    add("--readers", type=int, default=2, help="processes a worker that read pictures ahead; without it 2")
    add("--max-steps", type=published.limit, help="end after so many steps")
    add("--target", type=float, metavar="METRIC", help="note when the metric is as good as this")
    add("--stop-at-target", action="store_true", help="end there")
    add("--measure-selection", action="store_true", help="measure how good selections are; costs a pass or two a step")
    add(
        "--log-dir",
        type=Path,
        default=Path("runs"),
        help="where a folder with log.jsonl and TensorBoard's events is made",
    )
    add(
        "--run-name",
        metavar="NAME",
        help="that folder's name; without it one of job, compression, workers and time",
    )
    add("--checkpoint-dir", type=Path, metavar="DIR", help="keep checkpoints there, one after every epoch")
    add("--resume", action="store_true", help="go on from the last checkpoint that all workers have")
    add("--portable", action="store_true", help="let other numbers of workers go on from checkpoints, too")
    add("--json", type=Path, metavar="FILE", help="write the results there, too")
    add("--no-cuda", action="store_true", help="train on the CPU")
    add("--list", action="store_true", help="show the jobs")
    add("--dry-run", action="store_true", help="show what would be trained, and how")


def _adder(group: Any) -> Any:
    """Return ``group.add_argument`` that accepts the published names of a flag, too."""

    def add(flag: str, **settings: Any) -> None:
        group.add_argument(*published.aliases(flag), dest=flag[2:].replace("-", "_"), **settings)

    return add


def recipe_of(job: Job, args: Namespace) -> Recipe:
    """Return the job's recipe as the command line changes it. Raises ``ValueError`` for what it does not have."""
    recipe = job.settled(args.tiny)
    changes = {name: getattr(args, name) for name in ("batch_size", "epochs", "momentum", "wd", "clip")}
    changes["lr"] = args.base_lr
    if args.momentum is not None and recipe.optimizer != "sgd":
        raise ValueError(f"--momentum is about SGD, and {job.name} trains with {recipe.optimizer}")
    warmup = published.warmup_epochs(args, args.epochs or recipe.epochs)
    if warmup is not None:
        changes["schedule"] = warmed(recipe, warmup, job.name)
    return replace(recipe, **{name: value for name, value in changes.items() if value is not None})


def warmed(recipe: Recipe, epochs: float, name: str) -> Any:
    """Return the recipe's schedule with so many epochs of warm-up. Raises ``ValueError`` if it has another one."""
    if isinstance(recipe.schedule, Steps):
        return replace(recipe.schedule, warmup=epochs)
    if isinstance(recipe.schedule, Linear):
        return replace(recipe.schedule, warmup=epochs / recipe.epochs)
    raise ValueError(f"--warmup-epochs: the rate of {name} has no warm-up by epochs ({recipe.schedule})")


def library_options(args: Namespace, job: Job, model: nn.Module) -> dict[str, Any]:
    """Return the arguments for the library: the job's, and what the command line says."""
    options: Mapping[str, Any] = given(args, model)
    extra = {argument: getattr(args, flag) for flag, argument in EXTRA.items() if getattr(args, flag) is not None}
    if extra.get("dense") == ["partial"]:
        extra["dense"] = "partial"
    if str(extra.get("warmup", "")).isdigit():
        extra["warmup"] = int(extra["warmup"])
    defaults = {} if args.local_steps is not None else {"compression": job.recipe.compressor, **job.options}
    return {**defaults, **options, **extra}
