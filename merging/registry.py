"""Planners by their canonical names, and by those of papers and their code."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from merging.planner import Planner
from merging.planners.agmerge import AGMerge
from merging.planners.agtf import AGTF
from merging.planners.count import Count
from merging.planners.dear import DeAR
from merging.planners.exact import Exact
from merging.planners.fgbuff import FGBuff
from merging.planners.horovod import Horovod
from merging.planners.layerwise import Layerwise
from merging.planners.mgwfbp import MGWFBP
from merging.planners.omgs import OMGS
from merging.planners.single import Single
from merging.planners.threshold import Threshold

_ALL = (Layerwise, Single, Count, Threshold, Horovod, MGWFBP, OMGS, DeAR, FGBuff, AGMerge, AGTF, Exact)
_PLANNERS: dict[str, type[Planner]] = {planner.name: planner for planner in _ALL}

_ALIASES = {
    "wfbp": "layerwise",
    "syncea": "single",
    "synceasgd": "single",
    "omgssgd": "omgs",
    "agtfsgd": "agtf",
}


def names() -> tuple[str, ...]:
    """Return the canonical names of all planners."""
    return tuple(_PLANNERS)


def get(name: str, /, **options: Any) -> Planner:
    """Return the planner called `name`, with its own defaults for the options left out.

    Case, hyphens, underscores and blanks do not tell names apart; aliases ("wfbp", "SyncEA") are accepted, not listed.
    Raises ValueError for an unknown name, TypeError for an unknown option; each lists what there is. A
    planner refuses a wrong option value with either.
    """
    spelt = "".join(letter for letter in str(name).casefold() if letter not in "-_ ")
    planner = _PLANNERS.get(_ALIASES.get(spelt, spelt))
    if planner is None:
        near = get_close_matches(str(name).casefold(), [*_PLANNERS, *_ALIASES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no planner {name!r}{hint} (there are {', '.join(_PLANNERS)})")
    accepted = sorted(field.name for field in fields(planner))
    unknown = sorted(options.keys() - set(accepted))
    if unknown:
        raise TypeError(f"planner {name!r} has no option {unknown[0]!r}; it takes {_listed(accepted)}")
    return planner(**options)


def _listed(accepted: list[str]) -> str:
    return ", ".join(accepted) if accepted else "no options"
