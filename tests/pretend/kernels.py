"""Count a function of torch operations as the one kernel that stands in its place on an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pretend.device import current


@contextmanager
def one_launch(owner: Any, name: str, size: Callable[..., int]) -> Iterator[None]:
    """Let ``owner.name``, called on a pretended device, be one launch that moves ``size(*its arguments)`` bytes.

    What it reads and writes is still looked at for races, operation by operation, and its host waits count.
    """
    reference = getattr(owner, name)

    @functools.wraps(reference)
    def fused(*args: Any, **kwargs: Any) -> Any:
        device = current()
        with device.fused():
            result = reference(*args, **kwargs)
        device.books.launched(name, 1, size(*args, **kwargs))
        return result

    with patch.object(owner, name, fused):
        yield
