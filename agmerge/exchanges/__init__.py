# SPDX-License-Identifier: Apache-2.0
"""Combine the messages of all ranks: one exchange a file, by name in ``table``.

``base``: what an exchange is; ``store``: the owner of residuals, as exchanges see it; ``multi_round``: an exchange of
several rounds. ``dense``, ``sparse``, ``masked`` (with ``mask_votes``), ``oktopk/``, ``low_rank/`` and
``reduce_scatter`` are the exchanges; ``all_reduce``: sums that several need.
``node_shards``: the stage inside a node. ``message/``: the format of a message. ``routing`` and ``splitting``: which
segments of a merge buffer share one; ``send_mode``: how a merge buffer is sent. ``traffic``: the bytes that are moved.

May import backends/, tensors/ and the package ``sparsifiers``.
"""

from __future__ import annotations

from agmerge.exchanges.base import Exchange, ExchangeContext, InFlight, Noise, Ranks, SegmentBuffers, Store
from agmerge.exchanges.dense import DenseExchange
from agmerge.exchanges.low_rank.exchange import LowRankExchange
from agmerge.exchanges.masked import MaskedExchange
from agmerge.exchanges.oktopk.exchange import OkTopkExchange
from agmerge.exchanges.sparse import SparseExchange

__all__ = [
    "DenseExchange",
    "Exchange",
    "ExchangeContext",
    "InFlight",
    "LowRankExchange",
    "MaskedExchange",
    "Noise",
    "OkTopkExchange",
    "Ranks",
    "SegmentBuffers",
    "SparseExchange",
    "Store",
]
