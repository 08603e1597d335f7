"""Notice a training with ``sync="updates"`` that ends while parameters differ between ranks, and say so once."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass

ENDED = (
    "training with sync='updates' has ended, and the parameters of each rank are its own: they have what was not sent. "
    "Call consolidate() on every rank after the last step, which makes them equal, or evaluate and save inside of "
    "shared() (docs/adaptive.md)"
)


@dataclass
class Strayed:
    """Remember of a worker's parameters whether they may be others than the shared ones."""

    ahead: bool = False  # a step has been made since all were equal
    unseen: bool = False  # likewise, and since then the script has not asked for the shared ones
    says: bool = False  # this rank is the one that warns

    def stepped(self, *, says: bool) -> None:
        """Note a step of this worker among others. ``says``: it is the one of them that warns."""
        self.ahead = self.unseen = True
        self.says = says

    def seen(self) -> None:
        """Note that the script has used the shared parameters."""
        self.unseen = False

    def settled(self) -> None:
        """Note that parameters are the shared ones on all ranks."""
        self.ahead = self.unseen = False


def watch(owner: object) -> Strayed:
    """Return what ``owner`` notes its steps in. There is a warning if it ends, or the interpreter does, before it is
    :meth:`Strayed.settled` or the shared parameters are :meth:`Strayed.seen`."""
    strayed = Strayed()
    weakref.finalize(owner, _warn, strayed)
    return strayed


def _warn(strayed: Strayed) -> None:
    if strayed.says and strayed.unseen:
        warnings.warn(ENDED, stacklevel=2)
