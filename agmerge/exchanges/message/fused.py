# SPDX-License-Identifier: Apache-2.0
"""Write and read sections in few passes, or kernels of the device, where it has them: the same bytes and the same sums.

Kernels of ``sparsifiers.gpu`` take a launch or two where torch's operations take dozens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agmerge.exchanges.message.format import Format, Section
from sparsifiers import gpu


def writes(section: Section, device: torch.device) -> bool:
    """Return whether kernels of ``device`` write the indices of a section."""
    return section.index is not None and section.index.layout is not None and gpu.is_fused(device)


def fused_places(section: Section, message: Tensor) -> tuple[gpu.Slots, gpu.IndexSection] | None:
    """Return where kernels write a section into ``message``, uint8[size]; None: they do not write all of it.

    They do where values travel as they are, or rounded.
    """
    dtype = None if section.value is None else section.value.dtype
    if dtype is None or not writes(section, message.device):
        return None
    assert section.index is not None and section.index.layout is not None
    indices = torch.empty(section.index.capacity, dtype=torch.int32, device=message.device)
    count = torch.empty((), dtype=torch.int32, device=message.device)
    slots = gpu.Slots(indices, message[section.values].view(dtype), count)
    return slots, gpu.IndexSection(section.index.layout, message[section.index_words].view(torch.int32))


def values_as_they_are(section: Section, message: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return where ``message``, uint8[size] on the host, has values of ``dtype`` as they are; None: it has not."""
    assert section.index is not None and section.value is not None
    if section.value.dtype != dtype or section.index.sends_all or message.device.type != "cpu":
        return None
    return message[section.values].view(dtype)


def encode_indices(section: Section, indices: Tensor, count: int | Tensor, message: Tensor) -> None:
    """Write the first ``count`` of ``indices``, int32[capacity], into the section of ``message``, uint8[size]."""
    assert section.index is not None
    if not writes(section, message.device):
        section.index.encode(indices, count, message[section.indices])
        return
    assert section.index.layout is not None
    words = message[section.index_words].view(torch.int32)
    words.zero_()
    gpu.encode_indices(indices, count, gpu.IndexSection(section.index.layout, words))


def fused_adds(section: Section, total: Tensor) -> bool:
    """Return whether kernels add up a section into ``total``, fp32[length]."""
    return gpu.has_kernels(total) and (section.index is None or section.index.layout is not None)


def fused_add(layout: Format, number: int, messages: Tensor, total: Tensor, scale: float) -> Tensor | None:
    """Write the sum of ``scale`` times all ranks' values of section ``number`` into ``total``, fp32[length].

    ``messages``: uint8[W, size]. Returns which ranks' indices were right, int32[W]: 1 or 0; None for a dense section.
    Damaged messages, too, have nothing written outside of ``total``.
    """
    section = layout.sections[number]
    if section.index is None or section.value is None:
        gpu.add_whole(total, layout.whole(messages, section), scale)
        return None
    codec = section.index.layout
    assert codec is not None
    ranks, capacity, device = len(messages), section.index.capacity, messages.device
    counts, words = layout.counts_of(messages, number), messages[:, section.index_words].view(torch.int32)
    indices = torch.empty(ranks, capacity, dtype=torch.int32, device=device)
    good = torch.empty(ranks, dtype=torch.int32, device=device)
    tiles = torch.empty(ranks, codec.tiles, dtype=torch.int32, device=device)
    gpu.decode_indices(words, counts, codec, indices, good, tiles)
    values = section.value.read_rows(messages[:, section.values], capacity, total.dtype)
    gpu.add_ranks(total, indices, values, counts, scale)
    return good
