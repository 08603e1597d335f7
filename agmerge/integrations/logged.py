# SPDX-License-Identifier: Apache-2.0
"""Figures for the logs and trackers of frameworks: what an optimizer sends now, and how much less than DDP."""

from __future__ import annotations

from typing import Any

from agmerge.engine.reporting import plan_status

WHOLE = 32  # bits of a float32 element, which link_bytes_dense counts


class LoggedFigures:
    """Figures of one optimizer, of the steps since they were asked for last. They cost no pass over tensors."""

    def __init__(self) -> None:
        self._of: object = None  # the totals of which the figures were
        self._sent = self._dense = 0  # its link bytes at the last call, of this rank and of dense float32 gradients
        self._reduction = 1.0  # of the steps before it

    def of(self, compressed: Any) -> dict[str, float]:
        """Return the figures by name.

        ``agmerge/bits``: of an element in the quantizer in use; without one those that are sent for an element.
        ``agmerge/traffic_reduction``: the bytes that DDP would have sent in float32 / those that have left this rank.
        Both only once something has left it. ``agmerge/density`` and ``agmerge/bytes_sent``: as in ``stats()``, since
        construction.
        """
        exchange = compressed._reducer.exchange
        totals = exchange.agreed.totals
        figures: dict[str, float] = {"agmerge/density": totals.density, "agmerge/bytes_sent": totals.bytes_sent}
        if totals is not self._of:
            self._of, self._sent, self._dense = totals, 0, 0
        sent, dense = totals.link_bytes - self._sent, totals.link_bytes_dense - self._dense
        if sent > 0:
            self._sent, self._dense, self._reduction = totals.link_bytes, totals.link_bytes_dense, dense / sent
        if totals.link_bytes:
            bits = plan_status(exchange).bits
            figures["agmerge/bits"] = WHOLE / self._reduction if bits is None else float(bits)
            figures["agmerge/traffic_reduction"] = self._reduction
        return figures
