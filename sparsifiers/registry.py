# SPDX-License-Identifier: Apache-2.0
"""Registry of factories by name, with errors that list names and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Generic, TypeVar

Made = TypeVar("Made")
ALIKE = 0.7  # how similar two names are, at least, for the one to be a slip of the pen for the other


def spelling(name: str) -> str:
    """Return the common form of all spellings of a name: without case, hyphens, underscores and blanks."""
    return "".join(letter for letter in name.casefold() if letter not in "-_ ")


def alike(name: str, known: Iterable[str]) -> str | None:
    """Return which of the known names is written most nearly as `name`; None: none is alike.

    That every other method is called "something-SGD" makes no two of them alike.
    """
    best = max(known, key=lambda each: _likeness(name, each), default=None)
    return None if best is None or _likeness(name, best) < ALIKE else best


def _likeness(first: str, second: str) -> float:
    """Return how much two names are alike, from 0 to 1; a common ending "SGD" is left out."""
    pair = spelling(first), spelling(second)
    if all(each.endswith("sgd") for each in pair):
        pair = pair[0].removesuffix("sgd"), pair[1].removesuffix("sgd")
    return SequenceMatcher(None, *pair).ratio()


class Registry(Generic[Made]):
    """Factories of objects of one kind, called by a name, positional arguments and named options.

    kind: their name in errors.
    base: the class that each factory must return an instance of.
    aliases: other names for the canonical ones; accepted, not listed.
    nearest: names that are not accepted, as `spelling` has them, and the nearest accepted name to each.

    Names are accepted in any spelling, see `spelling`.
    """

    def __init__(
        self,
        kind: str,
        base: type,
        aliases: Mapping[str, str] | None = None,
        nearest: Mapping[str, str] | None = None,
    ) -> None:
        self._kind = kind
        self._base = base
        self._aliases = dict(aliases or {})
        self._nearest = dict(nearest or {})
        self._factories: dict[str, Callable[..., Made]] = {}

    def names(self) -> tuple[str, ...]:
        """Return the canonical names, in the order in which they were registered."""
        return tuple(self._factories)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.canonical(name) is not None

    def register(self, name: str, factory: Callable[..., Made]) -> None:
        """Add a factory. ValueError for a taken name, TypeError for other arguments."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"a {self._kind}'s name must be a non-empty string, got {name!r}")
        if not callable(factory):
            raise TypeError(f"the factory of {self._kind} {name!r} must be callable, got {factory!r}")
        if self.canonical(name) is not None:
            raise ValueError(
                f"the {self._kind} name {name!r} is already used. Choose a name other than {self._known()}."
            )
        self._factories[name] = factory

    def create(self, name: str, /, *arguments: object, **options: object) -> Made:
        """Return factory(*arguments, **options). ValueError for an unknown name, TypeError for an unknown option."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self._kind} must be a string, got {name!r}. Choose from: {self._known()}")
        known = self.canonical(name)
        if known is None:
            near = self.published(name) or alike(name, [*self._factories, *self._aliases])
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"unknown {self._kind} {name!r}. Choose from: {self._known()}{hint}")
        factory = self._factories[known]
        self._check_options(name, factory, len(arguments), options)
        made = factory(*arguments, **options)
        if not isinstance(made, self._base):
            raise TypeError(f"the factory of {self._kind} {name!r} returned {made!r}, expected a {self._base.__name__}")
        return made

    def canonical(self, name: str) -> str | None:
        """Return the canonical name, from any spelling of it or of an alias; None: there is none."""
        aliases = {spelling(alias): known for alias, known in self._aliases.items()}
        return {**aliases, **{spelling(known): known for known in self._factories}}.get(spelling(name))

    def published(self, name: str) -> str | None:
        """Return the nearest name here to a published one; None: that is not known, or accepted itself."""
        return self._nearest.get(spelling(name))

    def _known(self) -> str:
        return ", ".join(self._factories)

    def _check_options(
        self, name: str, factory: Callable[..., Made], given: int, options: Mapping[str, object]
    ) -> None:
        parameters = list(inspect.signature(factory).parameters.values())
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return  # the factory judges its options itself
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        accepted = [parameter.name for parameter in parameters[given:] if parameter.kind in named]
        unknown = [option for option in options if option not in accepted]
        if unknown:
            raise TypeError(
                f"{self._kind} {name!r} has no option {', '.join(map(repr, unknown))}. Its options: "
                f"{', '.join(accepted) or 'none'}"
            )
