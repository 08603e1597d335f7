# SPDX-License-Identifier: Apache-2.0
"""Last backward pass of a model in buckets, until an optimizer steps with its update or the script drops that.

The pass ends before the script has decided: residuals and momenta of a parameter move when an optimizer has stepped it.
If it has not when the next pass comes, the script has thrown the update away (``zero_grad()``), and residuals are as
before the pass; or it accumulates, without ``no_sync()``, and the update is in the gradient of the next pass.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

from agmerge.errors import AGMergeError, warn
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.arena import MOMENTA
from agmerge.tensors.parameters import ParameterTable, optimizers_of

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
