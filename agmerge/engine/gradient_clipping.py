# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm that the averaged gradient has, in each mode of synchronization.

With ``sync="gradients"`` that is the norm of ``p.grad`` once it is combined. With ``sync="updates"`` a worker has its
own gradient alone, which is noisier than the mean of all: its norm is larger by a factor that the reducer estimates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.nn.utils import clip_grad_norm_

from agmerge.engine.optimizer_wrapper import AnyReducer
from agmerge.tensors.parameters import is_dtensor


def clip(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    ratio: float = 1.0,
) -> torch.Tensor:
    """Scale gradients down, in place, where ``ratio`` times their total norm exceeds ``max_norm``; return the product.

    Equals ``torch.nn.utils.clip_grad_norm_`` bitwise if ``ratio`` is 1. Sparse gradients count too, with duplicate
    indices added up. Of DTensors the norm is that of the full tensors, which is a collective among their ranks. Returns
    a tensor of shape (), on the device of the first gradient. Raises ``RuntimeError`` for a norm that is not finite, if
    ``error_if_nonfinite``.
    """
    holders = [_strided(parameter) for parameter in parameters]
    norm: Any = clip_grad_norm_(holders, max_norm / ratio, norm_type, error_if_nonfinite)
    norm = norm.full_tensor() if is_dtensor(norm) else norm
    return norm if ratio == 1.0 else norm * ratio  # type: ignore[no-any-return]


def _strided(parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a strided ``grad``: ``parameter``, or the values of its sparse gradient, made unique."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.sparse_coo:
        return parameter
    with torch.no_grad():
        parameter.grad = gradient = gradient.coalesce()
        values = gradient._values()
    holder = values.detach()
    holder.grad = values
    return holder


def check_max_norm(max_norm: float) -> None:
    """Raise ``ValueError`` for a bound that is negative or NaN."""
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm={max_norm}: expected a number that is not negative")


def begin_clipping(reducer: AnyReducer, parameters: Iterable[torch.Tensor]) -> float:
    """Return the norm of the averaged gradient, relative to that of ``p.grad``: these ``parameters`` will be clipped.

    1.0 where they are not the reducer's. Gradients are not combined here.
    """
    if reducer.combines_gradients:
        return 1.0
    own = set(reducer.members.name_all())
    if not any(parameter in own for parameter in parameters):
        return 1.0
    reducer.prepare_clipping(None)
    return reducer.norm_ratio


class ClippingMixin:
    """Method to clip gradients, for all that exchanges for a script."""

    _reducer: AnyReducer

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Collective. Clip the gradients as ``torch.nn.utils.clip_grad_norm_`` clips averaged gradients.

        Call it between ``backward()`` and ``step()``, on every rank. It synchronizes first, and the ``step()`` that
        follows does not synchronize again. An attached ``GradScaler`` unscales the gradients before. With
        ``sync="updates"`` nothing is communicated: each worker clips its own gradients, with the norm that is estimated
        for the average. Call ``scaler.unscale_(optimizer)`` before, if you use a scaler there.

        Args:
            max_norm (float): Upper bound of the norm. ``float("inf")`` only measures it.
            norm_type (float): The p of the p-norm. ``float("inf")`` is the maximum norm. Default: 2.0.
            error_if_nonfinite (bool): Raise ``RuntimeError`` if the norm is infinite or NaN. Default: False.

        Returns:
            The norm of the averaged gradients before clipping, a tensor of shape ``()``. It covers all parameters of
            the optimizer. With DTensors it is the norm of the full tensors.

        Raises:
            ValueError: With a memory that makes ``p.grad`` a velocity, such as that of ``compression="dgc"``, and with
                ``merging="dear"``.
        """
        if is_dynamo_compiling():
            return _outside_graphs(ClippingMixin.clip_grad_norm_, self, max_norm, norm_type, error_if_nonfinite)
        check_max_norm(max_norm)
        reducer = self._reducer
        reducer.prepare_clipping(self)
        ratio = 1.0 if reducer.combines_gradients else reducer.norm_ratio
        return clip(reducer.members.name_all(), max_norm, norm_type, error_if_nonfinite, ratio=ratio)


@_disable_dynamo
def _outside_graphs(call: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call a function that a compiled one must not trace, since it depends on messages: a break in its graph."""
    return call(*args)


def clipping_as_mean(clip: Callable[..., Any], reducer: Callable[[], AnyReducer | None]) -> Callable[..., Any]:
    """Return a framework's ``clip(parameters, max_norm, ...)``, which bounds the norm of the averaged gradient.

    ``reducer``: returns the one that exchanges now; None: there is none. The result of ``clip`` is a norm, or None.
    """

    @functools.wraps(clip)
    def clipped(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        exchanging = reducer()
        ratio = 1.0 if exchanging is None else begin_clipping(exchanging, given)
        norm = clip(given, max_norm / ratio, *args, **kwargs)
        return norm if norm is None or ratio == 1.0 else norm * ratio

    return clipped
