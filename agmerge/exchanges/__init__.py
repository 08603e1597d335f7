"""Combine the messages of all ranks: one exchange a file, by name in `table`."""

from __future__ import annotations

from agmerge.exchanges.base import Commit, Exchange, ExchangeContext, InFlight, SegmentBuffers
from agmerge.exchanges.dense import DenseExchange
from agmerge.exchanges.masked import MaskedExchange
from agmerge.exchanges.oktopk.exchange import OkTopkExchange
from agmerge.exchanges.sparse import SparseExchange

__all__ = [
    "Commit",
    "DenseExchange",
    "Exchange",
    "ExchangeContext",
    "SegmentBuffers",
    "MaskedExchange",
    "OkTopkExchange",
    "InFlight",
    "SparseExchange",
]
