# SPDX-License-Identifier: Apache-2.0
"""View tensors as bytes, so that any dtype travels on any backend."""

from __future__ import annotations

import torch


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of ``tensor`` in C order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous ``tensor``, 1-D."""
    return tensor.detach().view(-1).view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its graph, contiguous: its own memory where that is so already, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a contiguous copy of ``tensor`` without its graph, perhaps of another dtype."""
    bare = tensor.detach().resolve_conj().resolve_neg()
    return bare.to(dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)


def row_kind(tensor: torch.Tensor) -> str:
    """Return, for agreements where lengths may differ, the dtype and the kind of device where that is no CPU."""
    return f"{tensor.dtype}{_elsewhere(tensor)}"


EXPANDED = " expanded, so several elements share one memory location and cannot be written. Pass its clone()"


def expanded(tensor: torch.Tensor) -> str:
    """Return, for the facts of a call that writes to ``tensor``, why this rank cannot; "" if it can."""
    return EXPANDED if torch._debug_has_internal_overlap(tensor) == 1 else ""  # 1: yes; 2: perhaps, which torch allows


def described(tensor: torch.Tensor) -> str:
    """Return, for agreements, dtype and shape as ``float32[2, 3]``, and the kind of device where that is no CPU."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{_elsewhere(tensor)}"


def _elsewhere(tensor: torch.Tensor) -> str:
    """Return the kind of device where that is no CPU, as the end of a text; else empty."""
    return "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"
