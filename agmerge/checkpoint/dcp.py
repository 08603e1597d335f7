# SPDX-License-Identifier: Apache-2.0
"""Residuals of all ranks in one checkpoint: a file that rank 0 saves, or keys of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import os
from typing import Any

import torch

from agmerge.backends import Backend, torch_objects
from agmerge.backends.handshake import LARGEST, gather_bytes
from agmerge.checkpoint import rank_state
from agmerge.checkpoint.rank_state import Wrapper
from agmerge.engine.optimizer_group import load_state
from agmerge.runtime import workers
from agmerge.runtime.tensor_stream import replaced

# One file with the state of all ranks, which a group of any size can load.


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


# ``torch.distributed.checkpoint``: a key for every rank and tensor.

_METADATA = "rest"  # all but the tensors of KINDS, as the bytes of torch.save
_SET = "ranks="  # begins the section of a key with the ranks of a process set


class ResidualState:
    """Save residuals with ``torch.distributed.checkpoint``, next to the model and the plain optimizer.

    Torch's own helpers know only the inner optimizer, so pass them ``optimizer.optimizer``, and add this object under a
    key of its own::

        state = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer.optimizer),
            "residuals": agmerge.ResidualState(optimizer),
        }
        torch.distributed.checkpoint.save(state, checkpoint_id=path)

    For several optimizers pass torch's helpers the list ``optimizer.optimizers``. With ``sync="updates"`` leave
    ``"optimizer"`` out: each rank's optimizer has stepped by itself, and this object keeps its state, too. The saved
    model is rank 0's then, and loading restores the parameters of each rank.

    To load, pass the path: ``agmerge.ResidualState(optimizer, path)``. Each rank reads its own part. On a different
    number of ranks residuals are redistributed, as with :func:`agmerge.gather_state`. If a checkpoint has no residuals,
    they start from zero, with a warning. With ``process_set=`` the keys contain the ranks of the set.

    Args:
        optimizer (DistributedOptimizer): The wrapped optimizer.
        saved (str or path): The checkpoint to load from. Default: None, for saving.
        name (str): Name of the optimizer, if a checkpoint has several. Default: ``"optimizer"``.
    """

    def __init__(
        self, optimizer: Wrapper, saved: str | os.PathLike[str] | None = None, name: str = "optimizer"
    ) -> None:
        """Save the state of ``optimizer``, or load it from the path ``saved`` if it is given.

        ``name``: one without "/".
        """
        if "/" in name:
            raise ValueError(f"ResidualState: name={name!r} must not contain '/'")
        self._optimizer, self._saved, self._prefix = optimizer, saved, f"agmerge/{name}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Collective. Return, by key, copies of this rank's state; if ``saved`` was given, empty tensors to load into.

        Ranks communicate only with ``overlap=``. Messages under way, or updates pending with ``merging="dear"``, are
        applied first.
        """
        if self._optimizer._reducer.exchange.group.outside:
            return {}
        if self._saved is not None:
            return self._wanted()
        self._optimizer.flush()
        section = rank_state.with_inner(self._optimizer.state_dict())
        if section["updates"] is not None and section["rank"] != 0:  # equal on all ranks
            section["updates"]["base"] = {}
        tensors = {plural: section.pop(plural) for plural in rank_state.KINDS.values()}
        entries = {f"{plural}/{name}": tensor for plural, named in tensors.items() for name, tensor in named.items()}
        file = io.BytesIO()
        torch.save({**section, "own": list(tensors["residuals"])}, file)
        entries[_METADATA] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        ranks = self._set
        start = f"{self._prefix}/{_SET}{','.join(map(str, ranks))}" if ranks else self._prefix
        return {f"{start}/{section['rank']}/{section['size']}/{key}": tensor for key, tensor in entries.items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Collective. Load tensors filled in by ``torch.distributed.checkpoint.load``, by keys of :meth:`state_dict`.

        Raises ``ValueError`` if this object was not made to load.
        """
        if self._saved is None:
            raise ValueError("ResidualState: loading requires a path. Pass ResidualState(optimizer, path).")
        sections: dict[int, dict[str, Any]] = {}
        size = 0
        for key, tensor in sorted(state_dict.items(), key=lambda item: not item[0].endswith(f"/{_METADATA}")):
            _, rank, size, what = _parsed(key.removeprefix(f"{self._prefix}/"))
            if what == _METADATA:
                metadata = torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)
                sections[rank] = {**metadata, **{plural: {} for plural in rank_state.KINDS.values()}}
            else:
                plural, name = what.split("/", 1)
                sections[rank][plural][name] = tensor
        if self._optimizer._reducer.exchange.group.outside:
            return
        if not sections:
            rank_state.load(self._optimizer._reducer, None)
            return
        for section in sections.values():
            if section["updates"] is not None:
                section["updates"]["base"] = sections[0]["updates"]["base"]
        unread = {**sections[0], "residuals": {}, "momenta": {}, "window": {}}
        whole = [sections.get(rank, unread) for rank in range(size)]
        together = {"version": sections[0]["version"], rank_state.RANKS: whole}
        inner = rank_state.load(self._optimizer._reducer, together)
        if inner is not None:
            load_state(self._optimizer._inner, inner)

    def _wanted(self) -> dict[str, torch.Tensor]:
        """Return empty tensors for what this rank reads: sections of ranks that it takes over, and rank 0's."""
        assert self._saved is not None
        comm, own_set = self._optimizer._reducer.exchange.group.comm or workers.world(), self._set
        wanted = {}
        for key, (shape, dtype) in torch_objects.saved_tensors(self._saved).items():
            at = key.find(f"{self._prefix}/")
            if at < 0:
                continue
            ranks, rank, size, what = _parsed(key[at + len(self._prefix) + 1 :])
            if bool(ranks) is not bool(own_set) or (own_set and own_set[0] not in ranks):
                continue
            inner = what == _METADATA and rank == comm.rank % size
            alike = rank == 0 and not what.startswith(("residuals/", "momenta/"))
            if rank % comm.size == comm.rank or inner or alike:
                wanted[key[at:]] = torch.empty(shape, dtype=dtype)
        return wanted

    @property
    def _set(self) -> list[int]:
        """Return the ranks of the world that exchange with this one; empty: all."""
        return self._optimizer._reducer.exchange.agreed.config.sync.process_set.members


def _parsed(key: str) -> tuple[list[int], int, int, str]:
    """Return a key's fields behind the optimizer's name: a set's ranks (empty: all), rank, number of ranks, tensor."""
    ranks, path = [], key
    if key.startswith(_SET):
        named, path = key.removeprefix(_SET).split("/", 1)
        ranks = [int(rank) for rank in named.split(",")]
    rank, size, what = path.split("/", 2)
    return ranks, int(rank), int(size), what
