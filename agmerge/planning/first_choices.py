"""Choose, once the first steps are measured, what is not asked again: budgets by importance and the dense cutoff.

Rank 0 chooses, and every rank hears of it. Nothing here changes the session: who asks applies the answer.
"""

from __future__ import annotations

import merging
from agmerge.options.dense_cutoff import DenseCutoff
from agmerge.planning.measuring import gather_seconds
from agmerge.step.agreement import decide_on_rank_0
from agmerge.step.importance import budgets_by_energy
from agmerge.step.merge_buffers import MergeBuffers
from merging import dense_cutoff


def choose_budgets(session: MergeBuffers) -> tuple[int, ...]:
    """Collective. Return the elements that each tensor may send in a step, by the energy of all ranks' gradients.

    ``session`` has added up energies (``density="importance"``). The counts are by slot; 0: nothing is selected.
    """
    slots = session.layout.slots
    assert session.energy is not None
    density = session.config.density.target
    (energies,) = gather_seconds(session, session.energy.of(slots))
    decision = decide_on_rank_0(
        session.comm, lambda: {"budgets": budgets_by_energy(slots, energies, density)}, None, session.config.timeout
    )
    return tuple(decision["budgets"])


def choose_cutoff(session: MergeBuffers, planner: merging.Planner, measured: merging.Measurements) -> DenseCutoff:
    """Collective. Return the cutoff of ``dense="partial"`` with which steps are predicted to end first; it is final.

    Args:
        session: its cutoff in use is the largest that may be chosen, for tensors only become sparse.
        planner: makes the plans that are compared, on rank 0.
        measured: of steps with the cutoff in use; rank 0's counts.

    It goes by the compressor's density, not by that of the step: a warm-up ends, the cutoff stays.
    """
    config = session.config
    cutoff = config.partial
    assert cutoff is not None and cutoff.elements is not None
    in_use, density = cutoff.elements, config.density.target

    def decide() -> dict[str, int]:
        sizes = [slot.numel for slot in session.tensors.slots]  # whole tensors, where ranks have shards of them
        exempt = [
            config.dense(slot.name, parameter)
            for slot, parameter in zip(session.tensors.slots, session.parameters, strict=True)
        ]
        if not dense_cutoff.feasible(sizes, exempt, density):
            return {"elements": in_use}
        chosen = dense_cutoff.choose(planner, measured, sizes, exempt, density, in_use, planner.min_gain)
        return {"elements": chosen}

    decision = decide_on_rank_0(session.comm, decide, lambda decision: "", config.timeout, decider=repr(planner))
    return DenseCutoff(decision["elements"], final=True)
