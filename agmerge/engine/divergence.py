"""Finding a diverged replica by name (guarantee G11)."""

from __future__ import annotations

import hashlib

import torch

from agmerge.backends import Backend
from agmerge.backends.handshake import gather_bytes, ranks_of
from agmerge.errors import DivergenceError
from agmerge.tensors.parameters import ParameterTable


def check(comm: Backend, members: ParameterTable, steps: int, timeout: float) -> None:
    """Collective. Raise :class:`agmerge.DivergenceError` on every rank unless all parameters are equal to the bit.

    Collective; reads every parameter once. One all-gather of 16 bytes for each parameter.
    """
    parameters = members.name_all()
    mine = b"".join(digest(parameter) for parameter in parameters)
    everyone = gather_bytes(comm, mine, "check_every", timeout)
    for i, parameter in enumerate(parameters):
        found = [one[16 * i : 16 * (i + 1)].hex() for one in everyone]
        if len(set(found)) > 1:
            sets = "; ".join(f"{value[:8]} on {ranks_of(found, value)}" for value in dict.fromkeys(found))
            raise DivergenceError(
                f"step {steps}: replicas differ, first in parameter {members.name_of(parameter)!r}: digest "
                f"{sets}. Something changed parameters on some ranks only: start them with "
                "broadcast_parameters, and change them only through the optimizer, or in the same way on every "
                "rank"
            )


def digest(tensor: torch.Tensor) -> bytes:
    """Return 16 bytes that differ if a bit of ``tensor`` does. Copies it only from a device, or out of its strides."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
