# SPDX-License-Identifier: Apache-2.0
"""What the launcher of the examples starts: statuses, signals, and that nothing is left behind.

Small programs with the names of mpirun, ssh and Slurm's stand for those.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from cluster.hosts import Cluster
from cluster.processes import run
from cluster.sbatch import sbatch

LAUNCH = Path(launch.__file__)


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def wait_for(path: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)


def test_one_that_fails_ends_the_others_at_once() -> None:
    before = time.monotonic()
    assert run([["sleep", "50"], ["sh", "-c", "sleep 0.2; exit 4"], ["sleep", "50"]]).status == 4
    assert time.monotonic() - before < 20


def until(path: Path) -> str:
    return f"while [ ! -e {shlex.quote(str(path))} ]; do sleep 0.02; done"


def test_one_that_ends_well_leaves_the_others_some_time(tmp_path: Path) -> None:
    assert run([["true"], ["sh", "-c", "sleep 0.3; exit 0"]]).status == 0
    ready = tmp_path / "ready"
    stubborn = f"trap '' TERM; touch {shlex.quote(str(ready))}; for i in {{1..600}}; do sleep 0.05; done"
    assert run([["bash", "-c", stubborn], ["sh", "-c", until(ready)]], grace=0.2).status == 128 + signal.SIGKILL


@pytest.mark.parametrize("number, written", [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
def test_signals_are_passed_on_and_workers_may_save(number: int, written: str, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(number, frame):\n"
        "    pathlib.Path('saved').write_text(signal.Signals(number).name)\n"
        "    sys.exit(0)\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, save)\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(50)\n"
    )
    launched = subprocess.Popen([sys.executable, LAUNCH, "--launcher", "alone", "--", "worker.py"], cwd=tmp_path)
    wait_for(tmp_path / "ready")
    launched.send_signal(number)
    assert launched.wait(20) == 0
    assert (tmp_path / "saved").read_text() == f"SIG{written}"


def test_after_a_signal_a_sweep_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "pathlib.Path(sys.argv[sys.argv.index('--seed') + 1]).touch()\n"
        "time.sleep(50)\n"
    )
    line = [sys.executable, str(LAUNCH), "--launcher", "alone", "--each", "seed=1,2", "--", "t.py"]
    launched = subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "1")
    launched.send_signal(signal.SIGTERM)
    assert "1 of 2 runs failed or were not made: run_seed=2" in launched.communicate(timeout=20)[1]
    assert launched.returncode == 1 and not (tmp_path / "2").exists()


def test_slurms_file_is_bash_that_saves_and_waits_for_its_next_turn(tmp_path: Path) -> None:
    """Programs of Slurm's names write down what they are told; the worker ends by a SIGTERM to itself alone."""
    program(tmp_path / "scontrol", '#!/bin/sh\necho "scontrol $*" >> said\necho node1\n')
    program(tmp_path / "scancel", '#!/bin/sh\necho "scancel $*" >> said\nkill "$(cat pid)"\n')
    program(
        tmp_path / "srun",
        "#!/bin/bash\ntrap 'echo saved >> said; exit' TERM\necho \"srun $* $MASTER_ADDR\" >> said\n"
        "echo $$ > pid.new\nmv pid.new pid\nfor i in {1..600}; do sleep 0.05; done\n",
    )
    (tmp_path / "job.sh").write_text(
        sbatch(Cluster(2, python="py"), "t.py", ["j", "--run-name", "r", "--checkpoint-dir", "c"])
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env)
    wait_for(tmp_path / "pid")
    job.send_signal(signal.SIGUSR1)
    job.wait(20)
    assert (tmp_path / "said").read_text().splitlines()[1:] == [
        "srun --kill-on-bad-exit=1 py t.py j --run-name r --checkpoint-dir c --resume node1",
        "scancel --signal=TERM 7",
        "saved",
        "scontrol requeue 7",
    ]
