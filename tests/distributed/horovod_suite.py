# SPDX-License-Identifier: Apache-2.0
"""Run Horovod's own tests with ``hvd`` = agmerge: ``python tests/distributed/horovod_suite.py CHECKOUT [TEST ...]``.

CHECKOUT is a checkout of Horovod v0.28.1 (its tests are no part of this repository, nor of its package); needs
Horovod, ``mpirun`` and ``cloudpickle``. Two ranks run ``test/parallel/test_torch.py`` with its one import changed; what
agmerge lacks is Horovod's own there. A launch goes on until a test does not pass on every rank, or takes too long: the
next one then begins with a fresh group. Prints a table of Markdown, of which docs/dev/horovod_tests.md has the last one
with reasons.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path
from typing import Any

LIMIT = 60  # seconds a test
RANKS = 2
SKIPPED = {"test_gpu_required": "skipped: says whether there is a GPU"}
WORDS = ("passed", "skipped", "did not", "no end", "failed")  # how a test ends, the better the earlier


class Both:
    """``hvd`` of a test: agmerge, and Horovod's own for what it lacks."""

    def __getattr__(self, name: str) -> Any:
        import horovod.torch

        import agmerge

        return getattr(agmerge, name) if name in agmerge.__all__ else getattr(horovod.torch, name)


def suite(checkout: Path) -> type[unittest.TestCase]:
    """Horovod's class of tests, made from its source with one line changed."""
    import torch

    sys.modules["mock"] = unittest.mock  # what its helpers import
    sys.path[:0] = [str(checkout / "test" / "utils")]
    if hasattr(torch.optim, "Muon"):
        del torch.optim.Muon  # newer than the tests, which give every optimizer biases too; it wants matrices alone
        torch.optim.Optimizer.__subclasses__ = lambda: [  # type: ignore[method-assign]
            one for one in type.__subclasses__(torch.optim.Optimizer) if one.__name__ != "Muon"
        ]
    path = checkout / "test" / "parallel" / "test_torch.py"
    source = path.read_text().replace("import horovod.torch as hvd", "hvd = BOTH", 1)
    namespace: dict[str, Any] = {"BOTH": Both(), "__name__": "horovod_test_torch", "__file__": str(path)}
    exec(compile(source, str(path), "exec"), namespace)
    found: type[unittest.TestCase] = namespace["TorchTests"]
    return found


def worker(checkout: Path, folder: Path, names: list[str]) -> None:
    """On every rank: run tests until one does not pass, and write how each ended."""
    tests = suite(checkout)
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    for name in names:
        (folder / f"{name}.{rank}").write_text("no end within the limit")
        result = unittest.TestResult()
        tests(name).run(result)
        bad = [*result.errors, *result.failures]
        said = bad[0][1].strip().splitlines()[-1] if bad else result.skipped[0][1] if result.skipped else ""
        word = "failed: " if bad else "skipped: " if result.skipped else "passed"
        (folder / f"{name}.{rank}").write_text(word + said)
        if bad:
            sys.stderr.write(bad[0][1])
            sys.stderr.flush()
            os._exit(1)
    os._exit(0)  # tests leave calls behind that nobody waits for


def launch(checkout: Path, folder: Path, names: list[str]) -> None:
    """One launch, ended by force when a test has taken too long."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS)]
    command += [sys.executable, __file__, str(checkout), "--worker", str(folder), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGMERGE_TIMEOUT": "20", "HOROVOD_CYCLE_TIME": "1"}
    log = (folder / "log").open("a")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    begun = 0
    while process.poll() is None:
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            before, begun = begun, len(list(folder.glob("*.0")))
            if begun == before:
                process.terminate()
                process.wait()


def main(checkout: Path, chosen: list[str]) -> int:
    """Run all tests, or ``chosen`` ones, and print how each ended; 1 if one did not pass."""
    folder, word = Path(tempfile.mkdtemp()), {}
    names = chosen or [
        line.split("def ")[1].split("(")[0]
        for line in (checkout / "test" / "parallel" / "test_torch.py").read_text().splitlines()
        if line.startswith("    def test_")
    ]
    left = [name for name in names if name not in SKIPPED]
    while left:
        launch(checkout, folder, left)
        ended = [name for name in left if (folder / f"{name}.0").exists()]
        left = left[max(1, len(ended)) :]
    rows = ["| test | result |", "|---|---|"]
    for name in names:
        said = [path.read_text() for path in sorted(folder.glob(f"{name}.[0-9]"))]
        said = said or [SKIPPED.get(name, "did not start")]
        word[name] = max(said, key=lambda one: next(i for i, word in enumerate(WORDS) if one.startswith(word)))
        rows.append(f"| {name.removeprefix('test_')} | {word[name][:200]} |")
    passed, skipped = (sum(one.startswith(how) for one in word.values()) for how in ("passed", "skipped"))
    rows.append(f"\n{passed} of {len(names)} passed, {skipped} skipped themselves")
    sys.stdout.write("\n".join(rows) + f"\n(log: {folder / 'log'})\n")
    return int(any(one.startswith(("failed", "no end")) for one in word.values()))


if __name__ == "__main__":
    if sys.argv[2:3] == ["--worker"]:
        worker(Path(sys.argv[1]), Path(sys.argv[3]), sys.argv[4:])
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
