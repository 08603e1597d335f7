# SPDX-License-Identifier: Apache-2.0
"""Find the bounds of eight rows at once, digit by digit, and mark the elements that reach them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsifiers.gpu.kernels.edge import BALLOTS
from sparsifiers.gpu.kernels.launching import launch
from sparsifiers.gpu.scratch import KEY_BITS, TILE, Scratch
from sparsifiers.gpu.tables import PANEL, RowTable

BLOCK = 256  # places of each row at once: with eight rows, as many elements as `compensate` takes
BITS = 5 if BALLOTS else 8  # of a digit: of eight rows 256 bins or 2048, and a row is read eight times or five


@triton.jit
def panel_of(
    work: tl.tensor, row: tl.tensor, place: tl.tensor, rows: tl.tensor, length: tl.tensor,
    row_step: tl.tensor, place_step: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the keys of rows and places, where they lie behind `work`, and which of them there are."""
    live = (row < rows)[:, None] & (place < length)[None, :]
    at = row[:, None] * row_step + place[None, :] * place_step
    keys = tl.load(work + at, mask=live, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return keys, at, live


@triton.jit
def rows_kernel(
    work: tl.tensor, panels: tl.tensor, places: tl.tensor, shares: tl.tensor, above: tl.tensor, counts: tl.tensor,
    PANEL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, LEVELS: tl.constexpr,
) -> None:  # fmt: skip
    """Set the bits of the selected elements of one panel."""
    panel = tl.program_id(0)
    tensor = tl.load(panels + 2 * panel)
    offset = tl.load(places + 5 * tensor)
    rows = tl.load(places + 5 * tensor + 1)
    length = tl.load(places + 5 * tensor + 2)
    row_step = tl.load(places + 5 * tensor + 3)
    place_step = tl.load(places + 5 * tensor + 4)
    row = tl.load(panels + 2 * panel + 1) + tl.arange(0, PANEL)
    turned = (row - tl.load(shares + 3 * tensor + 2) + rows) % rows
    quota = tl.load(shares + 3 * tensor) + (turned < tl.load(shares + 3 * tensor + 1)).to(tl.int32)
    room = tl.where(row < rows, quota, 0)
    if tl.sum(room, 0) > 0:
        # The quota-th largest key of each row, digit by digit.
        bound = tl.zeros([PANEL], tl.int32)
        bins = tl.arange(0, 1 << BITS)[None, :]
        for level in range(LEVELS):
            shift = BITS * (LEVELS - 1 - level)
            histogram = tl.zeros([PANEL << BITS], tl.int32)
            for first in range(0, length, BLOCK):
                place = first + tl.arange(0, BLOCK)
                keys, at, live = panel_of(work + offset, row, place, rows, length, row_step, place_step)
                live = live & (((keys >> shift) >> BITS) == bound[:, None])
                digits = (tl.arange(0, PANEL)[:, None] << BITS) + ((keys >> shift) & ((1 << BITS) - 1))
                histogram += tl.histogram(
                    tl.reshape(digits, [PANEL * BLOCK]), PANEL << BITS, mask=tl.reshape(live, [PANEL * BLOCK])
                )
            table = tl.reshape(histogram, [PANEL, 1 << BITS])
            from_top = tl.cumsum(table, 1, reverse=True)
            digit = tl.sum((from_top >= room[:, None]).to(tl.int32), 1) - 1
            # A row without a quota reaches the last digit: its bound is the largest key, and nothing is above that.
            digit = tl.minimum(digit, 0x7FFFFFFF >> shift)
            room -= tl.sum(tl.where(bins > digit[:, None], table, 0), 1)
            bound = (bound << BITS) | digit

        # Of the elements on the bound the first `room` are taken.
        equals = tl.zeros([PANEL], tl.int32)
        for first in range(0, length, BLOCK):
            place = first + tl.arange(0, BLOCK)
            keys, at, live = panel_of(work + offset, row, place, rows, length, row_step, place_step)
            equal = (live & (keys == bound[:, None])).to(tl.int32)
            rank = equals[:, None] + tl.cumsum(equal, 1)
            taken = live & ((keys > bound[:, None]) | ((equal != 0) & (rank <= room[:, None])))
            index = offset + at
            ones = tl.full([PANEL, BLOCK], 1, tl.int32)
            tl.atomic_or(above + index // 32, ones << (index % 32), mask=taken, sem="relaxed")
            tl.atomic_add(counts + 2 * (index // TILE), ones, mask=taken, sem="relaxed")
            equals += tl.sum(equal, 1)


def launch_rows(work: Tensor, rows: RowTable, shares: Tensor, scratch: Scratch) -> None:
    """Launch the kernel of `sparsifiers.gpu.mark_rows`, with all marks 0."""
    launch(
        rows_kernel, len(rows.panels), work,
        work, rows.panels, rows.places, shares, scratch.above, scratch.counts,
        PANEL=PANEL, BLOCK=BLOCK, TILE=TILE, BITS=BITS, LEVELS=-(-KEY_BITS // BITS),
    )  # fmt: skip
