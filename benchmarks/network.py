"""A slow network on one Linux machine: a network namespace per worker, all links shaped to one rate.

    with Network(2, "200mbit") as network:
        outputs = network.run([sys.executable, "worker.py"], timeout=300)
        network.shape("100mbit")           # at any time, also while workers run

Every worker's link is shaped in both directions by a token bucket (tc-tbf), so the rate is that of a full-duplex port
of a switch. Needs root, ``ip`` and ``tc``; delays are not added (netem is a module that many kernels lack).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PORT = 29577
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def usable() -> str:
    """Why there can be no such network here; empty if there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = subprocess.run(["ip", "netns", "add", f"agm{os.getpid()}x"], capture_output=True, text=True)
    if probe.returncode:
        return f"network namespaces are not to be had: {probe.stderr.strip()}"
    _call("ip", "netns", "del", f"agm{os.getpid()}x")
    return ""


def burst(rate: str) -> int:
    """Bytes that may pass at once: a millisecond's worth. With more, small messages would not meet the limit."""
    unit = next((unit for unit in UNITS if rate.endswith(unit)), None)
    if unit is None:
        raise ValueError(f"rate {rate!r}: write it as 100mbit or 1gbit")
    return max(10_000, int(float(rate.removesuffix(unit)) * UNITS[unit] / 8 * 1e-3))


class Network:
    """``workers`` namespaces at a switch. ``rate``: as tc writes it ("200mbit"), or None for no limit."""

    def __init__(self, workers: int, rate: str | None = None) -> None:
        self.workers, self.rate = workers, rate
        self._name = f"agm{os.getpid()}"
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Network:
        why = usable()
        if why:
            raise RuntimeError(why)
        try:
            self._build()
            self.shape(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _space(self, number: int | str) -> str:
        return f"{self._name}n{number}"

    def _build(self) -> None:
        switch = self._space("s")
        _call("ip", "netns", "add", switch)
        _inside(switch, "ip", "link", "add", "br0", "type", "bridge")
        _inside(switch, "ip", "link", "set", "br0", "up")
        for number in range(self.workers):
            space, port = self._space(number), f"p{number}"
            _call("ip", "netns", "add", space)
            _inside(space, "ip", "link", "add", "net0", "type", "veth", "peer", "name", port, "netns", switch)
            _inside(switch, "ip", "link", "set", port, "master", "br0", "up")
            _inside(space, "ip", "addr", "add", f"10.213.7.{number + 1}/24", "dev", "net0")
            _inside(space, "ip", "link", "set", "net0", "up")
            _inside(space, "ip", "link", "set", "lo", "up")

    def shape(self, rate: str | None) -> None:
        """Set the rate of every link, both ways."""
        for number in range(self.workers):
            for space, device in ((self._space(number), "net0"), (self._space("s"), f"p{number}")):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _inside(space, "tc", "qdisc", "del", "dev", device, "root")
                if rate is not None:
                    bucket = ("tbf", "rate", rate, "burst", str(burst(rate)), "latency", "50ms")
                    _inside(space, "tc", "qdisc", "add", "dev", device, "root", *bucket)
        self.rate = rate

    def start(self, command: Sequence[str], **more: str) -> list[subprocess.Popen[str]]:
        """Start ``command`` once per worker, with torchrun's variables and one thread each."""
        dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "HOROVOD", "AGMERGE", "TORCHELASTIC")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        for rank in range(self.workers):
            environment = {
                **kept,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.workers),
                "LOCAL_WORLD_SIZE": str(self.workers),
                "MASTER_ADDR": "10.213.7.1",
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": "net0",
                **more,
            }
            inside = ["ip", "netns", "exec", self._space(rank), *command]
            pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            here = Path(__file__).resolve().parents[1]
            self._running.append(subprocess.Popen(inside, env=environment, cwd=here, start_new_session=True, **pipe))
        return self._running[-self.workers :]

    def wait(self, started: Sequence[subprocess.Popen[str]], timeout: float) -> list[str]:
        """What the workers have printed, once all have ended. ``RuntimeError`` if one failed or was too slow."""
        deadline = time.monotonic() + timeout
        outputs = []
        try:
            for process in started:
                outputs.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            self._kill()
            raise RuntimeError(f"workers did not end within {timeout:g} s") from None
        for rank, (process, output) in enumerate(zip(started, outputs, strict=True)):
            if process.returncode:
                raise RuntimeError(f"worker {rank} ended with {process.returncode}:\n{output[-4000:]}")
        return outputs

    def run(self, command: Sequence[str], timeout: float, **more: str) -> list[str]:
        """Start, wait, and return what each worker has printed."""
        return self.wait(self.start(command, **more), timeout)

    def _kill(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running = []

    def close(self) -> None:
        """End the workers and take the network down."""
        self._kill()
        for number in (*range(self.workers), "s"):
            subprocess.run(["ip", "netns", "del", self._space(number)], capture_output=True, check=False)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _inside(space: str, *command: str) -> None:
    _call("ip", "netns", "exec", space, *command)
