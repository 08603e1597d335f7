# SPDX-License-Identifier: Apache-2.0
"""Replicas compared to the bit, by name (guarantee G11), and made equal again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from agmerge.backends import Backend
from agmerge.backends.handshake import gather_bytes, ranks_of
from agmerge.errors import DivergenceError, warn
from agmerge.runtime import workers
from agmerge.runtime.broadcast import broadcast_optimizer_state, broadcast_parameters, plain_state
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors.dtensors import local_of
from agmerge.tensors.fingerprint import fingerprints
from agmerge.tensors.parameters import ParameterTable

DIGEST_BYTES = 16
WRITTEN = (
    "AGM152: Replicas differed in a backward pass, first in parameter {name!r}, because the script changed parameters "
    "since the last step. This is correct if each rank restores them before the step (SAM, for example). Otherwise "
    "change parameters in the same way on every rank."
)


def compare_replicas(
    comm: Backend, parameters: Mapping[str, torch.Tensor], steps: int, timeout: float, *, written: bool = False
) -> None:
    """Collective. Raise :class:`agmerge.DivergenceError` on every rank unless all parameters are bitwise equal.

    Reads every parameter twice, and costs one all-gather of 16 bytes for each of them. Where replicas differ and the
    script of a rank has written parameters since the last step, that is a warning: it may put them back.

    Args:

        comm: the ranks with the replicas.
        parameters: by the names for the error, in an order that is the same on every rank.
        steps: how many were committed, for the error.
        timeout: seconds.
        written: the script of this rank has written parameters since the last step.
    """
    own = fingerprints(parameters.values()).numpy().tobytes() + bytes([written])
    rows = gather_bytes(comm, own, "check_every", timeout)
    for i, name in enumerate(parameters):
        digests = [row[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)].hex() for row in rows]
        if len(set(digests)) > 1:
            if any(row[-1] for row in rows):
                warn(WRITTEN.format(name=name), comm.rank)
                return
            sets = "; ".join(f"{value} on {ranks_of(digests, value)}" for value in dict.fromkeys(digests))
            raise DivergenceError(
                f"AGM102: Step {steps}: replicas differ, first in parameter {name!r}: digest {sets}. Parameters were "
                "changed on some ranks only. Call broadcast_parameters first, and change them only through the "
                "optimizer. Otherwise data was damaged in transit: restart from a checkpoint. With sync='updates', "
                "initialize new parameters inside optimizer.shared()."
            )


def level_replicas(
    comm: Backend, members: ParameterTable, optimizer: torch.optim.Optimizer, root: int, timeout: float
) -> None:
    """Collective. Give every rank the parameters and optimizer state of rank ``root``, if those of any rank differ.

    Raises :class:`agmerge.DivergenceError` on every rank where they differ among the ranks of a process set.

    Args:

        comm: the ranks with the replicas.
        members: the parameters.
        optimizer: the wrapped one; its state is compared too.
        root: a rank of ``comm``.
        timeout: seconds, for the comparison.
    """
    parameters, fingerprint = members.name_all(), hashlib.blake2b(digest_size=DIGEST_BYTES)
    state, tensors = plain_state(optimizer)
    fingerprint.update(fingerprints([*parameters, *tensors]).numpy().tobytes())
    fingerprint.update(repr(state).encode())
    if len(set(gather_bytes(comm, fingerprint.digest(), "join/replicas", timeout))) == 1:
        return
    if comm.size < workers.size():
        raise DivergenceError(
            "AGM120: join(): the ranks of this process set differ afterwards. Clip gradients and change learning "
            "rates in hooks of the optimizer's step (register_step_pre_hook, register_step_post_hook), which also run "
            "on ranks that joined."
        )
    broadcast_parameters(parameters, root_rank=root)
    broadcast_optimizer_state(optimizer, root_rank=root)


class SyncedReplica:
    """Replica of the parameters that is equal on all ranks after every step, where gradients are exchanged."""

    def __init__(self, members: ParameterTable, exchange: GradientExchange) -> None:
        self._members, self._exchange = members, exchange

    @property
    def steps(self) -> int:
        """Return how many steps the optimizer has made."""
        return self._exchange.agreed.steps

    def compared(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be equal on all ranks after a step, by name: all parameters."""
        return {self._members.name_of(parameter): parameter for parameter in self._members.name_all()}

    def unsent(self) -> dict[str, torch.Tensor]:
        """Return the residuals of this rank, by name, in the shape of the parameter or of this rank's shard."""
        return self._exchange.agreed.current.residuals()

    def saved(self) -> None:
        """Return None: a rank has no state beside residuals and the optimizer's."""

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Make the parameters the shared ones that a training with local steps has saved, if one has."""
        base: Mapping[str, torch.Tensor] = {} if saved is None else saved["base"]
        for name, parameter in self.compared().items():
            if name in base:
                local_of(parameter).copy_(base[name])
