"""``agmerge.DistributedOptimizer``: the optimizer that a training script sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

import sparsifiers
from agmerge.checkpoint import horovod_elastic, rank_state
from agmerge.engine import dear, grad_scaler, join
from agmerge.errors import AGMergeError
from agmerge.ops import Average, ReduceOp
from agmerge.options import compressors, notices
from agmerge.options.compressors import DENSITY
from agmerge.options.config import IMPORTANCE, followed
from agmerge.options.resolve import check_passes, resolve
from agmerge.options.wrapped import check_optimizer
from agmerge.reporting import ReportingMixin
from agmerge.runtime import workers

ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
_OWN = ("self", "__class__", "optimizer", "named_parameters")  # what is no option


class DistributedOptimizer(ReportingMixin, torch.optim.Optimizer):
    """Wraps ``optimizer`` so that every step uses gradients combined over all workers.

    The wrapped optimizer keeps working as it is: ``param_groups``, ``state`` and ``defaults`` are its own, and
    everything this class does not know goes to it. Collective: every rank constructs it with the same model and
    the same arguments, else all of them raise :class:`agmerge.RankMismatchError`.

    Arguments, in the order of Horovod's:

    * ``optimizer``: any ``torch.optim.Optimizer`` whose ``step`` needs no closure (LBFGS is refused).
    * ``named_parameters``: ``model.named_parameters()``; names travel in errors and checkpoints.
    * ``compression``: a sparsifier's name or object, ``"none" | "fp16" | "bf16"``, ``Compression.*``, or ``"auto"``:
      ``"dgc"`` where an SGD has momentum and no weight decay, else ``"topk"``; ``stats()["compressor"]`` says which.
    * ``backward_passes_per_step``: gradients of so many passes are summed locally, not averaged.
    * ``op``: ``Average`` or ``Sum``. ``gradient_predivide_factor``: f; dense sums are of ``g / f`` and multiplied
      by f afterwards, against overflow (sparse values are scaled before they are added anyway).
    * ``groups``: a number of groups, or lists of parameters: one merge buffer each, instead of ``merging``.
      ``num_groups``: its old name. ``sparse_as_dense``: gradients of sparse layout are made dense; without it they
      are an error. ``process_set``: a Horovod process set, or the ranks (on any backend) that exchange gradients;
      the others step by themselves.
    * ``density``: elements sent / elements; or ``{pattern: density}`` by whole name, the first match counts, 0.01
      where none does; or ``"importance"``: around the compressor's own, by the energy per element of each tensor's
      gradients in the first steps. ``warmup``: ``"dgc"`` (its paper's ladder, 200 steps a rung), a number of steps
      (geometric, from 25 %), or ``callable(step) -> density``; :func:`agmerge.ladder`: the paper's, steps of yours.
    * ``exchange``: how messages are combined: ``"sparse"``, or ``"auto"``, which measures the first steps and sends
      dense what is faster so; ``"oktopk"``, ``"masked"``, ``"two-level"``: docs/exchanges.md. To ``"none" | "fp16" |
      "bf16"``, which send every element, a number as ``density`` and ``"sparse"`` say nothing and may stay where they
      are swapped in; other arguments about what a sparsifier selects are refused with them.
    * ``memory``: ``"residual"`` keeps what is not sent (the default where anything is dropped), ``"none"`` drops it,
      ``"dgc"`` (the default of ``"dgc"``) applies the momentum of an SGD's groups before selection, instead of the SGD.
    * ``dense``: which parameters are always sent whole: patterns for whole names, or a callable
      ``(name, parameter) -> bool``; default: fewer than two dimensions or than 1024 elements. ``"partial"``: the small
      layers beside these, up to a size that is chosen so that the volume stays (docs/compressors.md).
    * ``merging``: a planner's name or object, a :class:`merging.Plan`, or the path of a saved one. ``"dear"``, with
      ``model=``, applies updates in the next forward (docs/dear.md); :meth:`flush` before you read parameters.
    * ``wire``: values on the wire (docs/wire.md): ``"auto"``, as the gradient, ``"fp32" | "fp16" | "bf16" | "int8"``.
    * ``dense_sum``: ``"ordered"`` adds in rank order whatever the plan; ``"native"`` as the backend does.
    * ``scaler``: the ``torch.amp.GradScaler`` in use (or :meth:`attach_scaler`); residuals are kept without its scale.
    * ``nonfinite``: a gradient that is infinite or NaN on any rank is ``"raise"``, the same
      :class:`agmerge.NonFiniteError` on all (the default), or ``"skip"``, a step that none of them makes (the default
      with a scaler): docs/guarantees.md.
    * ``timeout``: seconds, for every wait (None: ``AGMERGE_TIMEOUT`` of the environment, else 300).
      ``check_every``: compare replicas every so many steps; 0: after the first step alone.
    * ``unused``: ``"none"`` leaves ``p.grad`` None where no rank had a gradient and nothing is left to send.
      ``"zero"`` is Horovod's way.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
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
        density: Any = 0.01,
        warmup: Any = None,
        memory: Any = None,
        dense: Any = None,
        merging: Any = "agmerge",
        sparsify: str = "auto",
        exchange: str = "auto",
        wire: str = "auto",
        dense_sum: str = "native",
        scaler: Any = None,
        nonfinite: str | None = None,
        timeout: float | None = None,
        check_every: int = 0,
        unused: str = "none",
        model: torch.nn.Module | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in _OWN}
        compressors.check_meaning(compression, arguments)
        self._set_up(optimizer, named_parameters, arguments)
        try:
            workers.adopt()
            horovod_elastic.prepare(DistributedOptimizer)
            if not workers.elastic():  # there newcomers are alone until all begin the next step
                self._reducer.connect()
            notices.tell(self._reducer.exchange, optimizer, None)
        except BaseException:
            self._reducer.close()
            raise

    def _set_up(self, optimizer: torch.optim.Optimizer, named: Any, arguments: dict[str, Any]) -> None:
        # Not super().__init__(): the groups, the state and the hooks are the inner optimizer's.
        check_optimizer(optimizer, ReportingMixin)
        self.optimizer = optimizer
        compression = compressors.chosen(arguments["compression"], optimizer, arguments["memory"])
        self._arguments = arguments = {**arguments, "compression": compression}
        self._should_synchronize = True
        config = followed(resolve(**arguments), optimizer)
        self._reducer = dear.reducer_for(optimizer, named, config)
        self._take_scaler()

    # -- what is the inner optimizer's ----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own list."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's own state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's own defaults."""
        return self.optimizer.defaults

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step() reads this first. Without it, scaled gradients would be stepped with.
        if self._reducer.scaling.scaler is None:
            raise AGMergeError(grad_scaler.NOT_ATTACHED)
        return False  # whatever the inner optimizer does: unscaling is the scaler's

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set up yet: while unpickling
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        self.flush()
        named = [(self._reducer.members.name_of(p), p) for p in self._reducer.members.name_all()]
        arguments = {**self._arguments, "backward_passes_per_step": self._reducer.passes}
        return _restore, (self.optimizer, named, arguments, rank_state.save(self._reducer))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's; on every rank at the same step. The next step agrees on it."""
        self._reducer.check_idle("add_param_group()")
        self.optimizer.add_param_group(param_group)
        self._reducer.admit_group()

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Runs once a step, after the gradients have been combined. The hook gets the inner optimizer."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Runs once a step. The hook gets the inner optimizer."""
        return self.optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the inner optimizer's."""
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the inner optimizer's."""
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the inner optimizer's."""
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """As the inner optimizer's."""
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    # -- a step ---------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Collective. Make every ``p.grad`` the combined update: for clipping between ``backward`` and ``step``."""
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step()`` takes the gradients as ``synchronize()`` (and clipping) left them."""
        before, self._should_synchronize = self._should_synchronize, False
        try:
            yield
        finally:
            self._should_synchronize = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only accumulate locally; they are not counted and nothing is sent."""
        with self._reducer.paused():
            yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients, then step the inner optimizer; returns the closure's loss, if there is one.

        A closure runs once, before the gradients are combined. Collective, unless in ``skip_synchronize()``.
        """
        return self._reducer.step(self, closure, combine=self._should_synchronize)

    def flush(self) -> None:
        """Apply the updates that ``merging="dear"`` leaves to the next forward; with others there are none."""
        self._reducer.flush()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's; an error while gradients are on their way.

        After a backward pass too many was refused, it drops the gradients of the step: then it is collective.
        """
        if self._reducer.unfinished and not self._reducer.abandon():
            raise AssertionError(ZERO_GRAD)
        if self._reducer.synchronized:
            self._reducer.discard()  # else a rank whose next step has no backward pass would not exchange anything
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum so many backward passes from the next step on. The same on every rank."""
        check_passes(passes)
        self._reducer.set_passes(passes)

    def set_compressor(
        self, compression: Any, *, density: Any = None, memory: Any = None, warmup: Any = None, **options: Any
    ) -> None:
        """Compress otherwise from the next step on. Collective, between steps; residuals and plan stay.

        Arguments as at construction; ``density`` None: as before; ``options``: of the sparsifier. What was not sent
        is sent by the new compressor; with one that drops nothing, all of it in the next step. A momentum that the
        new memory does not have is kept, and saved, until one takes it up; an SGD's own then begins at zero.
        """
        compression = compressors.chosen(compression, self.optimizer, memory)
        compressors.check_meaning(compression, {"density": density, "warmup": warmup})
        density = self._arguments["density"] if density is None else density
        if options:
            compression = sparsifiers.get(compression, DENSITY if density == IMPORTANCE else density, **options)
        if isinstance(compression, sparsifiers.Sparsifier) and density != IMPORTANCE:
            density = compression.density
        arguments = {**self._arguments, "compression": compression, "density": density}
        arguments |= {"memory": memory, "warmup": warmup}
        config, before = followed(resolve(**arguments), self.optimizer), self._reducer.config
        config = rank_state.keeping(self._reducer.exchange, config, memory)
        self._reducer.reconfigure(config, "set_compressor()", "Give every rank the same compressor, at the same step.")
        self._arguments = arguments
        notices.tell(self._reducer.exchange, self.optimizer, before)

    def attach_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Work with ``scaler`` from the next step on, as ``scaler=`` does from the first. Collective, between steps."""
        self._reducer.check_idle("attach_scaler()")
        arguments = {**self._arguments, "scaler": scaler}
        config = resolve(**arguments)
        grad_scaler.check(self._reducer.members, config.scaled)
        config = replace(self._reducer.config, nonfinite=config.nonfinite, scaled=config.scaled)
        self._reducer.reconfigure(config, "attach_scaler()", "Attach the scaler on every rank, at the same step.")
        self._arguments = arguments
        self._take_scaler()

    def _take_scaler(self) -> None:
        scaler = self._arguments["scaler"] if self._reducer.config.scaled else None
        grad_scaler.check(self._reducer.members, scaler is not None)
        if scaler is not self._reducer.scaling.scaler:
            self._reducer.attach_scaler(grad_scaler.LossScale(scaler))
            if scaler is not None:
                scaler.unscale_ = grad_scaler.UnscaleHook(scaler, self)

    def _combine_for(self, scaler: torch.amp.GradScaler) -> None:
        """The scaler is about to unscale the gradients, and to look for infinities among them."""
        self._reducer.combine_for(scaler, combine=self._should_synchronize)

    def join(self) -> int:
        """Called by a rank that has no batches left: take part without gradients until every rank has called it.

        Returns the rank that joined last. Averages go on being over all ranks; what this rank has kept goes on being
        sent. Steps are taken here as on the others, hooks of the optimizer's step included. Collective.
        """
        return join.join(self._reducer, self.optimizer, self._step_combined)

    def _step_combined(self) -> None:
        scaler = self._reducer.scaling.scaler
        with self.skip_synchronize():
            if scaler is None:
                self.step()
            else:  # as the scripts of the ranks that go on do
                scaler.step(self)
                scaler.update()

    def reset(self) -> None:
        """Forget the group of workers; the next step connects to the one that there is then.

        After ``agmerge.shutdown()`` and ``agmerge.init()`` this happens by itself. Residuals stay with this worker,
        fitted to the new number (docs/checkpoints.md).
        """
        self._reducer.leave()

    def close(self) -> None:
        """Take all hooks off. The inner optimizer and the model go on without this wrapper."""
        self._reducer.close()

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under ``"agmerge"`` this rank's residuals by name."""
        self.flush()
        return {**self.optimizer.state_dict(), rank_state.SECTION: rank_state.save(self._reducer)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave here, or a plain optimizer's (residuals are then zero, with a warning)."""
        inner = {key: value for key, value in state_dict.items() if key != rank_state.SECTION}
        before = self._reducer.config
        rates = followed(before, self.optimizer, inner["param_groups"]).rates
        rank_state.load(self._reducer, state_dict.get(rank_state.SECTION))
        config = replace(self._reducer.config, rates=rates)
        exchange = self._reducer.exchange
        exchange.adopt(rank_state.keeping(exchange, config, self._arguments["memory"]))
        self.optimizer.load_state_dict(inner)
        notices.tell(self._reducer.exchange, self.optimizer, before)


def _restore(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    arguments: dict[str, Any],
    section: dict[str, Any],
) -> DistributedOptimizer:
    """An unpickled or copied wrapper; it shakes hands at its first synchronize()."""
    self = DistributedOptimizer.__new__(DistributedOptimizer)
    known = signature(DistributedOptimizer).parameters  # a pickle of an older version may have arguments that are gone
    self._set_up(optimizer, named, {name: value for name, value in arguments.items() if name in known})
    rank_state.load(self._reducer, section)
    exchange = self._reducer.exchange
    exchange.adopt(rank_state.keeping(exchange, exchange.config, arguments["memory"]))
    return self
