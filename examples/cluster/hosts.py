# SPDX-License-Identifier: Apache-2.0
"""Hold on which machines a script is to run, and read it from a file in TOML such as ``cluster.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEYS: dict[str, type] = {  # of a file, and what each must be
    "launcher": str,
    "workers": int,
    "hosts": list,
    "interface": str,
    "python": str,
    "port": int,
    "environment": dict,
    "slurm": dict,
}


@dataclass(frozen=True)
class Host:
    """Hold a machine's name, and how many workers it may have."""

    name: str  # as the others reach it
    slots: int = 1  # workers

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class Cluster:
    """Hold what every launcher is told. Raises ``ValueError`` for more workers than there is place for."""

    workers: int = 1  # processes, over all hosts
    hosts: tuple[Host, ...] = ()  # in the order in which they are filled; none: this machine
    interface: str = ""  # the network interface to talk over; empty: the launcher's choice
    python: str = sys.executable  # the interpreter, at the same place on every host
    port: int = 29500  # where torchrun's workers of several hosts meet, on the first one
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that workers get, beside those exported
    slurm: Mapping[str, str] = field(default_factory=dict)  # options of sbatch, without their dashes; empty: a switch

    def __post_init__(self) -> None:
        slots = sum(host.slots for host in self.hosts)
        if self.workers < 1:
            raise ValueError(f"-np {self.workers}: there must be one worker at least")
        if self.hosts and self.workers > slots:
            raise ValueError(f"-np {self.workers}: the hosts have {slots} slots ({','.join(map(str, self.hosts))})")

    def placed(self) -> list[Host]:
        """Return the hosts that get workers, with how many each: the first ones are filled first."""
        left, found = self.workers, []
        for host in self.hosts:
            if left > 0:
                found.append(Host(host.name, min(host.slots, left)))
            left -= host.slots
        return found

    def variables(self) -> dict[str, str]:
        """Return what workers get beside what is exported here: how to reach each other, and ``environment``."""
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if self.interface else ()
        return {**dict.fromkeys(names, self.interface), **self.environment}


def cluster(settings: Mapping[str, Any]) -> Cluster:
    """Return the cluster that ``settings`` describe, with keys as in a file; what is missing has its default.

    Without ``workers`` there are as many as slots. Raises ``ValueError`` if neither they nor hosts are given.
    """
    found = {key: value for key, value in settings.items() if key not in ("launcher", "hosts")}
    found["hosts"] = hosts(settings.get("hosts", ()))
    if "workers" not in found:
        if not found["hosts"]:
            raise ValueError("how many workers? -np N, -H host:slots,..., or workers in the file of --config")
        found["workers"] = sum(host.slots for host in found["hosts"])
    return Cluster(**found)


def hosts(texts: Iterable[str]) -> tuple[Host, ...]:
    """Return the hosts of ``texts``, each "name" or "name:slots"; ``ValueError`` for anything else."""
    found = []
    for text in texts:
        parts = re.fullmatch(r"([^\s:,]+)(?::([1-9]\d*))?", text)
        if parts is None:
            raise ValueError(f"{text!r} is no host with slots; write name:4 for 4 workers, or name for one")
        found.append(Host(parts[1], int(parts[2] or 1)))
    return tuple(found)


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a file. ``ValueError`` with what is wrong and where; ``FileNotFoundError``."""
    if sys.version_info < (3, 11):
        raise ValueError(f"--config {path}: Python 3.10 cannot read TOML; use 3.11 or newer, or flags instead")
    import tomllib

    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    for key, value in found.items():
        if key not in KEYS:
            raise ValueError(f"{path}: there is no {key!r}; a file may have {', '.join(KEYS)}")
        if type(value) is not KEYS[key]:
            raise ValueError(f"{path}: {key} = {value!r} must be of type {KEYS[key].__name__}")
    for table in ("environment", "slurm"):
        found[table] = {key: _text(value) for key, value in found.get(table, {}).items() if value is not False}
    return found


def _text(value: Any) -> str:
    return "" if value is True else str(value)
