# SPDX-License-Identifier: Apache-2.0
"""Join the other workers, and keep the backend of this process, or of this thread of an in-memory group."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

from agmerge.backends import Backend, registry, slurm, status, timeouts
from agmerge.backends.generations import NEWCOMERS, Generations
from agmerge.backends.generations import Elastic as Elastic
from agmerge.backends.registry import ALONE, BACKENDS, detect
from agmerge.errors import AGMergeError, warn
from agmerge.runtime import pretended_link
from agmerge.runtime.peers import exit_guard, monitor

# Backends of workers: a thread of an in-memory group has one of its own, all others share the process's.
_process: Backend | None = None  # None: init() was not called; written by _set_process alone
_thread = threading.local()  # .backend, .regroup, .leaves; written by bind and announce_leaving alone
_job: Generations | None = None  # of an elastic job; None: it is not; written by _set_process alone
Regroup = Callable[[bool], Backend]  # whether it lets newcomers in: forms the next group of workers
LIGHTHOUSE = "AGMERGE_LIGHTHOUSE"
_has_left = False  # this worker has left its elastic job; written by shutdown alone
_looked = False  # the last init() of the process looked for others; the script had not named a backend

_inherited: Backend | None = None  # of the process that has forked this one; written by _after_fork_in_child alone

NOT_INITIALIZED = "AGM001: AGMerge has not been initialized; use agmerge.init()."
HAS_LEFT = "\nThis worker left its elastic job. Do not call agmerge after commit() has returned False."
FORKED = (
    "\nThis process was forked from one that called init(). A fork has no rank: call agmerge.init() in it, after "
    "init_process_group() or with a launcher's variables, and create optimizers there"
)
FORKED_RANK = (
    "AGM016: This process was forked from {who}, and cannot use its connections. Start workers before the parent "
    "calls agmerge.init() or init_process_group(), or use start_method='spawn'. Workers of a DataLoader need no "
    "init(): agmerge.rank() and agmerge.size() return the parent's values."
)
ONE_AGENT = (
    "AGM218: init(elastic=True): one torchrun started {count} workers, and ends all of them if one fails. Start each "
    "worker with its own torchrun and --nproc_per_node 1, or without a launcher. See docs/elastic.md."
)
OTHERS_LATER = (
    "AGM009: agmerge.init() found no other workers, so this process would train alone, but then the script "
    "initialized {name}, which has {count}. Call agmerge.init() after {call}, or remove it: agmerge uses an "
    "initialized backend."
)


def init(backend: str | None = None, *, elastic: bool | Elastic = False) -> None:
    """Collective. Connect to the other workers. Call it once, before everything else.

    If your script initializes Horovod or ``torch.distributed`` itself, call it afterwards. A second call does nothing.

    Args:
        backend (str): ``"horovod"``, ``"torch"``, ``"mpi"``, or ``"local"`` for this process alone. Default: detected
            from the launcher (docs/backends.md).
        elastic (bool or Elastic): True if workers may fail and join (docs/elastic.md). The call then waits until the
            lighthouse at ``AGMERGE_LIGHTHOUSE`` admits this worker. Pass :class:`agmerge.Elastic` for more options.

    Raises:
        ValueError: For an unknown backend, or another one than in the first call.
        agmerge.AGMergeError: If the backend does not see all workers that the launcher has started.
    """
    if bound() is not None or _process is not None:
        if backend not in (None, backend_name()):
            raise ValueError(
                f"init(backend={backend!r}): already initialized with {backend_name()!r}. Call shutdown() first."
            )
        return
    _refuse_fork()
    env = os.environ
    if elastic:
        _init_elastic(backend, _options_of(elastic, env))
        return
    name = backend or detect(env)
    if launched_elastic() and name != "horovod":
        raise AGMergeError(
            f"AGM010: HOROVOD_ELASTIC=1 requires the Horovod backend, got {name!r}. Remove AGMERGE_BACKEND and "
            "backend=, or launch with a fixed number of workers."
        )
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} is unknown. Choose from: {', '.join(BACKENDS)}")
    timeout = timeouts.default()
    try:
        opened = registry.open_backend(name, env, timeout, monitor.listen)
    finally:
        if name != ALONE:
            exit_guard.install()
    variable = registry.size_variable(env, name)
    if name != ALONE and variable is not None and opened.size == 1:
        # Going on would train as many unrelated models as there are workers.
        raise AGMergeError(
            f"AGM008: The launcher started {env[variable]} workers ({variable}), but the {name} backend sees one, "
            "because it was built for another launcher. `python -m agmerge doctor` shows the launchers that work"
            + (". Under srun, set AGMERGE_BACKEND=torch" if slurm.launched(env) else "")
        )
    if opened.size > 1 and not launched_elastic() and not monitor.is_open():
        monitor.open(opened.rank, monitor.over(opened, timeout))
    rate = env.get(pretended_link.VARIABLE, "")
    if rate and opened.rank == 0 and opened.size > 1:
        sys.stderr.write(
            f"agmerge: {pretended_link.VARIABLE}={rate}: simulating a network of this speed for each worker\n"
        )
    linked = pretended_link.linked(opened, rate) if opened.size > 1 else opened
    _set_process(linked, looked=backend is None and not env.get("AGMERGE_BACKEND"))


def _refuse_fork() -> None:
    """Raise :class:`agmerge.AGMergeError` in a fork of a process that has joined workers."""
    if _inherited is not None and _inherited.name != ALONE:
        raise AGMergeError(FORKED_RANK.format(who=f"rank {_inherited.rank} of {_inherited.size}"))
    if registry.inherits():
        raise AGMergeError(FORKED_RANK.format(who="one with a process group of torch.distributed"))


def listen() -> None:
    """Collective. Answer questions of peers from now on, if this worker does not do so yet.

    In an elastic job it waits for the first step: newcomers are alone until all begin one.
    """
    backend = None if bound() is not None else _process
    if launched_elastic() and backend is not None and backend.size > 1 and not monitor.is_open():
        monitor.open(backend.rank, monitor.over(backend, timeouts.default()))


def launched_elastic() -> bool:
    """Return whether Horovod has launched this process to be joined and left by others."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _options_of(elastic: bool | Elastic, env: Mapping[str, str]) -> Elastic:
    """Return the options of an elastic job, with the lighthouse of the environment where none is named."""
    options = Elastic() if elastic is True else cast(Elastic, elastic)
    if not options.lighthouse:
        options = replace(options, lighthouse=env.get(LIGHTHOUSE, ""))
    if not options.lighthouse.rpartition(":")[2].isdigit():
        raise AGMergeError(
            f"AGM014: init(elastic=True): {LIGHTHOUSE}={options.lighthouse!r}, expected host:port. Run `python -m "
            f"agmerge lighthouse` on a machine that stays up, and set {LIGHTHOUSE} on every worker to the address "
            "that it prints."
        )
    return options


def _init_elastic(backend: str | None, options: Elastic) -> None:
    """Collective. Join an elastic job."""
    if os.environ.get(pretended_link.VARIABLE):
        raise AGMergeError(
            f"AGM308: init(elastic=True) is not supported with {pretended_link.VARIABLE}, which simulates a network "
            "for a fixed number of workers. Unset it."
        )
    if backend not in (None, "torch"):
        raise AGMergeError(
            f"AGM015: init(backend={backend!r}, elastic=True) is not supported: elastic jobs use torch's Gloo. Remove "
            "backend=. Under horovodrun, use horovod.torch.elastic (docs/checkpoints.md)."
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        warn(ONE_AGENT.format(count=os.environ["LOCAL_WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
    job = Generations(options, timeouts.default())
    _set_process(job.group.backend, job=job)


def adopt() -> None:
    """Collective. Take a Horovod or torch.distributed that the script has initialised by itself.

    For scripts that never call :func:`init`. Nothing happens where there is none, or it was called. Raises
    :class:`agmerge.AGMergeError` where it was called too early, found no other worker, and the script has initialised
    several workers since: each of them would train a model of its own.
    """
    name = registry.initialised()
    if name is None or bound() is not None:
        return
    if _process is None:
        init()
    elif _looked and backend_name() == ALONE and registry.BACKENDS[name].workers() > 1:
        call = "hvd.init()" if name == "horovod" else "init_process_group()"
        raise AGMergeError(OTHERS_LATER.format(name=name, count=registry.BACKENDS[name].workers(), call=call))


def shutdown() -> None:
    """Leave the group of workers. Only :func:`init` may be called afterwards. It has no effect in
    ``agmerge.testing.run``."""
    global _has_left
    if _process is not None and bound() is None:
        _has_left = _job is not None and _job.leaves
        monitor.ended("has called agmerge.shutdown()")
        monitor.close()
        if _job is not None:
            _job.close()
        _process.close()
        _set_process(None)
        timeouts.take_over(0.0)


def _set_process(backend: Backend | None, *, looked: bool = False, job: Generations | None = None) -> None:
    """Make ``backend`` the one of this process; None: it has none any more. ``looked``: the script had not named it.

    ``job``: the elastic one that it is of.
    """
    global _process, _looked, _job
    _process, _looked, _job = backend, looked, job


def bind(backend: Backend | None, regroup: Regroup | None = None) -> None:
    """Make ``backend`` this thread's own (None: the process's again). For in-memory groups.

    ``regroup``: forms the next group where one of its ranks is lost; None: the others end, too.
    """
    _thread.backend, _thread.regroup = backend, regroup
    status.bind_thread(backend is not None)


def bound() -> Backend | None:
    """Return this thread's own backend; None if it has none."""
    return getattr(_thread, "backend", None)


def world() -> Backend:
    """Return the communicator of all workers, for module-level collectives. Raises if there is none yet.

    It is the thread's own in an in-memory group, else the process's. Raises :class:`agmerge.AGMergeError` before
    :func:`init`.
    """
    backend = bound() or _process
    if backend is None:
        _refuse_fork()
        raise AGMergeError(NOT_INITIALIZED + (HAS_LEFT if _has_left else FORKED if _inherited is not None else ""))
    if backend is _process and backend.stale:
        renew()
        return world()
    return backend


def renew() -> None:
    """Take the workers that there are now: an elastic Horovod has initialised itself anew."""
    if _process is not None and _job is None:
        monitor.close()  # its ranks are other workers' now
        _set_process(_process.renewed())


def can_regroup() -> bool:
    """Return whether steps of the others go on without a worker that is lost."""
    return (_job is not None and _job.survives) or getattr(_thread, "regroup", None) is not None


def is_elastic() -> bool:
    """Return whether workers may come and go."""
    return _job is not None or can_regroup()


def newcomers_wait() -> bool:
    """Return whether workers wait to be let in, as far as this one knows."""
    return _job is not None and _job.newcomers_wait


def announce_leaving() -> None:
    """Announce, in the messages of later rounds, that this worker leaves its elastic job."""
    if bound() is not None:
        _thread.leaves = True
    elif _job is not None:
        _job.announce_leaving()


def announce_begun() -> None:
    """Announce that this worker of an elastic job has its state: one that dies is not the last that has it."""
    if bound() is None and _job is not None:
        _job.announce_begun()


def leaves() -> bool:
    """Return whether this worker has announced that it leaves."""
    return bool(getattr(_thread, "leaves", False)) or (_job is not None and _job.leaves)


def has_too_few() -> bool:
    """Return whether an elastic job has fewer workers now than are to train: the same on all of them."""
    return _job is not None and size() < _job.min_workers


def regroup(*, lets_in: bool = False) -> Backend:
    """Collective. Form the next group of all that are there still, and return its communicator of all workers.

    ``lets_in``: with the workers that wait; all say the same. Raises :class:`agmerge.TooFewWorkers` where too few are
    left for longer than this worker waits.
    """
    form: Regroup | None = getattr(_thread, "regroup", None)
    if form is not None:
        backend = form(lets_in)
        bind(backend, form)
        return backend
    assert _job is not None and _process is not None
    backend = _job.after(_process, *([NEWCOMERS] if lets_in else [])).backend
    _set_process(backend, job=_job)
    return backend


def current(backend: Backend | None) -> bool:
    """Return whether ``backend`` is the group of now. Autograd's own threads do not know of an in-memory group."""
    now = bound() or _process
    if backend is None or backend is _inherited:
        return False
    return not backend.stale and (now is backend or now is None)


def _after_fork_in_child() -> None:
    """Forget the workers of the parent: its connections are its own, and a lone one's child may have others."""
    global _inherited, _has_left
    _inherited, _has_left = bound() or _process or _inherited, False
    _set_process(None)
    if bound() is not None:
        bind(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _numbering() -> Backend:
    """Return the communicator with the numbers of this worker: in a DataLoader's worker, a fork, its parent's."""
    return _inherited if _inherited is not None and (bound() or _process) is None else world()


def is_initialized() -> bool:
    """Return whether :func:`init` has been called. In a forked process: whether its parent is connected to other
    workers."""
    return (bound() or _process) is not None or (_inherited is not None and _inherited.size > 1)


def backend_name() -> str:
    """Return the name of the backend in use: ``"horovod"``, ``"torch"``, ``"mpi"`` or ``"local"``."""
    return _numbering().name


def rank() -> int:
    """Return this worker's number, from 0 to ``size() - 1``. A forked process, such as a DataLoader worker, has its
    parent's."""
    return _numbering().rank


def size() -> int:
    """Return the number of workers."""
    return _numbering().size


def launched() -> int:
    """Return how many workers the launcher says that it has started: 1 without a launcher."""
    variable = registry.size_variable(os.environ, ALONE)
    return int(os.environ[variable]) if variable else 1


def local_rank() -> int:
    """Return this worker's number among the workers on the same machine, from 0."""
    return _numbering().local_rank


def local_size() -> int:
    """Return the number of workers on this machine."""
    return _numbering().local_size
