# SPDX-License-Identifier: Apache-2.0
"""Errors of hooks, raised behind the backward pass.

Where a hook raises on a device that is written in Python, torch's guard of that device ends the process: it looks for
its methods while the error is on its way, in a destructor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from agmerge.engine.grad_hooks import BackwardPasses


@contextmanager
def held() -> Iterator[None]:
    """Make backward passes on this and other threads raise, at their ends, the first error of their hooks."""
    thread = threading.local()  # .error: of a hook
    on_gradient: Callable[..., None] = BackwardPasses.on_gradient
    backward: Callable[..., None] = Tensor.backward

    def holding(self: BackwardPasses, parameter: Tensor, name: str) -> None:
        if thread.error is None:
            try:
                on_gradient(self, parameter, name)
            except BaseException as error:
                thread.error = error

    def raising(self: Tensor, *args: Any, **kwargs: Any) -> None:
        thread.error = None
        backward(self, *args, **kwargs)
        if thread.error is not None:
            raise thread.error

    with patch.object(BackwardPasses, "on_gradient", holding), patch.object(Tensor, "backward", raising):
        yield
