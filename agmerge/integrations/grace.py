# SPDX-License-Identifier: Apache-2.0
"""Compressors written for GRACE, as they are (Xu et al., "GRACE", ICDCS 2021)."""

from __future__ import annotations

from typing import Any

from sparsifiers.custom import Custom


def grace(compressor: Any, memory: Any = None, *, sums: bool = False) -> Custom:
    """Return a compressor with GRACE's interface for ``compression=``.

    Args:
        compressor: Object with ``compress(tensor, name)`` and ``decompress(tensors, ctx)``.
        memory: Object with ``compensate`` and ``update``; None: nothing is kept.
        sums (bool): Add up the tensors of all ranks, as GRACE's ``Allreduce`` does. Otherwise they are gathered.

    Raises:
        TypeError: For an object without these methods.
    """
    return Custom(compressor, memory, sums=sums)
