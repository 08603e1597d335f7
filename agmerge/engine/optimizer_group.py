# SPDX-License-Identifier: Apache-2.0
"""Group of several optimizers of one model: for example ``torch.optim.Muon`` for matrices, AdamW for other tensors.

Lower layers work with one inner optimizer: the group has the attributes that they use. Nothing is copied, so that each
of the optimizers can be scheduled, saved and given another param group by itself.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from agmerge.engine.followed_optimizer import complete_hooks
from agmerge.engine.optimizer_states import SECTIONS, StateOfAll, load_state
from agmerge.engine.optimizer_wrapper import OF_SCALER, SEVERAL, check_optimizer

OneOrSeveral = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
ADD_GROUP = (
    "add_param_group(): there are several optimizers ({}). Choose one, on every rank at the same step: "
    "optimizer.optimizers[0].add_param_group(...)"
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))  # values that are alike if they compare with ==


def inner_of(given: OneOrSeveral, named: Iterable[Any] | None) -> torch.optim.Optimizer:
    """Return the optimizer that a script gives, or one group for the several of a list or tuple.

    ``named``: pairs (name, parameter), for errors. Raises as :func:`check_optimizer` does, of a list with the place of
    the optimizer in it, and ``ValueError`` for an empty list and a parameter that two of them have.
    """
    if not isinstance(given, (list, tuple)):
        check_optimizer(given)
        only: Any = given  # which is an optimizer, then
        complete_hooks(only)
        return only  # type: ignore[no-any-return]
    if not given:
        raise ValueError("optimizer=[]: expected at least one optimizer")
    for number, optimizer in enumerate(given):
        try:
            check_optimizer(optimizer)
            complete_hooks(optimizer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"optimizers[{number}], a {type(optimizer).__name__}: {error}") from None
    pairs = [pair for pair in named or () if isinstance(pair, tuple) and len(pair) == 2]
    return given[0] if len(given) == 1 else grouped(given, {parameter: name for name, parameter in pairs})


def grouped(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> OptimizerGroup:
    """Return one optimizer for these, of a class named after theirs: texts then say "Muon and AdamW".

    ``names``: of parameters, for errors. Pickles call this.
    """
    kinds = list(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    text = " and ".join([", ".join(kinds[:-1]), kinds[-1]]) if len(kinds) > 1 else kinds[0]
    made: OptimizerGroup = type(text, (OptimizerGroup,), {})(optimizers, names)
    return made


def _registering(name: str) -> Any:
    """Return torch's method ``name`` of a group, which registers a hook with every optimizer."""

    @functools.wraps(getattr(torch.optim.Optimizer, name))
    def register(self: OptimizerGroup, *args: Any, **kwargs: Any) -> Handles:
        return Handles(getattr(each, name)(*args, **kwargs) for each in self.optimizers)

    return register


class OptimizerGroup(torch.optim.Optimizer):
    """Optimizer of several optimizers, which step in their order whenever this one does.

    ``param_groups`` are those of all, in order, and ``state`` is a view of all. Hooks of its step run once, around all
    steps. Other attributes are read from the optimizers, where they agree. Raises ``ValueError`` for a parameter that
    two of them have.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> None:
        # Not super().__init__(), which would make groups and a state of its own.
        self.optimizers = list(optimizers)
        self._names = dict(names)
        self._counts: list[int] = []  # of each optimizer's param groups, when `_owners` was made
        self._owners: dict[torch.Tensor, int] = {}  # by parameter, the number of its optimizer
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._find_owners()

    @property
    def stepped_together(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that step when this one does."""
        return self.optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the groups of all optimizers, in order: the list is a new one, the groups are theirs.

        Raises ``ValueError`` where one of them has been given a parameter of another.
        """
        if self._counts != [len(each.param_groups) for each in self.optimizers]:
            self._find_owners()
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> StateOfAll:  # type: ignore[override]
        """Return a view of the states of all optimizers."""
        return StateOfAll(self.optimizers, self.owner_of)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the defaults that all optimizers have, with equal values."""
        first, *others = [each.defaults for each in self.optimizers]
        return {key: first[key] for key in first if all(key in one and _alike(first[key], one[key]) for one in others)}

    def owner_of(self, parameter: Any) -> torch.optim.Optimizer:
        """Return the optimizer that has ``parameter``. Raises ``KeyError`` if none has it."""
        if parameter not in self._owners:
            self._find_owners()
        return self.optimizers[self._owners[parameter]]

    def _find_owners(self) -> None:
        owners: dict[torch.Tensor, int] = {}
        for number, each in enumerate(self.optimizers):
            for parameter in (parameter for group in each.param_groups for parameter in group["params"]):
                other = owners.setdefault(parameter, number)
                if other != number:
                    name = self._names.get(parameter)
                    what = f"a parameter of shape {list(parameter.shape)}" if name is None else f"parameter {name!r}"
                    kind, own = (type(self.optimizers[i]).__name__ for i in (other, number))
                    raise ValueError(
                        f"{what} is in two of the optimizers, optimizers[{other}] ({kind}) and optimizers[{number}] "
                        f"({own}). Pass each parameter to one optimizer only."
                    )
        self._owners, self._counts = owners, [len(each.param_groups) for each in self.optimizers]

    def __getattr__(self, name: str) -> Any:
        if "optimizers" not in vars(self):  # not set up yet
            raise AttributeError(name)
        kinds = type(self).__name__
        if name == "optimizer":
            raise AttributeError(SEVERAL.format(kinds))
        values = {i: getattr(each, name) for i, each in enumerate(self.optimizers) if hasattr(each, name)}
        if not values:
            raise AttributeError(f"{kinds}: none of these optimizers has an attribute {name!r}")
        first, *others = values.values()
        if len(values) == len(self.optimizers) and all(_alike(first, other) for other in others):
            return first
        raise AttributeError(
            f"{kinds} have different values of {name!r}. Read it from one of them: "
            f"optimizer.optimizers[{next(iter(values))}].{name}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return grouped, (self.optimizers, self._names)

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every optimizer, in order. Return the loss of ``closure``, which is called once, before."""
        args: tuple[Any, ...] = (self, closure)
        kwargs: dict[str, Any] = {}
        for before in list(self._optimizer_step_pre_hooks.values()):
            args, kwargs = before(self, args, kwargs) or (args, kwargs)  # as of torch's: it may give others
        closure, loss = args[1] if len(args) > 1 else kwargs.get("closure"), None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_scaler = {name: vars(self)[name] for name in OF_SCALER if name in vars(self)}
        for each in self.optimizers:
            vars(each).update(of_scaler)
            try:
                each.step()
            finally:
                for name in of_scaler:
                    vars(each).pop(name, None)
        for after in list(self._optimizer_step_post_hooks.values()):
            after(self, args, kwargs)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of every optimizer."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``ValueError``: there is no telling which optimizer should get the group."""
        raise ValueError(ADD_GROUP.format(type(self).__name__))

    # -- states -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, under ``"optimizers"``."""
        return {SECTIONS: [each.state_dict() for each in self.optimizers]}

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the result of :meth:`state_dict`, or a list of states, one of each optimizer.

        Raises as :func:`load_state`.
        """
        load_state(self, state_dict)

    # Hooks get the state of each optimizer by itself.
    register_state_dict_pre_hook = _registering("register_state_dict_pre_hook")
    register_state_dict_post_hook = _registering("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _registering("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _registering("register_load_state_dict_post_hook")


class Handles:
    """Removable handles of hooks that were registered together, and are removed together."""

    def __init__(self, handles: Iterable[RemovableHandle]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """Remove all of the hooks."""
        for handle in self._handles:
            handle.remove()


def _alike(one: Any, other: Any) -> bool:
    """Return whether two attributes are the same: the very object, equal plain values, or tuples of such."""
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)
