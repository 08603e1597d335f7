"""Fingerprints of tensors, computed on their own device: replicas compare them in place of the tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from agmerge.tensors.dtensors import local_of
from sparsifiers.kernel_message import checksum

WORD = 8  # bytes
CHUNK = 1 << 19  # words that are read at a time on a device, where each takes three times its own memory


def fingerprints(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return 128 bits for each of ``tensors``: int64[n, 2], on the host.

    They are the checksum of its bytes, and that of its bytes but the first four. One or two differing bits always
    change them; any other difference does with probability 1 - 2**-64. Integer sums make them equal in any order of
    addition and on every device. Of a DTensor the local shard counts. Copies only tensors that are not contiguous.
    """
    octets = [_octets(local_of(tensor).detach()) for tensor in tensors]
    found = torch.empty(len(octets), 2, dtype=torch.int64)
    on_devices = [index for index, one in enumerate(octets) if one.device.type != "cpu"]
    for index, one in enumerate(octets):
        for column, part in enumerate((one, one[WORD // 2 :])) if one.device.type == "cpu" else ():
            total = checksum(part)
            found[index, column] = total - (total >> 63 << 64)
    if on_devices:  # read together: every reading waits for the device
        pairs = [torch.stack([_checksum(octets[index]), _checksum(octets[index][WORD // 2 :])]) for index in on_devices]
        found[on_devices] = torch.stack(pairs).cpu()
    return found


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, in the order of its elements: uint8[n]."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element counts as contiguous with any stride
    return flat.view(torch.uint8)


def _checksum(octets: torch.Tensor) -> torch.Tensor:
    """Return :func:`sparsifiers.kernel_message.checksum` of ``octets``, uint8[n], with torch's operations: int64[]."""
    total = torch.zeros((), dtype=torch.int64, device=octets.device)
    for first in range(0, len(octets), CHUNK * WORD):
        part = octets[first : first + CHUNK * WORD]
        words = pad(part, (0, -len(part) % WORD)).clone().view(torch.int64)  # a copy begins at a multiple of a word
        weights = torch.arange(len(words), device=octets.device) * 2 + (2 * first // WORD + 1)
        total = total + (words * weights).sum()
    return total
