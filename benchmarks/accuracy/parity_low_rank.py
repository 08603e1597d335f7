# SPDX-License-Identifier: Apache-2.0
"""Hold low rank against a dense exchange, and against others of as many bytes: ``parity.py --cases lowrank``.

Two workers: there an all-reduce and an all-gather of so many bytes put as many on the network, so that the bytes handed
to collectives, which ``stats()`` counts, are what to compare by. PowerSGD sends both factors in a step; ACP-SGD one, so
half as much on average, and at rank 8 as much as PowerSGD at rank 4. How much a sparsifier may send for as many bytes
follows from the shapes of the model alone: :func:`density`. Results are stored and printed as in parity_updates.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch

import sparsifiers
from accuracy.parity_tasks import TASKS, Case
from accuracy.parity_updates import updates
from agmerge.exchanges.low_rank.bases import matrix_shape, rank_of
from agmerge.exchanges.message.format import slot_bytes
from agmerge.step.config import is_small

NAMES, RANKS = ("powersgd", "acpsgd"), (4, 16)
UPDATES_WIRE = {4: "sign", 16: "int8"}  # with 1.4 and 5.4 bits an element: of signs there are not so many to send


def low_rank(base: Case, name: str, rank: int = 4, **more: object) -> Case:
    """Return ``base`` with factors of ``rank`` in the place of its gradients, or of its updates."""
    return replace(base, compressor=name, rank=rank, memory="residual", **more)


@cache
def elements(task: str, rank: int) -> tuple[int, int]:
    """Return the elements of the task's tensors that are not always sent whole, and those of their factors.

    A tensor that its factors would not make smaller counts with all its elements among the latter.
    """
    named = TASKS[task](0, 0, 8).model.named_parameters()
    shapes = [parameter.shape for name, parameter in named if not is_small(name, parameter)]
    shrinks = sparsifiers.low_rank("powersgd", rank).shrinks
    factors = (
        rank_of(shape, rank) * sum(matrix_shape(shape)) if shrinks("", shape) else shape.numel() for shape in shapes
    )
    return sum(shape.numel() for shape in shapes), sum(factors)


def density(task: str, rank: int, wire: str = "fp32") -> float:
    """Return how much a sparsifier may send in the bytes of PowerSGD's factors: a density, in thousandths.

    It is the largest one of which indices and values, by the codecs of ``wire``, take no more bytes than those.
    """
    whole, factors = elements(task, rank)

    def size(share: float) -> float:
        sent = math.ceil(share * whole)
        return sent * slot_bytes(whole, sent, torch.float32, wire)

    return max(share for share in (part / 1000 for part in range(1, 1001)) if size(share) <= 4 * factors)


def of_equal_bytes(base: Case, rank: int) -> list[Case]:
    """Return ``base`` with as many bytes as PowerSGD's: top-k of gradients, and of updates in a small wire."""
    topk = replace(base, compressor="topk", memory="residual", density=density(base.task, rank))
    wire = UPDATES_WIRE[rank]
    return [topk, updates(base, density(base.task, rank, wire), wire)]


def stages(count: int) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield cases of fold 0 and seed 0, and the seeds to run them with, the most important ones first."""
    seeds = range(count)
    lm, digits = Case(task="lm", optimizer="adamw"), Case(task="digits")
    # With carry="hold", which is refused since then, it was +6.9 to +18 % (benchmarks/notebook/parity.md).
    carried = [low_rank(lm, name, sync="updates", carry="apply") for name in NAMES]
    for base in (lm, digits, Case(task="lm"), Case(task="digits", optimizer="adamw")):
        yield [base, *(low_rank(base, name, rank) for rank in RANKS for name in NAMES)], seeds
        yield [case for rank in RANKS for case in of_equal_bytes(base, rank)], seeds
        if base == digits:
            yield carried, seeds
    for base in (lm, digits):
        yield [low_rank(base, name, wire=wire) for name in NAMES for wire in ("fp16", "bf16")], seeds
    # As many bytes as PowerSGD at rank 4, and three quarters of those at rank 16.
    yield [low_rank(lm, "acpsgd", 8), updates(lm, 1.0, "int4")], seeds
