"""CRC-32 as a word of a message: int32."""

from __future__ import annotations

import zlib
from typing import Any


def checksum(data: Any) -> int:
    """The CRC-32 of ``data`` (bytes, or a buffer), in the range of int32."""
    word = zlib.crc32(data)
    return word - (word >> 31 << 32)
