# SPDX-License-Identifier: Apache-2.0
"""What planning does on one rank, what is in use, and why: the record for reports."""

from __future__ import annotations

from agmerge.planning.quantiser_choice import QuantiserChoice
from agmerge.planning.sparse_choice import SparseChoice
from agmerge.step.config import AUTO, Config
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import Activity, PlanStatus
from merging import Measurements
from sparsifiers import Kind
from sparsifiers.quantising.choice import NONE

NONE_SELECTED = "no sparsifier is in use"
ALONE = "there is one worker, which sends nothing"
UNTIL = "candidates are tried until about step {until}"


def status_of(
    buffers: MergeBuffers,
    choice: SparseChoice | QuantiserChoice,
    now: Activity,
    measured: Measurements | None,
    bytes_probed: int,
    until: int,
) -> PlanStatus:
    """Return the status of planning with these merge buffers and this choice.

    ``until``: the step, counted from 1, before which a choice that is open is likely to be made.
    """
    quantiser = None if all(buffers.plan.dense) else buffers.quantiser
    return PlanStatus(
        wire=buffers.wire,
        wire_why=_why_codec(buffers, choice.codec_why, now, until),
        exchange=buffers.exchange,
        exchange_why=_why_exchange(buffers, choice.exchange_why, now, until),
        quantiser=quantiser.name if quantiser is not None else NONE,
        bits=quantiser.bits if quantiser is not None else None,
        quantiser_why=_why_quantiser(buffers, choice, now, until),
        activity=now,
        bytes_probed=bytes_probed,
        measured=measured,
    )


def _why_codec(buffers: MergeBuffers, chosen: str, now: Activity, until: int) -> str:
    """Return the reason for the value codec in use. ``chosen``: that of the choice, "" if none was made."""
    config, given = buffers.config, buffers.config.compression.wire
    if not config.wires:
        if not _selects(config):
            return NONE_SELECTED
        return "these options leave no choice" if given == AUTO else f"you set wire={given!r}"
    return _why_undecided(buffers, chosen, now, until) or "no other format was tried"


def _why_exchange(buffers: MergeBuffers, chosen: str, now: Activity, until: int) -> str:
    """Return the reason for the exchange in use. ``chosen``: that of the choice, "" if none was made."""
    config, given = buffers.config, buffers.config.merging.exchange
    if not _selects(config) and (config.quantises or not config.chooses_dense):
        return NONE_SELECTED
    if not config.exchanges and not config.chooses_dense:
        return f"you set exchange={given!r}"
    why = _why_undecided(buffers, chosen, now, until) or "no other exchange was tried"
    return why if config.exchanges else f"exchange={given!r} compresses if that is faster: {why}"


def _why_quantiser(buffers: MergeBuffers, choice: SparseChoice | QuantiserChoice, now: Activity, until: int) -> str:
    """Return the reason for the quantizer in use."""
    if not buffers.config.quantisers:
        return "you set it" if buffers.quantiser is not None else "no quantizer is in use"
    if choice.is_open:
        return ALONE if buffers.comm.size == 1 else UNTIL.format(until=until)
    return choice.quantiser_why


def _selects(config: Config) -> bool:
    """Return whether elements of tensors are selected."""
    return Kind.SPARSE in config.compression.compressor.kinds


def _why_undecided(buffers: MergeBuffers, chosen: str, now: Activity, until: int) -> str:
    """Return ``chosen``, the reason for this run's choice, or why it has made none; empty: neither is known."""
    if buffers.comm.size == 1:
        return ALONE
    if now is Activity.FIXED:
        return "the plan is fixed"
    return chosen or ("" if now is Activity.SETTLED else UNTIL.format(until=until))
