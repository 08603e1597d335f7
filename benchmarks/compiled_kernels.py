# SPDX-License-Identifier: Apache-2.0
"""What kernels of a GPU are compiled to, for GPUs that are not here: registers, spills, and dear instructions.

    python benchmarks/compiled_kernels.py --json
    python benchmarks/compiled_kernels.py --arch sm_90 --triton 3.7.1

One form of each kernel is compiled for each architecture with the Triton of the pinned torch's CUDA build, and with the
newest. Both are installed by pip into ``build/`` once, half a GB each. The exit code is 1 where a kernel exceeds a
limit. ``popc``: the instructions that count bits of a ballot, of a tile of 8 elements a thread; ``membar``: fences;
``local_bytes``: memory of a thread beside its registers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
NEWEST = "3.9.0"
LIMITS = {"registers": 128, "spills": 16, "popc": 66, "membar": 1, "local_bytes": 8}  # bytes: of some words alone
# Of the sums of one bit, which is no default: sign bits and halves of four rotations leave some words no register.
ONE_BIT = {**LIMITS, "spills": 24}
FIELDS = ("kernel", "triton", "arch", *LIMITS)


def pinned() -> str:
    """The version that requirements-triton.txt names: that of the pinned torch's CUDA build."""
    found = re.search(r"^triton==([\d.]+)", (ROOT / "requirements-triton.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def folder_of(version: str) -> Path:
    """Where a Triton is, which is installed there at first."""
    folder = ROOT / "build" / f"triton-{version}"
    if not (folder / "triton").is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
            made = Path(place) / "made"
            subprocess.run([*pip, "--target", str(made), "--no-deps", f"triton=={version}"], check=True)
            made.rename(folder)  # whole, or not there
    return folder


def compiled(arch: str, *options: str, path: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """What the kernels become for ``arch``, by the Triton that is found, in ``path`` first."""
    places = [*map(str, path), str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "device.triton_compiling", arch.removeprefix("sm_"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"kernels were not compiled for {arch}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def excesses(row: dict[str, Any]) -> list[str]:
    """Names of what exceeds its limit."""
    is_one_bit = row.get("kernel") == "eden_encode_sum" and "1 bits" in row.get("form", "")
    return [name for name, limit in (ONE_BIT if is_one_bit else LIMITS).items() if row[name] > limit]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    add("--triton", nargs="+", default=[pinned(), NEWEST], metavar="VERSION")
    add("--json", action="store_true", help="print all of it as a list on the last line, too")
    args = parser.parse_args(argv)

    folders = {version: folder_of(version) for version in args.triton}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(
            lambda one: compiled(one[1], "once", path=[folders[one[0]]]), itertools.product(args.triton, args.arch)
        )
        rows = [{name: row[name] for name in FIELDS} for row in itertools.chain.from_iterable(parts)]
    print("".join(f"{name:>13}" for name in FIELDS))
    for row in rows:
        over = excesses(row)
        print("".join(f"{row[name]:>13}" for name in FIELDS) + (f"  FAILED: {', '.join(over)}" if over else ""))
    if args.json:
        print(json.dumps(rows))
    return int(any(map(excesses, rows)))


if __name__ == "__main__":
    sys.exit(main())
