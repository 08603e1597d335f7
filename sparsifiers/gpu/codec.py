# SPDX-License-Identifier: Apache-2.0
"""Write ascending indices in few bits, and read those of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsifiers.gpu.choice import runs_triton
from sparsifiers.gpu.layout import BITMAP, PLAIN, WIDTHS, IndexLayout, IndexSection


def pack_bits(flags: Tensor, words: Tensor) -> None:
    """Write bool[n] into int32 words, the first in the lowest bit; the bits behind them are 0."""
    spread = torch.zeros(32 * len(words), dtype=torch.int32, device=words.device)
    spread[: len(flags)] = flags
    classes = torch.arange(32, dtype=torch.int32, device=words.device)
    words.copy_((spread.view(-1, 32) << classes).sum(1, dtype=torch.int32))


def bits_of(words: Tensor) -> Tensor:
    """Return the bits of int32 words along the last dimension, the lowest first: int32[..., 32 * words]."""
    classes = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> classes & 1).flatten(-2)


def encode_indices(indices: Tensor, count: int | Tensor, section: IndexSection) -> None:
    """Write the first `count` of `indices`, int32[capacity], into `section`, in which all words are 0.

    count: an int, or int32, 0-dim, on the device. `gather` writes them, too.

    One launch; reads 4 bytes a slot, and changes bits of as many words as there are planes, and one more.
    """
    if runs_triton(section.words):
        from sparsifiers.gpu.kernels.codec import launch_encode

        launch_encode(indices, count, section)
    else:
        encode_reference(indices, count, section)


def decode_indices(
    words: Tensor, counts: Tensor, layout: IndexLayout, out: Tensor, good: Tensor, tiles: Tensor
) -> None:
    """Read the indices of all W ranks.

    words: int32[W, layout.words], a section a rank; rows may be any number of words apart. counts: int32[W] of any
    stride: how many each announces. out: int32[W, capacity]; entries at and behind the count are not to be read.
    good: int32[W], set to 1 where a section holds as many as were announced, ascending, within the vector, and else to
    0; of damaged sections, too, nothing is written outside of `out`. tiles: int32[W, layout.tiles], scratch.

    Two launches; reads the marks twice, and two words a slot and plane.
    """
    if runs_triton(words):
        from sparsifiers.gpu.kernels.codec import launch_decode

        launch_decode(words, counts, layout, out, good, tiles)
    else:
        decode_reference(words, counts, layout, out, good)


def encode_reference(indices: Tensor, count: int | Tensor, section: IndexSection) -> None:
    """Write indices with torch's operations, for :func:`encode_indices`."""
    layout, words = section.layout, section.words
    slot = torch.arange(layout.capacity, device=words.device)
    live = slot < count
    if layout.low == PLAIN:
        words.copy_(indices * live)
        return
    index = indices.long()
    *planes, unary = layout.planes
    places = [unary + (index if layout.low == BITMAP else (index >> layout.low) + slot)]
    fields = [live.long()]
    shift = 0
    for width, start in zip(WIDTHS, planes, strict=True):
        if layout.low & width:
            places.append(start + slot * width)
            fields.append((index >> shift & (1 << width) - 1) * live)
            shift += width
    bits = torch.cat(places)
    # Unused entries fall behind the last word.
    at = torch.where(live.repeat(len(places)), bits >> 5, len(words))
    # Unique bits: their sum is their union. In 64 bits the highest of a word is no sign.
    total = torch.zeros(len(words) + 1, dtype=torch.int64, device=words.device)
    total.index_add_(0, at, torch.cat(fields) << (bits & 31))
    words.copy_(words.long() | total[:-1])


def decode_reference(words: Tensor, counts: Tensor, layout: IndexLayout, out: Tensor, good: Tensor) -> None:
    """Read indices with torch's operations, for :func:`decode_indices`."""
    index, held = read_reference(words, counts, layout)
    live = torch.arange(layout.capacity, device=words.device) < counts[:, None]
    unsorted = ((index[:, 1:] <= index[:, :-1]) & live[:, 1:]).any(1)
    outside = (((index < 0) | (index >= layout.length)) & live).any(1)
    miscounted = (held != counts) | (counts > layout.capacity) | (counts < 0)
    out.copy_(index)
    good.copy_(~(unsorted | outside | miscounted))


def read_reference(words: Tensor, counts: Tensor, layout: IndexLayout) -> tuple[Tensor, Tensor]:
    """Return the indices of all entries, int64[W, capacity], unchecked, and how many entries are used: int[W]."""
    if layout.low == PLAIN:
        return words.long(), counts
    *planes, unary = layout.planes
    capacity = layout.capacity
    bits = bits_of(words)
    marks = bits[:, unary : unary + layout.marks]
    ranks = marks.cumsum(1)
    slot = torch.where((marks > 0) & (ranks <= capacity), ranks - 1, capacity)
    at = torch.arange(layout.marks, device=words.device).expand_as(slot)
    places = torch.zeros(len(words), capacity + 1, dtype=torch.int64, device=words.device).scatter_(1, slot, at)[:, :-1]
    index = places
    if layout.low != BITMAP:
        index = places - torch.arange(capacity, device=words.device) << layout.low
        shift = 0
        for width, start in zip(WIDTHS, planes, strict=True):
            if layout.low & width:
                field = bits[:, start : start + capacity * width].reshape(len(words), capacity, width).long()
                index = index + ((field << torch.arange(width, device=words.device)).sum(2) << shift)
                shift += width
    return index, marks.sum(1)
