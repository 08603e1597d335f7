# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors, computed on their own device: replicas compare them in place of the tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from agmerge.tensors.dtensors import local_of
from sparsifiers import kernel
from sparsifiers.kernel_message import checksum

WORD = 8  # bytes
CHUNK = 1 << 19  # words that are read at a time without compiled loops: each takes three times its own memory


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 128 bits for each of ``tensors``: int64[n, 2], on the host.

    They are the checksum of its bytes, and that of its bytes but the first four. One or two differing bits always
    change them; any other difference does with probability 1 - 2**-64. Integer sums make them equal in any order of
    addition and on every device. Of a DTensor the local shard counts. Copies only tensors that are not contiguous.
    """
    octets = [_octets(local_of(tensor).detach()) for tensor in tensors]
    pairs = [torch.stack([_checksum(one), _checksum(one[WORD // 2 :])]) for one in octets]  # devices are not waited for
    return torch.stack([pair.cpu() for pair in pairs]) if pairs else torch.empty(0, 2, dtype=torch.int64)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its elements: uint8[n]."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element counts as contiguous with any stride
    return flat.view(torch.uint8)


def _checksum(octets: torch.Tensor) -> torch.Tensor:
    """Return :func:`sparsifiers.kernel_message.checksum` of ``octets``, uint8[n], on their device: int64[]."""
    if kernel.plain(octets, dtype=torch.uint8):
        found = checksum(octets)
        return torch.tensor(found - (found >> 63 << 64))
    return _checksum_by_torch(octets)


def _checksum_by_torch(octets: torch.Tensor) -> torch.Tensor:
    """Return the same with torch's operations, chunk by chunk, so that little memory is needed: int64[]."""
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for first in range(0, len(octets), CHUNK * WORD):
        part = octets[first : first + CHUNK * WORD]
        words = pad(part, (0, -len(part) % WORD)).clone().view(torch.int64)  # a copy begins at a multiple of a word
        weights = torch.arange(len(words), device=octets.device) * 2 + (2 * first // WORD + 1)
        total = total + (words * weights).sum()
    return total
