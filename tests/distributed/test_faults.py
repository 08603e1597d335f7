# SPDX-License-Identifier: Apache-2.0
"""G4: whatever becomes of one worker, the job ends by itself, not with 0, and says which rank is missing.

Two workers under every launcher and under none; rank 1 fails in every way, at every place, in the first step and in a
later one. All cells are under way at once, a few at a time: much of their time is waiting.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty import FAILS, TIMEOUT
from launching import HERE, Ended, launch, missing, start_by_hand

SCRIPT = HERE / "faulty.py"
SLACK = 30.0  # seconds, on a busy machine, from the deadline to the end of the job
PATIENCE = 150.0  # seconds: for a launch in all
AT_ONCE = 4  # launches
FAULTS, WHEN, STEPS = ("kill", "exit", "raise", "sleep"), ("before", "inside", "after"), (0, 2)
HAND, TORCHRUN, HOROVODRUN = "by hand", "torchrun", "horovodrun, Gloo"
LAUNCHERS = (HAND, "mpirun", HOROVODRUN, "mpirun, mpi4py")  # one for each: torch, Horovod on MPI and on Gloo, MPI
MARK = "FAULTY_LAUNCH"  # what every process of a launch has in its environment


@dataclass(frozen=True)
class Cell:
    """One launch: rank 1 fails in exchange ``step``."""

    launcher: str
    fault: str
    when: str
    step: int

    def __str__(self) -> str:
        return f"{self.launcher}: {self.fault} {self.when} backward in step {self.step}"


ALL = [Cell(*values) for values in itertools.product((*LAUNCHERS, TORCHRUN), FAULTS, WHEN, STEPS)]
HANDSHAKES = [Cell(launcher, "sleep", "handshake", 0) for launcher in LAUNCHERS]
SHORT = [  # each launcher and each fault
    Cell(HAND, "kill", "inside", 2),
    Cell("mpirun", "exit", "after", 2),
    Cell(HOROVODRUN, "raise", "before", 2),
    Cell("mpirun, mpi4py", "sleep", "inside", 2),
]


@dataclass(frozen=True)
class Outcome:
    """How a launch went. ``took``: seconds from the fault to the end of all that had to end by itself."""

    code: int | None
    output: str
    took: float
    left: list[int]


def run(cell: Cell) -> Outcome:
    """One launch; then whatever it has left is killed."""
    mark = {MARK: uuid.uuid4().hex}
    given = [cell.fault, cell.when, str(cell.step)]
    if cell.launcher == HAND:
        ended, end = _by_hand(*given, **mark)
    else:
        ended = launch(cell.launcher, 2, SCRIPT, *given, timeout=PATIENCE, **mark)
        end = time.time()
        time.sleep(1.0)  # what a launcher has told to end has ended then
    left = marked(mark[MARK])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    failed = re.search(r"the worker \d+ fails at ([\d.]+)", ended.output)
    return Outcome(ended.code, ended.output, end - float(failed[1]) if failed else float("nan"), left)


def _by_hand(*given: str, **more: str) -> tuple[Ended, float]:
    """Without a launcher: how rank 0 ended, and when. Its end ends nobody else."""
    survivor, other = start_by_hand(2, SCRIPT, *given, **more)
    first = _to_its_end(survivor)
    end = time.time()
    if given[0] == "sleep":
        other.kill()
    second = _to_its_end(other)
    return Ended(None if second.code is None else first.code, first.output + second.output), end


def _to_its_end(process: subprocess.Popen[str]) -> Ended:
    """How a worker ended; one that goes on for too long is killed."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
        return Ended(process.returncode, output)
    except subprocess.TimeoutExpired:
        process.kill()
        return Ended(None, process.communicate()[0])


def marked(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            pass  # it has ended, or is another's
    return found


class Outcomes:
    """The outcomes of cells, each launched once."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._futures: dict[Cell, Future[Outcome]] = {}

    def start(self, cells: list[Cell]) -> None:
        """Launch those that can be launched here."""
        for cell in cells:
            if not cannot(cell):
                self._futures[cell] = self._pool.submit(run, cell)

    def of(self, cell: Cell) -> Outcome:
        """How it went."""
        return self._futures[cell].result()


def cannot(cell: Cell) -> str:
    """Why a cell cannot be launched here; empty if it can, or must."""
    must = os.environ.get("AGMERGE_TEST_ALL_LAUNCHERS") == "1"
    return "" if must or cell.launcher == HAND else missing(cell.launcher)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[Outcomes]:
    """Of all cells that were selected."""
    chosen = [item.callspec.params["cell"] for item in request.session.items if _here(item)]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = Outcomes(pool)
        made.start(list(dict.fromkeys(chosen)))
        try:
            yield made
        finally:
            pool.shutdown(cancel_futures=True)


def _here(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and "cell" in getattr(getattr(item, "callspec", None), "params", {})


def cases() -> list[object]:
    """Those of ``make test``, and the others."""
    rest = [cell for cell in [*ALL, *HANDSHAKES] if cell not in SHORT]
    return [*(pytest.param(cell, id=str(cell)) for cell in SHORT)] + [
        pytest.param(cell, id=str(cell), marks=pytest.mark.long) for cell in rest
    ]


# What a launcher says of the rank that failed first.
SAID = re.compile(r"rank 1 with PID|@1,1\]|Process name: 1\b|Process 1 exit with status code [^0]|rank +: 1 \(")
MISSING = re.compile(r"agmerge\.errors\.(CollectiveTimeout|PeerLost): .*\bMissing: rank 1 \(host \S+, pid \d+\): ")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", cases())
def test_the_job_ends_and_names_the_rank_that_is_missing(cell: Cell, outcomes: Outcomes) -> None:
    if cannot(cell):
        pytest.skip(cannot(cell))
    outcome = outcomes.of(cell)
    output = outcome.output[-6000:]
    assert outcome.code not in (0, None), output
    assert outcome.took < TIMEOUT + SLACK, output
    error = MISSING.search(outcome.output)
    if cell.launcher == HAND or cell.fault in ("exit", "sleep"):  # no launcher ends the survivor before it can speak
        assert error is not None, output
    if error is not None and cell.fault == "exit":
        assert "it came to the end of its script" in outcome.output, output  # the commonest cause is uneven data
        assert "optimizer.join()" in outcome.output or cell.step == 0, output
    if error is not None:
        # What has been handed over before it failed may yet arrive; the first step begins with an agreement.
        at = [cell.step, cell.step + 1] if cell.when == "after" and cell.step else [cell.step]
        if cell.when == "handshake":
            assert "(in step" not in error[0] and ": sets/" in error[0], output
        else:
            assert any(f"(in step {step}, after " in error[0] for step in at), output
            assert re.search(r": (buffer \d+|membership/digest): ", error[0]), output
    else:
        assert SAID.search(outcome.output), output
    assert outcome.left == [], output


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_survivor_names_the_same_rank() -> None:
    workers = start_by_hand(3, SCRIPT, "kill", "before", "2")
    try:
        outputs = [worker.communicate(timeout=PATIENCE)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert workers[FAILS].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert workers[rank].returncode != 0
        error = MISSING.search(outputs[rank])
        assert error is not None, outputs[rank]
        said = outputs[rank][error.end() :].split("Waiting too: ")
        assert said[0].startswith("its process has ended") and "rank" not in said[0]
        assert said[1].startswith(f"rank {2 - rank} ")


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("launcher", ["mpirun", HOROVODRUN])
@pytest.mark.parametrize("busy", ["starting", "stuck"])
def test_who_ends_does_not_wait_for_who_is_busy(launcher: str, busy: str) -> None:
    """Horovod's threads need Python's lock to free tensors, and hold locks of its own then."""
    if missing(launcher):
        pytest.skip(missing(launcher))
    ended = launch(launcher, 2, HERE / "ending.py", busy, timeout=300)
    assert ended.code not in (0, None), ended.output[-3000:]
    said = "PeerLost" if busy == "starting" else "of its own"
    assert said in ended.output, ended.output[-3000:]
