# SPDX-License-Identifier: Apache-2.0
"""Gradients with a loss scale (``torch.amp.GradScaler``), and sparse gradients (``torch.optim.SparseAdam``).

Residuals have no scale, ``p.grad`` has it, so that recipes need no change: a gradient is divided by the scale when it
is handed over, and the combined update multiplied by it. Changes of the scale then do not reach residuals, and the
scaler finds the gradients that it expects: with its scale, and the same on all ranks.
"""

from __future__ import annotations

import io
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from agmerge.backends import Backend
from agmerge.backends.handshake import gather_texts
from agmerge.errors import AGMergeError, NonFiniteError, and_more
from agmerge.metrics.totals import Totals
from agmerge.ops import Average
from agmerge.step.config import Config
from agmerge.tensors.nonfinite import KEEP, RAISE, is_finite
from agmerge.tensors.parameters import ParameterInfo, ParameterTable, local_of, optimizers_of

# Sparse gradients of an optimizer that accepts no others: all ranks' indices and values are gathered.
#
# That is ``torch.optim.SparseAdam``, for embeddings with ``sparse=True``. As in Horovod, gathered values are added up;
# they are not compressed, not merged, and leave no residual. Gradients of sparse layout elsewhere, where the optimizer
# accepts dense ones too, are made dense, or are an error.

NOT_FINITE = (
    "AGM106: Gradients are infinite or NaN: {where}. Parameters and residuals are unchanged. Call zero_grad() to "
    "continue without this step, or pass nonfinite='skip' to skip such steps."
)


def takes_sparse_alone(optimizer: object) -> bool:
    """Return whether an optimizer refuses dense gradients."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def gathered_of(members: ParameterTable) -> list[torch.Tensor]:
    """Return the parameters with gathered gradients, in the order of the groups."""
    taking = [each for each in optimizers_of(members.optimizer) if takes_sparse_alone(each)]
    return [parameter for each in taking for group in each.param_groups for parameter in group["params"]]


class DenseTable:
    """Table of the parameters that are exchanged in merge buffers: all but those with gathered gradients."""

    def __init__(self, members: ParameterTable) -> None:
        self._members = members

    def active(self) -> list[ParameterInfo]:
        """Return the parameters that take part now, in the order of the groups."""
        left_out = set(gathered_of(self._members))
        return [member for member in self._members.active() if member.parameter not in left_out]

    def names(self) -> set[str]:
        """Return the names of all parameters of the optimizer."""
        return self._members.names()

    def snapshot(self) -> object:
        """Return the table's snapshot: where it changes, ranks have to agree again."""
        return self._members.snapshot()


class GatheredGradients:
    """Exchange of the sparse gradients of those parameters of ``members`` that :func:`gathered_of` returns."""

    def __init__(self, members: ParameterTable) -> None:
        self._members = members

    def combine(self, comm: Backend, config: Config, totals: Totals, *, joined: bool) -> bool:
        """Collective. Make every such ``p.grad`` the average or sum over ranks; None where no rank has a gradient.

        Values are added in rank order, on the host, so that all ranks have the same bits. ``joined``: this rank has no
        gradients. Returns False where a step is to be skipped, according to ``config.guards.nonfinite``: gradients are
        infinite then. Raises :class:`agmerge.NonFiniteError`, the same on every rank, or ``ValueError`` for a dense
        gradient.
        """
        parameters = gathered_of(self._members)
        own = {} if joined else {number: self._own(p) for number, p in enumerate(parameters) if p.grad is not None}
        file = io.BytesIO()
        torch.save(own, file)
        totals.sent(len(file.getvalue()), sum(gradient["values"].numel() for gradient in own.values()))
        texts = gather_texts(comm, file.getvalue(), "sparse gradients", config.guards.timeout)
        ranks = [torch.load(io.BytesIO(text), weights_only=True) for text in texts]
        problems = {rank: said for rank, gradients in enumerate(ranks) if (said := self._not_finite(gradients))}
        if problems and config.guards.nonfinite == RAISE:
            where = "; ".join(f"rank {rank}: {and_more(names)}" for rank, names in problems.items())
            raise NonFiniteError(NOT_FINITE.format(where=where), where)
        if config.guards.nonfinite == KEEP:
            problems = {}
        factor = 1.0 / comm.size if config.sync.op is Average else 1.0
        for number, parameter in enumerate(parameters):
            given = [gradients[number] for gradients in ranks if number in gradients]
            parameter.grad = _added(parameter, given, float("inf") if problems else factor) if given else None
        return not problems

    def _own(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the indices and values of this rank's gradient, on the host, coalesced."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.sparse_coo:
            raise ValueError(
                f"parameter {self._members.name_of(parameter)!r} has a gradient of layout {gradient.layout}, but "
                "SparseAdam requires sparse gradients. Create the embedding with sparse=True, or use Adam for it."
            )
        whole = gradient.detach().coalesce().cpu()
        return {"indices": whole.indices(), "values": whole.values()}

    def _not_finite(self, gradients: dict[int, dict[str, torch.Tensor]]) -> list[str]:
        """Return the names of a rank's gradients that are infinite or NaN."""
        parameters = gathered_of(self._members)
        return [self._members.name_of(parameters[n]) for n, g in gradients.items() if not is_finite(g["values"])]


def _added(parameter: Any, gradients: list[dict[str, torch.Tensor]], factor: float) -> torch.Tensor:
    """Return the sum of ``gradients``, of all ranks in order, times ``factor``: sparse, on the parameter's device."""
    indices = torch.cat([gradient["indices"] for gradient in gradients], dim=1)
    values = torch.cat([gradient["values"] for gradient in gradients]) * factor
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce().to(parameter.device)


# Loss scales.

NOT_ATTACHED = (
    "AGM115: GradScaler.step(): the scaler is not attached. Pass scaler=scaler to DistributedOptimizer, or call "
    "optimizer.attach_scaler(scaler), on every rank."
)
NOT_BY_SCALER = (
    "AGM115: step(): the gradients still contain the scale of the attached GradScaler. Call scaler.step(optimizer), "
    "then scaler.update()."
)
NOT_GIVEN = (
    "AGM602: The script scales its loss with a GradScaler that compress() does not know, so residuals would contain "
    "its changing scale. No parameter was stepped. Pass it on every rank: agmerge.integrations.ddp.compress(model, "
    "optimizer=optimizer, scaler=scaler)."
)
SCALERS = os.path.join("amp", "grad_scaler.py")  # the end of the path of torch's file
DEEP = 8  # calls, from GradScaler.step() to a hook of the optimizer's step


def check_dtypes(members: ParameterTable, scaled: bool) -> None:
    """Raise ``ValueError`` for a parameter with gradients that no GradScaler accepts. ``scaled``: there is one."""
    for parameter in members.name_all() if scaled else ():
        if parameter.dtype == torch.float16:
            raise ValueError(
                f"parameter {members.name_of(parameter)!r} is torch.float16, which GradScaler does not support. Keep "
                "parameters in float32 and use torch.autocast for float16."
            )


class LossScale:
    """Loss scale of one scaler (None: there is none), taken off gradients and given back to updates."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        self.combined = False  # the gradients of this step were combined because the scaler asked, or for a clipping
        self._divided: set[int] = set()  # by identity of the parameter: a repeated attempt asks again
        self._inverses: dict[torch.device, torch.Tensor] = {}  # 1 / scale, of this step

    def divided(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return the gradient without the scale: divided in place, once a step. Waits for no device."""
        scale = self._scale()
        if gradient is None or scale is None or id(parameter) in self._divided:
            return gradient
        self._divided.add(id(parameter))
        if gradient.device not in self._inverses:  # as GradScaler.unscale_ does; the scale changes between steps
            self._inverses[gradient.device] = scale.double().reciprocal().float().to(gradient.device)
        return gradient.mul_(self._inverses[gradient.device])

    def multiply(self, updates: Iterable[torch.Tensor]) -> None:
        """Multiply updates by the scale, in place."""
        scale = self._scale()
        if scale is not None:
            for update in map(local_of, updates):
                update.mul_(scale.to(update.device))

    def clear(self) -> None:
        """Forget the step, which has ended or comes to nothing."""
        self._divided, self._inverses, self.combined = set(), {}, False

    def mark_combined(self) -> None:
        """Record that the gradients of this step were combined because the scaler asked, or for a clipping."""
        self.combined = True

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the scaler, if there is one, unscale the gradients of ``optimizer``, once a step."""
        if self.scaler is None:
            return
        state = self.scaler._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})
        if state["stage"] is OptState.READY:
            self.scaler.unscale_(optimizer)

    def check_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        """Raise unless ``optimizer`` steps because the scaler, if there is one, calls it."""
        if self.scaler is None:
            return
        if closure is not None:
            raise ValueError(
                "step(closure) is not supported with a GradScaler, because the closure's loss would not be scaled. "
                "Remove the closure or the scaler."
            )
        state = self.scaler._per_optimizer_states.get(id(optimizer), {"stage": OptState.READY})
        if state["stage"] is not OptState.UNSCALED:
            raise AGMergeError(NOT_BY_SCALER)

    def _scale(self) -> torch.Tensor | None:
        return None if self.scaler is None else self.scaler._get_scale_async()


class UnscaleHook:
    """Replacement of an attached scaler's ``unscale_``, which combines the gradients of ``optimizer`` first.

    The plain recipe calls it right after ``backward()``, by itself or in ``scaler.step(optimizer)``, when ``p.grad`` is
    still this rank's own. Clipping and the check for infinities have to see the combined gradients.
    """

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: Any, combine: Callable[[Any], None]) -> None:
        """Call ``combine`` first, a bound method that takes the scaler. It and ``optimizer`` are held weakly."""
        self._scaler, self._before = scaler, scaler.unscale_
        self._optimizer, self._combine = weakref.ref(optimizer), weakref.WeakMethod(combine)

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective. Combine the gradients of ``optimizer`` if it is the one attached, and unscale them."""
        combine = self._combine()
        if optimizer is self._optimizer() and combine is not None:
            combine(self._scaler)
        self._before(optimizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the scaler has no optimizer yet.
        return _plain, (self._scaler,)


def _plain(scaler: torch.amp.GradScaler) -> Any:
    """Return the scaler's own ``unscale_``. Pickles of scalers call this."""
    return types.MethodType(type(scaler).unscale_, scaler)


def refuse_unknown(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Raise :class:`agmerge.AGMergeError` in the first step of ``optimizer``, if a GradScaler makes it.

    For reducers that were given no scaler. Returns a function that ends it.
    """
    known = False  # that there is none

    def before(*_: Any) -> None:
        nonlocal known
        if not known and _scaler_steps():
            raise AGMergeError(NOT_GIVEN)
        known = True

    return optimizer.register_step_pre_hook(before).remove


def _scaler_steps() -> bool:
    """Return whether the optimizer's step that has called here was called by an enabled GradScaler."""
    frame, left = sys._getframe(1).f_back, DEEP
    while frame is not None and left:
        scaler, left = frame.f_locals.get("self"), left - 1
        if isinstance(scaler, torch.amp.GradScaler) and frame.f_code.co_filename.endswith(SCALERS):
            return scaler.is_enabled()
        frame = frame.f_back
    return False
