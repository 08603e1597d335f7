# SPDX-License-Identifier: Apache-2.0
"""A worker that is lost between the two phases of a quantised all-reduce: the others say so in time, and end."""

from __future__ import annotations

import re
import signal
import time

import pytest
from faulty import FAILS, TIMEOUT
from launching import HERE, launch, start_by_hand
from test_faults import HOROVODRUN, MISSING, PATIENCE, SLACK
from test_workers import need

SCRIPT = HERE / "dying_quantised.py"
# Of the two others one may still wait in the phase before, and is told of, too.
AMONG_THREE = re.compile(MISSING.pattern.replace("Missing: rank 1", r"Missing: (?:.*; )?rank 1"))

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("phase", [pytest.param("first", marks=pytest.mark.long), "second"])
def test_both_survivors_name_the_rank_that_was_killed(phase: str) -> None:
    workers = start_by_hand(3, SCRIPT, "kill", phase)
    try:
        outputs = [worker.communicate(timeout=PATIENCE)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert workers[FAILS].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert workers[rank].returncode not in (0, None), outputs[rank]
        error = AMONG_THREE.search(outputs[rank])
        assert error is not None, outputs[rank]
        assert "(in step 1, after " in error[0] and re.search(r": buffer 0(/sum)?: ", error[0]), error[0]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["mpirun, mpi4py", "mpirun", HOROVODRUN])
def test_a_rank_that_does_not_go_on_ends_the_job_in_time(launcher: str) -> None:
    need(launcher)
    ended = launch(launcher, 3, SCRIPT, "sleep", "second", timeout=PATIENCE)
    end = time.time()
    assert ended.code not in (0, None), ended.output[-6000:]
    failed = re.search(r"the worker \d+ fails at ([\d.]+)", ended.output)
    assert failed is not None and end - float(failed[1]) < TIMEOUT + SLACK, ended.output[-6000:]
    error = MISSING.search(ended.output)
    assert error is not None and "(in step 1, after " in error[0], ended.output[-6000:]
