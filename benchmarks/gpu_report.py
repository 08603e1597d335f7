# SPDX-License-Identifier: Apache-2.0
"""Judge the GPUs of this machine, and write one file to mail back; where there is none, say what would have been done.

    make gpu                                    # or: python benchmarks/gpu_report.py [--out F]

One GPU takes some minutes, several of them some more. Where there is one, two workers share it: NCCL is told that they
are on hosts of their own, so that what it moves is looked at, too, and not how fast. The exit code is 1 if a figure
failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch

JUDGE = str(Path(__file__).with_name("gpu.py"))


def commands(gpus: int) -> dict[str, list[str]]:
    """Return what is run on a machine with so many GPUs, by name. Each takes ``--json F`` too."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={max(2, gpus)}"]
    return {"one": [sys.executable, JUDGE], "world": [sys.executable, *launch, JUDGE, "--world"]}


def result(command: Sequence[str], file: Path) -> dict[str, Any]:
    """Run a command, whose lines are printed as they come; return what it wrote, its lines and its exit code."""
    lines = []
    with subprocess.Popen(
        [*command, "--json", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {**found, "lines": lines, "exit_code": process.returncode}


def report(todo: Mapping[str, Sequence[str]], out: Path) -> int:
    """Run the commands, write ``out``, and return the exit code."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in todo.items():
            found[name] = result(command, Path(folder, f"{name}.json"))
            out.write_text(json.dumps(found, indent=1), encoding="utf-8")  # what there is, should the next one hang
    print(f"\nSend {out} with an issue: it is all that was found here.")
    return int(any(one["exit_code"] for one in found.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, or say what would have been judged; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), metavar="F", help="the file to mail back")
    out = parser.parse_args(argv).out.resolve()
    if torch.cuda.is_available():
        return report(commands(torch.cuda.device_count()), out)
    print(f"There is no GPU here that torch {torch.__version__} can use. With one or two, these would have been run,")
    print(f"and all that they find written to {out}:\n")
    for command in commands(2).values():
        print("   ", *(Path(word).name if word == sys.executable else word for word in command))
    print("\nNothing was judged. What they look at: docs/dev/gpu_checks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
