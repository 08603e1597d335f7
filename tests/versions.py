# SPDX-License-Identifier: Apache-2.0
"""Does the package work with this Python and that torch? What setup.py admits at both ends has passed here.

    python tests/versions.py --python python3.10 --torch 2.4.0 --numpy 1.26.4
    python tests/versions.py --python python3.13 --torch 2.15.0

A fresh virtual environment, the package installed into it (not editable), a short cover of the tests in one process,
and two workers under torchrun. Not part of `make test`: torch from PyPI brings gigabytes. ``--folder`` keeps
environments for the next time; the package itself is installed anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "scikit-learn>=1.3", "tensorboardX>=2.6", "tqdm")
# What touches torch in ways of its own: hooks, dtypes, optimizers, state, scalers, threads, modules, compiled loops.
COVER = (
    "tests/agmerge/tensors/test_arena.py",
    "tests/agmerge/script/test_module_hooks.py",
    "tests/agmerge/optimizer/test_hybrid.py",
    "tests/agmerge/engine/test_optimizer_accumulation.py",
    "tests/agmerge/optimizer/test_optimizer_awkward.py",
    "tests/agmerge/checkpoint/test_optimizer_checkpoint.py",
    "tests/agmerge/optimizer/test_optimizer_dtypes.py",
    "tests/agmerge/optimizer/test_optimizer_steps.py",
    "tests/agmerge/optimizer/test_optimizer_wrapper.py",
    "tests/agmerge/engine/test_grad_scaler.py",
    "tests/merging/test_merging_plan.py",
    "tests/merging/test_merging_planners.py",
    "tests/sparsifiers/test_kernel.py",
    "tests/sparsifiers/test_memories.py",
)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="a short cover of the tests with a given Python and torch")
    parser.add_argument("--python", required=True, help="an interpreter")
    parser.add_argument("--torch", required=True, help="a version, as pip has it")
    parser.add_argument("--numpy", help="a version; without it pip's choice")
    parser.add_argument("--folder", type=Path, help="where environments are kept; without it none is")
    return parser.parse_args()


@contextlib.contextmanager
def folder(args: argparse.Namespace) -> Iterator[Path]:
    """Where the environment goes."""
    if args.folder is None:
        with tempfile.TemporaryDirectory() as place:
            yield Path(place)
    else:
        place = args.folder / f"{Path(args.python).name}-torch-{args.torch}"
        place.mkdir(parents=True, exist_ok=True)
        yield place


def run(command: Sequence[str | Path], place: Path, timeout: float = 1800.0) -> None:
    """Ends this script where ``command`` fails. It finds the package that is installed, none of a checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*map(str, command)], cwd=place, env=env, timeout=timeout, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")


def main() -> None:
    """Set up, test, and say what has passed."""
    args = arguments()
    with folder(args) as place:
        python = place / "venv" / "bin" / "python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-input"]
        if not python.exists():
            run([args.python, "-m", "venv", "venv"], place)
        numpy = [f"numpy=={args.numpy}"] if args.numpy else ["numpy"]
        run([*pip, f"torch=={args.torch}", *numpy, *TOOLS], place)
        run([*pip, "--force-reinstall", "--no-deps", ROOT], place)
        about = "import sys, torch, numpy, agmerge; from sparsifiers import native; print(sys.version.split()[0], "
        about += "torch.__version__, numpy.__version__, native.available(), agmerge.__file__)"
        run([python, "-c", about], place)
        tests = ["-p", "no:cacheprovider", "-q", "-m", "not long", *(ROOT / one for one in COVER)]
        run([python, "-m", "pytest", "-c", ROOT / "pyproject.toml", *tests], place)
        launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        job = [ROOT / "examples" / "train_digits.py", "--epochs", "3", "--log-dir", place, "--json", place / "out.json"]
        run([*launch, *job], place, timeout=300.0)
        found = json.loads((place / "out.json").read_text(encoding="utf-8"))
        if not (found["workers"] == 2 and found["replicas_equal"] and found["accuracy"] > 0.8):
            raise SystemExit(f"two workers did not learn: {found}")
        print(f"two workers: accuracy {found['accuracy']:.2%}, replicas equal")


if __name__ == "__main__":
    main()
