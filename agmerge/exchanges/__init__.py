# SPDX-License-Identifier: Apache-2.0
"""Exchanges, which combine the messages of all ranks.

* ``base``: the contract, and the owner of residuals as exchanges see it. ``table``: exchanges by name.
* ``dense``: all-reduces. ``sparse``: an all-gather of selections.
* ``multi_round``: base of those with several rounds. ``masked`` (with ``mask_votes``): one index set for all ranks.
* ``oktopk/``: the largest of the sum. ``low_rank/``: factors of matrices. ``quantised/``: all elements in few bits.
* ``node_shards``: the stage inside a node of ``two-level``.
* ``message/``: the bytes of a sparse message.
* ``routing``: which segments of a merge buffer share a message, and how it is sent.

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
