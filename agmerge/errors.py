"""What can go wrong in a step. Mistakes in arguments are ``ValueError`` or ``TypeError`` instead."""

from __future__ import annotations


class AGMergeError(RuntimeError):
    """Base of every error that is not a mistake in an argument."""


class RankMismatchError(AGMergeError):
    """Ranks disagree on something that must be the same on all of them. Raised on every rank."""


class CollectiveTimeout(AGMergeError):
    """A collective did not end within its deadline."""


class PeerLost(AGMergeError):
    """Another rank has left, so a collective can never end."""


class MessageError(AGMergeError):
    """A message that arrived is damaged, or belongs to another step, plan or buffer."""


class NonFiniteError(AGMergeError):
    """A gradient is infinite or NaN. Raised on every rank; nothing of the step is kept, and the next one works."""


class DivergenceError(AGMergeError):
    """Replicas that must be equal to the bit are not."""
