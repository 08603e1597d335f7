# SPDX-License-Identifier: Apache-2.0
"""Choose, once the first steps are measured, budgets by importance and the dense cutoff, for good.

Rank 0 chooses, and tells every rank. Nothing here changes merge buffers: the caller applies the answer.
"""

from __future__ import annotations

import merging
from agmerge.planning.measuring import gather_seconds
from agmerge.step.agreement import decide_on_rank_0
from agmerge.step.dense_cutoff import DenseCutoff
from agmerge.step.importance import budgets_by_energy
from agmerge.step.merge_buffers import MergeBuffers
from merging import dense_cutoff


def choose_budgets(buffers: MergeBuffers) -> tuple[int, ...]:
    """Collective. Return the elements that each tensor may send in a step, by the energy of all ranks' gradients.

    ``buffers`` has added up energies (``density="importance"``). The counts are by slot; 0: nothing is selected.
    """
    slots = buffers.layout.slots
    assert buffers.budgets.energy is not None
    density = buffers.config.compression.density.target
    (energies,) = gather_seconds(buffers, buffers.budgets.energy.of(slots))
    decision = decide_on_rank_0(
        buffers.comm,
        lambda: {"budgets": budgets_by_energy(slots, energies, density)},
        None,
        buffers.config.guards.timeout,
    )
    return tuple(decision["budgets"])


def choose_cutoff(buffers: MergeBuffers, planner: merging.Planner, measured: merging.Measurements) -> DenseCutoff:
    """Collective. Return the cutoff of ``dense="partial"`` with which steps are predicted to end first; it is final.

    The compressor's density counts, not that of the step: a warm-up ends, the cutoff stays.

    Args:

        buffers: its cutoff in use is the largest that may be chosen, for tensors only become sparse.
        planner: makes the plans that are compared, on rank 0.
        measured: of steps with the cutoff in use; rank 0's counts.
    """
    config = buffers.config
    cutoff = config.compression.partial
    assert cutoff is not None and cutoff.elements is not None
    in_use, density = cutoff.elements, config.compression.density.target

    def decide() -> dict[str, int]:
        sizes = [slot.numel for slot in buffers.flat.tensors.slots]  # whole tensors, where ranks have shards of them
        exempt = [
            config.compression.dense(slot.name, local)
            for slot, local in zip(buffers.flat.tensors.slots, buffers.flat.locals, strict=True)
        ]
        if not dense_cutoff.feasible(sizes, exempt, density):
            return {"elements": in_use}
        chosen = dense_cutoff.choose(planner, measured, sizes, exempt, density, in_use, planner.min_gain)
        return {"elements": chosen}

    decision = decide_on_rank_0(buffers.comm, decide, lambda decision: "", config.guards.timeout, decider=repr(planner))
    return DenseCutoff(decision["elements"], final=True)
