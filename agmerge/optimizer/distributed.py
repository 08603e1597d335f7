# SPDX-License-Identifier: Apache-2.0
"""Wrapper of an optimizer: ``agmerge.DistributedOptimizer``, for training scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from agmerge.checkpoint import horovod_elastic, rank_state, torch_helpers
from agmerge.engine import dear, grad_scaler, reducer
from agmerge.engine.gradient_clipping import ClippingMixin
from agmerge.engine.optimizer_group import OneOrSeveral, inner_of
from agmerge.engine.optimizer_wrapper import OptimizerWrapper, SharingMixin, SwappingMixin, reducer_for
from agmerge.engine.reducer import Reducer
from agmerge.engine.reporting import ReportingMixin
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import AGMergeError
from agmerge.ops import Average, ReduceOp
from agmerge.optimizer.saving import SavingMixin
from agmerge.options import defaults, typed
from agmerge.options.resolve import check_passes, prepare, resolve
from agmerge.options.typed import (
    Carry,
    DenseSum,
    Diverged,
    ExchangeName,
    Moments,
    Nonfinite,
    Options,
    Sparsify,
    Sync,
    Unused,
    Wire,
)
from agmerge.runtime import workers
from agmerge.tensors.nonfinite import KEEP
from agmerge.tensors.parameters import optimizers_of
from sparsifiers.custom import adapted

ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition. If your script continues after an exception between "
    "backward() and step(), call optimizer.step() first. If the exception occurred on all ranks, call "
    "optimizer.reset() on all of them."
)
NOT_OF_UPDATES = (
    "{call} is not supported with sync='updates', because gradients are never combined: p.grad is this worker's own. "
    "Clip with optimizer.clip_grad_norm_(), or change p.grad, between backward() and step(). To accumulate, call "
    "backward() several times before step()."
)
INFERENCE = (
    "optimizer.step() in torch.inference_mode() is not supported, because residuals could not be changed later. Call "
    "it outside, or use torch.no_grad()."
)


class DistributedOptimizer(ReportingMixin, SavingMixin, SharingMixin, SwappingMixin, ClippingMixin, OptimizerWrapper):
    """Collective. Wrap an optimizer so that it steps with gradients averaged over all workers.

    Your optimizer object does not change: ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's, and
    unknown attributes are read from it. So schedulers and checkpoints work as before. Construct the wrapper on every
    rank, with the same model and the same arguments.

    The first ten arguments are Horovod's and may be positional. Pass all others by name. Patterns in arguments are
    regular expressions that must match the full parameter name. The first match wins.

    Args:
        optimizer (torch.optim.Optimizer or list): The optimizer to wrap. LBFGS and others that need a closure are not
            supported. For several optimizers, for example Muon for matrices and AdamW for other tensors, pass a list.
            They step in this order after one exchange (docs/with_pytorch.md).

        named_parameters (iterable of pairs): Pass ``model.named_parameters()``. The names appear in errors, reports and
            checkpoints, and patterns are matched against them.

        compression (str, list, dict or object): How gradients are compressed. ``"auto"`` sends every value,
            uncompressed or with 8, 4 or 2 bits per value. It considers only formats that increased the loss by less
            than 1 % in our tests with this kind of optimizer. In the first steps it measures them, and keeps the most
            precise format that is about as fast as the fastest one. Set a compressor to send even less, or to reproduce
            a paper (docs/compressors.md). You can pass

            * a name: a quantizer such as ``"int8"`` or ``"eden-2"``, a sparsifier such as ``"topk"`` or ``"dgc"``,
              ``"powersgd"`` or ``"acpsgd"`` (docs/low_rank.md), a cast (``"fp16"``, ``"bf16"``), or ``"none"``
            * a list of quantizers and ``"none"``: agmerge chooses as with ``"auto"``, but only among these
            * ``{pattern: compressor}``: different compressors for different parameters. A parameter that matches no
              pattern gets the last compressor
            * an object: for example ``sparsifiers.get("topk", density=0.05)`` or ``agmerge.Compression.fp16``

            If you set ``density`` but no compressor, ``"auto"`` uses ``"dgc"`` for SGD with momentum and ``"topk"`` for
            other optimizers. agmerge logs a warning once if the compressor increased the loss by 5 % or more in our
            tests. An argument that the compressor would ignore raises ``ValueError``, for example ``rank=4`` with
            ``"topk"``. There are two exceptions, so that a script can switch compressors by name: a number as
            ``density``, and ``exchange="sparse"``.

        backward_passes_per_step (int): Number of backward passes before each step (gradient accumulation). The
            gradients are summed locally, not averaged, and exchanged after the last pass.

        op (ReduceOp): ``agmerge.Average`` or ``agmerge.Sum`` of the workers' gradients. Use ``Sum`` if your loss is
            already divided by the global batch size.

        gradient_predivide_factor (float): A factor f. Uncompressed gradients are divided by f before the sum, and the
            sum is multiplied by f. Raise it if sums of 16-bit gradients overflow. It requires ``op=Average``.
            Compressed values are always scaled before they are added.

        num_groups (int): Horovod's older name of ``groups``. 0 means not set.

        groups (int or list): A fixed number of merge buffers, such as ``groups=4``, or lists of parameters of which
            each becomes one merge buffer. Set it, in place of ``merging``, to decide yourself which gradients share a
            message.

        sparse_as_dense (bool): Convert gradients of sparse layout, such as those of ``nn.Embedding(sparse=True)``, to
            dense ones. Otherwise they raise an error. The exception is SparseAdam, which requires sparse gradients:
            agmerge gathers those of all ranks.

        process_set (list, ProcessGroup, DeviceMesh or process set): The ranks that exchange gradients. ``None`` means
            all. Other ranks step by themselves. Set it if only some ranks hold replicas of the same parameters, for
            example ``process_set=mesh["replicate"]``.

        density (float, dict or str): Fraction of the values that a sparsifier sends. Default: 0.01, or 0.05 with
            ``sync="updates"``. Lower it to send less. Raise it if the loss suffers. You can also pass
            ``{pattern: density}``, for example ``{r".*wte.*": 0.001, r".*": 0.01}``. Parameters without a match get the
            default. ``"importance"`` varies the density around the compressor's own: tensors with more gradient energy
            per element in the first steps get more.

        rank (int or dict): Rank of the two factors that ``"powersgd"`` and ``"acpsgd"`` send, or ``{pattern: rank}``,
            for example ``{r".*attn.*": 8, r".*": 4}``. Default: 4. A higher rank is more precise and sends more
            (docs/low_rank.md).

        warmup (int, str or callable): Use higher densities in the first steps, as in the DGC paper. For example,
            ``warmup=500`` lowers the density from 25 % to its target within 500 steps, by a constant factor per step.
            ``"dgc"`` is the schedule of the paper, with 200 steps per stage. For another length, use
            ``agmerge.ladder(steps)``. A callable gets the step and returns a density.

        memory (str or object): Error feedback. ``"residual"`` keeps unsent values and adds them to the next gradient.
            ``"none"`` drops them. ``"dgc"`` also applies the momentum of your SGD before selection, in place of the
            optimizer. Default: what the compressor needs. For ``compression="dgc"`` that is ``"dgc"`` with SGD, and
            ``"residual"``, with a warning, if another optimizer has its own momentum. Pass an object to set options,
            for example ``sparsifiers.memory("dgc", clipping=1.0)``.

        dense (list, callable or str): Parameters that are never compressed. Default: those with fewer than two
            dimensions or fewer than 1024 elements. A list of patterns, for example ``[r".*\\.bias", r"head\\..*"]``, or
            a callable ``(name, parameter) -> bool`` replaces this rule. ``"partial"`` keeps the rule and adds small
            layers, up to a size at which the total volume does not grow.

        merging (str, Planner, Plan or path): Which gradients share a message. ``"agmerge"`` chooses the sizes of merge
            buffers from measured times. Pass the name of another planner, a planner object, a :class:`merging.Plan`, or
            the path of a saved plan (docs/planners.md). ``"dear"``, with ``model``, applies updates in the next forward
            pass. Call :meth:`flush` before you read parameters then.

        sparsify (str): ``"ahead"`` selects values from each tensor before merging, ``"behind"`` from the complete merge
            buffer. ``"auto"`` uses the mode that agmerge predicts to be faster. Set it to reproduce a paper.

        exchange (str): How the messages of all ranks are combined (docs/exchanges.md).

            * ``"auto"``: compressed, or uncompressed if that is measured to be faster
            * ``"sparse"``: always compressed. With ``compression="auto"`` this is the smallest format that it may use
            * ``"masked"``: values of all ranks at the same indices. ``"oktopk"``: the largest values of the sum. Both
              need a sparsifier
            * ``"fastest"``: ``"auto"``, or ``"masked"`` or ``"oktopk"`` if that makes steps more than 5 % faster
            * ``"two-level"``: uncompressed within a node, compressed between nodes

        wire (str): Format of the values that a sparsifier sends. The residual keeps the rounding errors, so they are
            sent later. ``"auto"`` is the gradient's dtype at first (with ``sync="updates"`` it is ``"sign"``). With
            planners that measure, such as the default one, agmerge then tries ``"fp32"``, ``"fp16"`` and ``"int8"``,
            which preserve nearly all of the energy, and keeps the most precise one whose steps take at most 5 % longer
            than the fastest. Set a format to send less, or to keep it fixed:

            * ``"fp32"``, ``"fp16"``, ``"bf16"``: 4 or 2 bytes per value. The only ones for ``"powersgd"`` and
              ``"acpsgd"``
            * ``"int8"``, ``"int4"``: 1.02 and 0.52 bytes per value, with one scale per 256 values
            * ``"2bit"``: 0.28 bytes per value. The sign, and one of two magnitudes. Not with ``exchange="masked"``
            * ``"sign"``: 0.14 bytes per value. The sign, and the mean magnitude. Not with ``exchange="masked"``

        dense_sum (str): ``"native"`` adds uncompressed gradients in the order of the backend. ``"ordered"`` adds them
            in rank order, so that the sum does not depend on the plan. Use it to compare plans bitwise.

        scaler (torch.amp.GradScaler): The ``GradScaler`` of your script, because residuals must be kept without its
            scale. If you use one, pass it here or to :meth:`attach_scaler`. With ``sync="updates"`` leave it out.

        nonfinite (str): What happens if a gradient is infinite or NaN on any rank. ``"raise"`` raises the same
            :class:`agmerge.NonFiniteError` on all ranks. ``"skip"`` skips the step on all ranks. ``"keep"`` averages
            them like other numbers, for a ``GradScaler`` that is not passed as ``scaler``, and needs
            ``compression="none"``. Default: ``"skip"``
            with a ``scaler``, else ``"raise"`` (docs/guarantees.md). With ``sync="updates"`` the error is raised at the
            next exchange, and only the affected worker skips its step.

        timeout (float): Timeout of each communication call, in seconds. Default: the environment variable
            ``AGMERGE_TIMEOUT``, else 300, or the timeout of your script's process group if that is longer. Raise it if
            one rank may be busy for minutes, for example while it evaluates.

        check_every (int): Check that replicas are bitwise identical after the first step and after every
            ``check_every`` steps. With 0 only the first step is checked. Lower it to find a divergence earlier.

        diverged (str): What happens if replicas differ. ``"raise"`` raises :class:`agmerge.DivergenceError` on all
            ranks. ``"warn"`` warns, and training continues. Use it if models differ on purpose.

        unused (str): The gradient of a parameter that no rank used in a step, if no residual is sent for it either.
            ``"none"`` leaves ``p.grad`` None, so the optimizer skips the parameter. ``"zero"`` sets it to zeros, as
            Horovod does.

        model (torch.nn.Module): The model whose forward pass applies the updates. Only for ``merging="dear"``.

        sync (str): ``"gradients"`` averages gradients. With ``"updates"`` each worker steps with its own gradients, and
            the resulting changes of parameters are exchanged. Use it to hide messages with AdamW and other adaptive
            optimizers (docs/adaptive.md). ``compression="auto"`` then also considers 1 bit per value, with
            at most four workers. The arguments below require ``sync="updates"``.

        carry (str): Where unsent updates stay. ``"apply"`` keeps them in the worker's own parameters, so models differ
            between workers. ``"hold"`` keeps them apart, so that all workers compute with the same parameters. Use it
            if your script needs equal models. It increases the loss more.

        every (int): Exchange after every so many steps (local SGD). Raise it if latency dominates. For DiLoCo, set
            ``every=500, compression="none", carry="hold", outer=agmerge.Nesterov()``. Default: 2 if
            ``compression="auto"`` sends updates in few bits and ``fragments`` is not set, else 1.

        fragments (int): Number of groups of merge buffers. Each group is exchanged at a different one of the ``every``
            steps, so that no step carries all of the traffic. At most ``every``. Default: as ``every``, if neither
            is set, else 1.

        overlap (int): Number of steps after which sent updates are received. They travel during these steps. Use 1 if
            steps wait for messages. At most ``every / fragments``, and only with ``carry="apply"``. Default: 1 with
            quantizers if ``every / fragments`` is at most 4, else 0.

        decay (float): Factor, above 0 and at most 1, for unsent updates at each exchange. Only with ``carry="hold"``.

        outer (Nesterov or callable): Outer optimizer that steps with the averaged updates, as in DiLoCo:
            :class:`agmerge.Nesterov`, or a function from a list of parameters to an optimizer of them. ``None`` applies
            the averaged updates directly.

        moments (str): With ``"mean"`` the moments of Adam and its relatives, and momenta of SGD, are kept in the scale
            of the mean gradient of all workers, and follow that mean. ``"own"`` leaves them to the optimizer, which
            increased the loss by 1 to 5 % in our tests. Default: ``"mean"`` with quantizers if ``every / fragments`` is
            at most 4, else ``"own"``. With rarer exchanges, ``"mean"`` made the loss worse.

    Raises:
        agmerge.RankMismatchError: On all ranks, if models or arguments differ between ranks.
        ValueError: If an argument has no effect, by itself or together with others, or has a wrong value.
        TypeError: If an argument is unknown or has a wrong type.
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
        diverged: Diverged = "raise",
        unused: Unused = "none",
        model: torch.nn.Module | None = None,
        sync: Sync = "gradients",
        carry: Carry | None = "apply",
        every: int | None = None,
        fragments: int | None = None,
        overlap: int | None = None,
        decay: float = 1.0,
        outer: Any = None,
        moments: Moments | None = None,
        **unknown: Any,
    ) -> None:
        if compression == "auto" and adapted(unknown.get("grace")) is not None:  # as scripts pass GRACE's objects
            compression = adapted(unknown.pop("grace"))
        typed.refuse_unknown(type(self).__name__, unknown)
        options = Options.from_saved(locals())  # by name
        workers.adopt()  # first, so that what is said below is said by rank 0, whoever has initialised the workers
        self._set_up(optimizer, named_parameters, options, are_new=True)
        try:
            horovod_elastic.prepare(DistributedOptimizer)
            # In an elastic job newcomers connect when all begin the next step.
            if not (workers.launched_elastic() or workers.is_elastic()):
                self._reducer.connect()
            defaults.warn_of_changes(self._reducer.exchange, self._inner, None)
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
        guards = self._reducer.exchange.agreed.config.guards
        if self._reducer.passes.scaling.scaler is None and guards.nonfinite != KEEP:
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
        """Collective. Add a parameter group to the inner optimizer.

        Call it on every rank at the same step. Ranks communicate here only with ``overlap=``, to receive updates that
        are under way.

        Args:
            param_group (dict): The group, as in ``torch.optim.Optimizer.add_param_group``.

        Raises:
            ValueError: With several optimizers. Call ``optimizer.optimizers[0].add_param_group(...)`` instead.
        """
        if len(optimizers_of(self._inner)) == 1:  # else the next line but one refuses, before anything is sent
            self._reducer.check_idle("add_param_group()")
        self._inner.add_param_group(param_group)
        model = self._reducer.exchange.agreed.config.sync.model
        if model is not None:
            dear.admit_group(model, self._inner)

    # -- a step ---------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Collective. Wait until every ``p.grad`` is the average over all workers, or the sum with ``op=Sum``.

        Call it between ``backward()`` and ``step()`` to change or read gradients, then step inside
        :meth:`skip_synchronize`. To clip by the norm, :meth:`clip_grad_norm_` is enough.

        Raises:
            ValueError: With ``sync="updates"``, which does not average gradients.
        """
        if is_dynamo_compiling():
            _outside_graphs(DistributedOptimizer.synchronize, self)
            return
        _of_gradients(self._reducer, "synchronize()").synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make ``step()`` inside this context use the gradients as they are after ``synchronize()``.

        Example::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        with _of_gradients(self._reducer, "skip_synchronize()").taking_combined():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the backward passes inside this context, without communication.

        These passes do not count for ``backward_passes_per_step``.
        """
        with _of_gradients(self._reducer, "no_sync()").passes.paused():
            yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Average the gradients over all workers, then step the inner optimizer.

        In :meth:`skip_synchronize` the gradients are not averaged again. With ``sync="updates"`` the inner optimizer
        steps first, with this worker's own gradients. Then the updates are exchanged, if an exchange is due.

        Args:
            closure (callable): Computes the loss and the gradients. It runs once, before the exchange. Default: None.

        Returns:
            The loss of the closure, or None.

        Raises:
            ValueError: In ``torch.inference_mode()``, where the residuals could not be changed.
        """
        if is_dynamo_compiling():
            return _outside_graphs(DistributedOptimizer.step, self, closure)
        if not self._inner.state:
            torch_helpers.refuse(self)  # torch's helpers step an optimizer without a state
        if torch.is_inference_mode_enabled():
            raise ValueError(INFERENCE)
        return self._reducer.step(self, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Collective. Set the gradients of the inner optimizer to zero or to None.

        Ranks communicate here only if a step has begun and cannot end. This is the case after too many backward passes,
        or after an exception in ``backward()`` that the script has caught. Its gradients are dropped then. In the
        second case the step is dropped on all ranks, and the others raise :class:`agmerge.AGMergeError` in it.

        Args:
            set_to_none (bool): Set gradients to None, which saves memory. Pass False for zeros. Default: True.

        Raises:
            AssertionError: Between a complete ``backward()`` and ``step()``, because the gradients are already being
                sent.
        """
        if is_dynamo_compiling():
            _outside_graphs(DistributedOptimizer.zero_grad, self, set_to_none)
            return
        if self._reducer.combines_gradients and not self._reducer.restart():
            raise AssertionError(ZERO_GRAD)
        self._inner.zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, from the next step on.

        Args:
            passes (int): The number, at least 1. It must be the same on every rank.
        """
        check_passes(passes)
        if self._reducer.combines_gradients or passes != 1:
            _of_gradients(self._reducer, f"set_backward_passes_per_step({passes})").passes.set_per_step(passes)

    def attach_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Collective. Use a ``GradScaler`` from the next step on, as with the argument ``scaler``.

        Call it between two steps, on every rank.

        Args:
            scaler (torch.amp.GradScaler): The scaler of your script.
        """
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
        """Collective. Take part in the steps of other ranks without gradients, until all ranks have joined.

        Call it on a rank that has no batches left. Averages are still over all ranks, and this rank's residuals are
        still sent. It makes the same optimizer steps as the others, and the hooks of these steps run.

        Returns:
            The rank that joined last.
        """
        return reducer.join(self._reducer, self._step_combined)

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
        """Forget the group of workers. The next step connects to the workers that exist then.

        After ``agmerge.shutdown()`` and ``agmerge.init()`` this happens automatically. Residuals stay with this worker,
        scaled to the new number of workers (docs/checkpoints.md). A step that has begun is dropped, and an earlier
        error is cleared.
        """
        self._reducer.leave()
        self._reducer.discard()

    def close(self) -> None:
        """Collective. Remove all hooks. The inner optimizer and the model then work without agmerge.

        Ranks communicate here only with ``sync="updates"``: :meth:`consolidate` runs first, unless an error is being
        raised.
        """
        self._stop_hiding()
        self._reducer.close()


def _of_gradients(combining: Reducer | UpdateReducer, call: str) -> Reducer:
    """Return ``combining``, if it combines gradients. Raises ``ValueError`` where it exchanges updates."""
    if combining.combines_gradients:
        return combining
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
