# SPDX-License-Identifier: Apache-2.0
"""Group of several optimizers of one model: for example ``torch.optim.Muon`` for matrices, AdamW for other tensors.

Lower layers work with one inner optimizer: the group has the attributes that they use. Nothing is copied, so that each
of the optimizers can be scheduled, saved and given another param group by itself.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from agmerge.engine.optimizer_wrapper import OF_SCALER, SEVERAL, check_optimizer, refuse_exchanging
from agmerge.tensors.parameters import optimizers_of

# Follow the steps of any object with step(). Many classes around an optimizer (Lookahead) share its groups and do not
# call ``Optimizer.__init__``, so that they have no hooks. Optimizers of other libraries are of no class of torch's.

NO_STEPS = (
    "optimizer=: agmerge cannot follow the steps of a {kind}: {why}. Remove optimizer=. Then residuals are updated "
    "when a torch optimizer steps inside it, or when parameters are written."
)


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not called ``Optimizer.__init__`` the hooks of its step that this makes."""
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        return
    try:
        torch.optim.Optimizer.__setstate__(optimizer, {})  # as for an unpickled one, with all that it has
    except AttributeError:
        if "_optimizer_step_pre_hooks" not in vars(optimizer):
            raise
        # It has no `defaults`, which are completed last.


def followed(given: Any) -> torch.optim.Optimizer:
    """Return an optimizer with hooks that run whenever ``given`` steps: it, or one that stands for it.

    Raises ``TypeError`` for an object without a step, or without groups of parameters, and as
    :func:`refuse_exchanging` does.
    """
    refuse_exchanging(given)
    for kind in type(given).__mro__:
        if kind.__module__ == "accelerate.optimizer":  # it steps the one inside, but not in every call
            return followed(given.optimizer)
    if isinstance(given, torch.optim.Optimizer):
        complete_hooks(given)
        return given
    if not callable(getattr(given, "step", None)):
        raise TypeError(NO_STEPS.format(kind=type(given).__name__, why="it has no step()"))
    if not _groups(given):
        raise TypeError(NO_STEPS.format(kind=type(given).__name__, why="it has no param_groups"))
    known: Any = getattr(given.step, "__self__", None)
    if getattr(known, "given", None) is given:  # compress() was called with it before
        return known  # type: ignore[no-any-return]
    made: FollowedOptimizer = type(type(given).__name__, (FollowedOptimizer,), {})(given)
    return made


def _groups(given: Any) -> list[dict[str, Any]]:
    """Return the groups of an object, also in fastai's form; an empty list: it has none."""
    groups = getattr(given, "param_groups", None)
    if groups is None:
        groups = [{"params": list(parameters)} for parameters in getattr(given, "param_lists", ())]
    usable = isinstance(groups, (list, tuple)) and all(isinstance(one, dict) and "params" in one for one in groups)
    return list(groups) if usable else []


class FollowedOptimizer(torch.optim.Optimizer):
    """Optimizer in torch's form that stands for an object of another class, of which ``step`` runs its hooks.

    Groups and state are the object's own. Raises ``TypeError`` if its ``step`` cannot be replaced.
    """

    def __init__(self, given: Any) -> None:
        # Not super().__init__(), which would make groups and a state of its own.
        self.given, self._step_of_given = given, given.step
        self.defaults = {}
        complete_hooks(self)

        try:
            vars(given)["step"] = self.step  # as schedulers of torch replace it
        except TypeError:
            text = NO_STEPS.format(kind=type(given).__name__, why="its step() cannot be replaced")
            raise TypeError(text) from None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the object's groups."""
        return _groups(self.given)

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the object's state; an empty one if it has none."""
        return getattr(self.given, "state", {})

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as the object does."""
        return self._step_of_given(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients as the object does."""
        self.given.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state, in its own form."""
        return self.given.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of the object's own form."""
        self.given.load_state_dict(state_dict)


# The group.

# States of optimizers that step together: access, saving and loading.

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


# The group.

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
