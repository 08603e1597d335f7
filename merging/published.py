"""List what papers and their code call planners: the one table of these names, for scripts and command lines.

What compressors and exchanges are called is the business of other packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

ALIKE = 0.7  # how similar two names are, at least, for the one to be a slip of the pen for the other


@dataclass(frozen=True)
class Meaning:
    """A planner here, and the options that make it the published one."""

    planner: str  # its canonical name
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"merging.get({self.planner!r}{said})" if said else repr(self.planner)


# By folded name: accepted, not listed.
ALIASES = {
    "wfbp": Meaning("layerwise"),
    "lags": Meaning("layerwise"),  # LAGS-SGD selects from each layer by itself: sparsify="ahead"
    "lagssgd": Meaning("layerwise"),
    "syncea": Meaning("single"),
    "synceasgd": Meaning("single"),
    "mgwfbpsgd": Meaning("mgwfbp"),
    "omgssgd": Meaning("omgs"),
    "agtfsgd": Meaning("agtf"),
    "snamgs": Meaning("agtf"),
    "snamgssgd": Meaning("agtf"),
    "agm": Meaning("agmerge"),
    "agminterintra": Meaning("agmerge"),  # AGM-(Inter+Intra)
    # The ablation has one plan to the end: what looks again at measured times is the other half.
    "agminter": Meaning("agmerge", {"intra": False, "check_every": 0}),
    "safusion": Meaning("agmerge"),
    "tensorfusion": Meaning("horovod"),
}
# What is none of ours, and comes nearest.
NEAREST = {
    "ddp": Meaning("threshold"),
    "bucket": Meaning("threshold"),
    "buckets": Meaning("threshold"),
    "p3": Meaning("dear"),
    "bytescheduler": Meaning("dear"),
    "optimal": Meaning("exact"),
    "none": Meaning("layerwise"),
}


def folded(name: str) -> str:
    """Return what spellings of one name have in common: neither case nor hyphens, blanks and brackets matter."""
    return "".join(letter for letter in name.casefold() if letter not in "-_ ()+")


def nearest(name: str, known: Iterable[str]) -> Meaning | None:
    """Return what an unknown name may have been meant for, among the canonical names `known`; None: nobody knows.

    That every other method is called "something-SGD" makes no two of them alike.
    """
    spelled = folded(name)
    if spelled in NEAREST:
        return NEAREST[spelled]
    meanings = {**{own: Meaning(own) for own in known}, **ALIASES}
    best = max(meanings, key=lambda each: _likeness(spelled, folded(each)))
    return meanings[best] if _likeness(spelled, folded(best)) >= ALIKE else None


def _likeness(first: str, second: str) -> float:
    """Return how much two folded names are alike, from 0 to 1; of what both end in ("SGD") nothing is said."""
    if first.endswith("sgd") and second.endswith("sgd"):
        first, second = first.removesuffix("sgd"), second.removesuffix("sgd")
    return SequenceMatcher(None, first, second).ratio()
