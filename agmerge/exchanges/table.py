# SPDX-License-Identifier: Apache-2.0
"""Exchanges of selections, by the names that ``exchange=`` takes, and those of other segments.

To add one, write a class that is made from one :class:`ExchangeContext`, and a line here.
"""

from __future__ import annotations

from agmerge.exchanges.base import Exchange, ExchangeContext
from agmerge.exchanges.custom import CustomExchange
from agmerge.exchanges.dense import DenseExchange
from agmerge.exchanges.low_rank.exchange import LowRankExchange
from agmerge.exchanges.masked import MaskedExchange
from agmerge.exchanges.oktopk.exchange import OkTopkExchange
from agmerge.exchanges.quantised.exchange import AloneExchange, GatheredExchange
from agmerge.exchanges.quantised.two_phase import TwoPhaseExchange
from agmerge.exchanges.sparse import SparseExchange
from sparsifiers import Kind

__all__ = ["DENSE", "EXCHANGES", "ExchangeContext", "exchange_of"]

DENSE = DenseExchange  # of dense segments, and of merge buffers that are planned dense
EXCHANGES: dict[str, type[Exchange]] = {
    "auto": SparseExchange,  # or DENSE, a merge buffer at a time, by measured times
    "fastest": SparseExchange,  # as "auto", or one of SUMS in routing.py in its place, by measured times
    "sparse": SparseExchange,
    "oktopk": OkTopkExchange,
    "masked": MaskedExchange,
    "two-level": SparseExchange,  # between nodes; inside one, see node_shards
}


def exchange_of(kind: Kind, name: str, context: ExchangeContext) -> Exchange:
    """Return a new exchange of tensors of a kind. ``name``: the option ``exchange=``, which is about selections."""
    if kind is Kind.LOW_RANK:
        return LowRankExchange(context)
    if kind is Kind.QUANTISED:
        return _quantised(context)
    if kind is Kind.CUSTOM:
        return CustomExchange(context)
    return (EXCHANGES[name] if kind is Kind.SPARSE else DENSE)(context)


def _quantised(context: ExchangeContext) -> Exchange:
    """Return the exchange of quantised tensors: between two ranks both phases send as many bytes as one, which is one
    hop; with error feedback in a residual a rank knows the error of its own message alone."""
    if context.ranks.comm.size == 1:
        return AloneExchange(context)
    if context.ranks.comm.size == 2 or context.ranks.second is None or (context.feedback and not context.owes):
        return GatheredExchange(context)
    return TwoPhaseExchange(context)
