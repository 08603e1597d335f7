# SPDX-License-Identifier: Apache-2.0
"""Norm of the combined gradient of a step, with and without the noise that quantisation has added."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from agmerge.errors import AGMergeError
from agmerge.exchanges import Noise
from sparsifiers import native

# Squares of tensors, summed in one order, so that every processor gets the same bits.

CLASSES, RUN = 16, 256  # as in kernel_squares.c
PART = 1 << 16  # elements that are widened at once, whole runs: they stay in the cache


def squares_of_all(tensors: Iterable[Tensor]) -> list[float | Tensor]:
    """Return the squares of ``tensors``, contiguous, in parts that add up to all of them; no device is waited for.

    One part is a number for each tensor of the host, see :func:`squares_of`; the other ones are 0-dim tensors, float64,
    one on each device.
    """
    found: list[float | Tensor] = []
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            found.append(squares_of(tensor))
        elif tensor.numel():
            by_device.setdefault(tensor.device, []).append(_real(tensor))
    for group in by_device.values():
        norms = torch._foreach_norm(group, 2, dtype=torch.float64)  # of all in a few kernels
        found.append(torch.stack(norms).square().sum())
    return found


def squares_of(tensor: Tensor) -> float:
    """Return the sum of the squares of all elements of ``tensor``, as float64; for complex ones, of their magnitudes.

    It has the same bits on every processor: squares are float64, and added in a fixed order, without a temporary of the
    tensor's size. ``tensor``: of the host, contiguous. Squares of float64 are rounded; those of narrower dtypes are
    exact.
    """
    flat = _real(tensor)
    compiled = native.squares(flat)
    if compiled is not None:
        return compiled
    total = 0.0
    for part in torch.split(flat, PART):
        wide = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
        for run in _runs_of(wide).tolist():
            total += run
    return total


def _real(tensor: Tensor) -> Tensor:
    """Return all elements of ``tensor``, contiguous, 1-D: of complex ones both parts."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.detach().reshape(-1)


def _runs_of(flat: Tensor) -> Tensor:
    """Return the sum of squares of each block of RUN elements of ``flat``, 1-D, as the loops add: float64[blocks]."""
    squares = pad(flat.to(torch.float64), (0, -flat.numel() % RUN)).square_().view(-1, RUN // CLASSES, CLASSES)
    classes = squares[:, 0]
    for row in range(1, RUN // CLASSES):
        classes = classes + squares[:, row]
    half = CLASSES
    while half > 1:
        half //= 2
        classes = classes[:, :half] + classes[:, half : 2 * half]
    return classes[:, 0]


# The norm.
#
# Let m be the gradient that is combined exactly, ``s * (g_1 + ... + g_W)``, where s is 1/W for an average. A quantiser
# of noise d turns each vector v into one that is v on average, with a square of ``(1 + d) |v|^2`` on average. Errors of
# ranks are independent. So the sum of the ranks' messages has on average the square ``|m|^2 + d1 s^2 G``, where G is
# ``|g_1|^2 + ... + |g_W|^2``; after a second phase it is ``1 + d2`` times as much. With p the update that ranks read,
# ``|p|^2 / (1 + d2) - d1 s^2 G`` is then |m|^2 on average. G is in the headers of messages. Blocks are many, and their
# errors independent, so one step's estimate is close.
#
# Rounding to the nearest level is biased, but with many levels the same holds. A quantiser's announced noise is that of
# normally distributed blocks. ``eden`` makes all blocks so; of ``int8``, ``int4`` and ``fp8`` the noise is small. Of
# ``qsgd`` and ``terngrad`` it depends on the blocks: with 2 bits the estimate may be off by a fifth.

NO_GRADIENT = (
    "AGM701: grad_norm() is not available before the first step. Call it after optimizer.synchronize() or "
    "optimizer.step() (with DistributedDataParallel: after backward())."
)


class GradientNorm:
    """Squares of the combined gradient of the last step: equal on every rank to the bit."""

    def __init__(self) -> None:
        self._exact: list[float | torch.Tensor] = []  # squares of tensors that were combined as they are, one each
        self._noisy: list[float | torch.Tensor] = []  # of those that were quantised
        self._noises: tuple[Noise, ...] = ()  # of their messages
        # Returns gradients of the last step that were not read yet. Not they: a reference would count as the script's.
        self._unread: Callable[[], Iterable[torch.Tensor]] | None = None
        self._is_wanted = False  # a norm was asked for: from then on each step's are read at once
        self._known = False

    def take(
        self,
        exact: Callable[[], Iterable[torch.Tensor]],
        noisy: Iterable[torch.Tensor],
        noises: Sequence[Noise],
        *,
        may_hold: bool,
        adds: bool = False,
    ) -> None:
        """Look at the combined gradients of a step, which may be changed afterwards. No device is waited for.

        Without noise they are read only once a norm has been asked for: a pass over a gradient costs 1 % of a step.

        ``exact``: returns contiguous tensors without noise; ``noisy``: those with the noise of ``noises``, one of each
        message. ``may_hold``: whether all of them lie in memory that stays; else ``exact`` is not called after this.
        ``adds``: they are others of the same step.
        """
        if not adds:
            self._exact, self._noisy, self._noises = [], [], ()
        self._noises, self._known, self._unread = (*self._noises, *noises), True, exact
        self._noisy += squares_of_all(noisy)
        if self._noises or self._is_wanted or adds or not may_hold:
            self._read()

    def _read(self) -> None:
        """Compute the squares of the gradients that were not read yet."""
        if self._unread is not None:
            self._exact += squares_of_all(self._unread())
        self._unread = None

    def norm(self) -> float:
        """Return the norm without the noise: an unbiased estimate of its square, of which the root is taken, or 0.

        It is exact where nothing is quantised. Waits for a device. Raises :class:`agmerge.AGMergeError` before the
        first step.
        """
        if not self._known:
            raise AGMergeError(NO_GRADIENT)
        self._is_wanted = True
        self._read()
        return math.sqrt(max(self._without_noise(), 0.0))

    def inflation(self) -> float:
        """Return the ratio of the norm of the update that ranks have read to :meth:`norm`; 1 before the first step.

        Infinite where gradients cancel, so that only noise remains. Waits for a device.
        """
        if not self._noises:
            return 1.0
        read, mean = _added(self._exact) + _added(self._noisy), self._without_noise()
        if mean > 0.0:
            return math.sqrt(read / mean)
        return math.inf if read > 0.0 else 1.0

    def _without_noise(self) -> float:
        """Return the square of the norm; less than 0 where gradients cancel, by chance."""
        exact, noisy = _added(self._exact), _added(self._noisy)
        if not self._noises:
            return exact + noisy
        return exact + noisy / (1.0 + self._noises[0].second) - _added([each.added for each in self._noises])


def _added(squares: Iterable[float | torch.Tensor]) -> float:
    """Return the sum of ``squares``, in their order: newer versions of Python's `sum` round differently."""
    total = 0.0
    for each in squares:
        total += float(each)
    return total
