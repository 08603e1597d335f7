"""Name the ranks of torch's groups: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension."""

from __future__ import annotations

from typing import Any

TWO_DIMENSIONS = "process_set={mesh}: it has {count} dimensions; give one of them, such as mesh['replicate']"


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
