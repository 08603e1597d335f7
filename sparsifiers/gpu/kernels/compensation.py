# SPDX-License-Identifier: Apache-2.0
"""Compensate all tensors of a merge buffer in one launch, and take a histogram on the way (K1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.edge import (
    REGISTERS,
    add_first_digits,
    count_first_digits,
    no_first_digits,
    usual_window,
)
from sparsifiers.gpu.kernels.launching import launch, persistent
from sparsifiers.gpu.scratch import LargestKey, Scratch
from sparsifiers.gpu.tables import BLOCK, Momenta, TensorTable

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
NONE, PLAIN, NESTEROV = 0, 1, 2  # forms of momentum


@triton.jit
def add_part(
    gradient: tl.tensor, residual: tl.tensor, work: tl.tensor, before: tl.tensor, after: tl.tensor,
    factor: tl.tensor, given: tl.tensor, left: tl.tensor,
    RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Write `BLOCK` elements, or the `left` first of them; return their keys, 0 for those that are not there."""
    places = tl.arange(0, BLOCK)
    live = (places >= 0) if FULL else (places < left)
    none = tl.zeros([BLOCK], tl.float32)
    if FULL:
        g = none
        if given:
            g = tl.load(gradient + places).to(tl.float32)
        r = tl.load(residual + places) if RESIDUAL else none
    else:
        g = tl.load(gradient + places, mask=places < tl.where(given, left, 0), other=0.0).to(tl.float32)
        r = tl.load(residual + places, mask=live, other=0.0) if RESIDUAL else none
    if MOMENTUM:
        u = tl.load(before + places, mask=live, other=0.0)
        u = (u + g) * factor if MOMENTUM == 2 else u * factor + g
        tl.store(after + places, u, mask=live)
        w = (g + u if MOMENTUM == 2 else u) + r if RESIDUAL else (g + u if MOMENTUM == 2 else u)
    else:
        # Where nothing is added, also the sign of a zero stays.
        w = tl.where(given, g + r, r) if RESIDUAL else g
    if FULL:
        tl.store(work + places, w)
    else:
        tl.store(work + places, w, mask=live)
    return w.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def compensate_kernel(
    tasks: tl.tensor, addresses: tl.tensor, places: tl.tensor, residual: tl.tensor, work: tl.tensor,
    before: tl.tensor, after: tl.tensor, edge: tl.tensor, histogram: tl.tensor, largest: tl.tensor, later: tl.tensor,
    factor: tl.tensor, task_count: tl.tensor, share: tl.tensor,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTUM: tl.constexpr,
    COUNTED: tl.constexpr, LOOKED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Take the tasks `share * program` and so on, and add up one histogram of all of them."""
    usual = usual_window(edge) if COUNTED else 0
    counts, zeros = no_first_digits()
    most = tl.zeros([BLOCK], tl.int32)
    first = tl.program_id(0) * share
    for task in range(first, tl.minimum(first + share, task_count)):
        tensor = tl.load(tasks + 2 * task)
        start = tl.load(tasks + 2 * task + 1)
        offset = tl.load(places + 2 * tensor) + start
        length = tl.load(places + 2 * tensor + 1)
        address = tl.load(addresses + tensor)
        gradient = address.to(tl.pointer_type(GRADIENT)) + start
        left = length - start
        if ALIGNED:
            gradient = tl.multiple_of(gradient, 16)
            offset = tl.multiple_of(offset, 16)
        if left >= BLOCK:
            keys = add_part(
                gradient, residual + offset, work + offset, before + offset, after + offset, factor,
                address != 0, left, RESIDUAL, MOMENTUM, True, BLOCK,
            )  # fmt: skip
        else:
            keys = add_part(
                gradient, residual + offset, work + offset, before + offset, after + offset, factor,
                address != 0, left, RESIDUAL, MOMENTUM, False, BLOCK,
            )  # fmt: skip
        if COUNTED:
            counts, zeros = count_first_digits(counts, zeros, usual, histogram, keys >> 20, left, BLOCK)
        if LOOKED:
            most = tl.maximum(most, keys)
    if COUNTED:
        add_first_digits(histogram, counts, zeros, usual)
    if LOOKED:
        tl.atomic_max(largest, tl.max(most, 0), sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(later, 0)


def launch_compensate(
    table: TensorTable,
    gradients: Sequence[Tensor | None],
    dtype: torch.dtype,
    residual: Tensor | None,
    work: Tensor,
    largest: LargestKey | None,
    scratch: Scratch | None,
    momenta: Momenta | None,
) -> None:
    """Launch the kernel of `sparsifiers.gpu.compensate`. `dtype`: of the gradients."""
    tasks = len(table.tasks)
    programs = persistent(tasks, work)
    form = NONE if momenta is None else NESTEROV if momenta.nesterov else PLAIN
    addresses, aligned = table.addresses(gradients)
    launch(
        compensate_kernel, programs, work,
        table.tasks, addresses, table.places, work if residual is None else residual, work,
        work if momenta is None else momenta.before, work if momenta is None else momenta.after,
        *((table.tasks, table.tasks) if scratch is None else (scratch.edge, scratch.histogram)),
        table.tasks if largest is None else largest.now, table.tasks if largest is None else largest.later,
        0.0 if momenta is None else momenta.factor, tasks, -(-tasks // max(programs, 1)),
        GRADIENT=DTYPES[dtype], ALIGNED=aligned, RESIDUAL=residual is not None, MOMENTUM=form,
        COUNTED=scratch is not None, LOOKED=largest is not None, BLOCK=BLOCK, maxnreg=REGISTERS,
    )  # fmt: skip
