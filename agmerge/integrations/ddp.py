# SPDX-License-Identifier: Apache-2.0
"""Compress averages of torch's DistributedDataParallel: ``compressed = ddp.compress(model, compression="topk")``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from agmerge.checkpoint import rank_state, torch_helpers
from agmerge.engine import elastic_refusals
from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.followed_optimizer import followed
from agmerge.engine.grad_scaler import LossScale, check_dtypes, refuse_unknown
from agmerge.engine.optimizer_group import OneOrSeveral, inner_of
from agmerge.engine.optimizer_states import load_state
from agmerge.engine.optimizer_wrapper import OptimizerHolder
from agmerge.engine.reporting import ReportingMixin
from agmerge.engine.sharing import SharingMixin
from agmerge.engine.step_hooks import follow
from agmerge.engine.swapping import SwappingMixin
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.engine.withheld_momentum import withhold
from agmerge.errors import AGMergeError
from agmerge.integrations import unsaved
from agmerge.integrations.ddp_hook import Hook, averaged_model, exchange, supersede
from agmerge.integrations.ddp_refusals import checked_model, checked_options
from agmerge.integrations.shared_model import show_shared
from agmerge.options import notices
from agmerge.options.arguments import Options
from agmerge.options.prepare import prepare, with_momentum_of
from agmerge.options.typed import DDPOptions
from agmerge.step.config import Config
from agmerge.step.updates import UPDATES
from agmerge.tensors.parameters import ParameterTable, optimizers_of

if TYPE_CHECKING:
    from typing import Unpack


def compress(
    model: torch.nn.Module,
    *,
    optimizer: OneOrSeveral | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Unpack[DDPOptions],
) -> Compressed:
    """Collective. Compress the gradients that a DistributedDataParallel model exchanges.

    Everything else works as before: after ``backward()``, ``p.grad`` holds the average, which you can clip, log and
    step with. ``model.no_sync()`` accumulates gradients. With ``sync="updates"`` the model averages no gradients.
    Instead, the updates of ``optimizer`` are exchanged after it has stepped, by hooks on its step.

    Example::

        model = DistributedDataParallel(net)
        compressed = agmerge.integrations.ddp.compress(model, optimizer=optimizer)

    Args:
        model (DistributedDataParallel): The model, also under ``torch.compile``. All ranks call this function, each
            with its own model.
        optimizer (torch.optim.Optimizer or list): The plain optimizer that steps, or several. ``sync="updates"`` and
            options that depend on momentum, such as ``compression="dgc"``, require it. Default: None. Then gradients
            are sent uncompressed or with 8 bits.
        scaler (torch.amp.GradScaler): The ``GradScaler`` in use, because residuals must be kept without its scale.
            Default: None. With ``sync="updates"`` it has no effect.
        **options: Arguments of :class:`agmerge.DistributedOptimizer`, except those that the model decides itself, such
            as ``named_parameters`` and ``process_set``.

    Returns:
        A :class:`Compressed` object, which has ``stats()``, ``set_compressor()``, ``grad_norm()``, ``state_dict()`` and
        other methods of :class:`agmerge.DistributedOptimizer`.

    Raises:
        TypeError: If ``model`` is not a DistributedDataParallel, or an argument is unknown.
        ValueError: If the model or an argument is not supported.
    """
    elastic_refusals.refuse_feature(
        "DistributedDataParallel, which needs a fixed number of workers,", elastic_refusals.PLAIN
    )
    plain = checked_model(model)
    compressed = Compressed(plain, optimizer, checked_options({**options, "scaler": scaler}, plain))
    notices.warn_of_changes(compressed._reducer.exchange, compressed._inner, None)
    return compressed


@dataclass(frozen=True)
class _OneGroup:
    """Parameters in one group, in the form of an optimizer's."""

    param_groups: list[dict[str, Any]]


class Compressed(ReportingMixin, SharingMixin, SwappingMixin, OptimizerHolder):
    """Handle of a model that :func:`compress` has prepared. Its methods are those of a DistributedOptimizer.

    ``optimizer`` is the plain optimizer, or None if you did not pass it. ``optimizers`` is the list of several.
    """

    _inner: torch.optim.Optimizer | None
    _reducer: BucketReducer | UpdateReducer

    def __init__(self, model: DistributedDataParallel, optimizer: OneOrSeveral | None, options: Options) -> None:
        self._inner = None if optimizer is None else inner_of(_followed(optimizer), _named(model, ignored=True))
        if self._inner is not None:
            _check_steps(self._inner, model)
            line = "compressed = agmerge.integrations.ddp.compress(model, optimizer=optimizer, ...)"
            rank_state.warn_of_unread(self._inner, line, "compressed")
        self._options, config = prepare(options, self._inner)
        self._attached = ExitStack()  # what hangs on the model and the optimizer
        self._note_whole: Callable[[], None] = lambda: None  # to be called when what this rank keeps is saved or loaded
        # To be called with what looks at a checkpoint some steps later.
        self.look_later: Callable[[unsaved.Look], None] = lambda look: None
        self._reducer = self._reducer_for(model, config)
        try:
            if self._steps_alone:
                self._attached.enter_context(model.no_sync())
            self._reducer.connect()
            self._attach(model)
        except BaseException:
            self.close()
            raise

    def _reducer_for(self, model: DistributedDataParallel, config: Config) -> BucketReducer | UpdateReducer:
        """Return the reducer of gradients, or of the optimizer's updates."""
        optimizer = self._inner
        if config.sync.updates is not None:
            if optimizer is None:
                raise ValueError(
                    "sync='updates' requires optimizer=, because it exchanges the optimizer's updates. Pass the "
                    "optimizer that steps."
                )
            _check_no_others(optimizer, model)
            return UpdateReducer(ParameterTable(optimizer, _named(model, ignored=True)), config)
        named = _named(model, ignored=False)
        table = ParameterTable(_OneGroup([{"params": [parameter for _, parameter in named]}]), named)
        check_dtypes(table, config.guards.scaled)
        reducer = BucketReducer(table, config, optimizer, averaged_model(model))
        if config.guards.scaled:
            reducer.attach_scaler(LossScale(self._options.scaler))
        return reducer

    def _attach(self, model: DistributedDataParallel) -> None:
        """Register the reducer's hooks with the model, or with the optimizer."""
        if self._inner is not None:
            self._note_whole, self.look_later, stop = unsaved.watch(self._reducer, optimizers_of(self._inner))
            self._attached.callback(stop)
        if not self._reducer.combines_gradients:
            # This object as a whole, which the script need not keep: no_sync() ends with its last reference.
            self._attached.callback(follow(self._reducer, lambda: self._check_apart(model)))
            self._attached.callback(show_shared(model.module, self._reducer))
            self._attached.callback(model.register_forward_pre_hook(_average_nothing).remove)
            return
        hook = Hook(model, self._reducer, self._attached)
        model.register_comm_hook(hook, exchange)
        self._attached.callback(hook.close)
        self._attached.callback(self._reducer.detach)
        supersede(model.module, hook)
        if self._inner is not None:
            self._attached.callback(withhold(self._reducer.exchange, self._inner))
            self._attached.callback(torch_helpers.hide_momentum(self._reducer.exchange, self._inner))
            for each in optimizers_of(self._inner) if not self._reducer.exchange.agreed.config.guards.scaled else ():
                self._attached.callback(refuse_unknown(each))

    def _check_apart(self, model: DistributedDataParallel) -> None:
        """Raise :class:`agmerge.AGMergeError` before a step of ``sync="updates"`` that others would wait for."""
        if model._join_config.enable:
            raise AGMergeError(
                "AGM603: model.join() is not supported with sync='updates', because a rank that joined does not step. "
                "Use the same number of batches on every rank."
            )

    def __getattr__(self, name: str) -> Any:
        advice = ". It is not an optimizer: keep using the script's own" if hasattr(torch.optim.Optimizer, name) else ""
        raise AttributeError(f"the result of ddp.compress() has no attribute {name!r}{advice}")

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and the plan, under the key ``"agmerge"``.

        With ``sync="updates"`` the state of this rank's optimizer is included, because it differs between ranks. Save
        the result next to the model and the plain optimizer, on every rank (docs/checkpoints.md).
        """
        self._note_whole()
        inner = self._inner.state_dict() if self._inner is not None and self._steps_alone else {}
        return rank_state.whole_state(self._reducer, inner)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective. Load a saved state. Load the model and the optimizer first.

        If the state has no residuals, they start from zero, with a warning.

        Args:
            state_dict (dict): The result of :meth:`state_dict` on this rank, or of :func:`agmerge.gather_state` on rank
                0.

        Raises:
            ValueError: If the state is of another model, or residuals are not finite.
        """
        self._note_whole()
        inner = {key: value for key, value in state_dict.items() if key != rank_state.SECTION}
        inner = rank_state.load(self._reducer, state_dict.get(rank_state.SECTION)) or inner
        if self._inner is not None and self._steps_alone and inner:
            load_state(self._inner, inner)
        exchange = self._reducer.exchange
        exchange.agreed.adopt(with_momentum_of(exchange.agreed.config, self._inner))

    @property
    def _steps_alone(self) -> bool:
        """Return whether each rank's optimizer steps with its own gradients."""
        return self._options.sync == UPDATES

    def close(self) -> None:
        """Collective. Turn compression off.

        DDP does not allow removing its hook, so it stays, and averages uncompressed gradients. With ``sync="updates"``,
        :meth:`consolidate` runs first, unless an error is being raised.
        """
        self._attached.close()
        self._reducer.close()


def _followed(given: Any) -> OneOrSeveral:
    """Return optimizers with hooks for what a script gives; of several in order. Raises as :func:`followed` does."""
    if isinstance(given, (list, tuple)):
        return [followed(one) for one in given]
    return followed(given)


def _check_steps(optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for an optimizer that has no parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            f"ddp.compress(): the {type(optimizer).__name__} in optimizer= has no parameter of the model. Pass the "
            "optimizer that steps the model."
        )


def _check_no_others(optimizer: torch.optim.Optimizer, model: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for an optimizer that steps parameters of other models too."""
    own = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ValueError(
                    f"sync='updates' is not supported with a {type(optimizer).__name__} that also steps another model "
                    f"(a parameter of shape {list(parameter.shape)} in group {number}). Use one optimizer for each "
                    "DistributedDataParallel and call compress() with each, or remove sync=."
                )


def _named(model: DistributedDataParallel, *, ignored: bool) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a model, by names as of the plain one; those that it averages, or all (``ignored``).

    States with such names fit, whether torch.compile has wrapped parts of the model or not.
    """
    return [
        (name.replace("_orig_mod.", ""), parameter)
        for name, parameter in model.module.named_parameters()
        if ignored or (parameter.requires_grad and name not in model.parameters_to_ignore)
    ]


def _average_nothing(model: Any, _: object) -> None:
    """Have the forward pass that begins prepare no average, though a script has set ``require_backward_grad_sync``.

    nanoGPT sets it in each pass, in place of ``no_sync()``.
    """
    if model.require_backward_grad_sync:
        model.require_backward_grad_sync = False
