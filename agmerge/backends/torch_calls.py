# SPDX-License-Identifier: Apache-2.0
"""Watch a script's own calls of torch.distributed: it may average gradients, or hand parameters round, by itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from agmerge.backends import torch_groups
from agmerge.backends.torch import initialised

# Methods of torch's ProcessGroup, through which all functions of torch.distributed go, however they were imported. The
# names of its versions differ.
SUMS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
)
ALL = (
    *SUMS,
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "_allgather_base",
    "alltoall",
    "alltoall_base",
    "gather",
    "scatter",
)
Note = Callable[[list[int], list[torch.Tensor]], None]  # of a call: ranks of the world that take part, and tensors

_lock = threading.Lock()
_notes: dict[int, tuple[Note, Collection[str]]] = {}  # of those that watch, by a number; written under the lock
_watched: dict[str, Any] = {}  # methods of ProcessGroup while they are watched, as they were


def watch(note: Note, methods: Collection[str]) -> Callable[[], None]:
    """Call ``note`` for every call by a group that the script has made; return a function that ends it.

    ``methods``: which calls, of ``ALL``. If torch.distributed is not in use nothing happens.
    """
    if not initialised():
        return lambda: None
    with _lock:
        number = max(_notes, default=0) + 1
        _notes[number] = note, methods
        if not _watched:
            _install()
    return functools.partial(_end, number)


def _end(number: int) -> None:
    with _lock:
        if _notes.pop(number, None) is None or _notes:
            return
        from torch.distributed import ProcessGroup

        for name, method in _watched.items():
            setattr(ProcessGroup, name, method)
        _watched.clear()


def _install() -> None:
    from torch.distributed import ProcessGroup

    for name in ALL:
        if name in vars(ProcessGroup):
            _watched[name] = vars(ProcessGroup)[name]  # as it is there: read from the class it would lose its binding
            setattr(ProcessGroup, name, _noted(name, getattr(ProcessGroup, name)))


def _noted(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group not in torch_groups.own:
            import torch.distributed as dist

            tensors = list(_tensors_in(args))
            for note, methods in list(_notes.values()):
                if name in methods:
                    note(list(dist.get_process_group_ranks(group)), tensors)
        return method(group, *args, **kwargs)

    return call


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors_in(one)
