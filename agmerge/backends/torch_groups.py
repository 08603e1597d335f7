# SPDX-License-Identifier: Apache-2.0
"""Make groups of torch.distributed, release them, and turn their errors into ours.

Gloo's are released by each rank alone, at any moment. To destroy one in which NCCL has moved something takes all of its
ranks on a machine, and waits for what is under way: a rank that did so by itself would wait for others, which wait for
its next call. Such a group stays until the world is left, or is aborted.

Source: NCCL's manual, ``ncclCommDestroy``: "an intra-node collective call, which all ranks on the same node should call
to avoid a hang".
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from agmerge.backends import streams
from agmerge.errors import CollectiveTimeout, PeerLost

DEFAULTS = (0.0, 600.0, 1800.0)  # seconds: time-outs of groups for which the script has named none: NCCL's, and Gloo's
ABORTED_WITHIN = 5.0  # seconds: an abort waits for kernels that it ends, and they may wait for another abort

# Groups of backends that are no longer referred to: finalizers put them here, at any moment; the next start destroys
# them.
dropped: deque[Any] = deque()
own: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that were made here; all others are the script's


def kinds(dist: Any) -> str:
    """Return the libraries that groups are made of, in torch's spelling."""
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available() and not streams.gpus_are_shared()
    return "cpu:gloo,cuda:nccl" if has_nccl else "gloo"


def has_nccl(dist: Any) -> bool:
    """Return whether groups move tensors of a GPU."""
    return "nccl" in kinds(dist)


def new_group(dist: Any, timeout: float, ranks: list[int] | None = None, label: str = "init()") -> Any:
    """Collective. Return a new group of torch's. ``ranks``: of the world; None: all. ``timeout``: seconds."""
    # NCCL's watchdog ends the process when the group's time-out has passed: not before our error has been raised.
    longest = 2 * timeout + 60 if has_nccl(dist) else timeout
    with translated(label):
        group = dist.new_group(ranks, backend=kinds(dist), timeout=timedelta(seconds=longest), group_desc=label)
    with suppress(TypeError):  # where this rank is not in it, torch returns a number
        own.add(group)
    return group


def timeout_of_script(dist: Any) -> tuple[float, bool]:
    """Return the time-out of the process group that the script has made, in seconds, and whether it is not a default.

    0 where this version of torch does not tell.
    """
    seconds = 0.0
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError, ValueError, TypeError):  # the group has no such part
            part = dist.group.WORLD._get_backend(torch.device(device))
            seconds = max(seconds, part.options._timeout.total_seconds())
    return seconds, seconds not in DEFAULTS


def give_back(dist: Any) -> None:
    """Destroy the groups that were dropped: their threads, files and connections are this process's own affair.

    Not where the last reference goes: that may be in the middle of anything, ``torch.distributed`` included.
    """
    while dropped:
        try:
            held = [dropped.popleft()]
        except IndexError:  # another thread was faster
            return
        if dist.is_initialized():
            with suppress(ValueError, AssertionError):  # it went with the world
                dist.destroy_process_group(held[0])
        # The last reference waits for what is under way, and that may be for a rank that does not come.
        threading.Thread(target=held.clear, name="agmerge gives back", daemon=True).start()


def abort(group: Any) -> None:
    """End what NCCL has under way in ``group``, without the other ranks: its kernels wait for a rank that is lost.

    Returns after ``ABORTED_WITHIN`` seconds at the latest. torch's list keeps the group to the end of the process.
    """
    nccl = group._get_backend(torch.device("cuda"))
    call = getattr(nccl, "abort", None) or nccl._shutdown  # torch 2.4 has the latter, which aborts there
    thread = threading.Thread(target=call, name="agmerge aborts", daemon=True)
    thread.start()
    thread.join(ABORTED_WITHIN)


# Errors: those that tell of other ranks become ours, and those of this rank alone stay.

# Errors of this rank's device, and of its calls; torch before 2.8 has no class for what a kernel did wrong.
OF_THIS_RANK = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
OF_THIS_RANK_WORDS = ("invalid usage", "ncclinvalidargument", "cuda error", "cuda failure", "cuda driver error")


@contextmanager
def translated(name: str, within: str = "") -> Iterator[None]:
    """Turn the errors of torch.distributed into ours, also those of the calls that only hand a tensor in.

    ``name``: of the collective. ``within``: how long was waited, in words. Gloo's errors have no class of their own,
    so each ``RuntimeError`` is one of a connection but for those that are known to be of this rank.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, OF_THIS_RANK) or any(words in text.lower() for words in OF_THIS_RANK_WORDS):
            raise  # no other rank has left
        if "imed out" in text or "imeout" in text:
            raise CollectiveTimeout(f"AGM201: {name}: no answer from all ranks{within}", text) from error
        raise PeerLost(f"AGM206: {name}: the connection to another rank broke", text) from error
