# SPDX-License-Identifier: Apache-2.0
"""Registry of planners, by their canonical names or those of papers and their code; new ones can be registered."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from merging.planner import Planner
from merging.planners.agmerge import AGMerge
from merging.planners.count import Count
from merging.planners.exact import Exact
from merging.planners.layerwise import Layerwise
from merging.planners.papers.agtf import AGTF
from merging.planners.papers.dear import DeAR
from merging.planners.papers.fgbuff import FGBuff
from merging.planners.papers.horovod import Horovod
from merging.planners.papers.mgwfbp import MGWFBP
from merging.planners.papers.omgs import OMGS
from merging.planners.single import Single
from merging.planners.threshold import Threshold
from merging.published import ALIASES, Meaning, folded, nearest

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
