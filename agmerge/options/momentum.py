"""Apply momentum before selection: the memory does, by the optimizer's groups, and the optimizer does not again.

``param_groups`` show the momentum that the script gave, to schedulers, hooks and checkpoints; only the arithmetic of
the inner optimizer's step sees 0.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import sparsifiers
from agmerge.ops import Average
from agmerge.tensors.dtensors import local_of
from agmerge.tensors.layout import Slot
from agmerge.tensors.parameters import ParameterTable, optimizers_of
from sparsifiers import Rate

Groups = Sequence[Mapping[str, Any]]

UNKNOWN = "{what}: pass optimizer=, the one that steps"
GONE = (
    "no group of {optimizer} has a momentum any more, and memory {memory!r} follows them: none is applied. If the "
    "groups are those of a checkpoint of SGD(momentum=0), give them the momentum again"
)
SHARDS = (
    "momentum buffers of {optimizer} are of whole tensors, and with exchange='two-level' a rank has shards of them: "
    "momentum starts from zero"
)


class Rates:
    """Momentum of ``optimizer``'s groups, for a memory that applies it in the optimizer's place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers_of(optimizer)  # their groups are read whenever a slot is asked for

    def by_slot(self, parameters: Sequence[torch.Tensor]) -> Callable[[Slot], Rate]:
        """Return a function from a slot to the present rate of its parameter's group; parameters keep their groups.

        ``parameters``: in the order of the slots.
        """
        place_of = {
            parameter: (optimizer, number)
            for optimizer in self._optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        places = [place_of[parameter] for parameter in parameters]

        def by_slot(slot: Slot) -> Rate:
            optimizer, number = places[slot.index]
            return rate(optimizer.param_groups[number])

        return by_slot


def rate(group: Mapping[str, Any]) -> Rate:
    """Return the momentum of a group of ``torch.optim.SGD``."""
    return _rate(float(group["momentum"]), bool(group["nesterov"]))


_rate = functools.lru_cache(Rate)  # one of a few, asked for in every step for every tensor


def applies(optimizer: torch.optim.Optimizer, groups: Groups | None = None) -> bool:
    """Return whether ``optimizer`` has a momentum that a memory can apply in its place: that of ``torch.optim.SGD``.

    ``groups``: its own, or those that it is about to load.
    """
    groups = optimizer.param_groups if groups is None else groups
    moving = [group for group in groups if group.get("momentum")]
    return bool(moving) and _is_sgd(optimizer) and not any(group.get("dampening") for group in moving)


def rates(
    optimizer: torch.optim.Optimizer | None, memory: sparsifiers.Memory, groups: Groups | None = None
) -> Rates | None:
    """Return the groups' momentum, which ``memory`` follows; None: it has its own, or none.

    Raises ``ValueError`` where both would apply one, or a memory cannot apply the groups'. ``groups``: those of
    ``optimizer`` (None: it is not known), or those that it is about to load.
    """
    if not memory.has_momentum:
        return None
    if optimizer is None:
        raise ValueError(UNKNOWN.format(what=f"{memory} applies the momentum of the optimizer before selection"))
    groups = optimizer.param_groups if groups is None else groups
    kind = type(optimizer).__name__
    for number, group in enumerate(groups):
        if "betas" in group:
            raise ValueError(
                f"{memory} applies momentum before selection, and {kind} has its own (betas, group {number}): pass "
                "memory='residual'"
            )
    moving = [number for number, group in enumerate(groups) if group.get("momentum")]
    if not moving:
        return None
    both = f"{memory} applies momentum before selection, and group {moving[0]} of {kind} has "
    both += f"momentum={groups[moving[0]]['momentum']} too"
    if not _is_sgd(optimizer):
        raise ValueError(
            f"{both}: only that of torch.optim.SGD can be applied in its place. Set it to 0, or pass memory='residual'"
        )
    if not memory.follows:
        raise ValueError(
            f"{both}: say it in one place. Leave momentum out of the memory, memory=sparsifiers.memory('dgc'), which "
            f"then applies the optimizer's, or make it SGD(momentum=0)"
        )
    _check_dampening(groups)
    if memory.options().get("nesterov") and not all(groups[number].get("nesterov") for number in moving):
        raise ValueError(f"{both}, without nesterov: say it in one place, SGD(nesterov=True)")
    return Rates(optimizer)


@contextmanager
def withheld(exchange: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep a step of ``optimizer``, inside, from applying momentum that a memory has applied; its hooks see it.

    ``exchange``: a ``GradientExchange``. Raises ``ValueError`` if the groups have got a momentum that the memory does
    not follow, and warns on rank 0 where no group has a momentum any more.
    """
    if not _has_applied(exchange, optimizer):
        yield
        return
    with ExitStack() as steps:
        for each in optimizers_of(optimizer):
            steps.enter_context(_withheld_from(each))
        yield


@contextmanager
def _withheld_from(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep a step of one optimizer, inside, from applying momentum; its hooks see it."""
    hidden = _Hidden(optimizer)
    last, first = optimizer.register_step_pre_hook(hidden.hide), optimizer.register_step_post_hook(hidden.show)
    hooks: Any = first.hooks_dict_ref()
    hooks.move_to_end(first.id, last=False)
    try:
        yield
    finally:
        hidden.show()  # the step has raised
        last.remove()
        first.remove()


def withhold(exchange: Any, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Withhold applied momentum, as :func:`withheld`, from every step of the script's; return a function that ends it.

    Hooks before the step that are registered later see no momentum. Of several optimizers each is stepped by itself.
    """
    ends = [_withhold_from(each, lambda: _has_applied(exchange, optimizer)) for each in optimizers_of(optimizer)]

    def end() -> None:
        for each in ends:
            each()

    return end


def _withhold_from(optimizer: torch.optim.Optimizer, has_applied: Callable[[], bool]) -> Callable[[], None]:
    """Withhold applied momentum from every step of one optimizer; return a function that ends it."""
    hidden = _Hidden(optimizer)

    def hide(*_: Any) -> None:
        hidden.show()  # the step before has raised
        if has_applied():
            hidden.hide()

    handles = [optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(hidden.show)]

    def end() -> None:
        hidden.show()
        for handle in handles:
            handle.remove()

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


def _has_applied(exchange: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a memory has applied ``optimizer``'s momentum in this step. Raises as :func:`withheld` does."""
    memory = exchange.config.compression.memory
    if not memory.has_momentum or exchange.outside:
        return False
    if exchange.config.compression.rates is None:
        if rates(optimizer, memory) is not None:
            raise ValueError(
                f"a group of {type(optimizer).__name__} has got a momentum, and {memory} applies its own, 0.9, before "
                "selection: set it back to 0, or call "
                f"set_compressor({exchange.config.compression.compressor.name!r}) on every rank"
            )
        return False
    _check_dampening(optimizer.param_groups)
    if exchange.comm.rank == 0 and not any(group["momentum"] for group in optimizer.param_groups):
        warnings.warn(GONE.format(memory=memory.name, optimizer=type(optimizer).__name__), stacklevel=5)
    return True


def take_over(exchange: Any, members: ParameterTable, optimizer: torch.optim.Optimizer) -> None:
    """Make the momentum buffers of ``optimizer`` the memory's momentum, before the next agreement.

    ``exchange``: a ``GradientExchange``; ``members``: the parameters that are exchanged, all of them the optimizer's.

    It is the same recursion. The buffers are averages (or sums) over all ranks and alike on all of them: where updates
    are averages every rank takes them; where they are sums rank 0 does, so that they count once.
    """
    if exchange.config.compression.rates is None or exchange.comm is None or exchange.agreed:
        return
    dropped = False
    for parameter, group in [(p, its_group) for its_group in optimizer.param_groups for p in its_group["params"]]:
        state = optimizer.state.get(parameter, {})
        buffer = state.pop("momentum_buffer", None)
        if not state:
            optimizer.state.pop(parameter, None)
        if buffer is None or not local_of(buffer).any():
            continue  # torch.distributed.checkpoint makes empty ones: they are no momentum in place of a loaded one
        dropped |= exchange.shard is not None
        own_part = None  # this rank's share of it
        if exchange.shard is None and (exchange.config.sync.op is Average or exchange.comm.rank == 0):
            factor, nesterov = rate(group)
            own_part = local_of(buffer)
            own_part = own_part * factor if nesterov else own_part  # nesterov's has its factor in DGCMemory
        exchange.carry("momentum", members.name_of(parameter), own_part)  # in place of an older one
    if dropped and exchange.comm.rank == 0:
        warnings.warn(SHARDS.format(optimizer=type(optimizer).__name__), stacklevel=4)


def _is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step is that of ``torch.optim.SGD``, of several each; others use momenta otherwise."""
    return all(
        isinstance(each, torch.optim.SGD) and inspect.unwrap(type(each).step) is inspect.unwrap(torch.optim.SGD.step)
        for each in optimizers_of(optimizer)
    )


def _check_dampening(groups: Groups) -> None:
    """Raise ``ValueError`` for a group with a momentum that has dampening."""
    for number, group in enumerate(groups):
        if group.get("momentum") and group.get("dampening"):
            raise ValueError(
                f"group {number} has dampening={group['dampening']}: momentum is applied before selection, and there "
                "without dampening. Set dampening=0, or pass memory='residual'"
            )
