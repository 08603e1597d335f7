# SPDX-License-Identifier: Apache-2.0
"""States of several optimizers that step together: access, saving and loading."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from agmerge.tensors.parameters import optimizers_of

SECTIONS = "optimizers"  # in a state: a list of each optimizer's own state_dict()
# A key of a state with more sections than a plain optimizer loads, which keeps unknown keys. Keys are numbers of
# parameters, which scripts may sort.
MARK = -1
ATTRIBUTE = "_agmerge"  # of groups, the mark of a state that is empty


class StateOfAll(MutableMapping[Any, Any]):
    """States of several optimizers as one, by parameter. Writing goes to the optimizer that has the parameter."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], owner_of: Callable[[Any], torch.optim.Optimizer]
    ) -> None:
        """Show the states of ``optimizers``.

        ``owner_of``: returns the one that has a parameter, or raises ``KeyError``.
        """
        self._optimizers, self._owner_of = optimizers, owner_of

    @property
    def _states(self) -> list[MutableMapping[Any, Any]]:
        return [each.state for each in self._optimizers]  # asked for each time: loading makes new ones

    def _holding(self, key: Any) -> MutableMapping[Any, Any] | None:
        return next((state for state in self._states if key in state), None)

    def __getitem__(self, key: Any) -> Any:
        state = self._holding(key)
        return self._owner_of(key).state[key] if state is None else state[key]  # an optimizer's makes an empty one

    def __setitem__(self, key: Any, value: Any) -> None:
        state = self._holding(key)
        (self._owner_of(key).state if state is None else state)[key] = value

    def __delitem__(self, key: Any) -> None:
        state = self._holding(key)
        if state is None:
            raise KeyError(key)
        del state[key]

    def __contains__(self, key: object) -> bool:
        return self._holding(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default``; nothing is made."""
        state = self._holding(key)
        return default if state is None else state[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove ``key`` and return its value; ``default`` where there is none, else ``KeyError``."""
        state = self._holding(key)
        return ({} if state is None else state).pop(key, *default)

    def __iter__(self) -> Iterator[Any]:
        return (key for state in self._states for key in state)

    def __len__(self) -> int:
        return sum(map(len, self._states))


def as_state(saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a state that a script loads as a mapping, also where it is a list of the states of several optimizers."""
    return saved if isinstance(saved, Mapping) else {SECTIONS: list(saved)}


def sections_of(optimizer: torch.optim.Optimizer, saved: Any) -> list[Any]:
    """Return the state of each optimizer that steps with ``optimizer``; ``ValueError`` where they are not as many.

    ``saved``: a result of ``state_dict()``, or a list with one of each optimizer.
    """
    state, count = as_state(saved), len(optimizers_of(optimizer))
    sections = list(state[SECTIONS]) if SECTIONS in state and "param_groups" not in state else [state]
    if len(sections) != count:
        wanted = f"states of {count} optimizers" if count > 1 else "the state of one optimizer"
        got = f"{len(sections)} states" if len(sections) != 1 else "one state"
        raise ValueError(
            f"load_state_dict(): expected {wanted} ({type(optimizer).__name__}), got {got}. Load the state_dict() of "
            "as many optimizers, or a list with the state_dict() of each, in the same order."
        )
    return sections


def marked(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with a mark where a plain optimizer keeps it when it loads: in its state by parameter.

    A state with nothing by parameter, as of SGD without momentum, gets none there: Horovod's
    ``broadcast_optimizer_state`` recognises it by its length. Nor is an option of a group a place for it, for that
    function expects them to be the same on all ranks. The mark is then an attribute of each group.
    """
    if SECTIONS in state and "param_groups" not in state:
        return {**state, SECTIONS: [marked(section) for section in state[SECTIONS]]}
    if state["state"]:
        return {**state, "state": {**state["state"], MARK: {}}}
    return {**state, "param_groups": [_marked_group(group) for group in state["param_groups"]]}


def _marked_group(group: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a copy of a group with the mark as an attribute, which files and ``load_state_dict`` keep."""
    copy = OrderedDict(group)
    vars(copy)[ATTRIBUTE] = True
    return copy


def unmark(optimizer: torch.optim.Optimizer) -> bool:
    """Remove the marks from states that optimizers have loaded; return whether there were any."""
    found = False
    for each in optimizers_of(optimizer):
        found |= each.state.pop(MARK, None) is not None
        for group in each.param_groups:
            found |= isinstance(group, OrderedDict) and vars(group).pop(ATTRIBUTE, None) is not None
    return found


def check_state(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raise ``ValueError`` for a state that the optimizers which step with ``optimizer`` could not load.

    For callers that change something else before :func:`load_state`. ``saved``: as in :func:`sections_of`.
    """
    sections, optimizers = sections_of(optimizer, saved), optimizers_of(optimizer)
    for number, (each, section) in enumerate(zip(optimizers, sections, strict=True)):
        where = "the optimizer's state" if len(optimizers) == 1 else f"the state of optimizers[{number}]"
        where += f" ({type(each).__name__})"
        for key in ("state", "param_groups"):
            if not isinstance(section, Mapping) or key not in section:
                raise ValueError(f"{where} has no {key!r}. Load the result of state_dict().")
        groups, own = section["param_groups"], each.param_groups
        if len(groups) != len(own):
            raise ValueError(f"{where} has {len(groups)} parameter groups, but the optimizer has {len(own)}")
        for place, (group, its_own) in enumerate(zip(groups, own, strict=True)):
            if len(group["params"]) != len(its_own["params"]):
                raise ValueError(
                    f"{where} has {len(group['params'])} parameters in group {place}, but the optimizer has "
                    f"{len(its_own['params'])}. Load a checkpoint of the same model."
                )


def load_state(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Load the state of each optimizer that steps with ``optimizer``. ``saved``: as in :func:`sections_of`.

    Raises as that does; errors of an optimizer's own get its place where there are several.
    """
    sections, optimizers = sections_of(optimizer, saved), optimizers_of(optimizer)
    for number, (each, section) in enumerate(zip(optimizers, sections, strict=True)):
        try:
            each.load_state_dict(section)
        except ValueError as error:
            if len(optimizers) == 1:
                raise
            raise ValueError(f"optimizers[{number}] ({type(each).__name__}): {error}") from None
    unmark(optimizer)
