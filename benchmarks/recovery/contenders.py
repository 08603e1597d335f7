# SPDX-License-Identifier: Apache-2.0
"""How each contender's workers are started, and how one that was killed is replaced."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Set
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHFT_PYTHON = ROOT / "build" / "torchft-venv" / "bin" / "python"
PORT = "29510"
WORKERS = 3
OF_OTHERS = ("HOROVOD", "AGMERGE", "TORCH", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "HTTP_PROXY", "HTTPS_PROXY")


class Contender(ABC):
    """A job of three workers, in a namespace of its own, which ends all of its processes with it."""

    replaces = False  # a killed worker is replaced without being asked for

    def __init__(self, folder: Path, model: str, suspect: int, file_every: int = 10) -> None:
        """Note what to start. ``suspect``: seconds without a sign of life after which a worker counts as dead.

        ``file_every``: steps from one file to the next, of those who write files.
        """
        self.folder, self.model, self.suspect, self.file_every = folder, model, suspect, file_every
        self._started: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> str:
        """Return why this contender cannot run here; empty: it can."""
        return ""

    @abstractmethod
    def start(self) -> None:
        """Start three workers, and what they need."""

    @abstractmethod
    def replace(self) -> None:
        """Start one more worker."""

    def launch(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a process, with none of this one's variables that are meant for workers."""
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(OF_OTHERS)}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
        ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"}
        with open(self.folder / "log", "a") as log:
            environment = {**kept, "PATH": path, **ours, **variables}
            self._started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
        return self._started[-1]

    def ended(self, killed: Set[int]) -> bool:
        """Return whether a process has ended that was started here, other than those of ``killed``."""
        return any(process.poll() is not None and process.pid not in killed for process in self._started)

    def worker(self, name: str, *arguments: str) -> tuple[str, ...]:
        """Return the command of a worker, without the interpreter."""
        return (str(HERE / f"{name}_worker.py"), str(self.folder), self.model, *arguments)


class AGMerge(Contender):
    """Elastic job of this library, with its default quantiser."""

    compression = "eden"

    def start(self) -> None:
        self.launch(sys.executable, "-m", "agmerge", "lighthouse", "--port", PORT)
        time.sleep(3)
        for _ in range(WORKERS):
            self.replace()

    def replace(self) -> None:
        command = self.worker("agmerge", self.compression, str(self.suspect))
        self.launch(sys.executable, *command, AGMERGE_LIGHTHOUSE=f"127.0.0.1:{PORT}")


class AGMergeDense(AGMerge):
    """Elastic job of this library, whole gradients in four bytes."""

    compression = "none"


class Torchrun(Contender):
    """DistributedDataParallel, and a file each so many steps; torchrun starts all workers again."""

    replaces = True

    def start(self) -> None:
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node {WORKERS} --max-restarts 1000".split()
        # Without the variable, workers that are started again may find addresses of the attempt before.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.launch(sys.executable, *launcher, *self.worker("torchrun", str(self.file_every)), **variables)

    def replace(self) -> None:
        raise NotImplementedError("torchrun does so itself")


class Horovod(Contender):
    """Horovod Elastic with its own optimizer; collectives wait for ten seconds, as the manual advises."""

    optimizer, seconds = "horovod", "10"

    @staticmethod
    def missing() -> str:
        if importlib.util.find_spec("horovod") is None:
            return "no horovod: python -m agmerge build-horovod"
        return ""

    def start(self) -> None:
        self._hosts = 0
        script = self.folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        script.chmod(0o755)
        for _ in range(WORKERS):
            self.replace()
        launcher = f"horovodrun --gloo -np {WORKERS} --min-np 2 --max-np {WORKERS} --host-discovery-script {script}"
        command = [*launcher.split(), sys.executable, *self.worker("horovod", self.optimizer)]
        self.launch(*command, HOROVOD_GLOO_TIMEOUT_SECONDS=self.seconds)

    def replace(self) -> None:
        """Add a host to those that the launcher finds: Horovod starts nothing again on a host that has lost a worker.

        A host is an address of the loopback device.
        """
        self._hosts += 1
        with open(self.folder / "hosts", "a") as hosts:
            print(f"127.0.0.{self._hosts}:1", file=hosts)


class HorovodDefault(Horovod):
    """Horovod Elastic as it is: collectives wait for thirty seconds."""

    seconds = "30"


class HorovodAGMerge(Horovod):
    """Horovod Elastic with this library's optimizer."""

    optimizer = "agmerge"


class TorchFT(Contender):
    """The Manager of torchft and its optimizer, a replica group for each worker."""

    way = "manager"

    @staticmethod
    def missing() -> str:
        if not TORCHFT_PYTHON.exists():
            return f"no {TORCHFT_PYTHON.relative_to(ROOT)}: --install-torchft makes it"
        return ""

    def start(self) -> None:
        self._count = 0
        # Its default of --join_timeout_ms, 60 s, is how long a quorum waits for workers that are slow to ask; ten
        # seconds are what its own manual starts it with.
        options = "--min_replicas 2 --join_timeout_ms 10000 --quorum_tick_ms 100".split()
        beat = ["--heartbeat_timeout_ms", str(1000 * self.suspect)]
        self.launch(str(TORCHFT_PYTHON.with_name("torchft_lighthouse")), *options, "--bind", f"[::]:{PORT}", *beat)
        time.sleep(2)
        for _ in range(WORKERS):
            self.replace()

    def replace(self) -> None:
        command = self.worker("torchft", str(self._count), self.way)
        self._count += 1
        self.launch(str(TORCHFT_PYTHON), *command, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{PORT}")


class TorchFTParallel(TorchFT):
    """The same with its DistributedDataParallel."""

    way = "ddp"


CONTENDERS: dict[str, type[Contender]] = {
    "agmerge": AGMerge,
    "agmerge none": AGMergeDense,
    "torchrun": Torchrun,
    "horovod": Horovod,
    "horovod 30 s": HorovodDefault,
    "horovod + agmerge": HorovodAGMerge,
    "torchft": TorchFT,
    "torchft ddp": TorchFTParallel,
}


def install_torchft() -> None:
    """Make the virtual environment in which torchft's workers run, with this environment's torch and transformers."""
    import torch
    import transformers

    home = TORCHFT_PYTHON.parents[1]
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    same = [f"torch=={torch.__version__.split('+')[0]}", f"transformers=={transformers.__version__}", "numpy"]
    subprocess.run([str(TORCHFT_PYTHON), "-m", "pip", "install", "-q", "torchft==0.2.0", *same], check=True)
