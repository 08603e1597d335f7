# SPDX-License-Identifier: Apache-2.0
"""Answer the other ranks' calls on a rank that makes no more of its own, until all have joined: ``join()``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import torch

from agmerge.backends import Backend, timeouts
from agmerge.runtime import workers
from agmerge.runtime.call_agreement import JOINED, exchange_digests, exchange_texts, joinable, share_numbers
from agmerge.runtime.collectives.operation import count
from agmerge.runtime.collectives.reduction import TRAVELS, flat

LABEL = "join() of agmerge's collectives; an optimizer has a separate join()"


def join(device: int | str = -1) -> int:
    """Collective. Take part with zeros in the sums and averages of other ranks, until all have joined.

    This is for ``agmerge.allreduce`` and similar calls over all ranks. For steps of an optimizer use
    ``optimizer.join()``. While a rank has joined, other collectives raise :class:`agmerge.AGMergeError`.

    Args:
        device (int or str): Device of the zeros: number of a GPU, or -1 for the CPU. Default: -1.

    Returns:
        The rank that joined last. If several ranks join at the same call, the highest one.
    """
    comm, answered = workers.world(), 0
    place = torch.device("cpu" if device == -1 else f"cuda:{device}" if isinstance(device, int) else device)
    while any(digest != JOINED for digest in exchange_digests(comm, LABEL, JOINED)):
        calls = [json.loads(text) for text in exchange_texts(comm, LABEL, b"") if text]
        if all(facts == calls[0] for facts in calls) and joinable(calls[0]):
            count(comm)
            _stand_in(comm, calls[0], place)
        answered += 1
    waited = [answers for (answers,) in share_numbers(comm, LABEL, [answered])]
    return max(rank for rank, answers in enumerate(waited) if answers == min(waited))


def _stand_in(comm: Backend, facts: Sequence[Sequence[str]], device: torch.device) -> None:
    """Collective. Make the messages of the all-reduce that ``facts`` describe, of zeros on ``device``."""
    message = dict((name, value) for name, value in facts)["name"]
    handles = []
    shapes = [value for name, value in facts if name.startswith("tensor")]
    for i, shape in enumerate(shapes):
        parsed = re.fullmatch(r"(\w+)(\[.*\])( on \w+)?", shape)
        assert parsed is not None
        dtype: torch.dtype = getattr(torch, parsed[1])
        travels = dtype if dtype in TRAVELS or dtype.is_complex else torch.int32
        zeros = torch.zeros(json.loads(parsed[2]), dtype=travels, device=device if parsed[3] else "cpu")
        if zeros.numel():
            handles.append(comm.all_reduce(flat(zeros), f"{message}.{i}" if i else message))
    for handle in handles:
        handle.wait(timeouts.default())
