# SPDX-License-Identifier: Apache-2.0
"""Connect Horovod's elastic training with ours."""

from __future__ import annotations

from typing import Any

from agmerge.errors import PeerLost


def register(kind: type[Any], handler: type[Any]) -> None:
    """Register ``handler(value)`` for objects of ``kind`` in Horovod's ``TorchState``, before its own handlers."""
    from horovod.torch.elastic import state

    registry = state.get_handler_registry()
    if not any(known is kind for known, _ in registry):
        state.set_handler_registry([(kind, handler), *registry])


def as_lost_worker(text: str, words: str) -> PeerLost:
    """Return a :class:`agmerge.PeerLost` that ``hvd.elastic.run`` knows too: it restores, and goes on with fewer.

    ``text``: ours. ``words``: Horovod's own.
    """
    from horovod.common.exceptions import HorovodInternalError

    kind = type("PeerLost", (PeerLost, HorovodInternalError), {"__module__": PeerLost.__module__})
    error: PeerLost = kind(text, words)
    return error
