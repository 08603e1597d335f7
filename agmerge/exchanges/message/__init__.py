# SPDX-License-Identifier: Apache-2.0
"""Bytes of the indices and values of a sparse section: every size is known beforehand, on every rank.

* ``format``: header, sections and checksums of a message.
* ``indices``: index codecs. ``scaled``: value codecs.
* ``bits``: packing and checksums; ``device_bits``: the same on a device.
"""

from __future__ import annotations

from agmerge.exchanges.message.indices import Bitmap, Blocks, Everything, IndexCodec, Int32, candidates, smallest
from agmerge.exchanges.message.scaled import VALUES, Cast, ValueCodec, value_codec

__all__ = [
    "VALUES",
    "Bitmap",
    "Blocks",
    "Cast",
    "Everything",
    "IndexCodec",
    "Int32",
    "ValueCodec",
    "candidates",
    "smallest",
    "value_codec",
]
