# SPDX-License-Identifier: Apache-2.0
"""Warning, once, for a training with ``sync="updates"`` that ends while parameters differ between ranks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from agmerge.errors import warn

ENDED = (
    "AGM118: Training with sync='updates' ended while parameters still differ between ranks. Call consolidate() on "
    "every rank after the last step, or evaluate and save inside `with optimizer.shared():`. See docs/adaptive.md."
)


@dataclass
class Strayed:
    """Flags of whether a worker's parameters may differ from the shared ones."""

    ahead: bool = False  # a step has been made since all were equal
    unseen: bool = False  # likewise, and since then the script has not asked for the shared ones
    says: bool = False  # this rank is the one that warns

    def stepped(self, *, says: bool) -> None:
        """Record a step of this worker among others. ``says``: this worker is the one that warns."""
        self.ahead = self.unseen = True
        self.says = says

    def seen(self) -> None:
        """Record that the script has used the shared parameters."""
        self.unseen = False

    def settled(self) -> None:
        """Record that parameters are the shared ones on all ranks."""
        self.ahead = self.unseen = False


def watch(owner: object) -> Strayed:
    """Return a record of the steps of ``owner``.

    A warning is given if ``owner`` is deleted, or the interpreter ends, before the parameters are
    :meth:`Strayed.settled` or the shared parameters are :meth:`Strayed.seen`.
    """
    strayed = Strayed()
    weakref.finalize(owner, _warn, strayed)
    return strayed


def _warn(strayed: Strayed) -> None:
    if strayed.says and strayed.unseen:
        warn(ENDED, 0)
