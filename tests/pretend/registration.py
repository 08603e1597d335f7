# SPDX-License-Identifier: Apache-2.0
"""Make ``pretend`` a kind of device that torch knows.

torch's PrivateUse1 hooks give the CPU build a device guard, and a device thread in autograd. What makes tensors from
nothing is registered here; all else reaches :class:`pretend.tensors.DeviceTensor`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration

from pretend.tensors import PLACE, perform

NAME = "pretend"
FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step")

_installing = threading.Lock()
_library: torch.library.Library | None = None  # keeps what is registered; written by install alone


def install() -> None:
    """Make the device known to torch, once in a process."""
    global _library
    with _installing:
        if _library is not None:
            return
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        # Other tests go on in this process, and torch.distributed.checkpoint would take the device for its own.
        getattr(torch, NAME).is_available = lambda: False
        _library = torch.library.Library("aten", "IMPL", "PrivateUse1")
        for name in FACTORIES:
            _library.impl(name, _factory(name))
        _library.impl("_copy_from", _copy_from)


def _factory(name: str) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = perform(operation, args, {**kwargs, "device": PLACE})
        return result

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    result: Tensor = perform(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
    return result
