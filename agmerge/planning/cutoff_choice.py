"""The cut of ``dense="partial"``, once the first steps are measured: rank 0 chooses, all ranks hear of it."""

from __future__ import annotations

from dataclasses import replace

import merging
from agmerge.options.dense_cutoff import DenseCutoff
from agmerge.step.agreement import decide_on_rank_0
from agmerge.step.merge_buffers import MergeBuffers
from merging import dense_cutoff


def settle(session: MergeBuffers, planner: merging.Planner, measured: merging.Measurements) -> bool:
    """Put the cut that is predicted to end steps first into the session's config; whether it is another one than that
    in use. Collective; ``measured``: rank 0's counts.

    It goes by the compressor's density, not by that of the step: a warm-up ends, the cut stays.
    """
    config = session.config
    rule, sparsifier = config.partial, config.sparsifier
    assert rule is not None and rule.most is not None and sparsifier is not None
    most, density = rule.most, sparsifier.density

    def decide() -> dict[str, int]:
        sizes = [slot.numel for slot in session.tensors.slots]  # whole tensors, where ranks have shards of them
        exempt = [
            config.dense(slot.name, parameter)
            for slot, parameter in zip(session.tensors.slots, session.parameters, strict=True)
        ]
        if not dense_cutoff.feasible(sizes, exempt, density):
            return {"cut": most}
        return {"cut": dense_cutoff.choose(planner, measured, sizes, exempt, density, most, planner.min_gain)}

    cut = decide_on_rank_0(session.comm, decide, lambda decision: "", config.timeout, decider=repr(planner))["cut"]
    session.config = replace(config, partial=DenseCutoff(cut, settled=True))
    return bool(cut != most)
