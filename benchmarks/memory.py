# SPDX-License-Identifier: Apache-2.0
"""Memory of one worker: bytes a parameter, of a plain loop, of other libraries, and of this one.

    python benchmarks/memory.py                      # 100 million parameters, two workers: 7 GB, some minutes
    python benchmarks/memory.py --small              # 10 million: seconds a row, to see that it works
    python benchmarks/memory.py --contenders "plain loop" "agmerge local 8" --matrices 20 --steps 52

Every row is a launch of its own (torchrun; horovodrun for Horovod), so that nothing is left over from another. The
model is matrices of 1000 x 1000 under SGD without momentum. What is read is the resident memory of rank 0: "steady"
after the last step, while gradients are there, "peak" the most that the process ever held. Both are divided by the
number of parameters; the process itself, torch's libraries above all, is in every row, and so in no difference.

DGC applies momentum in the place of the optimizer, and keeps it: it is compared with a plain loop of
SGD(momentum=0.9), too. Sparsifiers' rows name their exchange, so that nothing here depends on measured times; the plan
of the first ten steps is the same on every machine. More than ten steps add what measuring and planning need.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.worker_results import received_results, send_result
from speed import contenders
from speed.contenders import MOMENTUM, Contender

SIDE, BATCH = 1000, 4  # of a matrix; a batch so small that activations do not count
PLAIN, MOVING = "plain loop", f"plain loop, momentum {MOMENTUM}"
ROWS: dict[str, Contender] = {
    PLAIN: Contender("alone"),
    MOVING: Contender("alone", (("momentum", MOMENTUM),)),
    "DDP": Contender("ddp"),
    "DDP PowerSGD": contenders.CONTENDERS["DDP PowerSGD"],
    "Horovod": Contender("horovod", horovod="gloo"),
    "agmerge none": contenders.ours(compression="none"),
    "agmerge eden-2": contenders.ours(compression="eden-2"),
    "agmerge eden-4": contenders.ours(compression="eden-4"),
    "agmerge int8": contenders.ours(compression="int8"),
    "agmerge topk": contenders.ours(compression="topk", exchange="sparse"),
    "agmerge powersgd": contenders.CONTENDERS["agmerge powersgd"],
    "agmerge acpsgd": contenders.CONTENDERS["agmerge acpsgd"],
    "agmerge updates": contenders.ours(exchange="sparse", sync="updates"),
    # As LocalOptimizer(every=4) and LocalOptimizer(every=8). Exchanges are rare: pass --steps 52.
    "agmerge local 4": contenders.ours(exchange="sparse", sync="updates", every=4, compression="eden-2"),
    "agmerge local 8": contenders.ours(exchange="sparse", sync="updates", every=8, density=1.0, wire="int4"),
    "agmerge fp16": contenders.ours(compression="fp16"),
    "agmerge dgc": contenders.ours(compression="dgc", exchange="sparse"),
}
PATIENCE = 900.0  # seconds for one row


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="bytes a parameter of one worker")
    parser.add_argument("--matrices", type=int, default=100, help=f"of {SIDE} x {SIDE} parameters")
    parser.add_argument("--small", action="store_true", help="10 matrices")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=str([*ROWS]))
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the bytes a parameter there, too")
    parser.add_argument("--worker", choices=ROWS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.small:
        args.matrices = 10
    return args


def resident() -> tuple[int, int]:
    """Bytes that this process holds in memory now, and the most that it ever has held."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now, most = (re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    assert now is not None and most is not None
    return 1024 * int(now[1]), 1024 * int(most[1])


def worker(args: argparse.Namespace) -> None:
    """One rank: train some steps; rank 0 tells its bytes a parameter."""
    import models
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(args.matrices)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=SIDE**-0.5)  # activations keep their size, however deep
    work = models.Workload(model, torch.randn(BATCH, SIDE), torch.randint(SIDE, (BATCH,)), "rows")
    one = ROWS[args.worker]
    options = dict(one.options)
    momentum = options.pop("momentum", 0.0)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=momentum)
    rank, step, _ = getattr(contenders, one.kind)(work, inner, **options)
    for _ in range(args.steps):
        step()
    if rank == 0:
        count = args.matrices * SIDE**2
        steady, peak = resident()
        send_result({"steady": steady / count, "peak": peak / count})
    if one.kind == "agmerge":
        import agmerge

        agmerge.shutdown()


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row, from a launch of its own. ``RuntimeError`` with the end of the output where it failed."""
    workers = str(args.workers)
    if ROWS[name].horovod:
        tool = Path(sys.executable).with_name("horovodrun")
        if not tool.exists():
            raise RuntimeError("Horovod is not installed: python -m agmerge build-horovod")
        launcher = [str(tool), "--gloo", "-np", workers, sys.executable]
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    command = [*launcher, str(Path(__file__).resolve()), "--worker", name]
    command += ["--matrices", str(args.matrices), "--steps", str(args.steps)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": path}
    # Another benchmark's allocator settings would change every figure.
    environment = {key: value for key, value in environment.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ended = subprocess.run(command, env=environment, timeout=PATIENCE, check=False, **pipe)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode}:\n{ended.stdout[-3000:]}")
    # horovodrun puts "[1,0]<stdout>:" before what a worker prints.
    return received_results(re.sub(r"^\[\d+[,\]].*?>:", "", ended.stdout, flags=re.MULTILINE))[0]


def table(found: dict[str, dict[str, float]]) -> str:
    """What was measured, in bytes a parameter, and how much more than the plain loops."""
    lines = [f"| | steady | peak | over the {PLAIN} of SGD | over that of SGD(momentum={MOMENTUM}) |"]
    lines.append("|---|---|---|---|---|")
    for name, one in found.items():
        against = {PLAIN: name != PLAIN, MOVING: name.endswith("dgc")}
        more = ["" if not here or plain not in found else over(one, found[plain]) for plain, here in against.items()]
        lines.append(f"| {name} | {one['steady']:.1f} | {one['peak']:.1f} | {more[0]} | {more[1]} |")
    return "\n".join(lines)


def over(one: dict[str, float], plain: dict[str, float]) -> str:
    """The difference, steady and peak."""
    return f"{one['steady'] - plain['steady']:+.1f} (peak {one['peak'] - plain['peak']:+.1f})"


def main() -> None:
    """Launch every row, then print the table."""
    args = arguments()
    if args.worker:
        worker(args)
        return
    found: dict[str, dict[str, float]] = {}
    for name in args.contenders:
        try:
            found[name] = measured(name, args)
        except RuntimeError as error:
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{name}: {found[name]['steady']:.1f}, peak {found[name]['peak']:.1f}", file=sys.stderr, flush=True)
    print(f"{args.matrices * SIDE**2 / 1e6:.0f} million parameters, {args.workers} workers, {args.steps} steps;")
    print("resident bytes a parameter of rank 0\n")
    print(table(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if len(found) < len(args.contenders):
        sys.exit(1)


if __name__ == "__main__":
    main()
