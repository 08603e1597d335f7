# SPDX-License-Identifier: Apache-2.0
"""State of all ranks in one file, which a group of any size can load."""

from __future__ import annotations

import io
from typing import Any

import torch

from agmerge.backends import Backend
from agmerge.backends.handshake import LARGEST, gather_bytes
from agmerge.checkpoint import rank_state
from agmerge.checkpoint.rank_state import Wrapper
from agmerge.checkpoint.tensor_stream import replaced
from agmerge.runtime import workers


def gather_state(optimizer: Wrapper) -> dict[str, Any] | None:
    """Collective. Gather ``optimizer.state_dict()`` with the residuals of all ranks on rank 0.

    Use it to save one file, or to resume with a different number of workers. Every rank loads it with
    ``load_state_dict()``. Residuals are kept (docs/checkpoints.md). Rank 0 needs memory for the residuals of all ranks.

    Args:
        optimizer (DistributedOptimizer, LocalSync or Compressed): What agmerge returned for your optimizer or model.

    Returns:
        A dictionary on rank 0, None on the others. With ``process_set=`` the first rank of each set gets the state of
        this set, and ranks outside get None.
    """
    config, exchange = optimizer._reducer.exchange.agreed.config, optimizer._reducer.exchange
    if exchange.group.outside:
        return None
    optimizer.flush()  # messages under way, on all ranks alike
    state, comm = optimizer.state_dict(), exchange.group.comm or workers.world()
    parts = gather_parts(comm, packed(rank_state.with_inner(state)), 0, "gather_state", config.guards.timeout)
    if parts is None:
        return None
    sections = [unpacked(part) for part in parts]
    return {**state, rank_state.SECTION: {"version": rank_state.VERSION, rank_state.RANKS: sections}}


def packed(state: dict[str, Any]) -> bytes:
    """Return a state as the bytes of ``torch.save``, with all tensors in the host's memory.

    Another worker may have no device of that number.
    """
    file = io.BytesIO()
    torch.save(replaced(state, torch.Tensor.cpu), file)
    return file.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """Return the state of which :func:`packed` has made ``data``."""
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return state


def gather_parts(comm: Backend, data: bytes, root: int, name: str, timeout: float) -> list[bytes] | None:
    """Collective. Return every rank's ``data`` on rank ``root``, None on the others, in messages of bounded size."""
    rows = gather_bytes(comm, len(data).to_bytes(8, "little"), f"{name}/lengths", timeout)
    lengths = [int.from_bytes(row, "little") for row in rows]
    parts = [bytearray() for _ in lengths]
    for start in range(0, max(lengths), LARGEST):
        sizes = [max(0, min(LARGEST, length - start)) for length in lengths]
        piece = torch.frombuffer(bytearray(data[start : start + LARGEST]) or bytearray(1), dtype=torch.uint8)
        piece = piece[: sizes[comm.rank]]
        takes = sizes if comm.rank == root else [0] * comm.size
        out = torch.empty(sum(takes), dtype=torch.uint8)
        gives = [len(piece) if rank == root else 0 for rank in range(comm.size)]
        comm.all_to_all(out, piece, takes, gives, f"{name}/{start}").wait(timeout)
        for part, received in zip(parts, torch.split(out, takes), strict=True):
            part += received.numpy().tobytes()
    return [bytes(part) for part in parts] if comm.rank == root else None
