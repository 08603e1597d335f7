# SPDX-License-Identifier: Apache-2.0
"""Combine the gradients of an optimizer that accepts only sparse ones: all ranks' indices and values are gathered.

That is ``torch.optim.SparseAdam``, for embeddings with ``sparse=True``. As in Horovod, gathered values are added up;
they are not compressed, not merged, and leave no residual. Gradients of sparse layout elsewhere, where the optimizer
accepts dense ones too, are made dense, or are an error.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from agmerge.backends import Backend
from agmerge.backends.handshake import gather_texts
from agmerge.errors import NonFiniteError, and_more
from agmerge.metrics.totals import Totals
from agmerge.ops import Average
from agmerge.step.config import Config
from agmerge.tensors.nonfinite import RAISE, is_finite
from agmerge.tensors.parameters import ParameterInfo, ParameterTable, optimizers_of

NOT_FINITE = (
    "AGM106: Gradients are infinite or NaN: {where}. Parameters and residuals are unchanged. Call zero_grad() to "
    "continue without this step, or pass nonfinite='skip' to skip such steps."
)


def takes_sparse_alone(optimizer: object) -> bool:
    """Return whether an optimizer refuses dense gradients."""
    return isinstance(optimizer, torch.optim.SparseAdam)


def gathered_of(members: ParameterTable) -> list[torch.Tensor]:
    """Return the parameters with gathered gradients, in the order of the groups."""
    taking = [each for each in optimizers_of(members.optimizer) if takes_sparse_alone(each)]
    return [parameter for each in taking for group in each.param_groups for parameter in group["params"]]


class DenseTable:
    """Table of the parameters that are exchanged in merge buffers: all but those with gathered gradients."""

    def __init__(self, members: ParameterTable) -> None:
        self._members = members

    def active(self) -> list[ParameterInfo]:
        """Return the parameters that take part now, in the order of the groups."""
        left_out = set(gathered_of(self._members))
        return [member for member in self._members.active() if member.parameter not in left_out]

    def names(self) -> set[str]:
        """Return the names of all parameters of the optimizer."""
        return self._members.names()

    def snapshot(self) -> object:
        """Return the table's snapshot: where it changes, ranks have to agree again."""
        return self._members.snapshot()


class GatheredGradients:
    """Exchange of the sparse gradients of those parameters of ``members`` that :func:`gathered_of` returns."""

    def __init__(self, members: ParameterTable) -> None:
        self._members = members

    def combine(self, comm: Backend, config: Config, totals: Totals, *, joined: bool) -> bool:
        """Collective. Make every such ``p.grad`` the average or sum over ranks; None where no rank has a gradient.

        Values are added in rank order, on the host, so that all ranks have the same bits. ``joined``: this rank has no
        gradients. Returns False where a step is to be skipped, according to ``config.guards.nonfinite``: gradients are
        infinite then. Raises :class:`agmerge.NonFiniteError`, the same on every rank, or ``ValueError`` for a dense
        gradient.
        """
        parameters = gathered_of(self._members)
        own = {} if joined else {number: self._own(p) for number, p in enumerate(parameters) if p.grad is not None}
        file = io.BytesIO()
        torch.save(own, file)
        totals.sent(len(file.getvalue()), sum(gradient["values"].numel() for gradient in own.values()))
        texts = gather_texts(comm, file.getvalue(), "sparse gradients", config.guards.timeout)
        ranks = [torch.load(io.BytesIO(text), weights_only=True) for text in texts]
        problems = {rank: said for rank, gradients in enumerate(ranks) if (said := self._not_finite(gradients))}
        if problems and config.guards.nonfinite == RAISE:
            where = "; ".join(f"rank {rank}: {and_more(names)}" for rank, names in problems.items())
            raise NonFiniteError(NOT_FINITE.format(where=where), where)
        factor = 1.0 / comm.size if config.sync.op is Average else 1.0
        for number, parameter in enumerate(parameters):
            given = [gradients[number] for gradients in ranks if number in gradients]
            parameter.grad = _added(parameter, given, float("inf") if problems else factor) if given else None
        return not problems

    def _own(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the indices and values of this rank's gradient, on the host, coalesced."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.sparse_coo:
            raise ValueError(
                f"parameter {self._members.name_of(parameter)!r} has a gradient of layout {gradient.layout}, but "
                "SparseAdam requires sparse gradients. Create the embedding with sparse=True, or use Adam for it."
            )
        whole = gradient.detach().coalesce().cpu()
        return {"indices": whole.indices(), "values": whole.values()}

    def _not_finite(self, gradients: dict[int, dict[str, torch.Tensor]]) -> list[str]:
        """Return the names of a rank's gradients that are infinite or NaN."""
        parameters = gathered_of(self._members)
        return [self._members.name_of(parameters[n]) for n, g in gradients.items() if not is_finite(g["values"])]


def _added(parameter: Any, gradients: list[dict[str, torch.Tensor]], factor: float) -> torch.Tensor:
    """Return the sum of ``gradients``, of all ranks in order, times ``factor``: sparse, on the parameter's device."""
    indices = torch.cat([gradient["indices"] for gradient in gradients], dim=1)
    values = torch.cat([gradient["values"] for gradient in gradients]) * factor
    return torch.sparse_coo_tensor(indices, values, parameter.shape).coalesce().to(parameter.device)
