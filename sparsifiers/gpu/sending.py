# SPDX-License-Identifier: Apache-2.0
"""Send numbers of the host to a device, without a wait of the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(numbers: Sequence[int] | Sequence[Sequence[int]] | NDArray[Any], out: Tensor) -> Tensor:
    """Queue a copy of `numbers`, as many as there are in `out`, to `out`, and return that; the host does not wait.

    The copy is one of pinned memory, which torch gives away again only when it has been made.
    """
    values = torch.tensor(numbers, dtype=out.dtype, pin_memory=out.is_cuda)
    return out.copy_(values.view(out.shape), non_blocking=True)
