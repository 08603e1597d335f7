"""Another number of workers: what becomes of residuals and momenta, so that no update is lost.

A residual enters the update with the weight of its rank's gradient, 1 / W where updates are averages and 1 where they
are sums. What ranks have not sent yet is the sum of residual * weight over ranks; that is what stays the same. So the
old rank r's residual goes to the new rank r mod W', and where updates are averages all of them are multiplied by
W' / W: the sum of W'/W * residual / W' over the new ranks is the sum of residual / W over the old ones. A momentum that
each rank has of its own gradients is linear in them, and is treated likewise. A momentum of averages, which every rank
has alike, stays as it is.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agmerge.backends import torch as torch_backend
from agmerge.engine.reducer import Reducer
from agmerge.errors import AGMergeError
from agmerge.ops import Average, ReduceOp
from agmerge.runtime import workers
from agmerge.step.merge_buffers import State

TWICE = (
    "the model is in DistributedDataParallel, which averages gradients too ({name!r}, for one): everything is "
    "exchanged twice, once of it dense. Leave DistributedDataParallel out: DistributedOptimizer takes the plain model"
)
Section = dict[str, Any]  # a rank's part of a state_dict()


def factor(op: ReduceOp, before: int, now: int) -> float:
    """What a residual of one of ``before`` workers is multiplied by among ``now``."""
    return now / before if op is Average else 1.0


def scaled(state: State, by: float) -> State:
    """What one rank keeps, as a member of another number of workers."""
    own = {name for kind, name in state if kind == "residual"}
    return {(kind, name): tensor * by if name in own else tensor for (kind, name), tensor in state.items()}


def redistributed(sections: Sequence[Section], rank: int, size: int, op: ReduceOp) -> Section:
    """The part of ``rank`` of ``size`` workers in what all ranks of another number have saved.

    Plan, steps, use and shares are all ranks' own. What sparsifiers remember starts cold, gradients of an unfinished
    accumulation are dropped, with a warning.
    """
    before, by = len(sections), factor(op, len(sections), size)
    mine = [section for r, section in enumerate(sections) if r % size == rank]
    found: Section = {**sections[0], "rank": rank, "size": size, "compressor": None, "window": {}}
    own = set(sections[0].get("own") or sections[0]["residuals"])
    for kind in ("residuals", "momenta"):
        alike = {name: tensor for name, tensor in sections[0][kind].items() if name not in own}
        found[kind] = alike | _sums([section[kind] for section in mine], own, by)
    if any(section.get("window") for section in sections):
        warnings.warn(
            f"the checkpoint was saved by {before} ranks between two backward passes of one step: the gradients of "
            f"that step are dropped among {size} ranks. Save after step()",
            stacklevel=4,
        )
    return found


def _sums(parts: Sequence[Mapping[str, torch.Tensor]], own: set[str], by: float) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in own:
                found[name] = found[name] + tensor if name in found else tensor
    return {name: tensor * by for name, tensor in found.items()}


def connect(reducer: Reducer) -> None:
    """Collective. Join the workers that there are now, if this has not happened, and fit what is kept to their number.

    Collective. The group is another one after ``shutdown()`` and ``init()``, and after a reset of an elastic Horovod.
    """
    world = workers.world()
    if reducer.world is not None and reducer.world is not world:
        leave(reducer)
    if reducer.comm is not None or reducer.outside:
        return
    shard = reducer.shard
    workers.listen()
    reducer.connect(world)
    if reducer.comm is not None and reducer.comm.rank == 0:
        twice = torch_backend.averaged(reducer.members.name_all())
        if twice:
            warnings.warn(TWICE.format(name=twice), stacklevel=4)
    if reducer.comm is not None:  # an optimizer that was dropped holds no threads and no connections
        weakref.finalize(reducer, reducer.comm.drop)
    origin, reducer.origin = reducer.origin, None
    if origin is None or reducer.comm is None or not reducer.parked:
        return
    if reducer.shard != shard:
        warnings.warn(
            "residuals are shards of other rows than this rank has now (exchange='two-level'): they are dropped and "
            "start from zero",
            stacklevel=4,
        )
        reducer.parked = {}
    by = factor(reducer.config.op, origin[1], reducer.comm.size)
    if by != 1.0:
        reducer.parked = scaled(reducer.parked, by)


def leave(reducer: Reducer) -> None:
    """Forget the group of workers; the next step connects to the one that there is then."""
    if reducer.config.model is not None:
        raise AGMergeError(
            "merging='dear' cannot go on among other workers: updates of the last step may be on their way. Restart "
            "from a checkpoint, or use another merging"
        )
    reducer.leave()
