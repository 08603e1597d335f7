# SPDX-License-Identifier: Apache-2.0
"""Options of a step: the arguments of :class:`agmerge.DistributedOptimizer`, resolved.

``options/`` checks them and makes a :class:`Config`; this file has what can be asked of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch

import sparsifiers
from agmerge.backends import topology
from agmerge.backends.handshake import Fact
from agmerge.exchanges.message import VALUES
from agmerge.exchanges.message.values import CHOICE, WHOLE
from agmerge.exchanges.send_mode import SUMS
from agmerge.step.records import Compression, Guards, Merging, Sync
from agmerge.step.updates import GRADIENTS, UPDATES
from agmerge.tensors.layout import TensorClass
from sparsifiers import Kind
from sparsifiers.quantising.choice import NONE

MERGING = "agmerge"  # the default planner
AUTO = "auto"
FASTEST = "fastest"
SPARSE = "sparse"
TWO_LEVEL = topology.EXCHANGE
SMALL = 1024  # elements; a smaller tensor costs more to select from than to send
WIRES = ("auto", *VALUES)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Checked options of a step: :func:`agmerge.options.resolve.resolve` makes them."""

    compression: Compression
    merging: Merging
    sync: Sync
    guards: Guards

    def changed(self, **fields: Any) -> Config:
        """Return this with other values for ``fields`` of its four records. All fields have different names."""
        records = {}
        for name in ("compression", "merging", "sync", "guards"):
            record = getattr(self, name)
            own = {field: fields.pop(field) for field in list(fields) if hasattr(record, field)}
            records[name] = replace(record, **own)
        assert not fields, fields
        return Config(**records)

    def memory_of(self, tensor_class: TensorClass, *, has_unsent: bool = False) -> sparsifiers.Memory:
        """Return the memory of a tensor class: dense ones have a residual only where something may be unsent.

        That is what was rounded, on the host, and with ``has_unsent`` this rank's residual from an earlier
        configuration: it is added to their gradients. With ``sync="updates"`` it is in the parameters instead.
        """
        memory, has_unsent = self.compression.memory, has_unsent and self.sync.updates is None
        if tensor_class.kind not in self.compression.compressor.kinds:  # dense beside compressed tensors
            return memory.for_dense_tensors(
                has_residual=has_unsent or (self.rounds_dense and not tensor_class.on_device)
            )
        keeps = memory.has_residual or memory.has_momentum or memory.hands_back
        sends_all = tensor_class.kind in (Kind.DENSE, Kind.QUANTISED)
        return sparsifiers.memory("residual") if has_unsent and sends_all and not keeps else memory

    @property
    def rounds_dense(self) -> bool:
        """Return whether small dense tensors in messages of selections may be rounded on the host.

        Not those that a script names, and not where the quantisation error would be lost.
        """
        if (
            Kind.DENSE in self.compression.compressor.kinds
            or not self.compression.compressor.selects
            or not self.compression.memory.has_residual
        ):
            return False
        if (
            self.compression.dense is not is_small
            or self.compression.partial is not None
            or self.sync.ordered
            or self.sync.updates is not None
        ):
            return False
        return self.merging.exchange in (SPARSE, AUTO, FASTEST) and (self.compression.wire in WHOLE or bool(self.wires))

    @property
    def quantises(self) -> bool:
        """True if some tensors are quantised, or may be by a later choice."""
        return Kind.QUANTISED in self.compression.compressor.kinds

    @property
    def quantisers(self) -> tuple[str, ...]:
        """Names of quantisers of which plans may take one, the most exact first; (): there is no choice."""
        return tuple(name for name in self.compression.compressor.candidates if name != NONE)

    def quantiser_of(self, label: str) -> sparsifiers.Quantiser | None:
        """Return the quantiser of quantised tensors; None: there are none.

        ``label``: its name, as a plan has it, where there is a choice; ``"auto"``: none was made.
        """
        if self.quantisers:
            return sparsifiers.quantiser(self.compression.compressor.until_chosen if label == AUTO else label)
        return cast("sparsifiers.Quantiser | None", self.compression.compressor.part(Kind.QUANTISED))

    @property
    def wires(self) -> tuple[str, ...]:
        """Return the value codecs that plans may take in place of the gradient's own dtype, most bits first.

        None where ``wire`` names one, where an exchange has none, where the quantisation error would be lost, and where
        sums are not to depend on the plan.
        """
        codecs = self.compression.compressor.selects and Kind.LOW_RANK not in self.compression.compressor.kinds
        if self.compression.wire != AUTO or self.sync.ordered or not codecs or self.merging.exchange in SUMS:
            return ()
        return CHOICE if self.compression.memory.has_residual else ()

    @property
    def chooses_dense(self) -> bool:
        """Return whether merge buffers that could be compressed may go dense where that is measured to be faster."""
        if self.quantises:  # a script that names a quantiser has decided that it travels
            return NONE in self.compression.compressor.candidates
        return self.merging.exchange in (AUTO, FASTEST) and self.compression.compressor.compresses

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Return the exchanges that plans may take in place of the usual one of selections."""
        return SUMS if self.merging.exchange == FASTEST else ()

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes in which planners may predict; the first one counts until times are measured.

        They say where selection is: "behind" or "ahead" of merging, or "dense" where there is none. Matrices are
        projected as soon as they are ready, so that is ahead.
        """
        if not self.compression.compressor.compresses:
            return ("dense",)
        if not self.compression.compressor.selects:
            return ("ahead",)
        return ("behind", "ahead") if self.merging.sparsify == "auto" else (self.merging.sparsify,)

    @property
    def plans_from(self) -> str:
        """Return where plans come from, as text."""
        if self.merging.groups is not None:
            return "groups"  # which ones: ranks compare that tensor by tensor
        return f"plan {self.merging.plan.digest()}" if self.merging.plan else repr(self.merging.planner)

    def facts(self) -> list[Fact]:
        """Return the facts that must be the same on every rank, by name and as text.

        ``backward_passes_per_step`` too: it decides what a step is.
        """
        rank = self.compression.compressor.rank
        momentum_of = "the memory's" if self.compression.memory.has_momentum else "None"
        return [
            ("sync", GRADIENTS if self.sync.updates is None else UPDATES),  # first: defaults of others hang on it
            *(() if self.sync.updates is None else self.sync.updates.facts()),
            ("compression", self.compression.compressor.name),
            *self.compression.density.facts(),
            *(() if rank is None else [("rank", str(rank))]),
            ("dense='partial'", str(self.compression.partial)),
            ("options", repr(self.compression.compressor)),
            ("memory", repr(self.compression.memory)),
            ("momentum before selection", momentum_of if self.compression.rates is None else "the optimizer's"),
            ("merging", self.plans_from),
            ("sparsify", self.merging.sparsify),
            ("exchange", self.merging.exchange),
            ("wire", self.compression.wire),
            ("op", self.sync.op.value),
            ("sparse_as_dense", str(self.sync.sparse_as_dense)),
            ("backward_passes_per_step", str(self.sync.passes)),
            ("gradient_predivide_factor", str(self.sync.predivide)),
            ("dense_sum", "ordered" if self.sync.ordered else "native"),
            ("check_every", str(self.guards.check_every)),
            ("unused", "zero" if self.sync.zero_unused else "none"),
            ("nonfinite", self.guards.nonfinite),
            ("scaler", "attached" if self.guards.scaled else "None"),
        ]


def is_small(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter has fewer than two dimensions (biases, norms), or than 1024 elements.

    This is the rule for ``dense=None``; ``name`` is not used.
    """
    return parameter.dim() < 2 or parameter.numel() < SMALL
