# SPDX-License-Identifier: Apache-2.0
"""Agreement, before an exchange, on members, their order, and the plan, which rank 0 makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import merging
from agmerge.backends import Backend
from agmerge.backends.handshake import Fact, broadcast_bytes, require_agreement
from agmerge.exchanges.send_mode import OWN, send_mode, why_labels_are_wrong, with_send_mode
from agmerge.exchanges.splitting import why_parts_impossible
from agmerge.step.carried_state import CarriedState
from agmerge.step.config import AUTO, FASTEST, Config
from agmerge.step.counted_links import Count
from agmerge.step.group import Group
from agmerge.step.merge_buffers import MergeBuffers
from agmerge.tensors.layout import Slot
from agmerge.tensors.parameters import ParameterInfo
from sparsifiers.gpu import is_fused

RESIZED = (
    "parameter {name!r} changed its shape from {before} to {now}, so its residual does not fit. Set the shapes before "
    "you wrap the optimizer, or close() this optimizer and wrap it again."
)
ADVICE = "Change parameters (add_param_group, requires_grad, dtype, device) on every rank at the same step."
SHARD = (
    "the shard of {name!r}, which all ranks of a process set must hold (fully_shard uses mesh['shard'], process_set= "
    "uses mesh['replicate'])"
)
COMPUTES = "the kernels on devices (AGMERGE_KERNEL=off on every rank uses torch's operations)"


def model_facts(members: Sequence[ParameterInfo], config: Config) -> list[Fact]:
    """Return the facts about the model that ranks must agree on: every tensor, in the order of the groups.

    For DTensors, first which shard a rank has: shards of the same shape could not be distinguished otherwise. Last
    whether kernels compute on their devices, for those select otherwise than torch's operations.
    """
    groups = config.merging.groups.by_name(members) if config.merging.groups is not None else []
    group_of = {name: f" group {number}" for number, group in enumerate(groups) for name in group}
    shards = [(SHARD.format(name=member.name), member.shard) for member in members if member.shard]
    tensors = [
        (f"tensor {i}", f"{member.name} {member.describe()}{group_of.get(member.name, '')}")
        for i, member in enumerate(members)
    ]
    devices = {member.device for member in members if member.device.type != "cpu"}
    computes = [(COMPUTES, "kernels" if all(map(is_fused, devices)) else "torch's operations")] if devices else []
    return shards + tensors + computes


def open_merge_buffers(
    group: Group,
    config: Config,
    members: Sequence[ParameterInfo],
    order: Iterable[str],
    steps: int,
    carried: CarriedState,
    count: Count,
) -> tuple[MergeBuffers, int, str]:
    """Collective. Agree on members, order and plan, and allocate memory.

    Returns the merge buffers, the step count, and the trial of plans to go on with.

    Args:

        group: the ranks that agree.
        config: the same on all of them.
        members: this rank's tensors, each with its class.
        order: names in the order in which this rank saw them ready; other tensors go last. Rank 0's counts.
        steps: committed exchanges so far. Rank 0's counts.
        carried: this rank's state of before, which is only read. Rank 0's plan, budgets and trial count.
        count: as in :class:`MergeBuffers`.

    Raises :class:`agmerge.RankMismatchError` on every rank if the models differ, and ``ValueError`` on every rank if
    the plan does not fit.
    """
    comm = group.comm
    assert comm is not None
    require_agreement(
        comm, model_facts(members, config), what="membership", advice=ADVICE, timeout=config.guards.timeout
    )
    if not members:
        raise ValueError(
            "no parameter requires a gradient, so there is nothing to exchange. Unfreeze one, or do not call step()."
        )
    names = [member.name for member in members]
    decision = decide_on_rank_0(
        comm,
        lambda: {
            "plan": _make_plan(config, members, order, carried.plan).dumps(),
            "steps": steps,
            "shares": carried.budgets,
            "trial": carried.trial,
        },
        reject=lambda decision: why_plan_does_not_fit(merging.Plan.loads(decision["plan"]), names),
        timeout=config.guards.timeout,
    )
    unsent = {name for name, residual in carried.residuals().items() if bool(residual.any())}
    plan = merging.Plan.loads(decision["plan"])
    buffers = MergeBuffers(comm, config, members, plan, group.side, group.nodes, group.second_across, count, unsent)
    buffers.budgets.restore(decision["shares"] or {})
    return buffers, decision["steps"], decision["trial"]


def check_shapes(before: Iterable[Slot], now: Iterable[Slot]) -> None:
    """Raise ``ValueError`` for a parameter that the script has given another shape since the last agreement."""
    shapes = {slot.name: slot.shape for slot in before}
    for slot in now:
        if shapes.get(slot.name, slot.shape) != slot.shape:
            raise ValueError(RESIZED.format(name=slot.name, before=list(shapes[slot.name]), now=list(slot.shape)))


def decide_on_rank_0(
    comm: Backend,
    decide: Callable[[], dict[str, Any]],
    reject: Callable[[dict[str, Any]], str] | None,
    timeout: float,
    *,
    decider: str = "",
) -> dict[str, Any]:
    """Collective. Return on every rank what ``decide()`` returned on rank 0, after a round trip through JSON.

    Args:

        comm: the ranks that receive the decision, all of which call this.
        decide: called on rank 0 alone. It may run a script's own planner: its error is sent to the other ranks.
        reject: called on every rank with the decision; returns why this rank cannot follow it, "" if it can. Then one
            more collective compares the answers. None: no rank can reject.
        timeout: seconds, for each collective.
        decider: the name that an error of ``decide`` is reported under; "": the class of the error.

    Raises ``ValueError`` on every rank if ``decide`` failed or every rank rejects, and
    :class:`agmerge.RankMismatchError` on every rank if only some of them reject.
    """
    text = ""
    if comm.rank == 0:
        try:
            text = json.dumps({"decision": decide()})
        except Exception as error:  # the other ranks wait for an answer: any error is sent to them
            text = json.dumps({"problem": f"{decider or type(error).__name__}: {error}"})
    answer = json.loads(broadcast_bytes(comm, text.encode(), 0, "plan", timeout))
    problem: str = answer.get("problem", "")
    if reject is not None:
        problem = problem or reject(answer["decision"])
        require_agreement(comm, [("the plan", problem or "fits")], what="plan", advice=ADVICE, timeout=timeout)
    if problem:
        raise ValueError(f"there is no plan for this model: {problem}")
    decision: dict[str, Any] = answer["decision"]
    return decision


def why_plan_does_not_fit(plan: merging.Plan, members: Iterable[str]) -> str:
    """Return why ``plan`` cannot serve members of these names; "" if it can."""
    names = sorted(members)
    if sum(plan.counts) != len(names):
        return f"it covers {sum(plan.counts)} tensors, the model has {len(names)}"
    different = sorted(set(plan.names or ()) ^ set(names))
    if different:
        return f"tensors that only one of them has: {', '.join(different)}"
    return why_labels_are_wrong(plan) or why_parts_impossible(plan)


def with_mode(plan: merging.Plan, mode: str) -> merging.Plan:
    """Return the plan, labelled with its mode: in mode "ahead" tensors are selected from before merging.

    Then merge buffers of several tensors are one message.
    """
    ahead, pairs = mode == "ahead", zip(plan.counts, plan.parts, strict=True)
    parts = tuple(1 if ahead and count > 1 else parts for count, parts in pairs)
    return replace(with_send_mode(plan, ahead=ahead), parts=parts)


def _make_plan(
    config: Config, members: Sequence[ParameterInfo], order: Iterable[str], recorded: merging.Plan | None
) -> merging.Plan:
    """Return this rank's plan, from its own readiness order. A saved plan with names brings its own order.

    A planner that needs times has none yet: until they are measured, merge buffers are made by size.
    """
    parameters = {member.name: member.local for member in members}
    fits = recorded is not None and not why_plan_does_not_fit(recorded, parameters)
    if (
        config.merging.plan is not None
        and config.merging.plan.names is not None
        and not (fits and _is_chosen(config, recorded))
    ):
        return config.merging.plan
    if recorded is not None and fits:
        if config.merging.exchange not in (AUTO, FASTEST) or (config.quantises and not config.chooses_dense):
            recorded = replace(recorded, dense=(False,) * len(recorded.counts))
        if not config.wires:
            recorded = with_send_mode(recorded, codec=OWN)
        if not config.exchanges:
            recorded = with_send_mode(recorded, exchange=OWN)
        mode = send_mode(recorded)
        if not (mode.workers and mode.quantiser in config.quantisers):  # a trial alone does not count
            if config.quantisers:
                recorded = replace(recorded, dense=(False,) * len(recorded.counts))
            recorded = with_send_mode(recorded, quantiser=OWN, workers=0)
        where = "ahead" if mode.ahead else "behind"
        if where in config.modes or not config.compression.compressor.compresses:
            return recorded
        return with_mode(recorded, config.modes[0])  # the script asks for the other mode now
    # Reversed registration stands in for tensors that no backward pass has reached yet.
    names = list(dict.fromkeys([*(name for name in order if name in parameters), *reversed(list(parameters))]))
    if config.merging.plan is not None:
        config.merging.plan.check(len(names))
        return replace(config.merging.plan, names=tuple(names))
    if config.merging.groups is not None:
        return with_mode(config.merging.groups.plan(members, names), config.modes[0])
    assert config.merging.planner is not None
    planner = merging.get("threshold") if config.merging.planner.timed else config.merging.planner
    numel = [parameters[name].numel() for name in names]
    profile = merging.Profile(names, numel, [0.0] * len(names))
    return with_mode(planner.plan(profile, _UNMEASURED), config.modes[0])


def _is_chosen(config: Config, recorded: merging.Plan | None) -> bool:
    """Return whether ``recorded`` is the script's own plan, with a quantiser that a run has chosen for it since."""
    if recorded is None or config.merging.plan is None:
        return False
    mode = send_mode(recorded)
    same = (recorded.counts, recorded.names) == (config.merging.plan.counts, config.merging.plan.names)
    return same and mode.quantiser in config.quantisers and mode.workers > 0


def _free(elements: Any) -> Any:
    """Return 0 seconds for each number of elements."""
    return 0.0 * elements


_UNMEASURED = merging.Costs(sparsify=_free, exchange=_free)  # planners that go by tensors and bytes read no costs
