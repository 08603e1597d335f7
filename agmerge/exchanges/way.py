"""Say how merge buffers are sent: what the labels of a plan mean.

A label is words with spaces between them; without any, everything is as it is until times are measured. So whatever
keeps a plan, a checkpoint or the user's cache, keeps this with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import merging
from agmerge.exchanges.message.values import VALUES

AHEAD = "ahead"
OWN = "auto"  # the wire of a gradient's own dtype
_WIRE = "wire="


@dataclass(frozen=True)
class Way:
    """Hold what a label says."""

    ahead: bool = False  # tensors are selected from one by one, before they are merged
    wire: str = OWN  # the value codec of what is selected

    @classmethod
    def of(cls, label: str) -> Way:
        """Return what ``label`` says. Raises ``ValueError`` for a word that says nothing."""
        way = cls()
        for word in label.split():
            wire = word.removeprefix(_WIRE)
            if word == AHEAD:
                way = replace(way, ahead=True)
            elif wire in VALUES and wire != word:
                way = replace(way, wire=wire)
            else:
                raise ValueError(
                    f"labels: {label!r} has the word {word!r}; there are {AHEAD!r} and, with a value codec, "
                    f"{_WIRE + 'int8'!r}"
                )
        return way

    @property
    def label(self) -> str:
        """Return the label that says this."""
        return " ".join([AHEAD] * self.ahead + [f"{_WIRE}{self.wire}"] * (self.wire != OWN))


def ways(plan: merging.Plan) -> list[Way]:
    """Return how each merge buffer of ``plan`` is sent. Raises as :meth:`Way.of` does."""
    return [Way.of(label) for label in plan.labels]


def why_labels_are_wrong(plan: merging.Plan) -> str:
    """Say what is wrong with the labels of ``plan``; empty if nothing is."""
    try:
        wires = sorted({way.wire for way in ways(plan)})
    except ValueError as error:
        return str(error)
    return "" if len(wires) == 1 else f"its merge buffers have the wires {', '.join(wires)}: give all the same one"


def wire_of(plan: merging.Plan) -> str:
    """Return the value codec of all that is selected."""
    return ways(plan)[0].wire


def with_wire(plan: merging.Plan, wire: str) -> merging.Plan:
    """Return ``plan`` with this value codec."""
    return replace(plan, labels=tuple(replace(way, wire=wire).label for way in ways(plan)))


def is_ahead(plan: merging.Plan) -> bool:
    """Tell whether ``plan`` was made to select from tensors before they are merged."""
    return any(way.ahead for way in ways(plan))


def with_ahead(plan: merging.Plan, ahead: bool) -> merging.Plan:
    """Return ``plan``, selecting before tensors are merged, or not."""
    return replace(plan, labels=tuple(replace(way, ahead=ahead).label for way in ways(plan)))
