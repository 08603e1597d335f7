# SPDX-License-Identifier: Apache-2.0
"""A slow network on one Linux machine, in network namespaces of its own: nothing leaves it, and it is taken down again.

    with Network(2, "200mbit") as network:
        outputs = network.run([sys.executable, "worker.py"], timeout=300)
        network.shape("100mbit")           # at any time, also while workers run

``Network``, the link "duplex": a namespace per worker; every link is shaped in both directions by a token bucket of its
own (tc-tbf), so the rate is that of a full-duplex port of a switch, which is what a user has. ``Loopback``, the link
"shared": one namespace for all workers, whose ``lo`` has the rate; both directions of all of them share it, so that two
workers who send at once take twice as long. Needs root, ``ip`` and ``tc``; delays are not added (netem is a module that
many kernels lack).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PORT = 29577
ETC = Path("/etc/netns")  # where `ip netns exec` looks for a namespace's own files of /etc
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LEVEL = "AGMERGE_KERNEL"  # as on a machine without newer instructions; ATEN_CPU_CAPABILITY is torch's
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "HOROVOD", "AGMERGE", "TORCHELASTIC")


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


class Spaces(ABC):
    """Namespaces and the workers in them. ``rate``: as tc writes it ("200mbit"), or None for no limit."""

    interface = "lo"  # that workers reach each other by
    address = "127.0.0.1"  # of the first

    def __init__(self, workers: int, rate: str | None = None) -> None:
        self.workers, self.rate = workers, rate
        self._name = f"agm{os.getpid()}"
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Any:
        why = usable()
        if why:
            raise RuntimeError(why)
        _sweep()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it is taken down then, too
        try:
            self._build()
            self.shape(self.rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _build(self) -> None:
        """Make the namespaces."""

    @abstractmethod
    def shape(self, rate: str | None) -> None:
        """Set the rate of every link, both ways."""

    @abstractmethod
    def space(self, worker: int) -> str:
        """The namespace of a worker; empty: none."""

    def start(self, command: Sequence[str], port: int = PORT, **more: str) -> list[subprocess.Popen[str]]:
        """Start ``command`` once per worker, with torchrun's variables and one thread each."""
        started = []
        for rank in range(self.workers):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.workers),
                "LOCAL_WORLD_SIZE": str(self.workers),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(port),
                **more,
            }
            started.append(self.launch(command, environment, rank))
        return started

    def launch(self, command: Sequence[str], environment: Mapping[str, str], worker: int = 0) -> subprocess.Popen[str]:
        """Start one process, a launcher say, where a worker is; no variable of a launcher outside reaches it."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(OF_LAUNCHERS) or key == LEVEL}
        kept |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface, **environment}
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        inside = [*_within(self.space(worker)), *command]
        benchmarks = Path(__file__).resolve().parents[1]
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(benchmarks), kept.get("PYTHONPATH")]))  # for -m
        self._running.append(subprocess.Popen(inside, env=kept, cwd=benchmarks.parent, start_new_session=True, **pipe))
        return self._running[-1]

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

    def sent(self) -> int:
        """Bytes that have left the interfaces of all workers so far."""
        spaces = {self.space(worker) for worker in range(self.workers)}
        file = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return sum(int(_inside(space, "cat", file)) for space in spaces)

    def _kill(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running = []

    def close(self) -> None:
        """End the workers and take the network down."""
        self._kill()
        for name in _spaces():
            if name.startswith(f"{self._name}n"):
                _remove(name)


class Network(Spaces):
    """A namespace for each of ``workers``, at a switch."""

    interface, address = "net0", "10.213.7.1"

    def space(self, worker: int | str) -> str:
        return f"{self._name}n{worker}"

    def _build(self) -> None:
        switch = self.space("s")
        _call("ip", "netns", "add", switch)
        _inside(switch, "ip", "link", "add", "br0", "type", "bridge")
        _inside(switch, "ip", "link", "set", "br0", "up")
        for number in range(self.workers):
            space, port = self.space(number), f"p{number}"
            _call("ip", "netns", "add", space)
            _inside(space, "ip", "link", "add", "net0", "type", "veth", "peer", "name", port, "netns", switch)
            _inside(switch, "ip", "link", "set", port, "master", "br0", "up")
            _inside(space, "ip", "addr", "add", f"10.213.7.{number + 1}/24", "dev", "net0")
            _inside(space, "ip", "link", "set", "net0", "up")
            _inside(space, "ip", "link", "set", "lo", "up")
            # Horovod's process sets listen where the host's own name leads to, which must not be lo.
            hosts = ETC / space / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.213.7.{number + 1} {socket.gethostname()}\n", encoding="ascii")

    def shape(self, rate: str | None) -> None:
        for number in range(self.workers):
            for space, device in ((self.space(number), "net0"), (self.space("s"), f"p{number}")):
                _shape(space, device, rate, 0 if rate is None else burst(rate))
        self.rate = rate


class Loopback(Spaces):
    """One namespace for all workers; all that they say to each other shares the rate of its ``lo``."""

    def space(self, worker: int) -> str:
        return f"{self._name}n"

    def _build(self) -> None:
        _call("ip", "netns", "add", self.space(0))
        _inside(self.space(0), "ip", "link", "set", "lo", "mtu", "9000", "up")

    def shape(self, rate: str | None) -> None:
        _shape(self.space(0), "lo", rate, 256 * 1024)
        self.rate = rate


LINKS: dict[str, type[Spaces]] = {"duplex": Network, "shared": Loopback}
SAID = {"duplex": "full duplex", "shared": "both directions share it"}
UNSHAPED = {"duplex": "unshaped, a port each", "shared": "unshaped, one loopback"}


def named(rate: str, link: str) -> str:
    """A link in words, for a table's title: ``200mbit, full duplex``."""
    return UNSHAPED[link] if rate == "none" else f"{rate}, {SAID[link]}"


class Machine(Spaces):
    """The machine as it is, without a namespace and without a limit: for where there can be none."""

    def __enter__(self) -> Any:
        self.shape(self.rate)
        return self

    def space(self, worker: int) -> str:
        return ""

    def _build(self) -> None:
        pass

    def shape(self, rate: str | None) -> None:
        if rate is not None:
            raise RuntimeError(f"no rate of {rate} here: {usable()}")

    def close(self) -> None:
        self._kill()


def _shape(space: str, device: str, rate: str | None, bucket: int) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _inside(space, "tc", "qdisc", "del", "dev", device, "root")
    if rate is not None:
        limit = ("tbf", "rate", rate, "burst", str(bucket), "latency", "50ms")
        _inside(space, "tc", "qdisc", "add", "dev", device, "root", *limit)


def _spaces() -> list[str]:
    lines = _call("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _sweep() -> None:
    """Take down what a benchmark that was killed has left."""
    for name in _spaces():
        owner = re.fullmatch(r"agm(\d+)[nx].*", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(name)


def _remove(name: str) -> None:
    """A namespace and what runs in it, frozen or not."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(ETC / name, ignore_errors=True)


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _inside(space: str, *command: str) -> str:
    return _call(*_within(space), *command)


def _within(space: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", space) if space else ()
