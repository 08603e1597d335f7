# SPDX-License-Identifier: Apache-2.0
"""Compression of torch's DistributedDataParallel: ``compressed = ddp.compress(model, compression="topk")``.

A hook gives the model's buckets to a reducer, and others show the parameters that all ranks share where that is due.
Annotations of this file are evaluated (no ``from __future__``), because DistributedDataParallel compares a hook's with
its own types.
"""

import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from agmerge.checkpoint import rank_state, torch_helpers
from agmerge.engine import participation
from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.engine.grad_scaler import LossScale, check_dtypes, refuse_unknown
from agmerge.engine.gradient_clipping import ClippingMixin
from agmerge.engine.optimizer_group import OneOrSeveral, followed, inner_of, load_state
from agmerge.engine.optimizer_wrapper import OptimizerHolder, SharingMixin, SwappingMixin
from agmerge.engine.reporting import ReportingMixin
from agmerge.engine.step_hooks import follow, withhold
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import AGMergeError
from agmerge.integrations import unsaved
from agmerge.integrations.ddp_refusals import checked_model, checked_options
from agmerge.options import defaults
from agmerge.options.resolve import prepare, with_momentum_of
from agmerge.options.typed import DDPOptions, Options
from agmerge.script.averaged_steps import AveragedModel
from agmerge.step.config import UPDATES, Config
from agmerge.tensors.parameters import ParameterTable, optimizers_of

if TYPE_CHECKING:
    from typing import Unpack

# Communication hook.

FEWER = (
    "AGM603: join(divide_by_initial_world_size=False) is not supported, because residuals of ranks that joined still "
    "count in the average. Set it to True."
)
Updated = torch.futures.Future[torch.Tensor]


class Hook:
    """Hook that hands the gradients of each bucket to a reducer, and tells the model when updates are in their place.

    The model keeps it alive; it does not keep the model alive.
    """

    def __init__(self, model: DistributedDataParallel, reducer: BucketReducer, attached: ExitStack) -> None:
        self._model = weakref.ref(model)
        self.attached = attached  # whose end takes everything off the model and the optimizer that is there for it
        self._reducer: BucketReducer | None = reducer  # None: closed
        self._waiting: list[tuple[Updated, torch.Tensor]] = []  # for the last bucket of this pass, with their updates
        # Parameters that got a gradient since the last pass that was averaged; None: all get one.
        self._used: set[int] | None = None
        self._handles: list[RemovableHandle] = []
        if model.find_unused_parameters or model.static_graph:
            self._used = set()
            mark = _marking(self._used)
            for parameter in reducer.members.name_all():
                self._handles.append(parameter.register_post_accumulate_grad_hook(mark))  # type: ignore[no-untyped-call]

    def take(self, bucket: GradBucket) -> Updated:
        """Collective. Take a bucket; with the last one, write the updates into all of them.

        Returns when the bucket holds its updates. All collectives are called here, in one thread.
        """
        model, reducer = self._model(), self._reducer
        assert model is not None
        if reducer is None:
            return allreduce_hook(model.process_group, bucket)
        if not getattr(model, "_divide_by_initial_world_size", True):
            raise AGMergeError(FEWER)
        buffer = bucket.buffer()
        updated = Updated(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._waiting.append((updated, buffer))
        # In join() the model calls this by itself, with zeros: outside of any backward pass.
        joined = torch._C._current_graph_task_id() < 0
        with reducer.participation.joined() if joined else nullcontext():
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                used = self._used is None or id(parameter) in self._used
                reducer.hand_over(parameter, as_laid_out(parameter, gradient), used=used)
            if bucket.is_last():
                self._end_pass(reducer)
        return updated

    def _end_pass(self, reducer: BucketReducer) -> None:
        waiting, self._waiting = self._waiting, []
        reducer.combine()
        if self._used is not None:
            self._used.clear()
        for updated, buffer in waiting:
            updated.set_result(buffer)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the model, or one that is loaded, has no hook: it is the process's, as groups are.
        text = (
            "AGM604: A copy of a compressed DistributedDataParallel averages uncompressed gradients. Call "
            "ddp.compress() with the copy."
        )
        warnings.warn(text, stacklevel=3)
        return str, ("agmerge, in the model that this is a copy of",)

    def close(self) -> None:
        """Exchange no more: buckets are averaged uncompressed from now on."""
        self._reducer = None
        for handle in self._handles:
            handle.remove()


def exchange(hook: Hook, bucket: GradBucket) -> Updated:
    """Collective. Take a bucket, in the form in which DistributedDataParallel calls a hook."""
    return hook.take(bucket)


# The hook of each module that is compressed, in the last DistributedDataParallel that it was put into.
_hooks: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Hook]] = weakref.WeakKeyDictionary()


def supersede(module: torch.nn.Module, hook: Hook) -> None:
    """Make ``hook`` the one of ``module``, and take off the one of another DistributedDataParallel around it."""
    before = _hooks[module]() if module in _hooks else None
    _hooks[module] = weakref.ref(hook)
    if before is not None:
        before.attached.close()


def averaged_model(model: DistributedDataParallel) -> AveragedModel:
    """Return what checks of steps ask of ``model``, which is held weakly."""
    reference, ignored = weakref.ref(model), set(model.parameters_to_ignore)

    def named() -> list[tuple[str, torch.Tensor]]:
        model = reference()
        return [] if model is None else [one for one in model.module.named_parameters() if one[0] not in ignored]

    apart = [parameter for name, parameter in model.module.named_parameters() if name in ignored]
    return AveragedModel(named, apart, reference, _is_compressed)


def _is_compressed(model: DistributedDataParallel) -> bool:
    """Return whether a model has a hook of this library."""
    return any(hook is exchange for hook, _ in getattr(model, "_comm_hooks", ()))


def as_laid_out(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a bucket in the shape of its parameter: a view, laid out as the bucket has it.

    That is in the strides of the parameter, if these leave no gap. The view that a bucket gives is in C order always,
    which for others (channels_last) mixes up the elements.
    """
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def _marking(used: set[int]) -> Callable[[torch.Tensor], None]:
    """Return a hook that notes which parameters get gradients; it refers to nothing else."""

    def mark(parameter: torch.Tensor) -> None:
        used.add(id(parameter))

    return mark


# Shared parameters, shown where a model is evaluated or saved in ``eval()`` mode.
#
# With ``sync="updates"`` a worker's own parameters are ahead of these. One rule holds for forward passes, with
# gradients or without, and for ``state_dict()``: parameters that the script has written since the last step (an average
# of weights, the best ones) are shown as they are; else a worker's own in training mode, and the shared ones in
# ``eval()`` mode.


def show_shared(module: torch.nn.Module, reducer: UpdateReducer) -> Callable[[], None]:
    """Put hooks on ``module``, the plain one inside DistributedDataParallel; return a function that removes them.

    A forward pass in ``eval()`` mode copies all parameters twice; inside of ``shared()`` it copies none. Entries of
    ``module.state_dict()`` are copies then. Neither the model nor the reducer is kept alive.
    """
    shown = _Shown(reducer)
    register_save: Any = module._register_state_dict_hook  # the public one is of torch 2.5
    handles = [
        module.register_forward_pre_hook(_Hook(shown.before)),
        module.register_forward_hook(_Hook(shown.after), always_call=True),
        register_save(_Hook(shown.save)),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


class _Shown:
    """Hooks that put shared parameters in place around forward passes in ``eval()`` mode, and into saved states.

    A script that trains in ``eval()`` mode has its own in both.
    """

    def __init__(self, reducer: UpdateReducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._inside: list[AbstractContextManager[None]] = []  # of forward passes in eval() mode that are under way
        # Whether the forward passes with gradients since the last step were in training mode, or in eval() mode.
        self._in_training = self._in_eval = False
        self._steps = 0  # when that was noted
        self._trains_in_eval = False  # the last step had forward passes in eval() mode alone

    def before(self, module: torch.nn.Module, *_: Any) -> None:
        """Begin a forward pass."""
        if not module.training:
            self._enter()
        elif torch.is_grad_enabled():
            self._in_training = True

    def after(self, *_: Any) -> None:
        """End a forward pass, also one that raises."""
        if self._inside:
            self._leave()

    @_disable_dynamo
    def _enter(self) -> None:
        reducer = self._showing()
        entered: AbstractContextManager[None] = nullcontext()
        if reducer is not None and not self._is_own(reducer):
            entered = _replaced(reducer, reducer.replica.written())
        self._in_eval |= torch.is_grad_enabled()
        entered.__enter__()
        self._inside.append(entered)

    @_disable_dynamo
    def _leave(self) -> None:
        self._inside.pop().__exit__(None, None, None)

    def save(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Put copies of the shared parameters into ``state``, the result of ``state_dict()``."""
        reducer = self._showing()
        if reducer is None:
            return
        if module.training or self._is_own(reducer):
            reducer.replica.saved_own()
            return
        values = reducer.replica.shared_values(but=reducer.replica.written())
        for name, parameter in module.named_parameters(remove_duplicate=False):
            entry = state.get(f"{prefix}{name}")
            if parameter in values and entry is not None and not isinstance(entry, torch.nn.Parameter):
                state[f"{prefix}{name}"] = values[parameter].to(device=entry.device, dtype=entry.dtype, copy=True)

    def _showing(self) -> UpdateReducer | None:
        """Return the reducer; None where a model's parameters are the right ones anyway."""
        reducer = self._reducer()
        is_right = reducer is None or reducer.exchange.group.alone or reducer.replica.shared.is_shown
        return None if is_right else reducer

    def _is_own(self, reducer: UpdateReducer) -> bool:
        """Return whether the script trains in ``eval()`` mode, so that the mode does not tell evaluation apart."""
        if self._steps != reducer.replica.steps:
            if self._in_training or self._in_eval:
                self._trains_in_eval = not self._in_training
            self._steps, self._in_training, self._in_eval = reducer.replica.steps, False, False
        return self._trains_in_eval


@contextmanager
def _replaced(reducer: UpdateReducer, written: Container[str]) -> Iterator[None]:
    """Put the shared parameters in place, all but those that the script has ``written``.

    A backward pass through what is computed inside gets copies: the parameters have this rank's own values by then.
    """
    replica = reducer.replica
    with replica.showing(but=written):
        if not torch.is_grad_enabled():
            yield
            return
        shown = {parameter.untyped_storage().data_ptr() for parameter in replica.shared_values()}
        with saved_tensors_hooks(lambda tensor: _kept(tensor, shown), lambda tensor: tensor):
            yield


def _kept(tensor: torch.Tensor, shown: set[int]) -> torch.Tensor:
    """Return what a backward pass keeps of ``tensor``: a copy, if its memory is one of those in ``shown``."""
    return tensor.detach().clone() if tensor.untyped_storage().data_ptr() in shown else tensor


class _Hook:
    """Hook that calls a function. A copy of the model, or one that is loaded, has a hook that does nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing."""


# ``compress``, and the handle that it returns.


def compress(
    model: torch.nn.Module,
    *,
    optimizer: OneOrSeveral | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: "Unpack[DDPOptions]",
) -> "Compressed":
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
    participation.refuse_feature("DistributedDataParallel, which needs a fixed number of workers,", participation.PLAIN)
    plain = checked_model(model)
    compressed = Compressed(plain, optimizer, checked_options({**options, "scaler": scaler}, plain))
    defaults.warn_of_changes(compressed._reducer.exchange, compressed._inner, None)
    return compressed


@dataclass(frozen=True)
class _OneGroup:
    """Parameters in one group, in the form of an optimizer's."""

    param_groups: list[dict[str, Any]]


class Compressed(ReportingMixin, SharingMixin, SwappingMixin, ClippingMixin, OptimizerHolder):
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
