"""The cut of ``dense="partial"``, once the first steps are measured: rank 0 chooses, all ranks hear of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import merging
from agmerge.options.dense_cutoff import DenseCutoff
from agmerge.step.agreement import broadcast_json, raise_on_all_ranks
from agmerge.step.merge_buffers import MergeBuffers
from merging import dense_cutoff


def settle(session: MergeBuffers, planner: merging.Planner, measured: merging.Measurements) -> bool:
    """Collective. Put the cut that is predicted to end steps first into the session's config; whether it is another one
    than that in use. ``measured``: rank 0's counts.

    It goes by the compressor's density, not by that of the step: a warm-up ends, the cut stays.
    """
    config = session.config
    rule, sparsifier = config.partial, config.sparsifier
    assert rule is not None and rule.most is not None and sparsifier is not None
    told: dict[str, Any] = {}
    if session.comm.rank == 0:
        sizes = [slot.numel for slot in session.tensors.slots]  # whole tensors, where ranks have shards of them
        exempt = [
            config.dense(slot.name, parameter)
            for slot, parameter in zip(session.tensors.slots, session.parameters, strict=True)
        ]
        density, gain = sparsifier.density, getattr(planner, "gain", 0.0)
        try:
            told = {"cut": rule.most}
            if dense_cutoff.feasible(sizes, exempt, density):
                told = {"cut": dense_cutoff.choose(planner, measured, sizes, exempt, density, rule.most, gain)}
        except Exception as error:  # a planner may be the script's own; the others wait for word
            told = {"problem": f"{planner!r}: {error}"}
    told = broadcast_json(session.comm, told, config.timeout)
    raise_on_all_ranks(session.comm, told.get("problem", ""), config.timeout)
    session.config = replace(config, partial=DenseCutoff(told["cut"], settled=True))
    return bool(told["cut"] != rule.most)
