# SPDX-License-Identifier: Apache-2.0
"""Hooks around the steps of an optimizer that a script or a framework calls.

They do the work of ``sync="updates"``, withhold momentum that a memory has applied, and know nested calls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import AGMergeError
from agmerge.ops import Average
from agmerge.options.momentum import check_dampening, rate, rates
from agmerge.script.seen_steps import after_closure
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import ParameterTable, local_of, optimizers_of
from agmerge.updates.local_replica import OwnStep, not_finite, unscale

# Nested calls of a step, of which the outermost counts, so that later actions happen once.
#
# torch runs the hooks of a step around the ``step`` of every class of which there has been an object. So where a
# subclass calls ``super().step()`` they run twice, or once, depending on the other optimizers that the process has
# made.


class OutermostStep:
    """Call of one optimizer's ``step`` that is under way, known by its frame.

    A step that raises runs no hook at its end, so calls cannot be counted: a frame that is not among the callers has
    ended.
    """

    def __init__(self) -> None:
        self._frame: FrameType | None = None  # of the call that runs hooks; None: there is none under way

    def begins(self) -> bool:
        """Return whether the step that begins is not inside another one. For a hook before it, and no other caller."""
        calling = _hook_runner()
        outer = calling.f_back
        while self._frame is not None and outer is not None:
            if outer is self._frame:
                return False
            outer = outer.f_back
        self._frame = calling
        return True

    def ends(self) -> bool:
        """Return whether the step that ends was not inside another one. For a hook after it, and no other caller."""
        if self._frame is not _hook_runner():
            return False
        self._frame = None
        return True


def _hook_runner() -> FrameType:
    """Return the frame that has called the hook that has called a method above."""
    return sys._getframe(3)


# Momentum that a memory has applied before selection, and that the inner optimizer does not apply again.
#
# ``param_groups`` show the momentum that the script gave, to schedulers, hooks and checkpoints; only the arithmetic of
# the inner optimizer's step sees 0.

GONE = (
    "AGM405: No parameter group of {optimizer} has a momentum any more, so memory={memory!r} applies none. If the "
    "groups were loaded from a checkpoint of SGD(momentum=0), set the momentum again."
)
SHARDS = (
    "AGM405: The momentum buffers of {optimizer} are for full tensors, but each rank holds shards with "
    "exchange='two-level'. Momentum is reset to zero."
)


@contextmanager
def withheld(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep a step of ``optimizer``, inside, from applying momentum that a memory has applied; its hooks see it.

    Raises ``ValueError`` if the groups have got a momentum that the memory does not follow, and warns on rank 0 where
    no group has a momentum any more.
    """
    if not _has_applied(exchange, optimizer):
        yield
        return
    with ExitStack() as steps:
        for each in optimizers_of(optimizer):
            steps.callback(_withhold_from(each, lambda: True))
        yield


def withhold(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Withhold applied momentum, as :func:`withheld`, from every step of the script's; return a function that ends it.

    Hooks before the step that are registered later see no momentum. Of several optimizers each is stepped by itself.
    """
    ends = ExitStack()
    for each in optimizers_of(optimizer):
        ends.callback(_withhold_from(each, lambda: _has_applied(exchange, optimizer)))
    return ends.close


def _withhold_from(optimizer: torch.optim.Optimizer, has_applied: Callable[[], bool]) -> Callable[[], None]:
    """Withhold applied momentum from every step of one optimizer; return a function that ends it."""
    hidden = _Hidden(optimizer)

    def hide_now() -> None:
        hidden.show()  # the step before has raised
        if has_applied():
            hidden.hide()

    def hide(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(hide_now, args, kwargs)  # backward passes in a closure apply it before selection

    last, first = optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(hidden.show)
    hooks: Any = first.hooks_dict_ref()
    hooks.move_to_end(first.id, last=False)  # those of the script see the momentum, before the step and after it

    def end() -> None:
        hidden.show()  # the step has raised
        last.remove()
        first.remove()

    return end


class _Hidden:
    """Momentum of an optimizer's groups, while it is taken out of them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._values: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of each group, while they are hidden

    def hide(self, *_: Any) -> None:
        for group in self._optimizer.param_groups:
            self._values.append((group, {name: group[name] for name in ("momentum", "nesterov")}))
            group.update(momentum=0.0, nesterov=False)

    def show(self, *_: Any) -> None:
        while self._values:  # once: changes by a later hook are the script's
            group, values = self._values.pop()
            group.update(values)


def _has_applied(exchange: GradientExchange, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a memory has applied ``optimizer``'s momentum in this step. Raises as :func:`withheld` does."""
    memory = exchange.agreed.config.compression.memory
    if not memory.has_momentum or exchange.group.outside:
        return False
    if exchange.agreed.config.compression.rates is None:
        if rates(optimizer, memory) is not None:
            raise ValueError(
                f"a parameter group of {type(optimizer).__name__} now has a momentum, but {memory} applies its own, "
                "0.9, before selection. Set it back to 0, or call "
                f"set_compressor({exchange.agreed.config.compression.compressor.name!r}) on every rank."
            )
        return False
    check_dampening(optimizer.param_groups)
    rank_0 = exchange.group.comm is not None and exchange.group.comm.rank == 0
    if rank_0 and not any(group["momentum"] for group in optimizer.param_groups):
        warnings.warn(GONE.format(memory=memory.name, optimizer=type(optimizer).__name__), stacklevel=5)
    return True


def take_over(exchange: GradientExchange, members: ParameterTable, optimizer: torch.optim.Optimizer) -> None:
    """Make the momentum buffers of ``optimizer`` the memory's momentum, before the next agreement.

    ``members``: the parameters that are exchanged, all of them the optimizer's.

    It is the same recursion. The buffers are averages (or sums) over all ranks and alike on all of them: where updates
    are averages every rank takes them; where they are sums rank 0 does, so that they count once.
    """
    if exchange.agreed.config.compression.rates is None or exchange.group.comm is None or exchange.agreed.is_valid:
        return
    dropped = False
    for parameter, group in [(p, its_group) for its_group in optimizer.param_groups for p in its_group["params"]]:
        state = optimizer.state.get(parameter, {})
        buffer = state.pop("momentum_buffer", None)
        if not state:
            optimizer.state.pop(parameter, None)
        if buffer is None or not local_of(buffer).any():
            continue  # torch.distributed.checkpoint makes empty ones: they are no momentum in place of a loaded one
        dropped |= exchange.group.shard is not None
        own_part = None  # this rank's share of it
        if exchange.group.shard is None and (
            exchange.agreed.config.sync.op is Average or exchange.group.comm.rank == 0
        ):
            factor, nesterov = rate(group)
            own_part = local_of(buffer)
            own_part = own_part * factor if nesterov else own_part  # nesterov's has its factor in DGCMemory
        exchange.agreed.carried.stash("momentum", members.name_of(parameter), own_part)  # in place of an older one
    if dropped and exchange.group.comm.rank == 0:
        warnings.warn(SHARDS.format(optimizer=type(optimizer).__name__), stacklevel=4)


# Exchanges around steps, for ``sync="updates"``.

TWICE = (
    "AGM122: {early} stepped twice before {late} stepped once. With sync='updates', call step() of every optimizer "
    "exactly once per training step. Otherwise use sync='gradients'."
)


def follow(reducer: UpdateReducer, check: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Exchange the updates of the optimizer of ``reducer`` whenever it steps; return a function that ends that.

    Each of several optimizers steps by itself, in any order, and their updates are exchanged together when each of them
    has stepped once. Each step is collective. The optimizer objects stay the same for schedulers, frameworks and
    checkpoints. An optimizer with a gradient that is infinite or NaN moves nothing: it is given no gradients then.
    ``check`` is called before each step, and raises where there should be none.
    """
    together = _Together(reducer, check)
    ends = [_follow_one(optimizer, together) for optimizer in optimizers_of(reducer.members.optimizer)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _follow_one(optimizer: Any, together: _Together) -> Callable[[], None]:
    """Register hooks on the steps of one optimizer; return a function that removes them."""
    # A GradScaler calls optimizers that check for infinities themselves even if there are some. Else a step that it
    # leaves out on one rank would have no hooks there, and the others would wait for it.
    looks_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True
    step, outermost = _Step(together.reducer.members, optimizer, looks_itself), OutermostStep()

    def before(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not outermost.begins():
            return args, kwargs
        together.check(optimizer)
        args, kwargs = _closed(args, kwargs)
        together.begin()
        if step.begin():
            together.reducer.stepping(optimizer)
        return args, kwargs

    def after(*_: object) -> None:
        if outermost.ends():
            together.end(optimizer, step.end())

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def end() -> None:
        for handle in handles:
            handle.remove()
        if not looks_itself:
            del optimizer._step_supports_amp_scaling

    return end


class _Together:
    """Steps of all optimizers together: how many have stepped, and when the common step begins and ends."""

    def __init__(self, reducer: UpdateReducer, check: Callable[[], None]) -> None:
        self.reducer, self._check = reducer, check
        self._optimizers = optimizers_of(reducer.members.optimizer)
        self._steps: dict[int, OwnStep] = {}  # of those that have stepped since the last exchange was due, by identity

    def check(self, optimizer: Any) -> None:
        """Raise :class:`agmerge.AGMergeError` unless ``optimizer`` may step now."""
        self._check()
        if id(optimizer) in self._steps:
            names = {id(each): f"optimizers[{i}] ({type(each).__name__})" for i, each in enumerate(self._optimizers)}
            late = " and ".join(name for key, name in names.items() if key not in self._steps)
            raise AGMergeError(TWICE.format(early=names[id(optimizer)], late=late))

    def begin(self) -> None:
        """Collective. Begin a common step before the first of the optimizers moves its parameters.

        Before a later one steps, use parameters that needed no gradient when the first one did.
        """
        if not self._steps:
            self.reducer.before_step()
        else:
            self.reducer.use_present()

    def end(self, optimizer: Any, step: OwnStep) -> None:
        """Collective. Record a step of ``optimizer``; after that of the last one count it, and make the exchange due.

        Raises as :meth:`UpdateReducer.after_step` does.
        """
        self._steps[id(optimizer)] = step
        if len(self._steps) < len(self._optimizers):
            return
        steps, self._steps = self._steps.values(), {}
        left_out = [each for each in steps if not each.stepped]
        bad = tuple(name for each in left_out for name in each.bad)
        scaled = all(each.scaled for each in left_out)
        self.reducer.after_step(OwnStep(stepped=not left_out, scaled=scaled, bad=bad))


def _closed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step after calling its closure, which makes the gradients to be checked."""
    optimizer, *given = args  # a closure is the first argument, or has its name
    closure = given[0] if given else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (optimizer, lambda: loss, *given[1:]), rest


class _Step:
    """Check of the gradients of each step of an optimizer, which withholds them from a step that is to do nothing.

    ``looks_itself``: the optimizer reads a GradScaler's scale and finding as attributes.
    """

    def __init__(self, members: ParameterTable, optimizer: Any, looks_itself: bool) -> None:
        self._members, self._optimizer, self._looks_itself = members, optimizer, looks_itself
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # by parameter, while withheld
        self._of_scaler: dict[str, Any] = {}  # attributes of the optimizer that a GradScaler has set, likewise
        self._bad: tuple[str, ...] = ()  # names of parameters with gradients that are not finite
        self._is_made = True  # False: nothing moves
        self._is_scaled = False  # a GradScaler steps

    def begin(self) -> bool:
        """Withhold all gradients from the optimizer if one is infinite or NaN; return whether it has them.

        Waits once for a device.
        """
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        attributes = vars(self._optimizer)
        self._is_scaled, self._bad = "found_inf" in attributes, ()
        if not self._is_scaled:
            self._bad = not_finite(self._members, parameters)
            self._is_made = not self._bad
        elif self._looks_itself:
            self._is_made = True  # by the optimizer, perhaps in vain: see end()
        else:
            self._of_scaler = {name: attributes.pop(name) for name in ("found_inf", "grad_scale")}
            self._is_made = not self._of_scaler["found_inf"].item()
            if self._is_made:
                unscale(self._optimizer, self._of_scaler["grad_scale"])
        held = [] if self._is_made else parameters
        self._gradients = [(parameter, parameter.grad) for parameter in held]
        for parameter in held:
            parameter.grad = None
        return self._is_made

    def end(self) -> OwnStep:
        """Put gradients and attributes back; return the result of the step."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        vars(self._optimizer).update(self._of_scaler)
        if self._is_scaled and self._looks_itself:
            self._is_made = not self._optimizer.found_inf.item()  # asked once the step is queued
        self._gradients, self._of_scaler = [], {}
        return OwnStep(stepped=self._is_made, scaled=self._is_scaled, bad=self._bad)
