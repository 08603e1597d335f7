# SPDX-License-Identifier: Apache-2.0
"""Wrapper of an optimizer by composition, which keeps all that is its own.

Beside it the choice of its reducer, methods that all wrappers have, and refusals of what cannot be wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.dear import DearReducer
from agmerge.engine.reducer import Reducer
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.options import defaults
from agmerge.options.resolve import prepare_change
from agmerge.options.typed import Options
from agmerge.script.module_hooks import check_readers
from agmerge.step.config import Config, check_patterns
from agmerge.tensors.parameters import ParameterTable, optimizers_of

# Choice of the reducer.

AnyReducer = Reducer | BucketReducer | UpdateReducer


def reducer_for(optimizer: torch.optim.Optimizer, named: Any, config: Config) -> Reducer | UpdateReducer:
    """Return the reducer that ``config`` asks for. Without ``named`` parameters, DeAR's have the names of its model."""
    if config.sync.updates is not None:
        return UpdateReducer(ParameterTable(optimizer, named), config)
    if config.sync.model is None:
        return Reducer(ParameterTable(optimizer, named), config)
    if len(optimizers_of(optimizer)) > 1:
        raise ValueError(
            f"merging='dear' is not supported with several optimizers ({type(optimizer).__name__}), because it steps "
            "a few parameters at a time. Use another merging."
        )
    check_readers(config.sync.model, optimizer)
    named = config.sync.model.named_parameters() if named is None else named
    return DearReducer(ParameterTable(optimizer, named), config)


# Methods of all that exchanges for a script: of wrappers, and of models in DistributedDataParallel.


class SharingMixin:
    """Methods about shared parameters, for all that exchanges for a script.

    That may be a wrapped optimizer, one with hooks on its steps, or a model in DistributedDataParallel.
    """

    _reducer: AnyReducer

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Give the model, inside this context, the parameters that all workers share. Evaluate and save in it.

        With ``sync="updates"`` each worker's own parameters are ahead of these. They are restored afterwards, so
        changes that you make inside are lost. Nothing is communicated. With ``sync="gradients"`` the parameters are the
        same anyway.
        """
        reducer = self._reducer
        with nullcontext() if reducer.combines_gradients else reducer.replica.showing():
            yield

    def consolidate(self) -> None:
        """Collective. Exchange all unsent updates, uncompressed, so that parameters are bitwise identical on all ranks.

        Call it after the last step with ``sync="updates"``. With ``sync="gradients"`` it does nothing.
        """
        if not self._reducer.combines_gradients:
            self._reducer.consolidate()

    def flush(self) -> None:
        """Collective. Apply the updates that are still under way.

        With ``overlap=`` these are updates that a later step would receive. With ``merging="dear"`` the next forward
        pass would apply them, and ranks need not call this together. With other settings it does nothing.
        """
        self._reducer.flush()


class SwappingMixin:
    """Method to change the compressor, for all that exchanges for a script."""

    _inner: torch.optim.Optimizer | None  # the one that steps; None: it is not known
    _reducer: AnyReducer
    _options: Options  # those in use

    def set_compressor(
        self,
        compression: Any,
        *,
        density: Any = None,
        rank: Any = None,
        memory: Any = None,
        warmup: Any = None,
        **options: Any,
    ) -> None:
        """Collective. Change the compressor, from the next step on. Call it between two steps, on every rank.

        The plan and the residuals are kept. The new compressor sends the residuals, or sends them completely in the
        next step if it has no residual itself. A momentum or a low-rank basis that the new compressor does not use is
        kept, and saved, until a later one uses it. An SGD's own momentum then starts at zero.

        Args:
            compression (str, list, dict or object): As in :class:`agmerge.DistributedOptimizer`.
            density (float, dict or str): As there. None: keep the present one.
            rank (int or dict): As there. None: keep the present one.
            memory (str or object): As there. None: what the compressor needs.
            warmup (int, str or callable): As there. None: no warm-up.
            **options: Options of the compressor, such as ``bits=8`` for ``"qsgd"``.

        Raises:
            ValueError: If an argument has no effect with this compressor.
            agmerge.RankMismatchError: On all ranks, if they set different compressors.
        """
        reducer, optimizer, before = self._reducer, self._inner, self._reducer.exchange.agreed.config
        chosen = {"density": density, "rank": rank, "memory": memory, "warmup": warmup}
        changed = prepare_change(self._options, optimizer, compression, chosen, options)
        check_patterns(changed.config, (reducer.members.name_of(one) for one in reducer.members.name_all()))
        advice = "Set the same compressor on every rank, at the same step."
        reducer.reconfigure(changed.config, "set_compressor()", advice)
        self._options = changed.options
        defaults.warn_of_changes(reducer.exchange, optimizer, before)


# The wrapper.

OF_SCALER = ("grad_scale", "found_inf")  # attributes that a GradScaler sets of an optimizer that takes a scale
SEVERAL = "there are several optimizers ({}). Use optimizer.optimizers, the list of them."


def _registering(name: str) -> Any:
    """Return torch's method ``name`` of a wrapper, which registers a hook with the inner optimizer."""

    @functools.wraps(getattr(torch.optim.Optimizer, name))
    def register(self: OptimizerWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return register


class OptimizerHolder:
    """Holder of the optimizer that the script gave, or of a group that stands for several."""

    _inner: torch.optim.Optimizer | None  # None: it is not known which one steps

    @property
    def optimizer(self) -> Any:
        """Return the plain optimizer that you passed. Raises ``AttributeError`` if you passed several."""
        if self._inner is not None and len(optimizers_of(self._inner)) > 1:
            raise AttributeError(SEVERAL.format(type(self._inner).__name__))
        return getattr(self._inner, "given", self._inner)  # of one that stands for an object of another library

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the list of the plain optimizers that you passed, in their order."""
        inner: Any = self._inner
        return [] if inner is None else getattr(inner, "optimizers", [inner])


class OptimizerWrapper(OptimizerHolder, torch.optim.Optimizer):
    """Optimizer around another one, with the groups, state, defaults, hooks and unknown attributes of that.

    Subclasses set ``_inner`` and do not call ``super().__init__()``, which would make other groups and hooks.
    Attributes of their own have a name with an underscore. Other attributes that are set here become the inner
    optimizer's, or that of each of several, except ``step`` and other methods, which schedulers replace.
    """

    _inner: torch.optim.Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the inner optimizer's own list."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._only("param_groups").param_groups = groups

    @property
    def state(self) -> Any:
        """Return the inner optimizer's own state."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._only("state").state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's own defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._only("defaults").defaults = defaults

    def _only(self, name: str) -> torch.optim.Optimizer:
        """Return the one inner optimizer, to set its attribute ``name``; ``AttributeError`` where there are several."""
        if len(optimizers_of(self._inner)) > 1:
            raise AttributeError(f"{name} of one of them can be set: {SEVERAL.format(type(self._inner).__name__)}")
        return self._inner

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not set up yet: while unpickling
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in OF_SCALER or hasattr(type(self), name) or "_inner" not in vars(self):
            super().__setattr__(name, value)
            return
        for optimizer in optimizers_of(self._inner):
            setattr(optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self) or name == "_inner":
            super().__delattr__(name)
            return
        for optimizer in optimizers_of(self._inner):
            delattr(optimizer, name)

    # Hooks around a step run once, those before it after the gradients have been combined. They get the inner
    # optimizer, and where there are several one that stands for all of them.
    register_step_pre_hook = _registering("register_step_pre_hook")
    register_step_post_hook = _registering("register_step_post_hook")
    register_state_dict_pre_hook = _registering("register_state_dict_pre_hook")
    register_state_dict_post_hook = _registering("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _registering("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _registering("register_load_state_dict_post_hook")


# What cannot be wrapped. Here by module: optimizers that exchange gradients by themselves, with the advice for each.
OF_OTHERS = {
    "deepspeed.runtime": (
        "DeepSpeed averages gradients in its own engine. With ZeRO stage 0, remove DeepSpeed and use "
        "DistributedOptimizer or DistributedDataParallel. Otherwise keep DeepSpeed's exchange"
    ),
    "torchft": (
        "torchft averages gradients in its own manager. Wrap the plain optimizer and remove torchft, or keep "
        "torchft's exchange (agmerge.LocalSync replaces its DiLoCo)"
    ),
}


def refuse_exchanging(optimizer: Any) -> None:
    """Raise ``TypeError`` for a wrapper around an optimizer, and for one that exchanges gradients itself."""
    if isinstance(optimizer, OptimizerWrapper):
        raise TypeError("optimizer is already a DistributedOptimizer. Wrap the plain optimizer, once.")
    for kind in type(optimizer).__mro__:
        for module, advice in OF_OTHERS.items():
            if f"{kind.__module__}.".startswith(f"{module}."):
                raise TypeError(
                    f"optimizer: a {type(optimizer).__name__} of {module.partition('.')[0]} is not supported: {advice}"
                )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless ``optimizer`` can be wrapped.

    ``TypeError`` for anything but an optimizer, for a wrapper around one and for one that exchanges gradients itself,
    ``ValueError`` if it needs closures.
    """
    refuse_exchanging(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure and closure.default is inspect.Parameter.empty):
        raise ValueError(
            f"{type(optimizer).__name__} is not supported, because its step() calls a closure several times and "
            "agmerge cannot average gradients between the calls. Use an optimizer whose step() needs no closure."
        )
