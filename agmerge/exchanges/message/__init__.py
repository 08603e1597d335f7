# SPDX-License-Identifier: Apache-2.0
"""Turn the indices and the values of a sparse section into bytes: every size is known beforehand, on every rank.

``format``: header, sections and checksums of a message. ``indices`` and ``values``: the codecs. ``pairs``: both side by
side, for later rounds. ``offers``: selections, as codecs take them. ``bits``: packing and checksums.
``sample``: the loss and the time of codecs on the values that are sent.
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
