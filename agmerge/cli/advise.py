# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge advise script.py ...``: try compressors in the first steps of a script, and say what to do.

The script is one that has never heard of this library, or one that uses it. It runs in workers that are started here,
or under its own launcher, and is ended on every rank after some eighty steps. Its file is not changed.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.multiprocessing
from torch.optim.optimizer import register_optimizer_step_post_hook

import agmerge
from agmerge.backends import registry
from agmerge.backends.horovod import cores
from agmerge.cli.advisor import NO_ANSWER, STEPS, Advisor, Enough, advised, leave_out_notices

STOPS = 10  # seconds for workers to print the table so far, until their launcher is told to end them
TOLD = "stopped"


def start(script: str, arguments: Sequence[str], flags: Sequence[str], workers: int) -> int:
    """Start workers on this machine, by torchrun, each of which runs ``script``; return the exit code."""
    sys.stderr.write(
        f"agmerge advise: runs about {STEPS} steps of {script} for real: it writes its files, and may resume from "
        "checkpoints and overwrite them\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", "-m", "agmerge", "advise"]
        environment = {"OMP_NUM_THREADS": str(max(1, cores() // workers)), **os.environ}
        command = [sys.executable, *run, *flags, "--result", str(file), script, *arguments]
        # In a session of its own: Ctrl-C comes here alone. Workers see a file, and end without a traceback.
        with subprocess.Popen(command, env=environment, start_new_session=True) as launcher:

            def stop(number: int, _: object) -> None:
                if _told_by(file).exists():  # a second time, or after some seconds
                    launcher.terminate()
                _told_by(file).touch()
                signal.alarm(STOPS)

            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
                signal.signal(number, stop)
        signal.alarm(0)  # the launcher has ended
        if file.exists():
            return int(file.read_text())
    sys.stderr.write(f"agmerge advise: no answer for {script}, see the messages above\n")
    return NO_ANSWER


def _told_by(result: Path) -> Path:
    """Return the file that tells workers to end, beside the one for the exit code."""
    return result.with_suffix(".stop")


def main(script: str, arguments: Sequence[str], *, as_json: bool, patience: float, workers: int, result: str) -> int:
    """Run ``script`` with ``arguments`` until enough was measured, ``patience`` seconds at most; return the exit code.

    Without a launcher it is started by so many ``workers``. ``result``: a file for the exit code, which a launcher
    would take for a failure.
    """
    if not os.path.isfile(script):
        sys.stderr.write(f"agmerge advise: file not found: {script}\n")
        return NO_ANSWER
    if workers < 2 or not patience > 0:
        sys.stderr.write(
            f"agmerge advise: --workers must be at least 2 and --patience above 0, got {workers} and {patience:g}\n"
        )
        return NO_ANSWER
    if not registry.has_launcher(os.environ):
        flags = [*(["--json"] if as_json else []), "--patience", str(patience)]
        return start(script, arguments, flags, workers)
    told_by = _told_by(Path(result)) if result else None
    return watched(Advisor(script, as_json, result), arguments, patience, told_by)


def watched(advisor: Advisor, arguments: Sequence[str], patience: float, told_by: Path | None = None) -> int:
    """Run the script of ``advisor`` until it ends; return the exit code. ``told_by``: a file that ends it earlier."""
    script = advisor.script
    agmerge.DistributedOptimizer = agmerge.optimizer.DistributedOptimizer = advised(advisor)  # type: ignore[misc]
    for name in ("spawn", "start_processes"):
        setattr(torch.multiprocessing, name, advisor.spawns)
    leave_out_notices()
    advisor.watch()
    _when_told_to_end(lambda: advisor.stopped(TOLD))
    hook = register_optimizer_step_post_hook(advisor.stepped)
    over = threading.Event()

    def guard() -> None:
        end = time.monotonic() + patience
        while not over.wait(0.2):
            if told_by is not None and told_by.exists():
                advisor.stopped(TOLD)
            if time.monotonic() > end:
                advisor.stopped(f"stopped by the time limit of {patience:g} s (--patience)")

    threading.Thread(target=guard, name="agmerge advise", daemon=True).start()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        pass
    except SystemExit as end:
        advisor.end(end.code)
    except Exception:
        traceback.print_exc()
        sys.stderr.write(f"agmerge advise: {script} failed in step {advisor.steps + 1}, see above\n")
        sys.stderr.flush()
        os._exit(NO_ANSWER)  # others may wait for this worker
    finally:
        over.set()
        hook.remove()
    return advisor.exit_code()


def _when_told_to_end(tell: Callable[[], object]) -> None:
    """Call ``tell`` at Ctrl-C and SIGTERM, in a thread: the script may wait in a collective, where no handler runs."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def wait() -> None:
        while (heard := os.read(reading, 1)) and heard[0] not in numbers:
            pass
        tell()

    def forked() -> None:  # a loader's process, which is told to end by itself
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=forked)
    threading.Thread(target=wait, name="agmerge advise is told to end", daemon=True).start()
