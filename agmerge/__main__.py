# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge`` with a command: doctor, build-horovod, plan, advise, compare, lighthouse or explain."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with the usage of every command."""
    whole = argparse.ArgumentParser(
        prog="python -m agmerge", description="Check this machine, test a script, compare plans, and explain errors."
    )
    commands = whole.add_subparsers(dest="command", metavar="command")
    doctor = commands.add_parser(
        "doctor", help="show which backends and launchers work on this machine, and how to fix the others"
    )
    doctor.add_argument(
        "--patience",
        type=float,
        default=12.0,
        metavar="SECONDS",
        help="timeout of each check, in seconds (default: 12)",
    )
    doctor.add_argument("--json", action="store_true", help="print the table as JSON")
    build = commands.add_parser(
        "build-horovod",
        help="build Horovod for the installed torch, and install it",
        epilog="Horovod uses NCCL if torch has CUDA and nvcc is installed. Variables of Horovod's own build have their "
        "usual effect, for example HOROVOD_GPU_OPERATIONS= (no NCCL) or HOROVOD_WITHOUT_MPI=1. Wheels are cached in "
        "$XDG_CACHE_HOME/agmerge/wheels, or else in ~/.cache/agmerge/wheels.",
    )
    build.add_argument("--force", action="store_true", help="build again, even if there is a cached wheel")
    build.add_argument("--nccl", action="store_true", help="fail if NCCL is not possible, and list the missing parts")
    plan = commands.add_parser("plan", help="compare all planners on the measurements of a training run")
    plan.add_argument("measurements", help="file that optimizer.measurements.save() wrote")
    plan.add_argument("--picture", metavar="FILE.svg", help="draw the timelines of all planners")
    plan.add_argument("--save", metavar="PLAN.json", help="save a plan, for merging='PLAN.json'")
    plan.add_argument("--planner", default="agmerge", help="planner for --save (default: agmerge)")
    advise = commands.add_parser(
        "advise",
        help="time the first steps of a script with and without compression, and print the lines to add",
        epilog="It starts two workers on this machine. For several machines, put your launcher in front, for example "
        "torchrun --nnodes=2 ... -m agmerge advise train.py --lr 0.1. Ctrl-C prints the table so far. Exit codes: "
        "0: there are lines to add, 3: do not use agmerge here, 4: no answer.",
    )
    advise.add_argument("--json", action="store_true", help="print the measurements and the advice as JSON")
    advise.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit of the test, in seconds (default: 600)",
    )
    advise.add_argument(
        "--workers",
        type=int,
        default=2,
        help="number of workers to start on this machine, without a launcher (default: 2)",
    )
    advise.add_argument("--result", default="", help=argparse.SUPPRESS)
    advise.add_argument(
        "script",
        help="a training script: plain PyTorch, DistributedDataParallel, Trainer, Accelerate, Lightning or agmerge",
    )
    advise.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    compare = commands.add_parser(
        "compare",
        help="train with a compressor of yours and with agmerge's own, and print a table",
        epilog="FILE.py has a class with compress(tensor, name) and decompress(tensors, ctx), or a "
        "sparsifiers.Sparsifier. Workers are simulated in memory. Run the same command again to continue.",
    )
    compare.add_argument("file", metavar="FILE.py", help="a Python file; FILE.py:NAME names a class or object in it")
    compare.add_argument(
        "--against",
        default="topk,dgc,eden-2,powersgd",
        metavar="NAME,NAME",
        help="agmerge's compressors (default: topk,dgc,eden-2,powersgd)",
    )
    compare.add_argument(
        "--task",
        default="digits,gpt-small,resnet-digits",
        metavar="NAME,NAME",
        help="tasks (default: digits,gpt-small,resnet-digits)",
    )
    compare.add_argument("--seeds", type=int, default=3, help="trainings of each contender on each task (default: 3)")
    compare.add_argument("--workers", type=int, default=2, help="number of simulated workers (default: 2)")
    compare.add_argument(
        "--minutes", type=float, default=10.0, help="time limit, in minutes (default: 10)", metavar="MINUTES"
    )
    compare.add_argument(
        "--rate", default="200mbit", help="rate of each worker's link, for estimated times (default: 200mbit)"
    )
    compare.add_argument("--out", default="runs/compare", metavar="FOLDER", help="folder (default: runs/compare)")
    lighthouse = commands.add_parser(
        "lighthouse",
        help="run the rendezvous server (lighthouse) of an elastic job",
        epilog="Start it on a machine that stays up, and stop it with Ctrl-C. Set the variable that it prints for "
        "every worker.",
    )
    lighthouse.add_argument("--port", type=int, default=29510, help="TCP port (default: 29510)")
    explain = commands.add_parser(
        "explain",
        help="explain an error: its cause and the remedy",
        epilog="It needs no network. Without a code, it lists all codes.",
    )
    explain.add_argument("code", nargs="*", help="error code, for example AGM102, or words of an error message")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``arguments``: None: those of the process."""
    whole = parser()
    chosen = whole.parse_args(arguments)
    if chosen.command is None:
        whole.print_help()
        return 0
    if chosen.command == "doctor":
        from agmerge.cli import doctor

        return doctor.main(chosen.patience, chosen.json)
    if chosen.command == "plan":
        from agmerge.cli import plan as plan_command

        return plan_command.main(chosen.measurements, chosen.picture, chosen.save, chosen.planner)
    if chosen.command == "advise":
        from agmerge.cli import advise

        return advise.main(
            chosen.script,
            chosen.arguments,
            as_json=chosen.json,
            patience=chosen.patience,
            workers=chosen.workers,
            result=chosen.result,
        )
    if chosen.command == "compare":
        from agmerge.cli import compare

        against, tasks = ([word for word in text.split(",") if word] for text in (chosen.against, chosen.task))
        numbers = chosen.seeds, chosen.workers, chosen.minutes
        return compare.main(chosen.file, against, tasks, *numbers, chosen.rate, chosen.out)
    if chosen.command == "lighthouse":
        from agmerge.cli import lighthouse

        return lighthouse.main(chosen.port)
    if chosen.command == "explain":
        from agmerge.cli import explain

        return explain.main(chosen.code)
    from agmerge.cli import build_horovod

    return build_horovod.main(force=chosen.force, nccl_wanted=chosen.nccl)


if __name__ == "__main__":
    sys.exit(main())
