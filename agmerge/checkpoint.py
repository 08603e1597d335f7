"""The rank's own part of ``optimizer.state_dict()``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import merging
from agmerge import nonfinite, runtime
from agmerge.engine import Engine
from agmerge.session import State
from agmerge.shards import shard_shape

SECTION = "agmerge"
VERSION = 1
KINDS = {"residual": "residuals", "momentum": "momenta"}


def save(engine: Engine) -> dict[str, Any]:
    """Residuals by name (copies), the plan, the step count, what ever had a gradient, and whose all this is.

    With ``exchange="two-level"`` residuals are of this rank's shard of each tensor; ``shard`` says which.
    """
    rank, size = _place(engine) or (0, 1)
    plan = engine.plan()
    return {
        "version": VERSION,
        "rank": rank,
        "size": size,
        "shard": engine.shard,
        "steps": engine.steps,
        "used": sorted(engine.used()),
        "merging": engine.config.merging,
        "plan": plan.dumps() if plan else None,
        "compressor": (repr(engine.config.sparsifier), engine.config.sparsifier.state_dict())
        if engine.config.sparsifier is not None
        else None,
        **{plural: _named(engine, kind) for kind, plural in KINDS.items()},
    }


def load(engine: Engine, section: Mapping[str, Any] | None) -> None:
    """Take back what :func:`save` gave on this rank; anything else is dropped, with one warning.

    Raises ``ValueError`` if a residual has another shape than its parameter, or is not finite.
    """
    state: State = {}
    steps, used, plan = 0, [], None
    if section is None:
        warnings.warn("the checkpoint has no residuals (it is a plain optimizer's): they start from zero", stacklevel=3)
    elif section["version"] != VERSION:
        raise ValueError(f"the checkpoint's agmerge section has version {section['version']}, this library {VERSION}")
    else:
        steps, used = section["steps"], section["used"]
        if section["plan"] and section["merging"] == engine.config.merging:  # else the script asks for another
            plan = merging.Plan.loads(section["plan"])
        saved, owned = (section["rank"], section["size"]), section.get("shard")
        rank, size = _place(engine) or saved
        if engine.comm is None:
            engine.shard = owned  # unpickled: it knows its node when it connects
        if saved == (rank, size) and owned == engine.shard:
            for kind, plural in KINDS.items():
                state |= {(kind, name): tensor.clone() for name, tensor in section.get(plural, {}).items()}
            sparsifier, kept = engine.config.sparsifier, section.get("compressor")
            if sparsifier is not None and kept is not None and kept[0] == repr(sparsifier):
                sparsifier.load_state_dict(kept[1])
        else:
            warnings.warn(
                f"the checkpoint's residuals are rank {saved[0]}'s of {saved[1]}{_part(owned)}, this is rank {rank} of "
                f"{size}{_part(engine.shard)}: they are dropped and start from zero. Load the file that this rank has "
                "saved",
                stacklevel=3,
            )
    nonfinite.refuse(state)
    shapes = {member.name: member.shape for member in engine.members.active()}
    if engine.shard is not None:
        shapes = {name: shard_shape(shape, engine.shard[1]) for name, shape in shapes.items()}
    for (kind, name), tensor in state.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"the {kind} of parameter {name!r} has shape {list(tensor.shape)} in the checkpoint, the "
                f"parameter has {list(shapes[name])}: load a checkpoint of the same model"
            )
    engine.resume(state, steps, used, plan)


def _named(engine: Engine, kind: str) -> dict[str, Any]:
    return {name: tensor.clone() for (one, name), tensor in engine.state().items() if one == kind}


def _place(engine: Engine) -> tuple[int, int] | None:
    """(rank, size); None for an optimizer that was unpickled before ``init()``."""
    comm = engine.comm or (runtime.world() if runtime.is_initialized() else None)
    return (comm.rank, comm.size) if comm else None


def _part(shard: tuple[int, int] | None) -> str:
    return "" if shard is None else f" (shard {shard[0]} of {shard[1]}, exchange='two-level')"
