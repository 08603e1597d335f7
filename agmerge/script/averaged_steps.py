# SPDX-License-Identifier: Apache-2.0
"""Checks that optimizers step with gradients that were averaged once: not by nobody, and not twice.

A parameter that was unfrozen, or put into the model, after the buckets were made is in none of them: ranks would train
different models. A forward pass that goes past the model, or through another one, fills no bucket at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from agmerge.backends import torch_calls, torch_objects
from agmerge.errors import DISTRIBUTED_DATA_PARALLEL, AGMergeError, and_more, warn
from agmerge.runtime import workers
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.parameters import ParameterTable, local_of

# Detection of a script or an optimizer that averages gradients by torch.distributed, beside this library.

LOOKS = 5  # first steps: those that average gradients do so in each
SHARE = 0.5  # of all elements: so many in tensors of the script's own, such as flattened gradients, are the gradients
TWICE = (
    "AGM136: {who} averages gradients by torch.distributed ({elements} elements per step), and so does "
    "DistributedOptimizer. Gradients are exchanged twice, once uncompressed. {remedy}"
)
OF_OPTIMIZER = (
    "Delete the all_reduce or reduce_scatter in its step(), or wrap the plain optimizer that it uses, such as "
    "torch.optim.AdamW. All ranks then step with the gradients that agmerge averaged."
)
OF_SCRIPT = "Delete it, and the division by the number of workers, because step() does both."


class AveragedTwice:
    """Watch of the first steps of the optimizer of ``members`` for sums of gradients among the ranks of ``exchange``.

    In each step :meth:`stepping` before the optimizer's own step, and :meth:`judge` after it.
    """

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, exchange
        self._looks = LOOKS
        self._in_step = False  # of the optimizer
        self._summed = {False: 0, True: 0}  # elements of gradients in this step, by `_in_step`
        self._others = {False: 0, True: 0}  # elements of other tensors
        self._end: Callable[[], None] | None = None  # of the watch; None: it has not begun

    def begin(self) -> None:
        """Begin to watch, once there are workers."""
        if self._end is None and self._looks:
            note = weakref.WeakMethod(self._note)
            self._end = torch_calls.watch(lambda ranks, tensors: _weakly(note, ranks, tensors), torch_calls.SUMS)
            weakref.finalize(self, self._end)

    def stepping(self) -> None:
        """Record that the optimizer begins its own step."""
        self._in_step = True

    def judge(self) -> None:
        """Warn, once, where gradients were summed since the last call. All ranks call it after a step."""
        if not self._looks:
            return
        self._looks -= 1
        total = sum(local_of(parameter).numel() for parameter in self._members.name_all())
        for in_step in (True, False):
            elements, others = self._summed[in_step], self._others[in_step]
            elements += others if others >= SHARE * total else 0
            if elements:
                kind = type(self._members.optimizer).__name__
                who = f"the optimizer, {kind}," if in_step else "the script"
                remedy = OF_OPTIMIZER if in_step else OF_SCRIPT
                self._looks = 0
                warn(TWICE.format(who=who, elements=elements, remedy=remedy), workers.rank())
                break
        self._in_step, self._summed, self._others = False, {False: 0, True: 0}, {False: 0, True: 0}
        if not self._looks and self._end is not None:
            self._end()

    def _note(self, ranks: list[int], tensors: list[torch.Tensor]) -> None:
        """Count a sum of the script's among ``ranks``, in ``tensors``."""
        chosen = self._exchange.agreed.config.sync.process_set.members
        if len(set(ranks).intersection(chosen or ranks)) < 2:
            return  # of shards, or of parts of a model: not among those that have the same parameters
        gradients = [local_of(p.grad) for p in self._members.name_all() if p.grad is not None]
        places = {gradient.data_ptr() for gradient in gradients if gradient.numel() > 1}
        elements = sum(tensor.numel() for tensor in tensors if tensor.data_ptr() in places)
        self._summed[self._in_step] += elements
        if not elements:
            self._others[self._in_step] += max((tensor.numel() for tensor in tensors), default=0)


def _weakly(note: weakref.WeakMethod[Any], *given: object) -> None:
    """Call a method while its object lives."""
    living = note()
    if living is not None:
        living(*given)


def check_not_averaged(members: ParameterTable) -> None:
    """Raise ``ValueError`` where DistributedDataParallel averages the gradients of ``members`` as well."""
    averaged = torch_objects.averaged(members.name_all())
    if averaged:
        raise ValueError(DISTRIBUTED_DATA_PARALLEL.format(name=averaged))


# Checks of gradients that come in the buckets of DistributedDataParallel.

UNFROZEN = (
    "AGM133: {optimizer} would step parameters whose gradients DistributedDataParallel does not average: {names}. "
    "They were frozen or missing when it was created. No parameter was stepped. Create DistributedDataParallel, and "
    "call compress(), after you unfreeze or replace parameters, or freeze them afterwards with "
    "find_unused_parameters=True."
)
APART = (
    "AGM135: {optimizer} steps {what}, which is not in DistributedDataParallel, so its gradient is not averaged (as "
    "without agmerge). If the parameter must be equal on all ranks, add it to the model. Otherwise ignore this "
    "warning."
)
PAST = (
    "AGM134: {optimizer} steps with gradients that this model has not averaged (for example {name!r}), so ranks train "
    "different models. Forward passes of model.module, or inside model.no_sync(), average nothing, as in plain "
    "DistributedDataParallel. Call the model itself."
)
ANEW = (
    "AGM134: The model that you passed to compress() is now in another DistributedDataParallel, which averages "
    "uncompressed gradients (for example {name!r}). Call compress() again with the new one."
)
_Seen = tuple["weakref.ref[torch.Tensor]", int]


@dataclass(frozen=True)
class AveragedModel:
    """Model with gradients that come in buckets, as checks of steps see it. Nothing here keeps it alive."""

    named: Callable[[], Iterable[tuple[str, torch.Tensor]]]  # all parameters that it has now, but for ignored ones
    ignored: Collection[torch.Tensor] = ()  # that it was told not to average
    itself: Callable[[], Any] = lambda: None  # the model
    is_compressed: Callable[[Any], bool] = lambda model: False  # whether gradients of another model are, too

    def others(self, parameter: torch.Tensor) -> list[Any]:
        """Return the other models that average the gradients of a parameter. Takes some ten milliseconds."""
        return [one for one in torch_objects.parallel_models([parameter]) if one is not self.itself()]


class AveragedSteps:
    """Check of the steps of all optimizers that have some of the ``members``, which ``model`` averages."""

    def __init__(self, exchange: GradientExchange, members: Iterable[torch.Tensor], model: AveragedModel) -> None:
        self._exchange, self._model = exchange, model
        self._members = {id(parameter) for parameter in members}
        self._known = self._members | {id(parameter) for parameter in model.ignored}
        # Parameters of no bucket that were asked about: whether another model averages them.
        self._apart: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._passes = 0  # that have filled the buckets
        # By optimizer, after its last step: how many passes there were, and which gradient it stepped with.
        self._after: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, _Seen]] = weakref.WeakKeyDictionary()
        self._said = False

    def count_pass(self) -> None:
        """Record that a pass has filled the buckets."""
        self._passes += 1

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters of ``optimizer``, which is about to step.

        Raises :class:`agmerge.AGMergeError` for gradients of parameters of the model that are in no bucket; warns once
        where plain DistributedDataParallel would go on.
        """
        if self._exchange.group.alone:
            return
        strange = [
            parameter
            for group in optimizer.param_groups
            if not self._known.issuperset(map(id, group["params"]))  # in C: this is asked in every step
            for parameter in group["params"]
            if id(parameter) not in self._known and parameter.grad is not None and parameter not in self._apart
        ]
        if strange:
            self._judge(optimizer, strange)
        passes, gradient = self._after.get(optimizer, (0, None))
        if passes == self._passes and not self._said:
            own = self._first(optimizer)
            if own is not None and not _is_same(own, gradient):
                self._tell(optimizer, own)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step of ``optimizer``."""
        own = self._first(optimizer)
        if own is not None:
            self._after[optimizer] = self._passes, _seen(own)

    def also_equal(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters of ``optimizer`` that are in no bucket, and the same on all ranks nevertheless.

        Those of the model, and those that another one averages. Others may be each rank's own.
        """
        inside = {id(parameter) for _, parameter in self._model.named()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = [parameter for parameter in parameters if id(parameter) not in self._known]
        return [one for one in others if id(one) in inside or one in self._apart and self._apart[one]]

    def _first(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        """Return the first parameter of ``optimizer`` that this model averages and that has a gradient."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in self._members:
                    return parameter  # type: ignore[no-any-return]
        return None

    def _judge(self, optimizer: torch.optim.Optimizer, strange: list[torch.Tensor]) -> None:
        """Raise or warn about parameters with gradients that are in no bucket."""
        inside = {id(parameter): name for name, parameter in self._model.named()}
        apart = [parameter for parameter in strange if not self._model.others(parameter)]
        unfrozen = [inside[id(parameter)] for parameter in apart if id(parameter) in inside]
        if unfrozen:
            raise AGMergeError(UNFROZEN.format(optimizer=type(optimizer).__name__, names=and_more(unfrozen)))
        for parameter in strange:
            self._apart[parameter] = not any(parameter is one for one in apart)
        if apart:
            what = f"a parameter of shape {list(apart[0].shape)}"
            warn(APART.format(optimizer=type(optimizer).__name__, what=what), self._rank())

    def _tell(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """Warn of a step with gradients that have filled no bucket, unless another compressed model averages them."""
        self._said, others = True, self._model.others(parameter)
        if any(map(self._model.is_compressed, others)):
            return
        name = next((name for name, one in self._model.named() if one is parameter), "")
        if others:
            warn(ANEW.format(name=name), self._rank())
        else:
            warn(PAST.format(optimizer=type(optimizer).__name__, name=name), self._rank())

    def _rank(self) -> int:
        comm = self._exchange.group.comm
        return 0 if comm is None else comm.rank


def _seen(parameter: torch.Tensor) -> _Seen:
    """Return the gradient of a parameter, which is not kept alive, and its version."""
    assert parameter.grad is not None
    return weakref.ref(parameter.grad), parameter.grad._version


def _is_same(parameter: torch.Tensor, seen: _Seen | None) -> bool:
    """Return whether a gradient is the object that was seen, with nothing written to it since.

    A new gradient may have the address of the last one: the object counts.
    """
    return seen is not None and seen[0]() is parameter.grad and seen[1] == getattr(parameter.grad, "_version", None)
