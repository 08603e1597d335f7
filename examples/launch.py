# SPDX-License-Identifier: Apache-2.0
"""Start the workers of a script with the launcher of your choice, here or on a cluster; the command is printed first.

python examples/launch.py --launcher torchrun -np 4 -- train.py resnet20-cifar10 --compression topk --density 0.01
python examples/launch.py --launcher mpirun -H gpu1:4,gpu2:4 --interface ib0 -- train.py bert-base-squad
python examples/launch.py --config cluster.toml --launcher slurm --sbatch job.sh -- train.py gpt2-wikitext2
python examples/launch.py -np 2 --each compression=none,topk,dgc --each density=0.01,0.001 -- train.py digits
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster import each
from cluster.commands import LAUNCHERS, Machine, command, over_ssh
from cluster.hosts import Cluster, cluster, read
from cluster.processes import Ended, run
from cluster.sbatch import sbatch

SLURM = "slurm"  # the launcher that is a file
ONLY_FOR = {"ssh": "torchrun", "sbatch": SLURM, "slurm": SLURM}  # flags, and the launcher that reads them
HERE = Path(__file__).parent


def arguments(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the flags, and the script with its own; ``SystemExit`` where there is no script."""
    parser = argparse.ArgumentParser(
        usage="launch.py [flags] -- train.py JOB [flags of train.py]", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--launcher", choices=(*LAUNCHERS, SLURM), help="what starts the workers; without it torchrun")
    add("-np", dest="workers", type=int, metavar="N", help="workers, over all hosts; without it as many as slots")
    add("-H", "--hosts", type=lambda text: text.split(","), metavar="HOST:SLOTS,...", help="without it this machine")
    add("--interface", metavar="IF", help="the network interface that leads to the other hosts")
    add("--python", help="the interpreter, on every host; without it this one")
    add("--port", type=int, help="where the workers of torchrun meet, on the first of several hosts; without it 29500")
    add("--config", type=Path, metavar="FILE", help="such as cluster.toml; flags come before what stands there")
    add("--ssh", action="store_true", help="run the lines of torchrun on their hosts, and end all when one ends")
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help="an option of sbatch, or KEY for a switch")
    add("--sbatch", type=Path, metavar="FILE", help="write Slurm's file there, and submit it; without it, print it")
    add("--each", action="append", default=[], metavar="FLAG=V1,V2", help="run every combination, and compare them")
    add("--dry-run", action="store_true", help="only print what would be run")
    flags = list(argv[: argv.index("--")] if "--" in argv else argv)
    args = parser.parse_args(flags)
    if len(argv) < len(flags) + 2:
        parser.error("what shall the workers run? launch.py [flags] -- train.py JOB")
    return args, list(argv[len(flags) + 1 :])


def settings(args: Namespace) -> dict[str, Any]:
    """Return what the file of --config says, and the flags above it."""
    flags = {key: getattr(args, key) for key in ("launcher", "workers", "hosts", "interface", "python", "port")}
    found = {"launcher": "torchrun", **(read(args.config) if args.config else {})}
    if args.hosts is not None:
        found.pop("workers", None)  # which were for the file's hosts
    found |= {key: value for key, value in flags.items() if value is not None}
    if found["launcher"] == "alone":
        found.setdefault("workers", 1)
    options = [option.lstrip("-").partition("=") for option in args.slurm]
    return found | {"slurm": found.get("slurm", {}) | {key: value for key, _, value in options}}


def script_path(name: str) -> str:
    """Return ``name`` if it is a file, else that of the same name beside this one; ``FileNotFoundError``."""
    if Path(name).is_file():
        return name
    if (HERE / name).is_file():
        return str(HERE / name)
    raise FileNotFoundError(f"there is no script {name}, neither in {Path.cwd()} nor in {HERE}")


def launch(launcher: str, where: Cluster, program: Sequence[str], args: Namespace) -> Ended:
    """Print the commands that start ``program``, a script and its arguments, and run them unless told otherwise."""
    machine = Machine()
    lines = command(launcher, where, program[0], program[1:], machine)
    hosts = [host.name for host in where.placed()] if launcher == "torchrun" else []
    away = [not machine.is_named(host) for host in hosts]
    if args.ssh:
        folder = str(Path.cwd())
        for number, host in enumerate(hosts):
            lines[number] = over_ssh(host, folder, lines[number]) if away[number] else lines[number]
    print(*map(shlex.join, lines), sep="\n", flush=True)
    if any(away) and not (args.ssh or args.dry_run):
        print(f"Run each line on its host ({', '.join(hosts)}), or add --ssh.", file=sys.stderr)
    elif not args.dry_run:
        return run(lines)
    return Ended(0, told=False)


def submit(where: Cluster, program: Sequence[str], args: Namespace) -> Ended:
    """Print the file that runs ``program`` under Slurm, or write it to the file of --sbatch and submit that."""
    text = sbatch(where, program[0], program[1:])
    if args.sbatch is None or args.dry_run:
        print(text, end="")
        return Ended(0, told=False)
    args.sbatch.write_text(text, encoding="utf-8")
    line = ["sbatch", str(args.sbatch)]
    print(shlex.join(line), flush=True)
    return run([line])


def sweep(launcher: str, where: Cluster, program: Sequence[str], args: Namespace) -> int:
    """Launch every combination of --each, show the table of what they left behind, and return 1 if one failed."""
    script, given = program[0], list(program[1:])
    folder = each.value_of("--log-dir", given)
    if folder is None:
        folder = f"runs/{each.job(given)}-{time.strftime('%Y%m%d-%H%M%S')}"
        given += ["--log-dir", folder]
    runs = each.runs(args.each, given)
    logs = [Path(folder, name, "log.jsonl") for name in runs]
    for log in logs:
        if log.exists() and "--resume" not in given and not args.dry_run:
            raise ValueError(f"{log} is there already; choose another --log-dir, or go on with --resume")
    failed = []
    for number, (name, line) in enumerate(runs.items(), start=1):
        ended = launch(launcher, where, [script, *line], args)
        if ended.status:
            failed.append(f"{name} (status {ended.status})")
        if ended.told:
            failed += list(runs)[number:]
            break
    if written := [log for log in logs if log.exists() and not args.dry_run]:
        print(f"{folder}/*/log.jsonl:")
        print(compared(written, each.value_of("--target", given)))
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed or were not made: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def compared(logs: Sequence[Path], target: str | None) -> str:
    """Return the table of ``report.py`` for these logs."""
    import report  # starting workers alone needs none of it

    return report.table(report.rows(report.read_all(logs), float(target) if target else None))


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the status of what it has run."""
    args, program = arguments(sys.argv[1:] if argv is None else argv)
    try:
        found: Mapping[str, Any] = settings(args)
        where = cluster(found)
        program[0] = script_path(program[0])
        for flag, launcher in ONLY_FOR.items():
            if getattr(args, flag) and found["launcher"] != launcher:
                raise ValueError(f"--{flag} is for --launcher {launcher}, not {found['launcher']}")
        if found["launcher"] == SLURM and args.each:
            raise ValueError("--each waits for every run; submit a script that calls launch.py --each with torchrun")
        if found["launcher"] == SLURM:
            return submit(where, program, args).status
        if args.each:
            return sweep(found["launcher"], where, program, args)
        return launch(found["launcher"], where, program, args).status
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"launch.py: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
