# SPDX-License-Identifier: Apache-2.0
"""Registry of planners, by their canonical names or those of papers and their code; new ones can be registered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from difflib import SequenceMatcher
from typing import Any

from merging.planner import Planner
from merging.planners.exact import AGMerge, Exact
from merging.planners.papers.agtf import AGTF
from merging.planners.papers.dear import DeAR
from merging.planners.papers.fgbuff import FGBuff
from merging.planners.papers.horovod import Horovod
from merging.planners.papers.mgwfbp import MGWFBP
from merging.planners.papers.omgs import OMGS
from merging.planners.simple import Count, Layerwise, Single, Threshold

# Names in papers and their code: the one table of these, for scripts and command lines.

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


# The registry.

_planners: dict[str, type[Planner]] = {}  # by canonical name, in the order in which they were registered


def names() -> tuple[str, ...]:
    """Return the names of all planners. Registered ones come last."""
    return tuple(_planners)


def register(name: str, planner: type[Planner]) -> None:
    """Register your own planner, for ``merging=name``. Do it on every rank.

    Args:
        name (str): A new name, which must be the class variable ``name`` of the planner.
        planner (type): A subclass of :class:`Planner`. Every option must have a default.

    Raises:
        TypeError: If the name is not a string, the class is not a planner, or an option has no default.
        ValueError: If the name is taken, or the class has another name.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"a planner's name must be a non-empty string, got {name!r}")
    if not (isinstance(planner, type) and issubclass(planner, Planner)):
        raise TypeError(f"planner {name!r} must be a subclass of merging.Planner, got {planner!r}")
    if find(name) is not None:
        raise ValueError(f"the planner name {name!r} is already used. Choose a name other than {', '.join(_planners)}.")
    own = getattr(planner, "name", None)
    if own != name:
        raise ValueError(f"{planner.__name__}.name is {own!r}, which ranks compare. Register it under this name.")
    for option in fields(planner):
        if option.default is MISSING and option.default_factory is MISSING:
            raise TypeError(f"planner {name!r} must have a default for its option {option.name!r}")
    _planners[name] = planner


def get(name: str, /, **options: Any) -> Planner:
    """Make a planner, by name.

    Args:
        name (str): A name of :func:`names`, or a published one such as ``"wfbp"`` or ``"AGM-Inter"``. Case, hyphens,
            underscores, spaces and brackets do not matter. A published name may imply options.
        **options: Options of this planner, such as ``bytes=8 << 20`` for ``"threshold"``. Others have their defaults.

    Raises:
        ValueError: For an unknown name, or a wrong value. The text lists the known names.
        TypeError: For an unknown option. The text lists the known ones.
    """
    meaning = find(name) if isinstance(name, str) else None
    if meaning is None:
        near = nearest(str(name), _planners)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"planner {name!r} is unknown{hint} (there are {', '.join(_planners)})")
    planner = _planners[meaning.planner]
    accepted = sorted(option.name for option in fields(planner))
    unknown = sorted(options.keys() - set(accepted))
    if unknown:
        raise TypeError(f"planner {name!r} has no option {unknown[0]!r}. Its options: {_listed(accepted)}")
    return planner(**{**meaning.options, **options})


def find(name: str) -> Meaning | None:
    """Return the planner of a name, in any spelling of it or as published; None where there is none."""
    return {**ALIASES, **{folded(known): Meaning(known) for known in _planners}}.get(folded(name))


def _listed(accepted: list[str]) -> str:
    """Return the names of options for an error."""
    return ", ".join(accepted) if accepted else "no options"


for _planner in (Layerwise, Single, Count, Threshold, Horovod, MGWFBP, OMGS, DeAR, FGBuff, AGMerge, AGTF, Exact):
    register(_planner.name, _planner)
