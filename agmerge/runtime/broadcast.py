# SPDX-License-Identifier: Apache-2.0
"""Start all replicas from one: parameters and optimizer state of the root rank.

Nothing here calls ``step()``, so no parameter moves and the order of the two calls does not matter.
(Horovod creates missing state by a real step with zero gradients; with weight decay that step moves the
parameters of the ranks that had no state.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from agmerge.backends import Backend, timeouts
from agmerge.backends.handshake import Fact
from agmerge.runtime import process_sets, tensor_stream
from agmerge.runtime.collectives import broadcast_object, root_of
from agmerge.runtime.collectives.operation import expanded
from agmerge.runtime.process_sets import agree
from agmerge.runtime.tensor_stream import replaced
from agmerge.tensors.parameters import is_dtensor, like, local_of, shard_of

Parameters = Mapping[str, Any] | Iterable[Any]


def broadcast_parameters(params: Parameters, root_rank: int | None = None, process_set: Any = None) -> None:
    """Collective. Give all ranks the parameters of one rank, in place and bitwise identical.

    Args:
        params (dict or iterable): ``model.state_dict()``, ``model.named_parameters()``, a list of (name, tensor) pairs,
            or tensors. Any dtype, stride and device is supported. For DTensors, the shards of this rank are
            overwritten. All ranks of ``process_set`` must hold the same shards.
        root_rank (int): The rank with the right parameters, a rank of the world. Default: the first one.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Raises:
        agmerge.RankMismatchError: On all ranks, if names, shapes, dtypes or shards differ.
        ValueError: If an entry is not a tensor.
    """
    where = process_sets.group(process_set, "broadcast_parameters")
    comm, root_rank = where.comm, where.ranks[0] if root_rank is None else root_rank
    root = root_of(comm, where.ranks, root_rank)
    tensors = _named(params)
    facts: list[Fact] = [("root_rank", str(root_rank))]
    # The root's are only read.
    facts += [
        (name, _described(value) + ("" if comm.rank == root else expanded(local_of(value)))) for name, value in tensors
    ]
    advice = "Create the same model on every rank."
    agree(comm, "broadcast_parameters", facts, "broadcast_parameters", advice)
    _broadcast_tensors(comm, [local_of(value) for _, value in tensors], root, "broadcast_parameters")


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int | None = None, process_set: Any = None
) -> None:
    """Collective. Give all ranks the optimizer state and options of one rank.

    It works for every optimizer, also if only the root has state, for example after loading a checkpoint there. State
    that the root does not have is removed on the others. Parameters and gradients do not change, and no optimizer step
    is made. Residuals of a :class:`agmerge.DistributedOptimizer` belong to their rank and are kept.

    Args:
        optimizer (torch.optim.Optimizer): The plain or the wrapped optimizer.
        root_rank (int): The rank with the right state, a rank of the world. Default: the first one.
        process_set (ProcessSet, list or ProcessGroup): The ranks that take part. Default: all.

    Raises:
        agmerge.RankMismatchError: On all ranks, if optimizers or their parameters differ.
    """
    where = process_sets.group(process_set, "broadcast_optimizer_state")
    comm, root_rank = where.comm, where.ranks[0] if root_rank is None else root_rank
    root = root_of(comm, where.ranks, root_rank)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    facts: list[Fact] = [("root_rank", str(root_rank)), ("optimizer", _kind(optimizer))]
    facts.append(("sizes of param_groups", str([len(group["params"]) for group in optimizer.param_groups])))
    facts += [(f"parameter {i}", _described(p)) for i, p in enumerate(parameters)]
    advice = "Create the same optimizer on every rank."
    agree(comm, "broadcast_optimizer_state", facts, "broadcast_optimizer_state", advice)

    (state, options), tensors = plain_state(optimizer)
    own_forms = [_form(tensor) for tensor in tensors]
    state, options, forms = broadcast_object(
        (state, options, own_forms), root_rank, "broadcast_optimizer_state", process_set
    )
    if comm.rank != root and not (own_forms == forms and _separate(tensors)):
        homes = {p.device.type: p.device for p in parameters}
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device=homes.get(kind, kind))
            for dtype, shape, strides, kind in forms
        ]
    _broadcast_tensors(comm, tensors, root, "broadcast_optimizer_state")
    if comm.rank == root:
        return
    for p, entry in zip(parameters, state, strict=True):
        if entry:
            optimizer.state[p] = _put_back(entry, tensors, p)
        else:
            optimizer.state.pop(p, None)
    for group, entry in zip(optimizer.param_groups, options, strict=True):
        for key in _options(group).keys() - entry.keys():
            del group[key]
        group.update(_put_back(entry, tensors, None))


def plain_state(optimizer: torch.optim.Optimizer) -> tuple[Any, list[torch.Tensor]]:
    """Return the optimizer's state and options, by the order of its parameters, and the tensors that belong in them.

    ``((states, options), tensors)``: in the first two a placeholder stands for each tensor. Of a DTensor it is this
    rank's shard.
    """
    tensors: list[torch.Tensor] = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [_take_out(dict(optimizer.state.get(p, {})), tensors) for p in parameters]
    return (state, [_take_out(_options(group), tensors) for group in optimizer.param_groups]), tensors


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group, without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _separate(tensors: list[torch.Tensor]) -> bool:
    """Return whether each may be written over by itself: none lies in another, or several times in itself."""
    full = [tensor for tensor in tensors if tensor.numel()]
    places = {tensor.untyped_storage().data_ptr() for tensor in full}
    return len(places) == len(full) and all(tensor.stride() == _form(tensor)[2] for tensor in full)


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], str]:
    """Return the form of a tensor, from which a tensor alike is made: dtype, shape, strides, kind of device.

    Strides too: sums over another order may have other bits.
    """
    strides = torch.empty_like(tensor, device="meta").stride()  # those of a tensor without gaps or overlaps
    return tensor.dtype, tuple(tensor.shape), strides, tensor.device.type


def _described(tensor: torch.Tensor) -> str:
    """Return the facts that must be the same on all ranks, as text: dtype, shape, and the shard of this rank."""
    return f"{tensor.dtype} {list(local_of(tensor).shape)} {shard_of(tensor)}".rstrip()


def _named(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Return names and tensors of ``params``, in the same order on all ranks; raise ``ValueError`` for others."""
    entries: list[Any] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return [(f"tensor {i}", entry) for i, entry in enumerate(entries)]
    for i, entry in enumerate(entries):
        if not (isinstance(entry, tuple) and len(entry) == 2):
            raise ValueError(
                f"invalid params of type: {type(entry).__name__} (entry {i}). Pass a state_dict, (name, tensor) "
                "pairs, or tensors."
            )
        if not isinstance(entry[1], torch.Tensor):
            raise ValueError(
                f"invalid params: {entry[0]!r} is a {type(entry[1]).__name__}, not a tensor. Use broadcast_object for "
                "it."
            )
        if entry[1].layout is not torch.strided:
            raise ValueError(
                f"invalid params: {entry[0]!r} has layout {entry[1].layout}, which is not supported. Make it dense "
                "first."
            )
    return [(str(name), value) for name, value in entries]


def _broadcast_tensors(comm: Backend, tensors: list[torch.Tensor], root: int, name: str) -> None:
    """Collective. Overwrite ``tensors`` with the root's."""
    for _ in tensor_stream.broadcast_tensors(comm, tensors, root, name, timeouts.default()):
        pass  # nothing else is to be done meanwhile


class _Place:
    """Placeholder in a pickled structure for tensor number ``index``."""

    def __init__(self, index: int, *, sharded: bool) -> None:
        self.index, self.sharded = index, sharded  # as the parameter is that it belongs to

    def __repr__(self) -> str:
        return f"tensor {self.index}"


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``value`` with a placeholder for every tensor, which is put at the end of ``tensors``."""

    def place(tensor: torch.Tensor) -> _Place:
        tensors.append(local_of(tensor))
        return _Place(len(tensors) - 1, sharded=is_dtensor(tensor))

    return replaced(value, place)


def _put_back(value: Any, tensors: list[torch.Tensor], parameter: torch.Tensor | None) -> Any:
    """Return ``value`` with its tensors, the opposite of :func:`_take_out`. ``parameter``: to which they belong."""

    def tensor(place: _Place) -> Any:
        return like(parameter, tensors[place.index]) if place.sharded else tensors[place.index]

    return replaced(value, tensor, _Place)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer, of the inner one where it is wrapped; of several the names of all."""
    inner: Any = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "optimizer", optimizer)]
    return " and ".join(type(each).__name__ for each in inner)
