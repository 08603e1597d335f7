"""CRC-32 as a word of a message, and checksums of parts that follow no header: their first four bytes.

A device computes none: there the word is 0 and not looked at.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

HEAD = 4  # bytes


def checksum(data: Any) -> int:
    """Return the CRC-32 of ``data`` (bytes, or a buffer), in the range of int32."""
    word = zlib.crc32(data)
    return word - (word >> 31 << 32)


def write(part: torch.Tensor) -> None:
    """Write the checksum of ``part``, uint8, or 0, into its first four bytes."""
    part[:HEAD].view(torch.int32).fill_(_sum(part) if part.device.type == "cpu" else 0)


def ok(part: torch.Tensor) -> bool:
    """Tell whether ``part`` is as it was written, as far as one can tell."""
    if part.device.type != "cpu":
        return True
    return int(part[:HEAD].view(torch.int32)[0]) == _sum(part)


def _sum(part: torch.Tensor) -> int:
    return checksum(part[HEAD:].numpy().data)
