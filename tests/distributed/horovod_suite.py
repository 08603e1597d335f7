# SPDX-License-Identifier: Apache-2.0
"""Run Horovod's own tests, unmodified, with agmerge in its place.

``python tests/distributed/horovod_suite.py CHECKOUT [FILE] [TEST ...]``: CHECKOUT is one of Horovod v0.28.1, whose
tests are no part of this repository, nor of its package. FILE: below its ``test`` folder, default
``parallel/test_torch.py``. Horovod need not be installed, and is not used where it is. Two ranks run the file. A launch
goes on until a test does not pass on every rank, or takes too long: the next one then begins with a fresh group. Prints
a table of Markdown, of which docs/dev/horovod_tests.md has the last one with reasons.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60  # seconds a test
RANKS = 2
SKIPPED = {"test_gpu_required": "skipped: says whether there is a GPU"}
WORDS = ("passed", "skipped", "did not", "no end", "failed")  # how a test ends, the better the earlier
FILE = "parallel/test_torch.py"


def suite(checkout: Path, file: str) -> type[unittest.TestCase]:
    """Horovod's class of tests, as its file has it."""
    import torch

    sys.modules["mock"] = unittest.mock  # what its helpers import
    for name in ("horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):  # of its launcher, unused
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["horovod.runner.util.threads"])["in_thread"] = None
    sys.path[:0] = [str(checkout / "test" / "utils")]
    if hasattr(torch.optim, "Muon"):
        del torch.optim.Muon  # newer than the tests, which give every optimizer biases too; it wants matrices alone
        torch.optim.Optimizer.__subclasses__ = lambda: [  # type: ignore[method-assign]
            one for one in type.__subclasses__(torch.optim.Optimizer) if one.__name__ != "Muon"
        ]
    spec = importlib.util.spec_from_file_location("horovods_tests", checkout / "test" / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, unittest.TestCase)]
    return next(one for one in cases if one.__module__ == spec.name)


def worker(checkout: Path, file: str, folder: Path, names: list[str]) -> None:
    """On every rank: run tests until one does not pass, and write how each ended."""
    rank = os.environ["HOROVOD_RANK"]
    tests = suite(checkout, file)
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


def launch(checkout: Path, file: str, folder: Path, names: list[str]) -> None:
    """One launch, ended by force when a test has taken too long."""
    ranks = 1 if file.startswith("single/") else RANKS
    command = [sys.executable, "-m", "agmerge", "horovodrun", "-np", str(ranks), "--instead"]
    command += [sys.executable, __file__, str(checkout), file, "--worker", str(folder), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AGMERGE_TIMEOUT": "20"}
    log = (folder / "log").open("a")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
    begun = 0
    while process.poll() is None:
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            before, begun = begun, len(list(folder.glob("*.0")))
            if begun == before:
                process.terminate()
                process.wait()


def main(checkout: Path, file: str, chosen: list[str]) -> int:
    """Run all tests of a file, or ``chosen`` ones, and print how each ended; 1 if one did not pass."""
    folder, word = Path(tempfile.mkdtemp()), {}
    names = chosen or [
        line.split("def ")[1].split("(")[0]
        for line in (checkout / "test" / file).read_text().splitlines()
        if line.startswith("    def test_")
    ]
    left = [name for name in names if name not in SKIPPED]
    while left:
        launch(checkout, file, folder, left)
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
    given = sys.argv[2:]
    path = given.pop(0) if given and given[0].endswith(".py") else FILE
    if given[:1] == ["--worker"]:
        worker(Path(sys.argv[1]), path, Path(given[1]), given[2:])
    sys.exit(main(Path(sys.argv[1]), path, given))
