# SPDX-License-Identifier: Apache-2.0
"""Local shards of DTensors; a plain tensor is its own local tensor.

FSDP2 makes parameters and gradients DTensors. Their class belongs to ``torch.distributed``, which this room may not
import: they are recognised by ``to_local``, a method that a plain tensor does not have.
"""

from __future__ import annotations

from typing import Any

import torch

FSDP1 = (
    "parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which is not supported, because it flattens "
    "parameters. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)."
)
REPLICATED = (
    "parameter {name!r} is replicated over mesh dimension {dimension!r}, over which FSDP already averages gradients. "
    "Pass the mesh of the shards to fully_shard, such as mesh['shard'], and the mesh of the replicas as process_set=, "
    "such as mesh['replicate']."
)
PARTIAL = (
    "parameter {name!r} is a partial sum over mesh dimension {dimension!r} ({placement}), which is not supported. "
    "Redistribute it first, to shards of the sum."
)
OTHER_PLACEMENTS = (
    "parameter {name!r} has the placements {own}, but its gradient has {gradients}, so a rank lacks the gradient of "
    "its own shard. Redistribute the gradient first."
)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, spread over several ranks."""
    return hasattr(tensor, "to_local")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, a view without autograd history; a plain tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    if not torch.is_grad_enabled():
        return tensor.to_local()  # type: ignore[no-any-return]
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[no-any-return]


def like(whole: Any, local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, this rank's shard, as a DTensor with the mesh and placements of ``whole``; nothing is copied.

    Where ``whole`` is a plain tensor, ``local`` itself.
    """
    if not hasattr(whole, "to_local"):
        return local
    made: torch.Tensor = type(whole).from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def set_gradient(parameter: torch.Tensor, local: torch.Tensor | None) -> None:
    """Make ``local`` this rank's shard of ``parameter.grad``; None: no gradient."""
    parameter.grad = None if local is None else like(parameter, local)


class Gradients:
    """Setter of parameters' gradients. DTensors are made once and kept, for making one costs as much as a hook."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by parameter: local shard, and its DTensor

    def set(self, parameter: torch.Tensor, local: torch.Tensor | None) -> None:
        """Make ``local`` this rank's shard of ``parameter.grad``; None: no gradient."""
        if local is None or not hasattr(parameter, "to_local"):
            parameter.grad = local
            return
        if parameter.grad is not None and local_of(parameter.grad) is local:
            return  # it was written there, so the gradient is the right one already
        made = self._made.get(id(parameter))
        if made is None or made[0] is not local:
            made = self._made[id(parameter)] = (local, like(parameter, local))
        parameter.grad = made[1]


def gradient_of(parameter: Any, name: str) -> torch.Tensor | None:
    """Return this rank's shard of ``parameter.grad``; ``ValueError`` if its placements are not the parameter's.

    ``name``: for the error.
    """
    gradient = parameter.grad
    if gradient is None or not hasattr(gradient, "to_local"):
        return gradient  # type: ignore[no-any-return]
    if gradient.placements != parameter.placements:
        own = _text(parameter.placements)
        raise ValueError(OTHER_PLACEMENTS.format(name=name, own=own, gradients=_text(gradient.placements)))
    return local_of(gradient)


def shard_of(parameter: Any) -> str:
    """Return which shard this rank has, such as ``"shard 0/2 S(0)"``; "" for a plain parameter.

    For each dimension of the mesh: its name, this rank's coordinate, its size, and the placement of the tensor along
    it.
    """
    if not hasattr(parameter, "to_local"):
        return ""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or [f"mesh dimension {number}" for number in range(mesh.ndim)]
    places = zip(names, mesh.get_coordinate() or [], mesh.shape, parameter.placements, strict=True)
    return ", ".join(f"{name} {place}/{size} {placement}" for name, place, size, placement in places)


def why_not_exchangeable(parameter: Any, name: str) -> str:
    """Return why ranks with the same shard cannot combine updates of ``parameter``; "" if they can."""
    if hasattr(parameter, "_is_flat_param") or hasattr(parameter, "_fsdp_flattened"):
        return FSDP1.format(name=name)
    if not hasattr(parameter, "to_local"):
        return ""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    for dimension, placement in zip(names, parameter.placements, strict=True):
        if placement.is_replicate():
            return REPLICATED.format(name=name, dimension=dimension)
        if placement.is_partial():
            return PARTIAL.format(name=name, dimension=dimension, placement=placement)
    return ""


def _text(placements: Any) -> str:
    return f"({', '.join(map(str, placements))})"
