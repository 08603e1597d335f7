# SPDX-License-Identifier: Apache-2.0
"""Streams of the host's tensors, which do nothing: a test gives those that it looks at something to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from agmerge.backends.streams import Streams


class HostStreams(Streams):
    """Streams that are always empty, and events that have come."""

    def is_current(self, device: torch.device) -> bool:
        return True

    def current(self, device: torch.device) -> Any:
        return None

    def number(self, device: torch.device) -> int:
        return 0

    def new(self, device: torch.device) -> Any:
        return None

    def within(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self, stream: Any, *, timed: bool = False) -> Any:
        return stream

    def seconds(self, earlier: Any, later: Any) -> float:
        return 0.0

    def wait(self, stream: Any, event: Any) -> None: ...

    def keep(self, tensor: torch.Tensor, stream: Any) -> None: ...

    def has_ended(self, event: Any) -> bool:
        return True

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def is_capturing(self) -> bool:
        return False
