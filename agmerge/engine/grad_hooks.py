# SPDX-License-Identifier: Apache-2.0
"""Gradients between backward and a reducer: hooks on parameters, counted passes, and a check that none changes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from agmerge.backends import status
from agmerge.backends.streams import Streams, streams_of
from agmerge.engine.grad_scaler import LossScale
from agmerge.engine.participation import Participation
from agmerge.errors import BETWEEN, CHANGED, NO_SYNC_LATE, TOO_MANY, AGMergeError, and_more
from agmerge.exchanges.message.format import Flag
from agmerge.tensors.parameters import Gradients, ParameterTable, gradient_of, local_of

SAMPLED = 16  # elements that are compared where versions may miss a change
CAPTURED = (
    "AGM114: The backward pass of parameter {!r} is being captured in a CUDA graph. Replays run no hooks, so "
    "gradients would not be exchanged. Do not capture backward(), or capture modules with "
    "torch.cuda.make_graphed_callables."
)


class GradientListener(Protocol):
    """Listener to gradients of parameters with hooks."""

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """React to ``parameter.grad``, which has been accumulated once more. Called without gradient recording."""


# Owners of each parameter; without other workers there may be several. Not an attribute: torch.save would save it.
_owners: MutableMapping[torch.Tensor, list[weakref.ref[GradientHooks]]] = WeakTensorKeyDictionary()


def _owners_of(parameter: torch.Tensor, but: GradientHooks | None = None) -> list[GradientHooks]:
    """Return the hooks of living listeners that own ``parameter``, except ``but``."""
    owners = [owner() for owner in _owners[parameter]] if parameter in _owners else []
    return [owner for owner in owners if owner is not None and owner is not but]


def refuse_owned(parameters: Iterable[torch.Tensor], names: ParameterTable, by: GradientHooks | None = None) -> None:
    """Raise ``ValueError`` for a parameter that a living listener owns, except ``by``. ``names``: for the error."""
    for parameter in parameters:
        if _owners_of(parameter, by):
            raise ValueError(
                f"parameter {names.name_of(parameter)!r} of shape {list(parameter.shape)} already belongs to another "
                "DistributedOptimizer (of an earlier run of this cell, perhaps). Call close() of the other one first, "
                "or pass different parameters to each optimizer."
            )


class GradientHooks:
    """Post-accumulate hooks of one listener, one a parameter, for as long as the listener lives.

    ``register_post_accumulate_grad_hook`` fires after ``p.grad`` is complete for this backward pass, also for tied
    weights, survives ``model.to(dtype)``, and needs no reference to autograd nodes. The listener is held weakly, so
    that a dropped optimizer does not go on exchanging gradients.
    """

    def __init__(self, listener: GradientListener) -> None:
        self._listener = weakref.ref(listener)
        self._handles: MutableMapping[torch.Tensor, RemovableHandle] = WeakTensorKeyDictionary()  # by parameter
        self._shared: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()  # owned by others, too

    def attach(self, parameters: Iterable[torch.Tensor], names: ParameterTable, *, alone: bool = False) -> None:
        """Hook every parameter that has no hook of this listener yet. ``names``: for errors.

        Raises ``ValueError`` for one that another living listener owns. ``alone``: there are no other workers, so
        nothing has to be sent early. Then several listeners may own a parameter, each reads its gradient in its step,
        and none hooks it.
        """
        new = [parameter for parameter in parameters if parameter not in self._handles]
        if not alone:
            refuse_owned(new, names, self)
        for parameter in new:
            others = _owners_of(parameter, self)
            if others:
                self._share(parameter, others)
                continue
            hook = _hook(self._listener, names.name_of(parameter), streams_of(parameter.device))
            _owners[parameter] = [weakref.ref(self)]
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _share(self, parameter: torch.Tensor, others: list[GradientHooks]) -> None:
        """Make a parameter belong to several listeners, none of which is notified of its gradients."""
        for owner in others:
            owner._unhook(parameter)
        _owners[parameter] = [weakref.ref(owner) for owner in (*others, self)]
        self._shared[parameter] = None

    def _unhook(self, parameter: torch.Tensor) -> None:
        if parameter in self._handles:
            self._handles.pop(parameter).remove()
            self._shared[parameter] = None

    def remove(self) -> None:
        """Remove all hooks; parameters stay with their other owners."""
        for parameter in list(self._handles):
            self._unhook(parameter)
        for parameter in list(self._shared):
            _owners[parameter] = [weakref.ref(owner) for owner in _owners_of(parameter, self)]
        self._shared = WeakTensorKeyDictionary()


class HandedOver:
    """Handed-over gradients, by parameter in readiness order, each as backward left it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[torch.Tensor, torch.Tensor | None, int]] = {}  # parameter, gradient, its version
        self._sampled: dict[str, torch.Tensor] = {}  # some elements, of gradients with a version that may miss a change
        self._parts: set[str] = set()  # their gradients share a version with others
        self.overrun = False  # a backward pass too many has been refused, and it has changed some of them

    def add(self, name: str, parameter: torch.Tensor, *, own: bool = False) -> None:
        """Record ``parameter.grad`` and its version; ``own``: it was put there by the exchange.

        Some elements, too, of a DTensor, since ``torch._foreach_mul_`` does not raise its version, and of a view of a
        larger tensor, such as a flat buffer of all gradients: all its views have one version together.
        """
        gradient = parameter.grad
        self._seen[name] = (parameter, gradient, 0 if gradient is None else gradient._version)
        if gradient is None:
            return
        if hasattr(gradient, "to_local"):  # a DTensor
            self._sampled[name] = _sample(gradient)
        elif not own and _is_part(gradient):
            self._sampled[name] = _sample(gradient)
            self._parts.add(name)

    def refuse_more(self) -> None:
        """Record that a backward pass too many was refused: it has changed gradients that are on their way."""
        self.overrun = True

    def error(self, members: ParameterTable, step: int, remedy: str) -> AGMergeError | None:
        """Return the error of a script that has replaced, removed or written to a gradient since; None if it has not.

        ``step``: its number, and ``remedy``: advice for the script, both for the text.
        """
        changed = {
            name
            for name, (parameter, gradient, version) in self._seen.items()
            if parameter.grad is not gradient
            or (gradient is not None and gradient._version != version and name not in self._parts)
        }
        changed |= self._resampled()
        if not changed:
            return None
        names = [name for name in map(members.name_of, members.name_all()) if name in changed]
        return AGMergeError(CHANGED.format(step, and_more(names), remedy))

    def _resampled(self) -> set[str]:
        """Return the names of gradients with a sampled element that has other bits now. Waits for devices."""
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, then in self._sampled.items():
            parameter, gradient, version = self._seen[name]
            if gradient is None or parameter.grad is not gradient:
                continue
            if name not in self._parts or gradient._version != version:
                by_device.setdefault(then.device, {})[name] = _sample(gradient)
        changed: set[str] = set()
        for now in by_device.values():
            if not torch.equal(torch.cat([*now.values()]), torch.cat([self._sampled[name] for name in now])):
                changed |= {name for name in now if not torch.equal(now[name], self._sampled[name])}
        return changed

    def __contains__(self, name: str) -> bool:
        return name in self._seen

    def __len__(self) -> int:
        return len(self._seen)


def _is_part(gradient: torch.Tensor) -> bool:
    """Return whether a strided gradient may lie in memory that other tensors use as well.

    DTensors are not asked about.
    """
    if gradient.layout != torch.strided:
        return False
    return gradient._is_view() or gradient.untyped_storage().nbytes() > gradient.numel() * gradient.element_size()


def _sample(gradient: torch.Tensor) -> torch.Tensor:
    """Return the bytes of about SAMPLED elements of this rank's shard of a gradient, evenly spaced: uint8, 1-D."""
    flat = local_of(gradient).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].clone().view(torch.uint8)


def _hook(
    reference: weakref.ref[GradientListener], name: str, streams: Streams | None
) -> Callable[[torch.Tensor], None]:
    """Return the hook that notifies the listener, if it still lives, without gradient recording.

    ``streams``: of the parameter's device, where a backward pass may be captured in a graph.
    """

    def tell(parameter: torch.Tensor) -> None:
        listener = reference()
        if listener is None:
            return
        if streams is not None and streams.is_capturing():
            raise AGMergeError(CAPTURED.format(name))
        if torch.is_grad_enabled():  # under create_graph=True; elsewhere its context would be half the cost of a hook
            with torch.no_grad():
                listener.on_gradient(parameter, name)
        else:
            listener.on_gradient(parameter, name)

    apart = _disable_dynamo(tell)  # its effect depends on messages

    def hook(parameter: torch.Tensor) -> None:
        # The backward pass is called in a compiled function, which traces hooks. Elsewhere the wrapper would cost as
        # much as the hook: about 40 us for each gradient of a GPU, under a profiler with torch 2.11.
        if is_dynamo_compiling():
            apart(parameter)
        else:
            tell(parameter)

    return hook


class BackwardPasses:
    """Backward passes of the step under way, until its gradients are combined and it ends.

    ``members``: the parameters of the wrapped optimizer. ``participation``: of the exchange to which gradients go.
    Hooks on parameters call :meth:`on_gradient`.
    """

    def __init__(self, members: ParameterTable, participation: Participation) -> None:
        self._members, self._participation, self._exchange = members, participation, participation.exchange
        self.per_step = participation.exchange.agreed.config.sync.passes
        self.combined = False  # the gradients of the step are, and the step has not ended
        self.lock = threading.RLock()  # autograd runs the hooks of each device on a thread of its own
        self.scaling = LossScale(None)
        self.gradients = Gradients()  # as of the last agreement
        self._paused = False  # in no_sync()
        self._fired: dict[str, int] = {}  # passes since the last step
        self.handed_over = HandedOver()

    def on_gradient(self, parameter: torch.Tensor, name: str) -> None:
        """Collective. Count a gradient that was accumulated once more; send it after the last pass. Called by the hook.

        It runs for every tensor: keep it short.
        """
        with self.lock:
            if self.combined:
                self.discard()  # synchronize() without step(): the update is discarded
            if not self._fired:
                status.current().enter("is in a backward pass", self._exchange.agreed.step)
            if self._paused:
                if name in self.handed_over:
                    self.handed_over.refuse_more()
                    raise AssertionError(f"{NO_SYNC_LATE} Parameter: {name!r}.")
                self._fired.setdefault(name, 0)  # a step has begun: its gradients so far belong in a checkpoint
                return
            fired = self._fired.get(name, 0) + 1
            if fired != self.per_step:
                self._exchange.fault.check()
            if fired > self.per_step:
                self.handed_over.refuse_more()
                raise AssertionError(TOO_MANY.format(name, fired, self.per_step))
            self._fired[name] = fired
            if fired == self.per_step:
                self._hand_over(parameter, name)

    def _hand_over(self, parameter: torch.Tensor, name: str) -> None:
        gradient = self._gradient(parameter, name)
        held = self._exchange.ready(name, gradient)
        if held is not gradient:
            self.gradients.set(parameter, held)
        self.handed_over.add(name, parameter, own=held is not gradient)

    def _gradient(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        """Return this rank's gradient of a parameter, strided and without a loss scale; None while it has joined."""
        if self._participation.flag == Flag.JOINED:
            return None
        gradient = parameter.grad
        if hasattr(gradient, "to_local"):  # a DTensor; asked here, for a call a tensor would cost more
            gradient = gradient_of(parameter, name)
        if gradient is not None and gradient.layout != torch.strided:
            with self._exchange.fault.recording():  # the others do not hear of it
                gradient = self._members.make_dense(parameter, self._exchange.agreed.config.sync.sparse_as_dense)
        return gradient if self.scaling.scaler is None else self.scaling.divided(parameter, gradient)

    def late(self, name: str) -> torch.Tensor | None:
        """Return the gradient of a parameter that no hook has handed over."""
        assert self._exchange.agreed.buffers is not None
        buffers = self._exchange.agreed.buffers
        slot = buffers.slot_of[name]
        parameter = buffers.flat.parameters[slot.index]
        gradient = self._gradient(parameter, name)
        if gradient is not None and buffers.flat.will_overwrite(slot, gradient):
            # The last update, made zero by zero_grad(): sums may be written there, and the round be repeated.
            gradient = gradient.clone()
            self.gradients.set(parameter, gradient)
        return gradient

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count no backward pass inside, and send nothing: gradients only accumulate locally."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def set_per_step(self, passes: int) -> None:
        """Sum ``passes`` backward passes from the next step on."""
        self.check_idle("set_backward_passes_per_step()")
        self.per_step = passes

    def attach_scaler(self, scaling: LossScale) -> None:
        """Divide gradients by another loss scale from now on."""
        self.scaling = scaling

    def start_agreement(self) -> None:
        """Forget what belongs to the last agreement."""
        self.gradients = Gradients()

    # -- the end of a step ------------------------------------------------------------------------------------------

    def mark_combined(self) -> None:
        """Record that the gradients are combined: the next one begins another step."""
        self.combined = True

    @property
    def unfinished(self) -> bool:
        """Return whether gradients are on their way."""
        return len(self.handed_over) > 0 and not self.combined

    def missing(self) -> list[str]:
        """Return the names of parameters of which no gradient has been handed over."""
        return [member.name for member in self._exchange.agreed.members() if member.name not in self.handed_over]

    def check_idle(self, what: str) -> None:
        """Raise unless ``what`` may happen now: no backward pass waits for its ``synchronize()``."""
        if any(self._fired.values()) and not self.combined:
            raise AGMergeError(BETWEEN.format(what=what))

    def forget(self) -> None:
        """Forget the passes of the step under way: its gradients will be zeroed."""
        self._fired, self.handed_over = {}, HandedOver()

    def discard(self) -> None:
        """Discard the step: handed-over gradients are forgotten, and residuals stay as before it."""
        self._fired, self.handed_over, self.combined = {}, HandedOver(), False
        self.scaling.clear()
        self._exchange.discard()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def window(self) -> dict[torch.Tensor, int]:
        """Return how many backward passes each parameter has seen in this step; none after a broken exchange."""
        if self.combined or self._exchange.fault:
            return {}
        by_name = {self._members.name_of(parameter): parameter for parameter in self._members.name_all()}
        return {by_name[name]: fired for name, fired in self._fired.items()}

    def resume(self, parameter: torch.Tensor, fired: int) -> None:
        """Resume a step: ``parameter`` has seen ``fired`` backward passes already; its gradient is in ``p.grad``."""
        name = self._members.name_of(parameter)
        self._fired[name] = fired
        if fired == self.per_step:
            self._hand_over(parameter, name)
