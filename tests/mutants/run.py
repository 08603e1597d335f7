# SPDX-License-Identifier: Apache-2.0
"""Run mutants: change one line of the library, and see that a named test fails.

    python tests/mutants/run.py [WORD ...]       mutants whose name or file has one of the words; without any, all

Each mutant (`table.py`) is found by its text, so moving code breaks nothing; a row whose text is gone is an error that
names it. A parent imports torch once and forks a process a mutant, which imports the library with the changed line and
runs the named tests under a hard time-out. Changed C is built first. All of these tests have to pass without a change,
which is tried first. The status is 0 if at most one mutant in twenty survives.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 (here and torch: once, for all forks)
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mutants.mutant import Mutant  # noqa: E402
from mutants.table import MUTANTS  # noqa: E402

OBJECTS = ROOT / "build" / "mutants"  # of compiled C, kept for the next run
LIMIT = 60.0  # seconds a mutant; one that hangs is dead
AT_ONCE = 2
SURVIVE = 0.05  # the share that may
DEAD, ALIVE, LOST = "dead", "ALIVE", "LOST"  # LOST: the row is wrong
TESTS_FAILED, TESTS_PASSED, NO_BUILD = 1, 0, 70


class _FirstFailure:
    """Plug-in of pytest that writes the name of the first test that fails to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write it; pytest calls this."""
        if report.failed:
            self._file.write_text(report.nodeid.rpartition("::")[2])


def run(mutant: Mutant | None, tests: Sequence[str], library: Path | None) -> None:
    """Become the process of a mutant: run the tests against the changed library, and exit with pytest's status.

    ``mutant`` None: nothing is changed. ``library``: a folder with changed loops. The name of a test that fails is
    written to a file with the process's number.
    """
    if mutant is not None and not mutant.in_c:
        _replace(ROOT / mutant.file, mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8")))
    elif library is not None:
        _load(library)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-m", "not long"]
    named = [str(ROOT / test) for test in tests]
    first = _FirstFailure(_failure_of(os.getpid()))
    os._exit(int(pytest.main([*options, f"--rootdir={ROOT}", *named], plugins=[first])))


def _failure_of(child: int) -> Path:
    """Return the file for the name of the test that fails in a process."""
    return Path(os.environ["MUTANTS_FOLDER"]) / f"failed-{child}"


def _replace(file: Path, text: str) -> None:
    """Make imports of ``file`` compile ``text``, whatever bytecode is there."""
    theirs = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, fullname: str) -> object:
        if Path(self.path).resolve() == file:
            return compile(text, self.path, "exec", dont_inherit=True)
        return theirs(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def _built(mutant: Mutant | None) -> Path | None:
    """Return a folder with the library of loops that has the mutant's line; None if it does not compile."""
    native, changed = ROOT / "sparsifiers" / "csrc", ROOT / mutant.file if mutant else None
    folder = Path(tempfile.mkdtemp(prefix="mutant-", dir=os.environ["MUTANTS_FOLDER"]))
    for source in native.glob("*.[ch]"):
        text = source.read_text(encoding="utf-8")
        (folder / source.name).write_text(
            mutant.applied(text) if mutant and source == changed else text, encoding="utf-8"
        )
    objects = [_object(source) for source in sorted(folder.glob("*.c")) if source.name != "kernel_module.c"]
    target = folder / f"_kernel{min(importlib.machinery.EXTENSION_SUFFIXES, key=len)}"
    built = all(objects) and _compiled(["-shared", *map(str, objects)], target)
    return folder if built else None


def _object(source: Path) -> Path | None:
    """Return what a source file compiles to, from an earlier run if nothing of it has changed; None: it does not."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    text = hashlib.sha256("\n".join([_flags(), *_included(source)]).encode()).hexdigest()[:16]
    target = OBJECTS / f"{source.stem}-{text}.o"
    return target if target.exists() or _compiled(["-c", *shlex.split(_flags()), str(source)], target) else None


def _included(source: Path) -> list[str]:
    """Return the text of a source file and of the headers that it names, in an include or in a macro for one."""
    files = [source]
    for file in files:
        names = dict.fromkeys(re.findall(r'"(\w+\.h)"', file.read_text(encoding="utf-8")))
        named = [source.parent / name for name in names]
        files += [header for header in named if header not in files and header.exists()]
    return [file.read_text(encoding="utf-8") for file in files]


def _compiled(arguments: Sequence[str], target: Path) -> bool:
    """Run the compiler; return whether it has written ``target``."""
    command = ["cc", "-fPIC", *arguments, "-o", str(target)]
    return not subprocess.run(command, capture_output=True, check=False).returncode


def _flags() -> str:
    """Return the compiler's flags of setup.py, with less optimization, which takes a minute."""
    line = next(line for line in (ROOT / "setup.py").read_text().splitlines() if line.startswith("FLAGS = "))
    return line.split("=", 1)[1].strip().strip('"').replace("-O3", "-O1")


def _load(folder: Path) -> None:
    """Make the library of loops in ``folder`` the one that is in use."""
    from sparsifiers import native

    native.library = native.load(folder)
    if native.library is None:
        os._exit(NO_BUILD)


def start(mutant: Mutant | None, tests: Sequence[str], *, in_c: bool) -> int:
    """Fork the process of a mutant, or of none; return its number. ``in_c``: build the loops first."""
    library = _built(mutant) if in_c else None
    child = os.fork()
    if child:
        return child
    os.setsid()  # with what it starts it is one group, which can be killed
    silent = os.open(os.devnull if not os.environ.get("MUTANTS_VERBOSE") else "/dev/stderr", os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        if not in_c or library is not None:
            run(mutant, tests, library)
    finally:
        os._exit(NO_BUILD)


def outcome(code: int | None, failed: str) -> tuple[str, str]:
    """Return what became of a mutant, and why; ``code``: pytest's status, None for a time-out; ``failed``: a test."""
    if code is None:
        return DEAD, "time-out"
    if code == TESTS_FAILED or code < 0:
        return DEAD, failed if code == TESTS_FAILED else f"signal {-code}"
    if code == TESTS_PASSED:
        return ALIVE, "its tests pass"
    return LOST, "does not compile" if code == NO_BUILD else f"pytest's status is {code}: are the tests still there?"


def check(mutants: Sequence[Mutant]) -> list[str]:
    """Return what is wrong with rows of the table: text that is gone or there more than once, missing tests."""
    found = [f"{name}: two mutants have this name" for name, n in Counter(one.name for one in mutants).items() if n > 1]
    for mutant in mutants:
        path = ROOT / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.before) if path.exists() else 0
        if count != 1:
            found.append(
                f"{mutant.name}: its text before is {count} times in {mutant.file}; give text that is there once"
            )
        found += [f"{mutant.name}: there is no {test}" for test in mutant.tests if not _is_there(test)]
        if not mutant.tests:
            found.append(f"{mutant.name}: names no test that must fail")
    return found


def _is_there(test: str) -> bool:
    """Return whether the file of a test, or of tests, has it: a node id without parameters is looked for by name."""
    file, _, name = test.partition("::")
    function = f"def {name.partition('[')[0]}("
    return (ROOT / file).exists() and (not name or function in (ROOT / file).read_text(encoding="utf-8"))


def judged(mutants: Sequence[Mutant]) -> dict[str, tuple[str, str]]:
    """Run mutants, some at a time; return what became of each, by name."""
    waiting, running, found = list(mutants), {}, {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            mutant = waiting.pop(0)
            running[start(mutant, mutant.tests, in_c=mutant.in_c)] = (mutant, time.monotonic())
        for child, (mutant, begin) in list(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            late = time.monotonic() - begin > LIMIT
            if not ended and late:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if ended or late:
                del running[child]
                failure = _failure_of(child)
                failed = failure.read_text() if failure.exists() else "a test failed"
                found[mutant.name] = outcome(os.waitstatus_to_exitcode(status) if ended else None, failed)
                seconds = time.monotonic() - begin
                print(f"{found[mutant.name][0]:6s}{seconds:5.1f} s  {mutant.name}: {found[mutant.name][1]}", flush=True)
        time.sleep(0.02)
    return found


def fails_unchanged(mutants: Sequence[Mutant]) -> str:
    """Run the tests of all mutants against the library as it is; return the name of one that fails, or ""."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    child = start(None, tests, in_c=any(mutant.in_c for mutant in mutants))
    code, failure = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), _failure_of(child)
    return "" if code == TESTS_PASSED else failure.read_text() if failure.exists() else f"pytest's status is {code}"


def main(words: Sequence[str]) -> int:
    """Run the mutants that the words name; return the status."""
    chosen = [one for one in MUTANTS if not words or any(word in f"{one.name} {one.file}" for word in words)]
    wrong = check(chosen)
    if wrong or not chosen:
        print("\n".join(wrong) or "no mutant has these words", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MUTANTS_FOLDER"] = folder
        if failed := fails_unchanged(chosen):
            print(f"without a mutant: {failed}", file=sys.stderr)
            return 2
        counts = Counter(kind for kind, _ in judged(chosen).values())
    print(f"{counts[DEAD]} of {len(chosen)} mutants die")
    return int(counts[LOST] > 0 or counts[ALIVE] > SURVIVE * len(chosen))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
