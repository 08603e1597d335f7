# SPDX-License-Identifier: Apache-2.0
"""Names of planners in papers and their code: the one table of these, for scripts and command lines.

Other packages have the names of compressors and exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

ALIKE = 0.7  # least similarity of two names for one to be a misspelling of the other


@dataclass(frozen=True)
class Meaning:
    """Planner here, with the options that make it the published one."""

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
    # The ablation has one plan to the end: planning again from measured times is the other half.
    "agminter": Meaning("agmerge", {"intra": False, "check_every": 0}),
    "safusion": Meaning("agmerge"),
    "tensorfusion": Meaning("horovod"),
}
# Names of other methods, by the nearest planner here.
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
    """Return a name in lower case, without hyphens, underscores, blanks and brackets."""
    return "".join(letter for letter in name.casefold() if letter not in "-_ ()+")


def nearest(name: str, known: Iterable[str]) -> Meaning | None:
    """Return the likely meaning of an unknown name, among the canonical names `known`; None: there is none.

    A common ending "SGD" does not count, as every other method has it.
    """
    spelled = folded(name)
    if spelled in NEAREST:
        return NEAREST[spelled]
    meanings = {**{own: Meaning(own) for own in known}, **ALIASES}
    best = max(meanings, key=lambda each: _likeness(spelled, folded(each)))
    return meanings[best] if _likeness(spelled, folded(best)) >= ALIKE else None


def _likeness(first: str, second: str) -> float:
    """Return the similarity of two folded names, from 0 to 1; a common ending "SGD" does not count."""
    if first.endswith("sgd") and second.endswith("sgd"):
        first, second = first.removesuffix("sgd"), second.removesuffix("sgd")
    return SequenceMatcher(None, first, second).ratio()
