# SPDX-License-Identifier: Apache-2.0
"""Scripts in Horovod's words, under ``python -m agmerge horovodrun``: few launches, many scenarios."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import HERE, ROOT, environment, run

DOOR = [sys.executable, "-m", "agmerge", "horovodrun", "--instead"]
SCRIPT, ELASTIC = HERE / "horovod_door.py", HERE / "horovod_door_elastic.py"
HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "horovod":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
from agmerge.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_scenarios_hold_on_two_ranks(tmp_path: Path) -> None:
    """Also where no Horovod can be found, without ``--instead``."""
    command = [sys.executable, "-c", HIDING, "horovodrun", "-np", "2"]
    ended = run([*command, sys.executable, str(SCRIPT), str(tmp_path)], 240)
    assert ended.code == 0, ended.output
    source = SCRIPT.read_text(encoding="utf-8").partition("SCENARIOS = (")[2].partition(")")[0]
    names = [line.strip(" ,\n") for line in source.splitlines() if line.strip()]
    assert len(names) == 10
    for name in names:
        assert all(f"[{rank}]<stdout>:ok {name}" in ended.output for rank in (0, 1)), ended.output
    assert ended.output.count("Gradients travel as they are, uncompressed, as the script says") == 2  # twice begun
    assert "AGM102" in ended.output  # the warning of models that differ


def test_the_users_compression_counts_before_the_scripts(tmp_path: Path) -> None:
    command = [*DOOR, "-np", "2", "--compression", "eden-2", "--cycle-time-ms", "3"]
    ended = run([*command, sys.executable, str(SCRIPT), str(tmp_path), "compression"], 120)
    assert ended.code == 0, ended.output
    assert "[1]<stdout>:eden-2" in ended.output
    assert ended.output.count("Gradients travel as 'eden-2', as AGMERGE_COMPRESSION says") == 1
    assert "--cycle-time-ms has no effect" in ended.output


def test_the_first_failing_rank_ends_all() -> None:
    program = "import os, sys, time; time.sleep(300 if os.environ['HOROVOD_RANK'] == '0' else 0); sys.exit(7)"
    began = time.monotonic()
    ended = run([*DOOR, "-np", "2", sys.executable, "-c", program], 100)
    assert ended.code == 7, ended.output
    assert "rank 1 on localhost ended with 7" in ended.output
    assert time.monotonic() - began < 100


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    command = [*DOOR, "-np", "2", sys.executable, str(SCRIPT), str(tmp_path), "waits"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        end = time.monotonic() + 120
        files = [tmp_path / f"waits {rank}" for rank in (0, 1)]
        while not all(path.exists() and path.read_text() for path in files):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        for path in files:
            with pytest.raises(ProcessLookupError):
                os.kill(int(path.read_text()), 0)
    finally:
        process.kill()


def test_other_machines_are_reached_by_ssh(tmp_path: Path) -> None:
    """A program in the place of ssh runs the command here: its words are those that ssh gets."""
    fake = tmp_path / "ssh"
    fake.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" >> "$0.log"\nexec env -i sh -c "$last"\n')
    fake.chmod(0o755)
    program = "import os, sys; print('here', os.environ['RANK'], os.environ['CROSS'], os.getcwd()); sys.exit(5)"
    command = [*DOOR, "-np", "2", "-H", "localhost:1,elsewhere:1", "-p", "2222"]
    program = program.replace("os.environ['CROSS']", "os.environ['HOROVOD_CROSS_RANK']")
    ended = run([*command, sys.executable, "-c", program], 100, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert ended.code == 5, ended.output
    words = (tmp_path / "ssh.log").read_text()
    assert "-p 2222" in words and "elsewhere" in words and "WORLD_SIZE=2" in words and "MASTER_ADDR=127" not in words


def test_workers_of_an_elastic_job_come_and_go(tmp_path: Path) -> None:
    hosts, script = tmp_path / "hosts", tmp_path / "discover.sh"
    hosts.write_text("localhost:2\n")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    command = [*DOOR, "-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script)]
    ended = run([*command, sys.executable, str(ELASTIC), str(hosts), "4"], 200)
    assert ended.code == 0, ended.output
    assert "worker 1 on localhost ended with 137; the others go on" in ended.output
    assert "reset 0: 1 workers" in ended.output and "reset 0: 2 workers" in ended.output, ended.output
    for name in (0, 2):
        assert f"end {name}: 2 workers, 1 model" in ended.output, ended.output
