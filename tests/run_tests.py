# SPDX-License-Identifier: Apache-2.0
"""What ``make test`` runs: pytest, and one line that sums it up.

    python tests/run_tests.py [--all] [pytest's arguments]

Without ``--all``: the unit tests and real workers, all but what is marked ``long`` (conftest.py says what is). With it:
everything, and the unit tests once more for each level of arithmetic that is here. Every part runs, whatever became of
the others.
Paths among the arguments choose the part that they lie in. The status is 0 if every part passed or had nothing to run.
At its end it prints the slowest files. ``build/test-times/`` keeps every test's seconds, in JUnit's format.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NOTHING_TO_RUN = 5
TIMES = Path("build/test-times")
SLOWEST = 20  # files that are printed
COUNTED = ("tests", "failures", "errors", "skipped")  # as JUnit's reports call them
WORKERS = "tests/distributed"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # that we may use
AT_ONCE = ("--processes", str(min(2 * max(2, CORES), 8)))  # files, two a core: some wait for something
UNITS = (*AT_ONCE, "--ignore", WORKERS)
SHORT = ("-m", "not long")
WHOLE = "AGMERGE_TEST_WHOLE"  # set: real workers import all of torch at their start (distributed/launching.py)
# Which instructions torch's own loops, oneDNN, MKL and our loops may use: each rounds in its own way.
PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "AGMERGE_KERNEL": "baseline",
}
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "AGMERGE_KERNEL": "avx2",
}


@dataclass(frozen=True)
class Part:
    """One run of pytest. ``chosen``: what it runs where the user names no paths."""

    name: str
    options: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    """How many tests ended how; a part that ended with an error of its own counts as one that failed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else "")

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


def parts(everything: bool) -> list[Part]:
    """Return what to run, in order.

    Real workers run beside the unit tests. With all of them they come last and one by one, because networks and batch
    systems take all cores.
    """
    launchers = {"AGMERGE_TEST_ALL_LAUNCHERS": "1"}
    if not everything:
        return [Part("short tests", (*SHORT, *AT_ONCE), environment=launchers)]
    levels = {"plain processor": PLAIN, "without loops in C": {"AGMERGE_KERNEL": "off"}}
    if capability() == "AVX512":
        levels["AVX2"] = AVX2
    units = Part("unit tests", ("--hypothesis-profile=long", *UNITS))
    workers = Part("real workers", (), (WORKERS,), {**launchers, WHOLE: "1"})
    return [units, *(Part(name, (*SHORT, *UNITS), (), level) for name, level in levels.items()), workers]


def capability() -> str:
    """The instructions that torch uses here: "AVX512", "AVX2" or another name."""
    command = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def choice(part: Part, arguments: Sequence[str]) -> list[str] | None:
    """The arguments of a part, its own paths among them; None if the user names paths and none of them is in it."""
    named = [one for one in arguments if one.startswith("tests/")]
    if not named:
        return [*arguments, *part.chosen]
    ignores, only = WORKERS in part.options, WORKERS in part.chosen
    mine = [one for one in named if not (ignores if one.startswith(WORKERS) else only)]
    return [one for one in arguments if one not in named or one in mine] if mine else None


def run(part: Part, arguments: Sequence[str]) -> tuple[int, Count]:
    """One part, with its output where ours goes: pytest's status, and what it counted."""
    file = report_of(part)
    file.unlink(missing_ok=True)  # an earlier run's
    command = [sys.executable, "-m", "pytest", *part.options, f"--junit-xml={file}", *arguments]
    status = subprocess.run(command, env=environment(part), check=False).returncode
    return status, counted(status, file)


def report_of(part: Part) -> Path:
    """Return the file that a part's report is written to."""
    return TIMES / f"{part.name.replace(' ', '-')}.xml"


def slowest(reports: Sequence[Path], most: int = SLOWEST) -> list[tuple[float, int, str]]:
    """Return seconds, tests and name of the files whose tests took longest, by these reports; the slowest first."""
    seconds: dict[str, list[float]] = {}
    for report in reports:
        if report.exists():
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                # As "tests.agmerge.step.test_round" or, of a class in it, "tests.agmerge.step.test_round.TestRound".
                module = case.get("classname", "").split(".Test")[0]
                seconds.setdefault(module, []).append(float(case.get("time", 0.0)))
    found = sorted(((sum(each), len(each), name) for name, each in seconds.items()), reverse=True)
    return found[:most]


def environment(part: Part) -> dict[str, str]:
    """Ours and a part's. Bytecode is kept: else each of some hundred processes would compile the library for itself."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **part.environment}


def counted(status: int, file: Path) -> Count:
    """What pytest counted, by its status and its report in JUnit's format, which it may not have written."""
    found = Count()
    if file.exists():
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            total, failures, errors, skipped = (int(suite.get(key, 0)) for key in COUNTED)
            found += Count(total - failures - errors - skipped, failures + errors, skipped)
    if status not in (0, NOTHING_TO_RUN) and not found.failed:
        found += Count(failed=1)
    return found


def main(arguments: Sequence[str]) -> int:
    """Run everything, sum it up; the status."""
    everything = "--all" in arguments
    rest = [one for one in arguments if one != "--all"]
    ended = {}
    for part in parts(everything):
        given = choice(part, rest)
        if given is not None:
            print(f"\n-- {part.name} --", flush=True)
            ended[part.name] = run(part, given)
    for seconds, tests, name in slowest([report_of(part) for part in parts(everything) if part.name in ended]):
        print(f"{seconds:7.1f} s in {tests} tests of {name}")
    print("\n" + "; ".join(f"{name}: {count}" for name, (_, count) in ended.items()))
    total = sum((count for _, count in ended.values()), Count())
    print(f"total: {total}", flush=True)
    return int(total.failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
