# SPDX-License-Identifier: Apache-2.0
"""Count a function of torch operations as the one kernel that stands in its place on an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pretend.device import current, has_current


@contextmanager
def one_launch(owner: Any, name: str, size: Callable[..., float], launches: int = 1) -> Iterator[None]:
    """Let ``owner.name``, called on a pretended device, be one launch that moves ``size(*its arguments)`` bytes.

    ``launches``: or so many. Within another such function it counts as a part of that. What it reads and writes is
    still looked at for races, operation by operation, and its host waits count.
    """
    reference = getattr(owner, name)

    @functools.wraps(reference)
    def fused(*args: Any, **kwargs: Any) -> Any:
        if not has_current():
            return reference(*args, **kwargs)
        device = current()
        is_part = device.is_fused
        with device.fused():
            result = reference(*args, **kwargs)
        if device.is_watched and not is_part:
            device.books.launched(name, launches, round(size(*args, **kwargs)))
        return result

    with patch.object(owner, name, fused):
        yield
