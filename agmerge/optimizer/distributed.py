# SPDX-License-Identifier: Apache-2.0
"""Wrapper of an optimizer: ``agmerge.DistributedOptimizer``, for training scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from agmerge.checkpoint import horovod_elastic, rank_state, torch_helpers
from agmerge.engine import dear_modules, grad_scaler, join
from agmerge.engine.optimizer_group import OneOrSeveral, inner_of
from agmerge.engine.optimizer_wrapper import OptimizerWrapper
from agmerge.engine.reducer import Reducer
from agmerge.engine.reducers import reducer_for
from agmerge.engine.reporting import ReportingMixin
from agmerge.engine.sharing import SharingMixin
from agmerge.engine.swapping import SwappingMixin
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import AGMergeError
from agmerge.ops import Average, ReduceOp
from agmerge.optimizer.saving import SavingMixin
from agmerge.options import keywords, notices
from agmerge.options.arguments import Options
from agmerge.options.prepare import prepare
from agmerge.options.resolve import check_passes, resolve
from agmerge.options.typed import Carry, DenseSum, ExchangeName, Nonfinite, Sparsify, Sync, Unused, Wire
from agmerge.runtime import workers
from agmerge.tensors.parameters import optimizers_of

ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition. If your script continues after an exception between "
    "backward() and step(), call optimizer.step() first. If the exception occurred on all ranks, call "
    "optimizer.reset() on all of them."
)
NOT_OF_UPDATES = (
    "{call} is not supported with sync='updates', because gradients are never combined: p.grad is this worker's own. "
    "Clip or change p.grad between backward() and step(). To accumulate, call backward() several times before step()."
)
INFERENCE = (
    "optimizer.step() in torch.inference_mode() is not supported, because residuals could not be changed later. Call "
    "it outside, or use torch.no_grad()."
)


class DistributedOptimizer(ReportingMixin, SavingMixin, SharingMixin, SwappingMixin, OptimizerWrapper):
    """Collective. Optimizer around ``optimizer`` that steps with gradients combined over all workers.

    The wrapped optimizer stays as it is: ``param_groups``, ``state`` and ``defaults`` are its own, and unknown
    attributes are read from it. Every rank constructs this with the same model and the same arguments,
    else all of them raise :class:`agmerge.RankMismatchError`. Arguments that mean nothing, by themselves or together,
    are refused with ``ValueError`` or ``TypeError``.

    Arguments in the order of the signature; the first ten are Horovod's:

    * ``optimizer``: The one to wrap: any ``torch.optim.Optimizer`` with a ``step`` without closure (LBFGS is refused).
      A list of several, say Muon for matrices and AdamW for other tensors, steps in its order after one exchange
      (docs/frameworks.md).
    * ``named_parameters``: Pass ``model.named_parameters()``. The names travel in errors and checkpoints.
    * ``compression``: ``"auto"``, the default, sends all of each gradient, dense or in 8, 4 or 2 bits a number. Of
      those that cost this optimizer no loss it takes the most exact one with which steps are about as fast as with any.
      A list of names is a choice of yours among ``"none"`` and quantisers. Or name one compressor: a quantiser
      (``"eden" | "eden-1" | "eden-4" | "int8" | ...``), a sparsifier (``"topk" | "dgc" | ...``), ``"powersgd" |
      "acpsgd"`` (docs/low_rank.md), ``"none" | "fp16" | "bf16"``, an object, ``Compression.*``, or ``{pattern: one of
      these}`` by whole name. ``density`` alone means ``"dgc"`` with SGD's momentum, else ``"topk"``. One line says what
      a name cost where that was measured (docs/compressors.md). Arguments without meaning for a compressor are
      refused with it. Only a number as ``density``, and ``exchange="sparse"``, may stay in a script that swaps its
      compressor by name; they say nothing then.
    * ``backward_passes_per_step``: The gradients of so many passes are summed locally, not averaged.
    * ``op``: Updates are the ``Average`` or the ``Sum`` over ranks.
    * ``gradient_predivide_factor``: Dense sums are of ``g / f`` and multiplied by this factor f afterwards, against
      overflow. Sparse values are scaled before they are added anyway.
    * ``num_groups``: The old name of ``groups``.
    * ``groups``: Give a number of groups, or lists of parameters. Each group is one merge buffer, instead of
      ``merging``.
    * ``sparse_as_dense``: Gradients of sparse layout are made dense. Without it they are an error; SparseAdam, which
      takes no others, gets those of all ranks, gathered.
    * ``process_set``: Give a Horovod process set, or the ranks (on any backend) that exchange gradients, also as
      torch's ``ProcessGroup`` or ``DeviceMesh``, as ``mesh["replicate"]``. The others step by themselves.
    * ``density``: Give one number, elements sent / elements, for a sparsifier 0.01 by default; or ``{pattern:
      density}`` by whole name, where the first match counts and the default where none does; or ``"importance"``, which
      goes around the compressor's own density by the energy per element of each tensor's gradients in the first steps.
    * ``rank``: ``"powersgd"`` and ``"acpsgd"`` send factors of so many rows, 4 by default; or ``{pattern: rank}``. With
      others it is refused.
    * ``warmup``: Other densities in the first steps are ``"dgc"`` (the ladder of its paper, 200 steps a rung), a number
      of steps (geometric, from 25 %), or ``callable(step) -> density``. :func:`agmerge.ladder` is the paper's with a
      number of steps of yours.
    * ``memory``: ``"residual"`` keeps unsent gradients (the default where any are dropped), ``"none"`` drops them.
      ``"dgc"`` (the default of ``compression="dgc"``) applies the momentum of an SGD's groups before selection, instead
      of the SGD. Beside another optimizer's momentum ``compression="dgc"`` goes with ``"residual"``, and says so.
    * ``dense``: Patterns for whole names, or a callable ``(name, parameter) -> bool``, say which parameters are always
      sent dense. By default those of fewer than two dimensions or than 1024 elements are. ``"partial"`` adds the small
      layers beside these, up to a size that is chosen so that the volume stays (docs/compressors.md).
    * ``merging``: Give a planner's name or object, a :class:`merging.Plan`, or the path of a saved one. ``"dear"``,
      with ``model``, applies updates in the next forward (docs/dear.md): call :meth:`flush` before you read parameters.
    * ``sparsify``: ``"ahead"`` selects from each tensor before merging, ``"behind"`` from the whole merge buffer after
      it. ``"auto"`` takes the mode that is predicted to be faster.
    * ``exchange``: How messages are combined. ``"sparse"`` compresses always; with ``"auto"`` a selection,
      and ``compression="auto"``, may go dense where that was measured to be faster. ``"oktopk"``, ``"masked"`` and
      ``"two-level"`` apply other sums, and ``"fastest"`` tries the first two beside ``"auto"`` (docs/exchanges.md).
    * ``wire``: Values travel as ``"fp32" | "fp16" | "bf16" | "int8" | "int4" | "2bit" | "sign"``; quantisation errors
      are sent later. With ``"auto"`` they travel as the gradient's. Where plans are made from measured
      times, it is the codec with the fastest steps from then on, if nearly all energy arrives (docs/wire.md).
    * ``dense_sum``: ``"ordered"`` adds in rank order whatever the plan, ``"native"`` as the backend does.
    * ``scaler``: Pass the ``torch.amp.GradScaler`` in use, here or to :meth:`attach_scaler`. Residuals are kept without
      its scale.
    * ``nonfinite``: Where a gradient is infinite or NaN on any rank, ``"raise"`` (the default) raises the same
      :class:`agmerge.NonFiniteError` on all; with ``"skip"`` (the default with a scaler) none of them makes the step
      (docs/guarantees.md).
    * ``timeout``: Every wait ends after so many seconds. None stands for ``AGMERGE_TIMEOUT`` of the environment, else
      300, or that of the process group that the script has made, if it is longer.
    * ``check_every``: Replicas are compared every so many steps, and after the first; with 0 after the first alone.
    * ``unused``: ``"none"`` leaves ``p.grad`` None where no rank had a gradient and no residual was sent. ``"zero"``
      makes it zeros, as Horovod does.
    * ``model``: With ``merging="dear"``, this module's forward applies the updates. Others take none.
    * ``sync``: Exchange ``"gradients"``, or ``"updates"``: each worker's optimizer steps with its own gradients, and
      its updates of parameters are exchanged (docs/adaptive.md). That is for AdamW and other adaptive optimizers.
      The arguments below are about it, and ``density`` is 0.05 then, ``wire`` ``"sign"``, by default.
    * ``carry``: ``"apply"`` (the default) leaves unsent updates in the worker's own parameters, ``"hold"`` beside
      them, so that all ranks compute with the same ones.
    * ``every``: Exchange after every so many steps.
    * ``fragments``: Merge buffers take turns in so many groups, at different ones of these steps.
    * ``overlap``: Updates sent after a step are received so many steps later, and travel meanwhile.
    * ``decay``: Unsent updates are multiplied by this factor at each exchange; with ``carry="hold"``.
    * ``outer``: :class:`agmerge.Nesterov`, or a function from a list of parameters to an optimizer of them, steps with
      the combined updates. None applies them as they are.
    """

    _inner: torch.optim.Optimizer

    def __init__(
        self,
        optimizer: OneOrSeveral,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Any = "auto",
        backward_passes_per_step: int = 1,
        op: ReduceOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = None,
        *,
        density: Any = None,
        rank: Any = None,
        warmup: Any = None,
        memory: Any = None,
        dense: Any = None,
        merging: Any = "agmerge",
        sparsify: Sparsify = "auto",
        exchange: ExchangeName = "auto",
        wire: Wire = "auto",
        dense_sum: DenseSum = "native",
        scaler: Any = None,
        nonfinite: Nonfinite | None = None,
        timeout: float | None = None,
        check_every: int = 100,
        unused: Unused = "none",
        model: torch.nn.Module | None = None,
        sync: Sync = "gradients",
        carry: Carry | None = "apply",
        every: int = 1,
        fragments: int = 1,
        overlap: int = 0,
        decay: float = 1.0,
        outer: Any = None,
        **unknown: NoReturn,
    ) -> None:
        keywords.refuse_unknown(type(self).__name__, unknown)
        options = Options.from_saved(locals())  # by name
        workers.adopt()  # first, so that what is said below is said by rank 0, whoever has initialised the workers
        self._set_up(optimizer, named_parameters, options, are_new=True)
        try:
            horovod_elastic.prepare(DistributedOptimizer)
            # In an elastic job newcomers connect when all begin the next step.
            if not (workers.launched_elastic() or workers.can_regroup()):
                self._reducer.connect()
            notices.warn_of_changes(self._reducer.exchange, self._inner, None)
        except BaseException:
            self._reducer.close()
            raise

    def _set_up(self, optimizer: OneOrSeveral, named: Any, options: Options, *, are_new: bool) -> None:
        # Not super().__init__(): the groups, the state and the hooks are the inner optimizer's.
        named = None if named is None else list(named)
        self._inner = optimizer = inner_of(optimizer, named)
        line = f"optimizer = agmerge.{type(self).__name__}(optimizer, ...)"
        rank_state.warn_of_unread(optimizer, line, "optimizer")
        self._options, config = prepare(options, optimizer, are_new=are_new)
        self._reducer: Reducer | UpdateReducer = reducer_for(optimizer, named, config)
        self._stop_hiding = torch_helpers.hide_momentum(self._reducer.exchange, optimizer)
        self._take_scaler()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this first. Without it, scaled gradients would be stepped with.
        if not self._reducer.combines_gradients:
            return True  # the scaler then leaves infinities to step(), and calls it at every step
        if self._reducer.passes.scaling.scaler is None:
            raise AGMergeError(grad_scaler.NOT_ATTACHED)
        return False  # whatever the inner optimizer does: unscaling is the scaler's

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        passes = self._options.backward_passes_per_step
        if self._reducer.combines_gradients:
            self._reducer.flush()
            passes = self._reducer.passes.per_step
        named = [(self._reducer.members.name_of(p), p) for p in self._reducer.members.name_all()]
        arguments = {**vars(self._options), "backward_passes_per_step": passes}
        given = optimizers_of(self._inner)
        inner = self._inner if len(given) == 1 else given
        return _restore, (inner, named, arguments, rank_state.save(self._reducer), type(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective. Add the group to the inner optimizer; on every rank at the same step. The next step agrees on it.

        Ranks communicate only with ``overlap=``: messages under way are received. Raises ``ValueError`` where there are
        several optimizers: call it on one of them, ``optimizers[0].add_param_group(...)``.
        """
        if len(optimizers_of(self._inner)) == 1:  # else the next line but one refuses, before anything is sent
            self._reducer.check_idle("add_param_group()")
        self._inner.add_param_group(param_group)
        model = self._reducer.exchange.agreed.config.sync.model
        if model is not None:
            dear_modules.admit_group(model, self._inner)

    # -- a step ---------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Collective. Make every ``p.grad`` the combined update: for clipping between ``backward`` and ``step``."""
        if is_dynamo_compiling():
            _outside_graphs(DistributedOptimizer.synchronize, self)
            return
        _of_gradients(self._reducer, "synchronize()").synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()``, inside, use the gradients as ``synchronize()`` (and clipping) left them."""
        with _of_gradients(self._reducer, "skip_synchronize()").taking_combined():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally in backward passes inside: they are not counted and nothing is sent."""
        with _of_gradients(self._reducer, "no_sync()").passes.paused():
            yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Combine the gradients, then step the inner optimizer. Return the closure's loss, if there is one.

        A closure runs once, before the gradients are combined. In ``skip_synchronize()`` they are used as they are.
        With ``sync="updates"``, step it first, with this worker's own gradients, and then make the exchange that is
        due. Raises ``ValueError`` in ``torch.inference_mode()``, where nothing can be kept for the next step.
        """
        if is_dynamo_compiling():
            return _outside_graphs(DistributedOptimizer.step, self, closure)
        if not self._inner.state:
            torch_helpers.refuse(self)  # torch's helpers step an optimizer without a state
        if torch.is_inference_mode_enabled():
            raise ValueError(INFERENCE)
        return self._reducer.step(self, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Collective. Zero the inner optimizer's gradients; ``AssertionError`` while all of them are on their way.

        Ranks communicate only where a step has begun and cannot end: after a backward pass too many was refused, or one
        has ended early, by an exception that the script survives. The gradients of the step are dropped then, and in
        the second case the step comes to nothing on all ranks: the others raise :class:`agmerge.AGMergeError` in it. A
        lone worker drops them at any time.
        """
        if is_dynamo_compiling():
            _outside_graphs(DistributedOptimizer.zero_grad, self, set_to_none)
            return
        if self._reducer.combines_gradients and not self._reducer.restart():
            raise AssertionError(ZERO_GRAD)
        self._inner.zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum so many backward passes from the next step on. The same on every rank."""
        check_passes(passes)
        if self._reducer.combines_gradients or passes != 1:
            _of_gradients(self._reducer, f"set_backward_passes_per_step({passes})").passes.set_per_step(passes)

    def attach_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Collective. Work with ``scaler`` from the next step on, as ``scaler=`` does from the first. Between steps."""
        self._reducer.check_idle("attach_scaler()")
        options = replace(self._options, scaler=scaler)
        guards = resolve(options).guards
        grad_scaler.check_dtypes(self._reducer.members, guards.scaled)
        config = self._reducer.exchange.agreed.config.changed(nonfinite=guards.nonfinite, scaled=guards.scaled)
        self._reducer.reconfigure(config, "attach_scaler()", "Attach the scaler on every rank, at the same step.")
        self._options = options
        self._take_scaler()

    def _take_scaler(self) -> None:
        scaler = self._options.scaler if self._reducer.exchange.agreed.config.guards.scaled else None
        grad_scaler.check_dtypes(self._reducer.members, scaler is not None)
        if self._reducer.combines_gradients and scaler is not self._reducer.passes.scaling.scaler:
            self._reducer.passes.attach_scaler(grad_scaler.LossScale(scaler))
            if scaler is not None:
                scaler.unscale_ = grad_scaler.UnscaleHook(scaler, self, self._reducer.combine_for)

    def join(self) -> int:
        """Collective. Take part without gradients until every rank does: for a rank that has no batches left.

        Return the rank that joined last. Averages go on being over all ranks; this rank's residuals go on being sent.
        This rank takes the steps that the others take, hooks of the optimizer's step included.
        """
        return join.join(self._reducer, self._step_combined)

    def _step_combined(self) -> None:
        """Collective. Step with the combined gradients, through the scaler where there is one."""
        scaler = None if self._reducer.passes is None else self._reducer.passes.scaling.scaler
        with self.skip_synchronize():
            if scaler is None:
                self.step()
            else:  # as the scripts of the ranks that go on do
                scaler.step(self)
                scaler.update()

    def reset(self) -> None:
        """Forget the group of workers; the next step connects to the group that exists then.

        After ``agmerge.shutdown()`` and ``agmerge.init()`` this happens by itself. Residuals stay with this worker,
        scaled to the new number of workers (docs/checkpoints.md). A step that has begun is given up, and an earlier
        error forgotten.
        """
        self._reducer.leave()
        self._reducer.discard()

    def close(self) -> None:
        """Collective. Remove all hooks. The inner optimizer and the model go on without this wrapper.

        Ranks communicate only with ``sync="updates"``, which is consolidated first unless there is an error under way.
        """
        self._stop_hiding()
        self._reducer.close()


def _of_gradients(reducer: Reducer | UpdateReducer, call: str) -> Reducer:
    """Return ``reducer``, if it combines gradients. Raises ``ValueError`` where it exchanges updates."""
    if reducer.combines_gradients:
        return reducer
    raise ValueError(NOT_OF_UPDATES.format(call=call))


@_disable_dynamo
def _outside_graphs(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function that a compiled one must not trace, since it depends on messages: a break in its graph.

    Otherwise no frame lies between the script and this library, so that warnings point at the script's lines.
    """
    return call(*args)


def _restore(
    optimizer: OneOrSeveral,
    named: list[tuple[str, torch.Tensor]],
    arguments: dict[str, Any],
    section: dict[str, Any],
    kind: type[DistributedOptimizer] = DistributedOptimizer,
) -> DistributedOptimizer:
    """Return an unpickled or copied wrapper, which connects at its first ``synchronize()``.

    Pickles of all releases call this. ``named``: parameters with their names; ``arguments``: fields of
    :class:`Options`, and perhaps some that are gone; ``section``: a result of
    :func:`agmerge.checkpoint.rank_state.save`; ``kind``: the class of the wrapper.
    """
    self = kind.__new__(kind)
    options = Options.from_saved(arguments)
    self._set_up(optimizer, named, options, are_new=False)
    rank_state.load(self._reducer, section)
    return self
