# SPDX-License-Identifier: Apache-2.0
"""Judge a GPU: is every rule of the device path kept on this machine, and how fast is it?

    python benchmarks/gpu.py [--json F] [--checks 1 2 3]               # one GPU; some minutes
    torchrun --nproc_per_node N benchmarks/gpu.py --world [--json F]   # several workers: NCCL, DDP's steps, a lost peer

A line a figure: ``ok`` or ``FAILED``, what was found, and the limit. The exit code is 1 if one failed, 2 where there is
no GPU. What is checked: docs/dev/gpu_checks.md.
Times: CUDA events over 50 runs after 10, median, with the cache flushed between.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch

# isort: split

import gpu_world
from device import gpu_elastic, gpu_exchanges, gpu_kernels, gpu_rules, gpu_training
from device.gpu_bench import Bench, settle
from device.gpu_figures import Figure, as_json, broke, exit_code

Check = Callable[[Bench], Iterator[Figure]]
CHECKS: dict[int, Check] = {
    1: gpu_kernels.bandwidth,
    2: gpu_kernels.kernels,
    3: gpu_kernels.compressors,
    4: gpu_rules.right,
    5: gpu_training.hooks,
    6: gpu_training.overlap,
    7: gpu_training.memory,
    9: gpu_training.graph,
    11: gpu_elastic.elastic,
}
WORLD: dict[int, Check] = {8: gpu_world.world, 10: gpu_exchanges.exchanges}


def about() -> dict[str, str]:
    """Return the machine, and what drives it."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
    except OSError:  # some images have none
        driver = ""
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else ""
    return {
        "device": f"{properties.name}, sm_{properties.major}{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "devices": str(torch.cuda.device_count()),
        "driver": (driver.splitlines() or ["unknown"])[0],
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
        "torch": torch.__version__,
        "Triton": triton or "none: torch's operations stand in for kernels",
    }


def main(argv: Sequence[str] | None = None, checks: Mapping[int, Check] | None = None) -> int:
    """Run the checks, print what they find, and return the exit code. ``checks``: None: all of this machine's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", help="write everything there, too")
    parser.add_argument("--world", action="store_true", help="the checks of several workers, under torchrun")
    parser.add_argument("--checks", type=int, nargs="+", choices=range(1, 12), help="these alone")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("there is no GPU here that torch can use: nothing was judged")
        return 2
    first = int(os.environ.get("RANK", "0")) == 0
    if arguments.world:
        settle(int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    known = about()
    tell(first, *(f"{name}: {value}" for name, value in known.items()))
    bench, figures = Bench(torch.device("cuda", torch.cuda.current_device())), list[Figure]()
    for number, check in (checks or (WORLD if arguments.world else CHECKS)).items():
        if arguments.checks is None or number in arguments.checks:
            for figure in found_by(number, check, bench):
                tell(first, figure.line())
                figures.append(figure)
    judged = sum(figure.limit is not None for figure in figures)
    tell(first, f"{len(figures)} figures, {judged} judged, {sum(figure.failed for figure in figures)} failed")
    if arguments.json is not None and first:
        arguments.json.write_text(json.dumps(as_json(known, figures), indent=1, allow_nan=False), encoding="utf-8")
    return exit_code(figures)


def found_by(number: int, check: Check, bench: Bench) -> Iterator[Figure]:
    """Return what a check finds; an error of it is one more figure, which has failed."""
    try:
        yield from check(bench)
    except Exception as error:  # the others are still to be seen
        yield broke(number, f"check {number}", error)


def tell(aloud: bool, *lines: str) -> None:
    """Print, on one rank."""
    for line in lines if aloud else ():
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
