# SPDX-License-Identifier: Apache-2.0
"""Derive from a few elements by which factor gradients were scaled, and from their norms whether to a bound.

Clipping leaves one norm behind, however large it was before. A division by a constant has one factor, and one by a
number of samples, or a warm-up, has neither.
"""

from __future__ import annotations

import torch

LEAST = 8  # elements that are not zero, below which no factor is derived
LOOKS = 16  # most norms to compute, each of which reads all gradients once
EXACT = 1e-12  # relative error of the factors computed here
SMALLEST = 1e-37  # about where processors may flush products to zero
UNLIKELY = 1e-5
ADDED = 1e-6  # added to the norm by torch.nn.utils.clip_grad_norm_ before it divides


def common_factor(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the factor by which each element of ``before`` has become that of ``after``, up to rounding.

    None: there is none, or too few elements are not zero to tell. Both are flat, of one floating dtype and one device,
    for which this waits.
    """
    if torch.equal(before, after):
        return 1.0
    then, now, of_dtype = before.double(), after.double(), torch.finfo(before.dtype)
    eps = max(of_dtype.eps, EXACT)
    if int(then.count_nonzero()) < LEAST:
        return None
    factor = float(then.dot(now)) / float(then.dot(then))
    # Three roundings: of the product, and of a loss scale that was put on and taken off.
    allowed = then.abs().mul_(2 * eps * abs(factor)).add_(max(of_dtype.tiny * of_dtype.eps, SMALLEST))
    return factor if bool(((now - factor * then).abs() <= allowed).all()) else None


class NormBound:
    """Test, scaling by scaling, of whether factors come from a bound on the norm.

    Norms of other scripts may agree by chance. How likely that is follows from how closely they agree: to 1e-6 once is
    enough; to 1e-3, the accuracy of float32 sums on a host, twice. Every norm that does not agree asks for ten times as
    much.
    """

    def __init__(self) -> None:
        self._factor = 1.0  # of the last scaling
        self._constant = 1.0  # the factor that came twice in a row: the script's own
        self._norm = 0.0  # of the last scaling, and of those before that agree; 0: there was none yet
        self._chance = 1.0  # approximate chance that unrelated norms agree as these do
        self._least = UNLIKELY  # below which agreement is taken for a bound
        self._looks = 0

    def asks(self, factor: float, dtype: torch.dtype) -> bool:
        """Return whether the norm after scaling by ``factor``, of gradients of ``dtype``, adds information."""
        least = _tolerance(dtype)  # below that factors are the same
        if abs(factor / self._factor - 1.0) <= least:
            self._constant = factor
        is_new = abs(factor / self._constant - 1.0) > least
        return self._looks < LOOKS and 0.0 < factor < 1.0 - least and is_new

    def binds(self, factor: float, norm: float, dtype: torch.dtype) -> bool:
        """Record the ``norm`` after scaling by ``factor``; return whether by now it is known to be a bound.

        ``norm``: computed as ``clip_grad_norm_`` does, with the same rounding.
        """
        norm += ADDED * factor
        self._looks, self._factor = self._looks + 1, factor
        apart = abs(norm - self._norm) / norm
        if apart <= _tolerance(dtype):
            self._chance *= max(4.0 * apart, 1e-6)
        else:
            self._least *= 0.1 if self._norm else 1.0
            self._norm, self._chance = norm, 1.0
        return self._chance < self._least


def _tolerance(dtype: torch.dtype) -> float:
    """Return by how much, relatively, norms to one bound may differ: ``clip_grad_norm_`` computes them in ``dtype``."""
    return 1e-3 if torch.finfo(dtype).eps < 1e-6 else 2e-2
