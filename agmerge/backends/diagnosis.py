# SPDX-License-Identifier: Apache-2.0
"""Results of trying a backend on this machine, as backends give them to ``python -m agmerge doctor``.

A backend hands over a program to be tried in a process of its own (``PROBE``) and makes a row of the doctor's table
from what that found (``diagnose``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    facts: Mapping[str, object] = field(default_factory=dict)  # the JSON object that the probe has printed
    error: str = ""  # why there are no facts, in one line; empty: there are
    late: bool = False  # the probe ran out of time, so nothing is known


@dataclass(frozen=True)
class Row:
    """Line of the doctor's table: something that works, or does not."""

    kind: str  # "backend", "launcher", "speed" or "elastic": the first column
    name: str  # what it is called: the second column
    works: bool
    detail: str  # versions and libraries where it works, else why it does not
    fix: str = ""  # the command that makes it work; empty where it does
    known: bool = True  # False: a check ran out of time, so ``works`` is False without evidence


def built_in(facts: Mapping[str, object]) -> str:
    """Return which of MPI, Gloo and NCCL are built into a library, for example ``"MPI, Gloo (no NCCL)"``.

    ``facts``: of its probe; libraries that they do not mention are left out.
    """
    names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
    present = [name for fact, name in names.items() if facts.get(fact)]
    absent = [name for fact, name in names.items() if fact in facts and not facts[fact]]
    return ", ".join(present or ["nothing"]) + (f" (no {', no '.join(absent)})" if absent else "")
