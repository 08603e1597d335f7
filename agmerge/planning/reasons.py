# SPDX-License-Identifier: Apache-2.0
"""What planning does on one rank, what is in use, and why: the record for reports."""

from __future__ import annotations

from enum import Enum

from agmerge.planning.quantiser_choice import QuantiserChoice
from agmerge.planning.sparse_choice import SparseChoice
from agmerge.step.config import AUTO, Config
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.step.plan_status import PlanStatus
from merging import Measurements
from sparsifiers import Kind
from sparsifiers.quantising.choice import NONE

NONE_SELECTED = "of no tensor elements are selected"


class State(Enum):
    """Activity of planning. The values are those of ``stats()["planning"]``."""

    FIXED = "fixed"  # nothing is planned from times
    TIMING = "timing"  # the first steps
    KNOWN = "known"  # the plan in use is one of an earlier run, and nothing has been measured in this one
    PROBING = "probing"  # messages are timed, and plans are made, between steps
    TRYING = "trying"  # steps are trained with each of several plans, in turn
    SETTLED = "settled"  # a plan is in use, and times are looked at again later


def status_of(
    buffers: MergeBuffers,
    choice: SparseChoice | QuantiserChoice,
    state: State,
    measured: Measurements | None,
    bytes_probed: int,
) -> PlanStatus:
    """Return the status of planning with these merge buffers and this choice."""
    quantiser = None if all(buffers.plan.dense) else buffers.quantiser
    named = "it was named" if buffers.quantiser is not None else "nothing is quantised"
    return PlanStatus(
        wire=buffers.wire,
        wire_why=_why_codec(buffers, choice.codec_why, state),
        exchange=buffers.exchange,
        exchange_why=_why_exchange(buffers, choice.exchange_why, state),
        quantiser=quantiser.name if quantiser is not None else NONE,
        bits=quantiser.bits if quantiser is not None else None,
        quantiser_why=choice.quantiser_why or named,
        activity=state.value,
        bytes_probed=bytes_probed,
        measured=measured,
    )


def _why_codec(buffers: MergeBuffers, chosen: str, state: State) -> str:
    """Return the reason for the value codec in use. ``chosen``: that of the choice, "" if none was made."""
    config, given = buffers.config, buffers.config.compression.wire
    if not config.wires:
        if not _selects(config):
            return NONE_SELECTED
        return "these options leave no choice" if given == AUTO else f"wire={given!r} was given"
    return _why_undecided(state) or chosen or "nothing has been measured since ranks agreed"


def _why_exchange(buffers: MergeBuffers, chosen: str, state: State) -> str:
    """Return the reason for the exchange in use. ``chosen``: that of the choice, "" if none was made."""
    config = buffers.config
    if not config.exchanges:
        if not _selects(config):
            return NONE_SELECTED
        given = f"exchange={config.merging.exchange!r} was given"
        return f"{given}: {chosen}" if config.chooses_dense and chosen else given
    return _why_undecided(state) or chosen or "no other one was tried"


def _selects(config: Config) -> bool:
    """Return whether elements of tensors are selected."""
    return Kind.SPARSE in config.compression.compressor.kinds


def _why_undecided(state: State) -> str:
    """Return why this run has not chosen a codec or exchange; empty: it has chosen, or will."""
    if state is State.FIXED:
        return "nothing is planned from times"
    return "it was settled on in an earlier run" if state is State.KNOWN else ""
