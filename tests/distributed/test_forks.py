# SPDX-License-Identifier: Apache-2.0
"""A forked rank is what ``python SCRIPT ARGUMENTS`` would be; the others of its launch end once one has failed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import Forked
from launching import ROOT, environment, forked

SCRIPT = """
import os, sys, threading
if "torch" in sys.modules:
    print("imported before")
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ["GIVEN"], threading.active_count(), flush=True)
if sys.argv[1] == "raise":
    raise ValueError("in the script")
sys.exit(int(sys.argv[1]))
"""


def as_python(script: Path, argument: str, env: dict[str, str]) -> tuple[int, str]:
    """Return how a new interpreter ends, and what it prints."""
    command = [sys.executable, str(script), argument]
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("argument", ["0", "3", "raise"])
def test_it_is_the_process_of_a_script(argument: str, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    env = environment(GIVEN="1")
    with log.open("a+") as file:
        code = Forked(script, [argument], env, ROOT, file).wait(200)
    first, *rest = log.read_text().splitlines()
    expected_code, expected = as_python(script, argument, env)
    assert first == "imported before" and code == expected_code
    assert [rest[0], rest[-1]] == [expected.splitlines()[0], expected.splitlines()[-1]]


def test_a_signal_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(60)\n")
    with (tmp_path / "log").open("a+") as file:
        rank = Forked(script, [], environment(), ROOT, file)
        assert rank.poll() is None
        rank.kill()
        assert rank.wait(30) == rank.poll() == -signal.SIGKILL


def test_all_ranks_end_once_one_has_failed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nassert os.environ['RANK'] == '0', 'not the first'\ntime.sleep(60)\n")
    start = time.monotonic()
    ended = forked(2, script, timeout=50)
    assert ended.code == 1 and "not the first" in ended.output
    assert time.monotonic() - start < 30
