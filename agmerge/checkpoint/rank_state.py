"""The rank's own part of ``optimizer.state_dict()``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

import merging
import sparsifiers
from agmerge.checkpoint.redistribute import redistributed
from agmerge.engine.reducer import Reducer
from agmerge.exchanges.node_shards import shard_shape
from agmerge.options import dense_cutoff
from agmerge.options.config import Config
from agmerge.runtime import workers
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.step.merge_buffers import State
from agmerge.tensors import nonfinite

SECTION = "agmerge"
VERSION = 1
RANKS = "ranks"  # of a consolidated checkpoint: every rank's section, rank by rank
KINDS = {"residual": "residuals", "momentum": "momenta"}


class Wrapper(Protocol):
    """Stand for :class:`agmerge.DistributedOptimizer`, which imports this room."""

    _reducer: Reducer

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and, under ``SECTION``, what this rank keeps."""

    def flush(self) -> None:
        """Apply what ``merging="dear"`` leaves to the next forward."""


def save(reducer: Reducer) -> dict[str, Any]:
    """Residuals by name (copies), the plan, the step count, and whose all this is.

    ``window``: where a step has begun, how many backward passes each parameter has seen, and its gradient so far.
    With ``exchange="two-level"`` residuals are of this rank's shard of each tensor; ``shard`` says which.
    """
    exchange = reducer.exchange
    rank, size = exchange.origin or _place(exchange) or (0, 1)
    plan, compressor = exchange.plan(), exchange.config.compressor
    return {
        "version": VERSION,
        "rank": rank,
        "size": size,
        "shard": exchange.shard,
        "steps": exchange.steps,
        "merging": exchange.config.merging,
        "plan": plan.dumps() if plan else None,
        "partial": dense_cutoff.saved(exchange.config.partial),
        "shares": exchange.budgets(),
        "compressor": (repr(compressor), compressor.state_dict()),
        "window": _window(reducer),
        **{plural: _copies(exchange, kind) for kind, plural in KINDS.items()},
    }


def load(reducer: Reducer, section: Mapping[str, Any] | None, *, own: bool = False) -> None:
    """Take back what :func:`save` gave on this rank, or what all ranks gave, together; anything else is dropped.

    That it is dropped is said by one warning. What ranks of another number have saved together is redistributed, see
    :mod:`agmerge.engine.resize`. ``own``: this very process has saved it, as whichever rank it was. Raises
    ``ValueError`` if a residual has another shape than its parameter, or is not finite.
    """
    exchange = reducer.exchange
    reducer.check_idle("load_state_dict()")
    state: State = {}
    steps, plan, budgets, window = 0, None, None, {}
    origin, shard = None, exchange.shard
    if section is not None and RANKS in section:
        section = _own_part(exchange, section)
    if section is None:
        warnings.warn("the checkpoint has no residuals (it is a plain optimizer's): they start from zero", stacklevel=3)
    elif section["version"] != VERSION:
        raise ValueError(f"the checkpoint's agmerge section has version {section['version']}, this library {VERSION}")
    else:
        steps = section["steps"]
        if section["plan"] and section["merging"] == exchange.config.merging:  # else the script asks for another
            plan = merging.Plan.loads(section["plan"])
        saved, owned = (section["rank"], section["size"]), section.get("shard")
        rank, size = saved if own else _place(exchange) or saved
        if exchange.comm is None:
            shard, origin = owned, saved  # it knows its node when it connects
        if saved == (rank, size) and owned == shard:
            for kind, plural in KINDS.items():
                state |= {(kind, name): tensor.clone() for name, tensor in section.get(plural, {}).items()}
            compressor, kept = exchange.config.compressor, section.get("compressor")
            if kept is not None and kept[0] == repr(compressor):
                compressor.load_state_dict(kept[1])
                budgets = section.get("shares")
            window = section.get("window", {})
        else:
            what = "residuals and momenta" if section.get("momenta") else "residuals"
            warnings.warn(
                f"the checkpoint's {what} are rank {saved[0]}'s of {saved[1]}{_part(owned)}, this is rank {rank} of "
                f"{size}{_part(shard)}: they are dropped and start from zero. Load the file that this rank has "
                "saved",
                stacklevel=3,
            )
    nonfinite.refuse(state)
    _check_shapes(reducer, state, shard)
    if section is not None:
        exchange.adopt(replace(exchange.config, partial=dense_cutoff.resumed(exchange.config.partial, section)))
    exchange.restore(state, steps, plan, budgets, origin, shard)
    reducer.discard()
    _reopen(reducer, window)


def _check_shapes(reducer: Reducer, state: State, shard: tuple[int, int] | None) -> None:
    """Raise ``ValueError`` for a tensor of another shape than its parameter, or this rank's shard of it."""
    shapes = {member.name: member.shape for member in reducer.members.active()}
    if shard is not None:
        shapes = {name: shard_shape(shape, shard[1]) for name, shape in shapes.items()}
    for (kind, name), tensor in state.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"the {kind} of parameter {name!r} has shape {list(tensor.shape)} in the checkpoint, the "
                f"parameter has {list(shapes[name])}: load a checkpoint of the same model"
            )


def keeping(exchange: GradientExchange, config: Config, memory: Any) -> Config:
    """Return ``config``, with a memory for what was not sent yet where the script names none (``memory`` None)."""
    if memory is None and not config.memory.has_residual and exchange.residuals():
        return replace(config, memory=sparsifiers.memory("residual"))
    return config


def _own_part(exchange: GradientExchange, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """This rank's part of a consolidated section."""
    if section["version"] != VERSION:
        return section
    ranks: list[dict[str, Any]] = section[RANKS]
    comm = exchange.comm or workers.world()
    in_shards = exchange.shard is not None or any(one.get("shard") is not None for one in ranks)
    if len(ranks) == comm.size or in_shards:  # shards are not redistributed
        return ranks[min(comm.rank, len(ranks) - 1)]
    return redistributed(ranks, comm.rank, comm.size, exchange.config.op)


def _window(reducer: Reducer) -> dict[str, Any]:
    """What the step that has begun would send: also gradients of no_sync(), and of what no hook watches yet."""
    counted = reducer.window()
    return {
        reducer.members.name_of(p): (counted.get(p, 0), _copy(p.grad))
        for p in (reducer.members.name_all() if counted else [])
        if p in counted or (p.requires_grad and p.grad is not None)
    }


def _reopen(reducer: Reducer, window: Mapping[str, Any]) -> None:
    """Go on in the step that had begun: its gradients are there again, and its backward passes are counted."""
    for parameter in reducer.members.name_all():
        if reducer.members.name_of(parameter) in window:
            fired, gradient = window[reducer.members.name_of(parameter)]
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.device)
            reducer.count(parameter, fired)


def _copies(exchange: GradientExchange, kind: str) -> dict[str, Any]:
    return {name: tensor.clone() for (other, name), tensor in exchange.state().items() if other == kind}


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _place(exchange: GradientExchange) -> tuple[int, int] | None:
    """(rank, size); None for an optimizer that was unpickled before ``init()``."""
    comm = exchange.comm or (workers.world() if workers.is_initialized() else None)
    return (comm.rank, comm.size) if comm else None


def _part(shard: tuple[int, int] | None) -> str:
    return "" if shard is None else f" (shard {shard[0]} of {shard[1]}, exchange='two-level')"
