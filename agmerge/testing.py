# SPDX-License-Identifier: Apache-2.0
"""Run ranks as threads of one process. Most distributed bugs show there, within milliseconds."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import merging
from agmerge.backends.local import Call, Group, LocalBackend
from agmerge.errors import PeerLost
from agmerge.runtime import workers
from agmerge.runtime.pretended_link import linked

__all__ = ["Call", "Inspection", "calls", "inspect", "jitter", "run"]

T = TypeVar("T")
_thread = threading.local()  # .group: of a rank that is a thread; written by run alone


def run(
    n: int,
    fn: Callable[[int], T],
    *,
    inject: Callable[[Call], None] | None = None,
    return_errors: bool = False,
    link: str = "",
) -> list[T]:
    """Call a function on several threads, each of them a rank of one in-memory group.

    ``torch.manual_seed`` acts on the complete process, so build a model once and give each rank a deepcopy.

    Example::

        def body(rank):
            return agmerge.allreduce(torch.tensor([float(rank)]))

        assert agmerge.testing.run(2, body) == [torch.tensor([0.5])] * 2

    Args:
        n (int): Number of ranks.
        fn (callable): Called as ``fn(rank)`` on each rank. When it ends, the rank is gone: ranks that wait for it get
            :class:`agmerge.PeerLost`.
        inject (callable): Called as ``inject(call)`` on the rank's thread before each collective. It can sleep (a slow
            rank), raise (a rank that fails), or change ``call.tensor`` in place (a damaged message). Default: None.
        return_errors (bool): Return exceptions among the results instead of raising the first one. Default: False.
        link (str): Simulate a network of this rate for each rank, such as ``"200mbit"``. Default: no limit.

    Returns:
        The results, by rank.

    Raises:
        BaseException: The first error of a rank that does not follow from the loss of another rank.
    """
    group = Group(n, inject)
    results: list[T | BaseException | None] = [None] * n

    def body(rank: int) -> None:
        _thread.group = group
        workers.bind(linked(LocalBackend(group, range(n), rank), link))
        try:
            results[rank] = fn(rank)
            group.leave(rank, "has already returned")
        except BaseException as error:
            results[rank] = error
            group.leave(rank, f"raised {type(error).__name__}: {error}")

    # MKL's vector functions choose their instructions at their first call in a process, without a lock: where threads
    # made it at once, a tanh() was rounded otherwise in one of a thousand processes: ranks were not as workers.
    torch.exp(torch.zeros(1))
    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors and not return_errors:
        raise next((error for error in errors if not isinstance(error, PeerLost)), errors[0])
    return results  # type: ignore[return-value]


def jitter(seed: int, longest: float = 1e-3) -> Callable[[Call], None]:
    """Return an ``inject`` for :func:`run` that makes ranks arrive in random order.

    Args:
        seed (int): Seed of the random times.
        longest (float): Seconds that a call sleeps at most. Default: 0.001.
    """
    source = random.Random(seed)

    def inject(call: Call) -> None:
        time.sleep(source.uniform(0.0, longest))

    return inject


def calls() -> list[tuple[str, str, int]]:
    """Return the collectives that this rank has started so far.

    Returns:
        A list of ``(kind, name, bytes)``, in order.

    Raises:
        ValueError: Outside of :func:`run`.
    """
    rank, group = workers.rank(), getattr(_thread, "group", None)
    if group is None or workers.bound() is None:
        raise ValueError("agmerge.testing.calls() works inside agmerge.testing.run() only")
    return list(group.calls[rank])


@dataclass(frozen=True)
class Inspection:
    """Internal state of an :class:`agmerge.DistributedOptimizer` on one rank, at one moment."""

    plan: merging.Plan | None  # in use; None before the first step
    # By name of the parameter, copies in its shape. Tensors without a residual are left out.
    residuals: Mapping[str, torch.Tensor]
    measurements: merging.Measurements | None  # behind the plan; None: nothing has been measured
    # By name, in the order in which gradients become ready: how each tensor is treated, with the attributes ``sparse``
    # (it is selected from), ``density`` (None: the compressor's own), ``dtype`` and ``device``. Empty before the first
    # step.
    classes: Mapping[str, Any]


def inspect(optimizer: Any) -> Inspection:
    """Return plan, residuals, measurements and tensor classes of an optimizer. Nothing changes, and nothing is sent.

    Args:
        optimizer (DistributedOptimizer): The optimizer. Its residuals are those after the last complete step.

    Returns:
        An :class:`Inspection`.
    """
    reducer, exchange = optimizer._reducer, optimizer._reducer.exchange  # so that tests need not know of them
    buffers = exchange.agreed.buffers
    return Inspection(
        plan=exchange.agreed.current.plan,
        residuals={name: residual.clone() for name, residual in reducer.replica.unsent().items()},
        measurements=exchange.agreed.plans.status().measured
        if exchange.agreed.plans is not None and exchange.agreed.is_valid
        else None,
        classes={} if buffers is None else {slot.name: slot.tensor_class for slot in buffers.layout.slots},
    )
