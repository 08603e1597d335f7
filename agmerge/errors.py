"""What can go wrong in a step. Mistakes in arguments are ``ValueError`` or ``TypeError`` instead."""

from __future__ import annotations


class AGMergeError(RuntimeError):
    """Base of every error that is not a mistake in an argument."""


class RankMismatchError(AGMergeError):
    """Ranks disagree on something that must be the same on all of them. Raised on every rank."""


class NoAnswer(AGMergeError):
    """A collective did not end, because a rank is missing from it.

    ``call``: its name, such as ``"buffer 3"``. ``step``: committed exchanges so far; None outside of steps.
    ``waited``: seconds. ``missing``: the ranks that are not known to have come as far; empty if none is known.
    """

    call: str = ""
    step: int | None = None
    waited: float = 0.0
    missing: tuple[int, ...] = ()


class CollectiveTimeout(NoAnswer):
    """A collective did not end within its deadline."""


class PeerLost(NoAnswer):
    """Another rank has left, so a collective can never end."""


class MessageError(AGMergeError):
    """A message that arrived is damaged, or belongs to another step, plan or buffer."""


class DivergenceError(AGMergeError):
    """Replicas that must be equal to the bit are not."""
