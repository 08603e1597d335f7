# SPDX-License-Identifier: Apache-2.0
"""Put integers of a few bits side by side in bytes, and checksums in front of bytes, to make messages.

The first integer is in the lowest bits. The bytes are the same on every device; machines are little-endian, as
everywhere in a message. Only the host computes checksums: on a device the word is 0, and not checked.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from agmerge.exchanges.message import device_bits

WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}  # by width: as many bytes as there are integers in one
CRC_BYTES = 4  # of the checksum in front of a section


def bytes_of(count: int, width: int) -> int:
    """Return the bytes that ``count`` integers of ``width`` bits take."""
    return -(-count * width // 8)


def pack(values: Tensor, width: int, out: Tensor) -> None:
    """Write the low ``width`` bits (1, 2, 4, 8 or 16) of ``values``, int32[m], into ``out``, uint8; padding is 0.

    ``values`` may be uint8[m] where they have no other bits.
    """
    count = values.numel()
    if width >= 8:
        # Conversion to a shorter integer keeps the low bits.
        whole = out if width == 8 else out.view(torch.int16)
        whole[:count].copy_(values)
        whole[count:] = 0
        return
    if out.device.type != "cpu":
        device_bits.pack(values, width, out)
        return
    each = 8 // width
    spread = values
    if values.dtype != torch.uint8 or count != out.numel() * each:
        spread = torch.zeros(out.numel() * each, dtype=torch.uint8, device=out.device)
        spread[:count].copy_(values).bitwise_and_((1 << width) - 1)
    if width == 1:
        out.numpy()[:] = np.packbits(spread.numpy(), bitorder="little")
        return
    # The integers of one byte lie in the bytes of one word; they are moved together in its lowest byte.
    words = packed = spread.view(WORDS[width])
    for place in range(1, each):
        packed = packed | words >> (place * (8 - width))
    out.copy_(packed)


def unpack(data: Tensor, width: int, count: int) -> Tensor:
    """Return the first ``count`` integers of ``width`` bits of ``data``, uint8: int32[count]."""
    if width == 16:
        return data.view(torch.int16)[:count].to(torch.int32) & 0xFFFF
    return unpack_bytes(data, width, count).to(torch.int32)


def unpack_bytes(data: Tensor, width: int, count: int) -> Tensor:
    """Return the first ``count`` integers of ``width`` bits, at most 8, of ``data``, uint8: uint8[count].

    Of 8 bits, they are a view.
    """
    if width == 8 or not count:
        return data[:count]
    if data.device.type != "cpu":
        return device_bits.unpack(data, width, count)
    if width == 1:
        return torch.from_numpy(np.unpackbits(data.numpy(), count=count, bitorder="little"))
    words = data[: bytes_of(count, width)].to(WORDS[width])
    spread = words
    for place in range(1, 8 // width):
        spread = spread | words << (place * (8 - width))
    spread &= ((1 << width) - 1) * (0x0101010101010101 & ((1 << 8 * spread.element_size()) - 1))
    return spread.view(torch.uint8)[:count]


def mark(places: Tensor, out: Tensor) -> None:
    """Set the bits ``places``, unique int32, of ``out``, uint8, and no others; one at ``8 * len(out)`` is dropped."""
    if out.device.type != "cpu":
        device_bits.mark(places, out)
        return
    marks = np.zeros(8 * out.numel() + 1, dtype=np.uint8)
    marks[places.numpy()] = 1
    out.numpy()[:] = np.packbits(marks[:-1], bitorder="little")


def marked(data: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the bits of ``data``, uint8, in the host's memory, that are set.

    Returns the places of the first ``count`` of them, int32[count] (0 for those that are missing), and how many are
    set, 0-dim.
    """
    ones = np.flatnonzero(np.unpackbits(data.numpy(), bitorder="little").view(np.bool_))
    places = np.zeros(count, dtype=np.int32)
    held = min(count, len(ones))
    places[:held] = ones[:held]
    return torch.from_numpy(places), torch.tensor(len(ones))


def write_crc(part: Tensor) -> None:
    """Write the CRC-32 of the bytes that follow into the first four of ``part``, uint8; 0 on a device."""
    part[:CRC_BYTES].view(torch.int32).fill_(_crc(part) if part.device.type == "cpu" else 0)


def crc_fits(part: Tensor) -> bool:
    """Return whether ``part``, uint8, is as :func:`write_crc` left it; on a device it always seems to be."""
    return part.device.type != "cpu" or int(part[:CRC_BYTES].view(torch.int32)[0]) == _crc(part)


def _crc(part: Tensor) -> int:
    """Return the CRC-32 of the bytes behind the first four of ``part``."""
    checksum = zlib.crc32(part[CRC_BYTES:].numpy().data)
    return checksum - (checksum >> 31 << 32)  # as int32 has these bits
