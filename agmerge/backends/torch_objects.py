# SPDX-License-Identifier: Apache-2.0
"""Read a script's objects of torch.distributed: groups and meshes, DistributedDataParallel, files of checkpoints."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from agmerge.backends.torch import initialised

TWO_DIMENSIONS = "process_set={mesh} has {count} dimensions. Pass one of them, such as mesh['replicate']."


def ranks_of(given: Any) -> list[int] | None:
    """Return the ranks of torch's world in ``given``, in its order; None if it is no group of torch's.

    Raises ``ValueError`` for a mesh of more than one dimension.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return None
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(given, dist.ProcessGroup):
        return list(dist.get_process_group_ranks(given))
    if not isinstance(given, DeviceMesh):
        return None
    if given.ndim != 1:
        raise ValueError(TWO_DIMENSIONS.format(mesh=given, count=given.ndim))
    return [int(rank) for rank in given.mesh.tolist()]


def averaged(parameters: Iterable[torch.Tensor]) -> str:
    """Return the name of one of ``parameters`` for which a living ``DistributedDataParallel`` averages gradients.

    Empty if there is none.
    """
    ours = {id(parameter): parameter for parameter in parameters}
    for model in parallel_models(ours.values()):
        for name, parameter in model.named_parameters():
            if id(parameter) in ours and parameter.requires_grad:
                return str(name)
    return ""


def parallel_models(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return the living ``DistributedDataParallel`` models that average gradients of one of ``parameters``.

    Nothing keeps a list of them, so all objects are looked at once: some ten milliseconds.
    """
    if not initialised():
        return []
    from torch.nn.parallel import DistributedDataParallel

    ours = {id(parameter) for parameter in parameters}
    is_parallel: dict[type, bool] = {}  # of each class that there is, as asking costs more than looking up

    def found() -> Iterator[Any]:
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in is_parallel:
                is_parallel[kind] = issubclass(kind, DistributedDataParallel)
            if is_parallel[kind] and vars(thing).get("require_backward_grad_sync"):
                if any(id(parameter) in ours and parameter.requires_grad for parameter in thing.parameters()):
                    yield thing

    if next(found(), None) is None:
        return []
    gc.collect()  # one that is unreachable averages nothing
    return list(found())


def saved_tensors(path: str | os.PathLike[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every tensor, by name, in a checkpoint of ``torch.distributed.checkpoint``.

    ``path``: its folder. Only the file of metadata is read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
