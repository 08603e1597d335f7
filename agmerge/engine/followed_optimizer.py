# SPDX-License-Identifier: Apache-2.0
"""Follow the steps of any object with ``step()``: one of torch's optimizers, set up or not, or one of another library.

Many classes around an optimizer (Lookahead) share its groups and do not call ``Optimizer.__init__``, so that they have
no hooks. Optimizers of other libraries have groups and a step, and are of no class of torch's.
"""

from __future__ import annotations

from typing import Any

import torch

from agmerge.engine.optimizer_wrapper import refuse_exchanging

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
