"""What all ranks agree on before they exchange: members, their order, and the plan, which rank 0 makes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import merging
from agmerge.backends import Backend
from agmerge.backends.handshake import broadcast_bytes, require_agreement
from agmerge.backends.topology import Nodes
from agmerge.exchanges.routing import AHEAD
from agmerge.exchanges.splitting import why_parts_impossible
from agmerge.options.config import AUTO, Config
from agmerge.step.merge_buffers import MergeBuffers, model_facts
from agmerge.tensors.parameters import ParameterInfo

ADVICE = "Change parameters (add_param_group, requires_grad, dtype, device) on every rank at the same step."


def open_session(
    comm: Backend,
    config: Config,
    members: Sequence[ParameterInfo],
    order: Iterable[str],
    steps: int,
    recorded: merging.Plan | None,
    nodes: Nodes | None = None,
    shares: dict[str, int] | None = None,
) -> tuple[MergeBuffers, int]:
    """Collective. Agree on members, order and plan, and set up memory. Collective.

    ``order``: names in the order in which this rank saw them ready; tensors it did not see go last. ``steps``:
    committed exchanges so far. Rank 0's count, in both. ``recorded``: a plan to go on with, if it still fits.
    ``shares``: elements to send by name, by importance, if that is known of every tensor; rank 0's count. Raises
    :class:`agmerge.RankMismatchError` on every rank if the models differ, and ``ValueError`` on every rank if
    the plan does not fit.
    """
    require_agreement(comm, model_facts(members, config), what="membership", advice=ADVICE, timeout=config.timeout)
    if not members:
        raise ValueError("no parameter needs a gradient, so there is nothing to exchange: unfreeze one, or do not step")
    told: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            told = {"plan": _make_plan(config, members, order, recorded).dumps(), "steps": steps, "shares": shares}
        except Exception as error:  # a planner may be the script's own; the other ranks wait to hear of it
            told = {"problem": f"{type(error).__name__}: {error}"}
    told = broadcast_json(comm, told, config.timeout)
    problem = told.get("problem") or why_plan_does_not_fit(
        merging.Plan.loads(told["plan"]), [member.name for member in members]
    )
    raise_on_all_ranks(comm, problem, config.timeout)
    session = MergeBuffers(comm, config, members, merging.Plan.loads(told["plan"]), nodes)
    session.give(told["shares"] or {})
    return session, told["steps"]


def broadcast_json(comm: Backend, told: dict[str, Any], timeout: float) -> Any:
    """Collective. What rank 0 has to say about the plan, on every rank. Collective."""
    return json.loads(broadcast_bytes(comm, json.dumps(told).encode(), 0, "plan", timeout))


def raise_on_all_ranks(comm: Backend, problem: str, timeout: float) -> None:
    """Collective. Raise the same error on every rank if the plan does not fit on one. Collective."""
    require_agreement(comm, [("the plan", problem or "fits")], what="plan", advice=ADVICE, timeout=timeout)
    if problem:
        raise ValueError(f"there is no plan for this model: {problem}")


def why_plan_does_not_fit(plan: merging.Plan, members: Iterable[str]) -> str:
    """Why ``plan`` cannot serve these members; empty if it can."""
    names = sorted(members)
    if sum(plan.counts) != len(names):
        return f"it covers {sum(plan.counts)} tensors, the model has {len(names)}"
    different = sorted(set(plan.names or ()) ^ set(names))
    return f"tensors that only one of them has: {', '.join(different)}" if different else why_parts_impossible(plan)


def with_mode(plan: merging.Plan, mode: str) -> merging.Plan:
    """The plan with what it was made for: whether tensors are sparsified before they are merged.

    Then merge buffers of several tensors are one message.
    """
    label, pairs = AHEAD if mode == "ahead" else "", zip(plan.counts, plan.parts, strict=True)
    parts = tuple(1 if label == AHEAD and count > 1 else parts for count, parts in pairs)
    return replace(plan, labels=(label,) * len(plan.counts), parts=parts)


def _make_plan(
    config: Config, members: Sequence[ParameterInfo], order: Iterable[str], recorded: merging.Plan | None
) -> merging.Plan:
    """This rank's plan, from what it saw. A saved plan with names brings its own order.

    A planner that goes by times has none yet: until they are measured, merge buffers go by their size.
    """
    parameters = {member.name: member.parameter for member in members}
    if config.plan is not None and config.plan.names is not None:
        return config.plan
    if recorded is not None and not why_plan_does_not_fit(recorded, parameters):
        if config.exchange != AUTO:
            recorded = replace(recorded, dense=(False,) * len(recorded.counts))
        ahead = AHEAD in recorded.labels
        if (AHEAD if ahead else "behind") in config.modes or config.sparsifier is None:
            return recorded
        return with_mode(recorded, config.modes[0])  # the script asks for the other way now
    # Reversed registration stands in for tensors that no backward pass has reached yet.
    names = list(dict.fromkeys([*(name for name in order if name in parameters), *reversed(list(parameters))]))
    if config.plan is not None:
        config.plan.check(len(names))
        return replace(config.plan, names=tuple(names))
    if config.groups is not None:
        return with_mode(config.groups.plan(members, names), config.modes[0])
    assert config.planner is not None
    planner = merging.get("threshold") if config.planner.timed else config.planner
    numel = [parameters[name].numel() for name in names]
    profile = merging.Profile(names, numel, [0.0] * len(names))
    return with_mode(planner.plan(profile, _UNMEASURED), config.modes[0])


def _free(elements: Any) -> Any:
    return 0.0 * elements


_UNMEASURED = merging.Costs(sparsify=_free, exchange=_free)  # planners that go by tensors and bytes read no costs
