# SPDX-License-Identifier: Apache-2.0
"""Plans with their measurements, kept in the user's cache, and found again for the same training.

A file is read and written by rank 0 alone. A file that is wrong causes a warning of one line, and new measurements.
A trial of plans that is under way is kept in checkpoints: a run that resumes goes on with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import merging
from agmerge.backends.handshake import gather_texts
from agmerge.backends.registry import BACKENDS
from agmerge.planning import candidates
from agmerge.planning.candidates import Candidate
from agmerge.planning.measuring import number_of_rank_0
from agmerge.step.agreement import decide_on_rank_0, why_plan_does_not_fit
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.version import __version__
from merging import Measurements, storage

VARIABLE = "AGMERGE_CACHE"  # the folder for kept plans; "off": none are kept
MOST = 200  # files that are kept, the latest ones
FRESH = 86400.0  # seconds: measurements of a busy machine shall not last for ever
_KIND, _TRIAL = "agmerge.KnownPlan", "agmerge.Trial"


@dataclass(frozen=True)
class KnownPlan:
    """Plan that a run has settled on, with its measurements."""

    plan: merging.Plan
    measured: Measurements  # the basis of the plan
    ratio: float  # seconds of its exchanges in training, measured / predicted

    def dumps(self) -> str:
        """Return the plan as text, with a checksum."""
        body = {"plan": self.plan.dumps(), "measured": self.measured.dumps(), "ratio": self.ratio}
        return storage.seal(_KIND, body)

    @classmethod
    def loads(cls, text: str) -> KnownPlan:
        """Return the plan of a text. ``ValueError`` for a text that is foreign, damaged or of another format."""
        return storage.unseal(text, _KIND, _build)


def _build(*, plan: str, measured: str, ratio: Any) -> KnownPlan:
    """Return the plan from the fields of a record."""
    return KnownPlan(merging.Plan.loads(plan), Measurements.loads(measured), float(ratio))


@dataclass(frozen=True)
class KeptTrial:
    """Trial of plans in an earlier run."""

    place: str  # a digest of what its times depend on: arguments, backend, workers
    tried: list[Candidate]  # none: costs were being measured, for the first time
    turns: dict[str, Any]  # and times so far, as :meth:`agmerge.planning.plan_trial.PlanTrial.saved` returns them

    def dumps(self) -> str:
        """Return the trial as text, with a checksum."""
        return storage.seal(_TRIAL, {"place": self.place, "tried": candidates.dumps(self.tried), "turns": self.turns})

    @classmethod
    def loads(cls, text: str) -> KeptTrial | None:
        """Return the trial of a text; None for a text that is damaged or of another version."""
        with suppress(ValueError):
            return storage.unseal(text, _TRIAL, lambda place, tried, turns: cls(place, candidates.loads(tried), turns))
        return None

    def fits(self, buffers: MergeBuffers) -> bool:
        """Return whether the trial is of these tensors, and was made among workers as these are."""
        names = [slot.name for slot in buffers.layout.slots]
        return self.place == place_of(buffers) and not any(why_plan_does_not_fit(one.plan, names) for one in self.tried)


def place_of(buffers: MergeBuffers) -> str:
    """Return a digest of what times of steps depend on: arguments, backend, workers, and how many of them share a host.

    Other hosts of a cluster are as good as these. Rank 0's counts.
    """
    comm = buffers.comm
    facts = [buffers.config.facts(), comm.name, comm.size, comm.local_size, __version__, torch.get_num_threads()]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def folder() -> Path | None:
    """Return the folder for plans: below ``AGMERGE_CACHE``, else in the user's cache; None: nowhere."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    with suppress(RuntimeError):  # there is no home folder
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agmerge"
        return (Path(chosen).expanduser() if chosen else home) / "plans"
    return None


def path_of(where: Path, buffers: MergeBuffers, hosts: Sequence[str]) -> Path:
    """Return the file for this training: its tensors, arguments, backend, launcher, workers, hosts and versions.

    The tensors in readiness order, which a plan keeps. ``hosts``: of every rank, which shows the ranks that share one.
    The launcher by the variables that it sets: one backend may have several, as Horovod has over MPI and over Gloo.
    """
    slots = [(slot.name, list(slot.shape), repr(slot.tensor_class)) for slot in buffers.flat.tensors.slots]
    versions = (__version__, torch.__version__, torch.get_num_threads())
    launcher = sorted({name for backend in BACKENDS.values() for name in backend.SIZES if name in os.environ})
    facts = [slots, buffers.config.facts(), buffers.comm.name, launcher, buffers.comm.size, list(hosts), versions]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
    return where / f"{digest}.json"


def recall(path: Path, buffers: MergeBuffers) -> str:
    """Return the text of the plan at ``path``; "" where there is none that is fresh and fits.

    A file that is wrong causes a warning of one line.
    """
    try:
        if time.time() - path.stat().st_mtime > FRESH:
            return ""
        text = path.read_bytes().decode("ascii")
        problem = why_plan_does_not_fit(KnownPlan.loads(text).plan, [slot.name for slot in buffers.layout.slots])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem:
        warnings.warn(f"AGM702: agmerge cannot use the cached plan {path}, and measures again: {problem}", stacklevel=2)
        return ""
    return text


def keep(path: Path, known: KnownPlan) -> None:
    """Keep a plan at ``path``, and delete all files there but the latest ones. Where that is impossible, warn."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write(path, known.dumps())
        kept = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in kept[:-MOST]:
            old.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"AGM702: agmerge cannot save its plan for the next run ({error}). Set {VARIABLE} to another folder, or "
            "to 'off'.",
            stacklevel=2,
        )


class EarlierRun:
    """Earlier runs, of one agreement. Rank 0 reads and writes files, and tells the others."""

    def __init__(self, buffers: MergeBuffers) -> None:
        self._buffers = buffers
        self._file: Path | None = None  # rank 0's, for the plan of this run; None: it is kept already, or nowhere

    def recall(self) -> KnownPlan | None:
        """Collective. Return the plan that an earlier run like this one has kept; None: there is none."""
        buffers, where = self._buffers, folder()
        if not number_of_rank_0(buffers, where is not None):
            return None
        hosts = gather_texts(buffers.comm, socket.gethostname().encode(), "hosts", buffers.config.guards.timeout)
        if buffers.comm.rank == 0 and where is not None:
            self._file = path_of(where, buffers, [host.decode() for host in hosts])

        def decide() -> dict[str, str]:
            return {"known": "" if self._file is None else recall(self._file, buffers)}

        text = decide_on_rank_0(buffers.comm, decide, None, buffers.config.guards.timeout)["known"]
        return KnownPlan.loads(text) if text else None

    def keep(self, known: KnownPlan) -> None:
        """Keep a plan for later runs, on rank 0; once, and only where :meth:`recall` has asked for one."""
        if self._file is not None:
            keep(self._file, known)
            self._file = None
