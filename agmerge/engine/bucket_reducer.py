# SPDX-License-Identifier: Apache-2.0
"""Reducer of gradients that are collected in buckets, with the updates written where the gradients were.

The buckets are only where gradients lie. Merge buffers, messages and residuals are by parameter, so that they do not
change when the owner of the buckets rearranges these.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from agmerge.backends import status
from agmerge.engine.grad_hooks import refuse_owned
from agmerge.engine.grad_scaler import LossScale
from agmerge.engine.participation import Participation, SyncedReplica, open_exchange
from agmerge.engine.step_hooks import take_over
from agmerge.errors import IN_BACKWARD, AGMergeError, NonFiniteError, warn
from agmerge.exchanges.message.format import Flag
from agmerge.ops import Average
from agmerge.planning.replanner import Replanner
from agmerge.script import seen_steps
from agmerge.script.averaged_steps import AveragedModel, AveragedSteps
from agmerge.script.clipping_watch import ClippingWatch
from agmerge.step.config import Config
from agmerge.step.gradient_exchange import Combined, GradientExchange
from agmerge.tensors.arena import MOMENTA
from agmerge.tensors.parameters import ParameterTable, fingerprints, optimizers_of

# The last backward pass, until an optimizer steps with its update or the script drops it. The pass ends before the
# script has decided. Residuals and momenta of a parameter move when an optimizer has stepped it. If none has when the
# next pass comes, the script has dropped the update (zero_grad()), and residuals are as before the pass. Or the script
# accumulates without no_sync(), and the update is in the gradient of the next pass.

KINDS = ("residual", *MOMENTA)  # of state that moves with a step
VELOCITY = (
    "AGM131: Step {step}: a backward pass added to the update of the previous pass in p.grad (for example {name!r}), "
    "which is a velocity with memory={memory!r}. Run all passes except the last one inside `with model.no_sync():`, "
    "call zero_grad() between passes, or pass memory='residual'."
)
UNSEEN = (
    "AGM132: No optimizer stepped in {count} backward passes since compress(), so their residuals are dropped, as for "
    "discarded gradients. Pass optimizer= to compress() (the object whose step() changes the parameters), or use a "
    "compressor without residuals, such as compression='eden'."
)
PATIENCE = 10  # dropped passes in a row, before the warning


class LastPass:
    """Last pass of an exchange in buckets, with residuals that wait for a step.

    ``members``: the parameters of the buckets. ``optimizer``: the one that steps; None: it is not known.
    """

    def __init__(
        self, exchange: GradientExchange, members: ParameterTable, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._exchange = exchange
        self._parameters = {members.name_of(parameter): parameter for parameter in members.name_all()}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._unstepped: dict[str, torch.Tensor] = {}  # by name, since the pass has ended; empty: all is decided
        # By name, the optimizer that has stepped a parameter last: parameters of one are thrown away together.
        self._owner: dict[str, int] = {}
        for each in [] if optimizer is None else optimizers_of(optimizer):
            self._own(each)
        self._before: dict[tuple[str, str], torch.Tensor] = {}  # state before the first of the passes that add up
        self._hooks: dict[str, tuple[Any, Any]] = {}  # by name: the node that accumulates the gradient, and its hook
        self._task = -1  # the backward pass of autograd in which gradients have been added last
        self._added: set[str] = set()  # names of parameters that got a gradient in that pass
        self._held: set[int | None] = set()  # owners with the update still in p.grad when they did
        self._thrown: set[int | None] = set()  # owners without it
        self._seen = False  # an optimizer has stepped since the exchange was opened
        self._versions = 0  # of all parameters, when the last pass ended
        self._dropped = 0  # passes in a row, as long as no step was seen

    def begin(self) -> None:
        """Wait for a step with the update of the pass that the exchange has received."""
        self._forget()
        self._unstepped = dict(self._parameters)
        if len(self._hooks) < len(self._parameters):
            self._watch()
        if not self._seen:
            self._versions = self.versions()

    def _own(self, optimizer: Any) -> list[str]:
        """Note that an optimizer steps its parameters; return the names of those of this model."""
        parameters = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        names = [self._names[key] for key in parameters if key in self._names]
        self._owner.update(dict.fromkeys(names, id(optimizer)))
        return names

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the residuals of the parameters of ``optimizer``, which has stepped."""
        self._seen, self._dropped = True, 0
        if not self._is_open():
            return
        names = self._unstepped.keys() & self._own(optimizer)
        self._before = {key: tensor for key, tensor in self._before.items() if key[1] not in names}
        if len(names) == len(self._unstepped):
            self.close()
        else:
            self._exchange.commit_some(names)
            self._unstepped = {name: one for name, one in self._unstepped.items() if name not in names}

    def close(self) -> None:
        """Count the update of the pass as applied: residuals move."""
        if self._is_open():
            self._exchange.commit(drops_unused=True)
            self._before = {}
        self._forget()

    def settle(self) -> None:
        """Decide, as another pass begins, about parameters that no optimizer has stepped since the last one.

        Raises :class:`agmerge.AGMergeError` where gradients were added to a velocity.
        """
        if not self._is_open():
            self._forget()
            return
        if not self._seen and self._stepped_unseen():
            self.close()
            return
        held = self._held_names()
        memory = self._exchange.agreed.config.compression.memory
        added = held & self._owner.keys() if self._seen else held  # what no optimizer steps is of no account
        if added and memory.has_momentum:
            raise AGMergeError(VELOCITY.format(step=self._exchange.agreed.step, name=min(added), memory=memory.name))
        current = self._exchange.agreed.current.tensors
        for key, tensor in current.items():
            if key[1] in held and key[0] in KINDS and key not in self._before:
                self._before[key] = tensor.clone()
        dropped = self._unstepped.keys() - held
        self._exchange.commit(drops_unused=True, dropped=dropped)
        current = self._exchange.agreed.current.tensors  # views of other halves by now
        for key in [key for key in self._before if key[1] in dropped]:
            current[key].copy_(self._before.pop(key))
        if dropped and not self._seen:
            self._dropped += 1
            comm = self._exchange.group.comm
            if self._dropped == PATIENCE and comm is not None:
                warn(UNSEEN.format(count=PATIENCE), comm.rank)
        self._forget()

    def _is_open(self) -> bool:
        """Return whether a pass waits for a step. It may have been discarded meanwhile."""
        return bool(self._unstepped) and self._exchange.under_way

    def _forget(self) -> None:
        self._unstepped, self._added, self._held, self._thrown = {}, set(), set(), set()

    # -- is the update still in p.grad? -----------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at each parameter's gradient before autograd adds to it."""
        for name, parameter in self._parameters.items():
            if name in self._hooks or not parameter.requires_grad:
                continue
            with torch.enable_grad():
                function = parameter.view_as(parameter).grad_fn
            assert function is not None
            node: Any = function.next_functions[0][0]
            self._hooks[name] = node, node.register_prehook(_looking(weakref.ref(self), name))

    def look(self, name: str) -> None:
        """Note whether the update of the last pass is in the gradient of a parameter, to which autograd will add.

        It runs for every tensor: keep it short.
        """
        if name not in self._unstepped:
            return
        self._turn_to(torch._C._current_graph_task_id())
        self._added.add(name)
        owner = self._owner.get(name)
        if owner not in self._held and _has_gradient(self._unstepped[name]):
            self._held.add(owner)

    def _turn_to(self, task: int) -> None:
        """Draw the conclusion of a backward pass, perhaps one in ``no_sync()``, if ``task`` is another one."""
        if task != self._task:
            self._thrown |= {self._owner.get(name) for name in self._added} - self._held
            self._task, self._added, self._held = task, set(), set()

    def _held_names(self) -> set[str]:
        """Return the names of parameters with gradients of the present pass that were added to the last update."""
        self._turn_to(torch._C._current_graph_task_id())
        for name, parameter in self._unstepped.items():
            owner = self._owner.get(name)
            decided = owner in self._held or owner in self._thrown
            if not decided and name not in self._added and _has_gradient(parameter):  # autograd may add to it later
                self._held.add(owner)
        held = self._held - self._thrown
        return {name for name in self._unstepped if self._owner.get(name) in held}

    # -- steps of objects that are no torch optimizer -----------------------------------------------------------------

    def _stepped_unseen(self) -> bool:
        """Return whether something other than a torch optimizer has moved parameters since the last pass ended."""
        if self._versions == self.versions():
            return False
        kinds: dict[type, bool] = {}  # asking for each object would cost more
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in kinds:
                kinds[kind] = issubclass(kind, torch.optim.Optimizer)
            if kinds[kind] and any(
                id(parameter) in self._names
                for group in getattr(thing, "param_groups", ())
                for parameter in group["params"]
            ):
                return False  # it will be seen when it steps: others write to parameters too
        return True

    def versions(self) -> int:
        """Return the sum of the versions of all parameters: each write in place raises it."""
        return sum(parameter._version for parameter in self._parameters.values())

    def end(self) -> None:
        """Remove all hooks."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks = {}


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a gradient other than zero. Waits for a device."""
    return parameter.grad is not None and bool(parameter.grad.any())


def _looking(reference: weakref.ref[LastPass], name: str) -> Callable[..., None]:
    """Return the hook that looks at a parameter's gradient; it keeps nothing alive."""

    def before(*_: Any) -> None:
        last = reference()
        if last is not None and last._unstepped:
            last.look(name)

    return before


# The reducer.

OTHERS = "one of the optimizer's that this model does not average"


class BucketReducer:
    """Reducer that combines the gradients of each backward pass: there is no ``step()`` to wait for.

    :meth:`hand_over` for each parameter, in the same order on every rank, then :meth:`combine`. From then on the update
    is the script's, which may clip it, add to it or drop it. ``members``: the parameters with gradients in the buckets.
    ``optimizer``: the one that steps; None: it is not known. ``model``: the owner of the buckets, for checks of steps;
    None: its members are all that it has. Raises ``ValueError`` where another DistributedOptimizer
    has a parameter, or the momentum of ``optimizer``, to be applied here, is of other parameters.
    """

    combines_gradients: Literal[True] = True  # p.grad becomes the combined gradient
    passes = None  # the owner of the buckets counts them

    def __init__(
        self,
        members: ParameterTable,
        config: Config,
        optimizer: torch.optim.Optimizer | None = None,
        model: AveragedModel | None = None,
    ) -> None:
        self.members = members
        self.exchange = open_exchange(members, members, config, Replanner)
        self.replica = SyncedReplica(members, self.exchange)
        self.participation = Participation(self.exchange, self._compared)
        self.scaling = LossScale(None)
        refuse_owned(members.name_all(), members)
        self._optimizer = optimizer
        self._check_momentum(config)
        self._gradients: dict[str, torch.Tensor] = {}  # handed over in this pass: views of buckets
        if model is None:
            model = AveragedModel(lambda: ((members.name_of(one), one) for one in members.name_all()))
        self._checks = AveragedSteps(self.exchange, members.name_all(), model)
        self._last = LastPass(self.exchange, members, optimizer)
        self._clipping = ClippingWatch(self.exchange)
        # Several optimizers step one by one: it looks when the first of them does.
        self._looks = [] if optimizer is None else [self._clipping.follow(each) for each in optimizers_of(optimizer)]
        self._stop_listening = seen_steps.listen(self, members.name_all())
        self._stepped_to: int | None = None  # versions of parameters after the last step; None: before the first
        self._end_due: Combined | None = None  # the pass that has ended, and after which replicas are to be compared

    def connect(self) -> None:
        """Collective. Connect to the present workers, if this has not happened."""
        if self.participation.outdated:
            self.leave()
        if not self.exchange.group.settled:
            self.participation.connect()

    def leave(self) -> None:
        """Forget the group of workers."""
        self.participation.leave()

    def attach_scaler(self, scaling: LossScale) -> None:
        """Divide gradients by another loss scale from now on."""
        self.scaling = scaling

    def _check_momentum(self, config: Config) -> None:
        """Raise ``ValueError`` where a momentum to be applied here is not that of exactly these parameters."""
        if config.compression.rates is None or self._optimizer is None:
            return
        stepped = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        others = stepped ^ set(self.members.name_all())
        if others:
            raise ValueError(
                f"AGM311: {config.compression.memory} applies the momentum of {type(self._optimizer).__name__}, but "
                "that steps other parameters than those that are exchanged (for example, one of shape "
                f"{list(next(iter(others)).shape)} differs). Pass an optimizer that steps exactly the exchanged "
                "parameters, or memory='residual'."
            )

    def _compared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks, by name. ``check_every``: the optimizer's, too."""
        tensors = self.replica.compared()
        if self._optimizer is not None and self.exchange.agreed.config.guards.check_every:
            others = self._checks.also_equal(self._optimizer)
            tensors[OTHERS] = fingerprints(others) if others else torch.zeros(1)
        return tensors

    def reconfigure(self, config: Config, what: str, advice: str) -> None:
        """Collective. Use another config, as :meth:`Participation.reconfigure`. Raises in a backward pass."""
        self._check_momentum(config)
        self.check_idle(what)
        self._last.close()
        self.participation.reconfigure(config, what, advice)
        self.discard()

    @torch.no_grad()
    def hand_over(self, parameter: torch.Tensor, gradient: torch.Tensor, *, used: bool = True) -> None:
        """Collective. Hand over the gradient of a parameter, and send the merge buffers that are complete now.

        ``gradient``: of the shape of ``parameter``, not to be changed before :meth:`combine`, which writes the update
        there. ``used``: whether this rank has one; if not, and where this rank has joined, ``gradient`` is zero.
        """
        if not self._gradients:
            self._last.settle()
            self._end_exchange()
            status.current().enter("is in a backward pass", self.exchange.agreed.step)
        name = self.members.name_of(parameter)
        self._gradients[name] = gradient
        if self.participation.flag == Flag.ACTIVE:  # of one that has joined, everything leaves in combine()
            self.exchange.ready(name, self.scaling.divided(parameter, gradient) if used else None, stays=True)

    @torch.no_grad()
    def combine(self) -> None:
        """Collective. Send the remaining messages, receive, and write the updates over the gradients; the pass ends.

        Connects first, if need be. A tensor that no rank has used gets no update, and its residual and momentum stay.
        Raises :class:`agmerge.NonFiniteError` on every rank, according to ``nonfinite=``.
        """
        self.connect()
        if self._optimizer is not None:
            take_over(self.exchange, self.members, self._optimizer)
        status.current().enter("averages gradients", self.exchange.agreed.step)
        try:
            combined = self.exchange.finish(flags=self.participation.flag)
        except NonFiniteError as error:
            raise NonFiniteError(IN_BACKWARD.format(where=error.where), error.where) from None
        waits = combined.buffers.flat.keeps_state and self.participation.flag == Flag.ACTIVE  # for a step
        with self.exchange.fault.recording():
            if self._optimizer is not None:
                self._clipping.note(combined)
            if combined.skipped and self.scaling.scaler is None and self.exchange.agreed.config.sync.op is Average:
                self._average_whole()
            else:
                here = ((name, update) for name, update in combined.updates.items() if update is not None)
                self.scaling.multiply([self._gradients[name].copy_(update) for name, update in here])
            if combined.skipped:
                self.exchange.discard()
            elif waits:
                self._last.begin()
            else:
                self.exchange.commit(drops_unused=True)
        self._end_pass()
        self._checks.count_pass()
        if not combined.skipped:
            self._end_due = combined
            if not waits:
                self._end_exchange()

    def prepare_clipping(self, optimizer: object) -> None:
        """Unscale the gradients, which will be clipped: backward passes have combined them.

        Raises ``ValueError`` for velocities, and where a scaler is used with an optimizer that is not known.
        """
        self._clipping.check_gradients()
        if self.scaling.scaler is not None and self._optimizer is None:
            raise ValueError(
                "clip_grad_norm_() requires optimizer= with a scaler, because the scaler unscales the gradients of one "
                "optimizer. Pass both to compress()."
            )
        for each in () if self._optimizer is None else optimizers_of(self._optimizer):
            self.scaling.unscale(each)
        self._clipping.forget()

    def _average_whole(self) -> None:
        """Collective. Average the gradients of this pass uncompressed, with infinities and NaN where ranks have them.

        As plain DistributedDataParallel does: the script then repairs the gradients, or skips the step, on all ranks
        alike. No residual moves. Gradients that are averages already stay as they are.
        """
        comm, timeout = self.exchange.group.comm, self.exchange.agreed.config.guards.timeout
        assert comm is not None
        gradients: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for gradient in self._gradients.values():
            gradients.setdefault((gradient.dtype, gradient.device), []).append(gradient)
        for number, parts in enumerate(gradients.values()):
            total = torch.cat([part.reshape(-1) for part in parts])
            comm.all_reduce(total, f"nonfinite gradients {number}").wait(timeout)
            total /= comm.size
            for part, own in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
                part.copy_(own.view_as(part))

    def _end_exchange(self) -> None:
        """Collective. Compare replicas and plan anew, where that is due, after a pass that has been committed."""
        combined, self._end_due = self._end_due, None
        if combined is not None:
            # Not before the optimizer has stepped, and not where it does not: on a rank that has joined.
            compares = self.exchange.agreed.steps > 1 and not combined.flags & Flag.JOINED
            self.participation.end_exchange(compares=compares, written=self._has_written)

    def _has_written(self) -> bool:
        """Return whether parameters were written in place since the last step."""
        return self._stepped_to is not None and self._stepped_to != self._last.versions()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check what ``optimizer``, which has some of the parameters, is about to step with.

        Raises :class:`agmerge.AGMergeError` for gradients that are averaged by nothing.
        """
        self._checks.before(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the residuals of the parameters that ``optimizer`` has stepped."""
        self._last.stepped(optimizer)
        self._checks.after(optimizer)
        self._stepped_to = self._last.versions()

    def flush(self) -> None:
        """Apply updates that are on their way: there are none, each pass ends with its own."""

    def discard(self) -> None:
        """Discard the pass that has begun."""
        self._end_due = None
        self.exchange.discard()
        self._end_pass()

    def _end_pass(self) -> None:
        self._gradients = {}
        self.scaling.clear()

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: not in a backward pass."""
        if self._gradients:
            raise AGMergeError(f"AGM111: {what} was called in a backward pass. Call it after backward().")

    def detach(self) -> None:
        """Stop watching steps of optimizers, and gradients: there will be no pass any more."""
        for handle in self._looks:
            handle.remove()
        self._stop_listening()
        self._last.end()

    def close(self) -> None:
        """Close the communicators, and stop watching the optimizer's steps."""
        self.detach()
        self.exchange.close()
