# SPDX-License-Identifier: Apache-2.0
"""Section of one rank in ``optimizer.state_dict()``: its check, saving and loading."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import merging
from agmerge.checkpoint.redistribute import displaced, displacements, redistribute
from agmerge.engine.optimizer_group import SECTIONS, marked, unmark
from agmerge.engine.optimizer_wrapper import AnyReducer
from agmerge.exchanges.low_rank import bases
from agmerge.exchanges.node_shards import shard_shape
from agmerge.runtime import workers
from agmerge.step import density_policy
from agmerge.step.agreed_state import CarriedState
from agmerge.step.config import Config
from agmerge.step.flat_buffers import State
from agmerge.step.gradient_exchange import GradientExchange
from agmerge.tensors import nonfinite
from agmerge.tensors.parameters import is_dtensor, like, local_of, set_gradient, shard_of

# Check of a section before it is loaded, for a rank that loads changes much, and cannot go back half-way. Errors name
# the key that is missing or of a wrong type.

Test = Callable[[Any], bool]
DAMAGED = (
    "the checkpoint's 'agmerge' section is damaged, or not from agmerge: {where} {problem}. Load another checkpoint."
)
OTHER_VERSION = (
    "the checkpoint's 'agmerge' section has version {saved}, but this agmerge supports version {own} only. Load it "
    "with the agmerge that saved it, or remove the section to start with zero residuals."
)


def whole(value: Any) -> bool:
    """Return whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tensors(value: Any) -> bool:
    """Return whether a value has tensors by name."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )


def flag(value: Any) -> bool:
    """Return whether a value is a truth value."""
    return isinstance(value, bool)


def text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def counted(value: Any) -> bool:
    """Return whether a value has pairs by name: how many passes a parameter has seen, and its gradient or None."""
    return isinstance(value, Mapping) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and whole(pair[0]) and isinstance(pair[1], torch.Tensor | None)
        for pair in value.values()
    )


def pair_of(first: Test, second: Test) -> Test:
    """Return a test for two values."""
    return lambda value: isinstance(value, Sequence) and len(value) == 2 and first(value[0]) and second(value[1])


def mapping(value: Any) -> bool:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def or_none(test: Test) -> Test:
    """Return a test that also accepts None."""
    return lambda value: value is None or test(value)


REQUIRED: dict[str, Test] = {
    "rank": whole,
    "size": whole,
    "steps": whole,
    "merging": text,
    "plan": or_none(text),
    **dict.fromkeys(("residuals", "momenta", "averaged_momenta", "left_bases", "right_bases"), tensors),
    "shard": or_none(pair_of(whole, whole)),
    "dtensors": mapping,
    "partial": or_none(pair_of(whole, flag)),
    "shares": or_none(mapping),
    "compressor": or_none(pair_of(text, mapping)),
    "window": counted,
    "updates": or_none(mapping),
}
OPTIONAL: dict[str, Test] = {
    "inner": or_none(mapping),  # where ranks' own optimizers differ
    "trial": text,  # of plans, which was under way
}
OF_UPDATES: dict[str, Test] = {
    "carry": text,
    "steps": whole,
    "base": tensors,
    "own": tensors,
    "displacements": tensors,
    "outer": or_none(mapping),
}
OPTIONAL_OF_UPDATES: dict[str, Test] = {
    "owed": tensors,  # of updates in few bits, and more than two workers
    "workers": whole,  # of the group of that
    "under_way": flag,
    "moments": mapping,
}


def check_section(section: Any, ranks: str, version: int) -> None:
    """Raise ``ValueError`` for a section of another version, or its first key that is missing or has a wrong type.

    ``section``: of one rank, or of all of them, under the key ``ranks``.
    """
    _check(section, "it", {"version": whole}, {})
    if section["version"] != version:
        raise ValueError(OTHER_VERSION.format(saved=section["version"], own=version))
    if ranks not in section:
        _check_rank(section, "")
        return
    parts = section[ranks]
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError(DAMAGED.format(where=repr(ranks), problem="lists no rank"))
    for number, part in enumerate(parts):
        _check_rank(part, f"{ranks}[{number}]: ")


def _check_rank(section: Any, where: str) -> None:
    """Raise ``ValueError`` as :func:`check_section` does, for the section of one rank."""
    _check(section, f"{where}it", REQUIRED, OPTIONAL)
    if section["rank"] >= section["size"]:
        problem = f"is rank {section['rank']}'s of {section['size']}"
        raise ValueError(DAMAGED.format(where=f"{where}it", problem=problem))
    if section["updates"] is not None:
        _check(section["updates"], f"{where}'updates'", OF_UPDATES, OPTIONAL_OF_UPDATES)


def _check(found: Any, where: str, required: Mapping[str, Test], optional: Mapping[str, Test]) -> None:
    """Raise ``ValueError`` unless ``found`` is a mapping with all required keys, and its values pass their tests."""
    if not isinstance(found, Mapping):
        raise ValueError(DAMAGED.format(where=where, problem=f"is {found!r:.40}"))
    for key, test in {**required, **optional}.items():
        if key not in found and key in required:
            raise ValueError(DAMAGED.format(where=where, problem=f"has no {key!r}"))
        if key in found and not test(found[key]):
            raise ValueError(DAMAGED.format(where=where, problem=f"has {key!r}: {found[key]!r:.40}"))


# Saving and loading. The constants have the meaning of the keys.

SECTION = "agmerge"
VERSION = 4  # the only one that can be loaded
RANKS = "ranks"  # of a consolidated checkpoint: every rank's section, rank by rank
INNER = "inner"  # in each of these, where they differ: the state of the rank's own optimizer
LEFT_BASIS, RIGHT_BASIS = BASES = tuple(bases.KINDS.values())
KINDS = {
    "residual": "residuals",
    "momentum": "momenta",
    "averaged_momentum": "averaged_momenta",
    LEFT_BASIS: "left_bases",
    RIGHT_BASIS: "right_bases",
}
OTHER_PARTS = (
    "AGM402: The checkpoint's residuals belong to another shard of parameter {name!r} ({saved}) than this rank holds "
    "({own}); they are reset to zero. Load the file of a rank that held the same shards."
)
NO_RESIDUALS = "AGM401: The checkpoint has no residuals (it was saved by a plain optimizer); they are reset to zero."
OTHER_NUMBER = (
    "To resume with a different number of workers, save agmerge.gather_state(optimizer) and load it on every rank."
)
LOST = ("residuals", "momenta", "averaged_momenta")  # entries that start from zero where they are not loaded
UNREAD = (
    "AGM403: The plain optimizer loaded a checkpoint of agmerge before it was wrapped, so its residuals (with "
    "sync='updates', also each rank's optimizer state) were not loaded. On every rank, load it after wrapping:\n"
    "    {made}\n    {name}.load_state_dict(state)  # of this rank's file, or from agmerge.gather_state()"
)
OTHER_SYNC = (
    "AGM402: The checkpoint was saved with a different sync= setting, so its residuals cannot be used and are reset "
    "to zero. The parameters were loaded."
)


class Wrapper(Protocol):
    """Interface of :class:`agmerge.DistributedOptimizer`, which imports this room."""

    _inner: torch.optim.Optimizer  # of several optimizers, their group

    @property
    def _reducer(self) -> AnyReducer: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state and, under ``SECTION``, that of this rank."""

    def flush(self) -> None:
        """Apply updates that ``merging="dear"`` leaves to the next forward."""


def save(reducer: AnyReducer) -> dict[str, Any]:
    """Return this rank's section: residuals by name (copies), the plan, the step count, rank and size.

    ``window``: where a step has begun, how many backward passes each parameter has seen, and its gradient so far.
    ``updates``: the shared parameters and this rank's own, with ``sync="updates"``, else None. With
    ``exchange="two-level"`` residuals are of this rank's shard of each tensor; ``shard`` says which. Of DTensors they
    are of the local shard; ``dtensors`` says which, by name.
    """
    exchange = reducer.exchange
    rank, size = exchange.agreed.carried.origin or _rank_and_size(exchange) or (0, 1)
    current, compressor = exchange.agreed.current, exchange.agreed.config.compression.compressor
    return {
        "version": VERSION,
        "rank": rank,
        "size": size,
        "shard": exchange.group.shard,
        "dtensors": _dtensors(reducer),
        "steps": exchange.agreed.steps,
        "merging": exchange.agreed.config.plans_from,
        "plan": current.plan.dumps() if current.plan else None,
        "trial": exchange.agreed.trial(),
        "partial": density_policy.to_checkpoint(exchange.agreed.config.compression.partial),
        "shares": current.budgets,
        "compressor": (repr(compressor), compressor.state_dict()),
        "window": _window(reducer),
        "updates": None if reducer.combines_gradients else reducer.saved(),
        **{plural: _copies(current, kind) for kind, plural in KINDS.items()},
    }


def has_own(section: Mapping[str, Any]) -> bool:
    """Return whether a section has what is its rank's alone: with the default it is the same on all ranks."""
    kept = any(section[key] for key in (*KINDS.values(), "window", "shares"))
    remembers = section["compressor"] is not None and not _is_empty(section["compressor"][1])
    return kept or remembers or section["updates"] is not None


def _is_empty(state: Mapping[str, Any]) -> bool:
    """Return whether a compressor's state is empty; that of several compressors by name: whether each one's is."""
    return all(isinstance(value, Mapping) and _is_empty(value) for value in state.values())


def keeps_back(config: Config) -> bool:
    """Return whether ranks keep what they have not sent, or parameters of their own."""
    return config.compression.memory.has_residual or config.sync.updates is not None


def whole_state(reducer: AnyReducer, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a wrapper: ``inner``, the plain optimizer's, and this rank's section.

    Where the section has residuals or the like, the state is marked: a plain optimizer that loads it has not got all of
    it.
    """
    section = save(reducer)
    state = {**inner, SECTION: section}
    keeps = section["updates"] is not None or any(section[plural] for plural in LOST)
    return marked(state) if keeps and inner else state


def warn_of_unread(optimizer: torch.optim.Optimizer, made: str, name: str) -> None:
    """Warn, on rank 0, if the plain ``optimizer`` has loaded a wrapper's state, of which a section is not loaded.

    ``made``: the script's line that wraps it, and ``name`` the variable for the wrapper.
    """
    if unmark(optimizer) and not (workers.is_initialized() and workers.rank() != 0):
        warnings.warn(UNREAD.format(made=made, name=name), stacklevel=4)


def with_inner(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of a wrapper's ``state_dict()`` for a file of all ranks: with ``INNER`` where ranks differ."""
    section = dict(state[SECTION])
    if section["updates"] is not None:  # each rank's optimizer has stepped by itself
        section[INNER] = {key: value for key, value in state.items() if key != SECTION}
    return section


@dataclass(kw_only=True)
class Restored:
    """State of a rank after it has loaded a section; by default nothing is restored."""

    shard: tuple[int, int] | None  # that `carried` is of: (number, of how many); None: of whole tensors
    carried: CarriedState = field(default_factory=CarriedState)  # copies; its origin: if not connected yet
    steps: int = 0  # committed
    window: Mapping[str, Any] = field(default_factory=dict)  # of the step that had begun, as in save()
    updates: Mapping[str, Any] | None = None  # a result of LocalReplica.saved()
    inner: dict[str, Any] | None = None  # of the inner optimizer, where the section has it


def load(reducer: AnyReducer, section: Mapping[str, Any] | None, *, own: bool = False) -> dict[str, Any] | None:
    """Collective. Load the result of :func:`save` on this rank, or those of all ranks; drop anything else.

    Ranks communicate only where a step had begun, and its gradients complete a merge buffer. One warning names what is
    dropped. A file of another number of ranks is redistributed, see :mod:`agmerge.checkpoint.redistribute`. Returns the
    inner optimizer's own state, where sections have it by rank. Raises ``ValueError`` if a residual has another shape
    than its parameter, or is not finite, and before anything changes for a section that is damaged.

    Args:

        reducer: of the optimizer that loads, between ``step()`` and the next ``backward()``.
        section: the rank's section of a ``state_dict()``; None: the checkpoint has none.
        own: this very process has saved it, perhaps as another rank.
    """
    exchange = reducer.exchange
    if section is not None:
        check_section(section, RANKS, VERSION)
    reducer.check_idle("load_state_dict()")
    reducer.discard()  # left by a synchronize() without step()
    if section is not None and RANKS in section:
        section = _own_part(exchange, section)
    if section is None:
        if keeps_back(exchange.agreed.config):
            warnings.warn(NO_RESIDUALS, stacklevel=3)
        restored = Restored(shard=exchange.group.shard)
    else:
        restored = _read(reducer, section, own)
    nonfinite.refuse(restored.carried.tensors)
    _check_shapes(reducer, restored.carried.tensors, restored.shard)
    _check_updates(reducer, restored.updates)
    if exchange.agreed.config.sync.updates is not None and not exchange.agreed.config.compression.memory.has_residual:
        _put_into_parameters(restored)
    if section is not None:
        exchange.agreed.adopt(
            exchange.agreed.config.changed(
                partial=density_policy.from_checkpoint(exchange.agreed.config.compression.partial, section)
            )
        )
    exchange.restore(restored.carried, restored.steps, restored.shard)
    reducer.replica.restore(restored.updates)
    if not reducer.combines_gradients:
        reducer.restart(restored.updates)
    _reopen_step(reducer, restored.window)
    return restored.inner


def _read(reducer: AnyReducer, section: Mapping[str, Any], own: bool) -> Restored:
    """Return what this rank loads of a section: all of it if it is the rank's own, else steps and plan alone.

    Restores the compressor's state, too. Warns where residuals or the like are dropped.
    """
    exchange, updates = reducer.exchange, section["updates"]
    saved, shard = (section["rank"], section["size"]), section["shard"]
    place = saved if own else _rank_and_size(exchange) or saved
    carried = CarriedState(plan=_saved_plan(exchange, section))
    carried.trial = section.get("trial", "") if carried.plan else ""
    restored = Restored(shard=exchange.group.shard, carried=carried, steps=section["steps"])
    restored.updates, restored.inner = updates, _at_home(reducer, section.get(INNER))
    if exchange.group.comm is None:
        restored.shard, restored.carried.origin = shard, saved  # it knows its node when it connects
    if (updates is None) is (exchange.agreed.config.sync.updates is not None):
        restored.updates = None if updates is None else common_part(updates)
        warnings.warn(OTHER_SYNC, stacklevel=4)
    elif other_part := _other_part(reducer, section):
        restored.updates, restored.inner = None, None
        warnings.warn(other_part, stacklevel=4)
    elif saved == place and shard == restored.shard:
        for kind, plural in KINDS.items():
            restored.carried.tensors |= {(kind, name): tensor.clone() for name, tensor in section[plural].items()}
        owed = {} if updates is None else updates.get("owed", {})
        restored.carried.tensors |= {("owed", name): tensor.clone() for name, tensor in owed.items()}
        if _restore_compressor(exchange, section):
            restored.carried.budgets = section["shares"]
        restored.window = section["window"]
    elif updates is not None or any(section[plural] for plural in (*KINDS.values(), "window")):
        what = "residuals and momenta" if section["momenta"] else "residuals"
        if updates is not None:
            what, restored.updates = "carried updates", common_part(updates)
        warnings.warn(
            f"AGM402: The {what} in this checkpoint were saved by rank {saved[0]} of {saved[1]}{_shard_text(shard)}, "
            f"but this is rank {place[0]} of {place[1]}{_shard_text(restored.shard)}; they are reset to zero. "
            + (OTHER_NUMBER if saved[1] != place[1] else "Load the file that this rank saved."),
            stacklevel=4,
        )
    return restored


def _at_home(reducer: AnyReducer, inner: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return an optimizer's state, perhaps saved by other ranks, with its DTensors on the mesh of its parameters."""
    if inner is None:
        return None
    parameters, sections = reducer.members.by_optimizer(), inner.get(SECTIONS, [inner])
    if len(sections) != len(parameters):
        return inner  # an error when it is loaded
    moved = [_section_among(section, own) for section, own in zip(sections, parameters, strict=True)]
    return {**inner, SECTIONS: moved} if SECTIONS in inner else moved[0]


def _section_among(section: dict[str, Any], parameters: list[torch.Tensor]) -> dict[str, Any]:
    """Return the state of one optimizer, converted as in :func:`_at_home`.

    ``parameters``: the optimizer's, in order.
    """

    def moved(number: int, value: Any) -> Any:
        alike = isinstance(value, torch.Tensor) and is_dtensor(value) and value.shape == parameters[number].shape
        return like(parameters[number], local_of(value)) if alike else value

    state = {
        number: {key: moved(number, value) for key, value in entry.items()}
        for number, entry in section["state"].items()
    }
    return {**section, "state": state}


def _dtensors(reducer: AnyReducer) -> dict[str, str]:
    """Return, by name, which shard this rank has of each parameter that is a DTensor."""
    members = reducer.members
    return {members.name_of(p): shard_of(p) for p in members.name_all() if is_dtensor(p)}


def _other_part(reducer: AnyReducer, section: Mapping[str, Any]) -> str:
    """Return a warning for a section's first parameter of another shard than this rank's; "" if there is none."""
    saved, own = section["dtensors"], _dtensors(reducer)
    kept = {name for plural in KINDS.values() for name in section[plural]}
    kept.update((section["updates"] or {}).get("base", ()))
    for name in sorted(kept):
        if name in own and saved.get(name) != own[name]:
            return OTHER_PARTS.format(name=name, saved=saved.get(name, "all of it"), own=own[name])
    return ""


def _saved_plan(exchange: GradientExchange, section: Mapping[str, Any]) -> merging.Plan | None:
    """Return the plan of a section; None if it has none, or the script asks for another ``merging`` now."""
    if section["plan"] and section["merging"] == exchange.agreed.config.plans_from:
        return merging.Plan.loads(section["plan"])
    return None


def _restore_compressor(exchange: GradientExchange, section: Mapping[str, Any]) -> bool:
    """Restore the compressor's state, if it is the compressor that was saved; return whether it is."""
    compressor, saved = exchange.agreed.config.compression.compressor, section["compressor"]
    if saved is None or saved[0] != repr(compressor):
        return False
    compressor.load_state_dict(saved[1])
    return True


def _check_shapes(reducer: AnyReducer, state: State, shard: tuple[int, int] | None) -> None:
    """Raise ``ValueError`` for a tensor of another shape than its parameter, or this rank's shard of it.

    Bases that do not fit are no error: new ones are drawn, as after a change of rank.
    """
    shapes = {member.name: member.shape for member in reducer.members.active()}
    if shard is not None:
        shapes = {name: shard_shape(shape, shard[1]) for name, shape in shapes.items()}
    for (kind, name), tensor in state.items():
        if kind not in BASES and name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"the {kind} of parameter {name!r} has shape {list(tensor.shape)} in the checkpoint, but the "
                f"parameter has {list(shapes[name])}. Load a checkpoint of the same model."
            )


def _check_updates(reducer: AnyReducer, updates: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` for parameters of another shape than the optimizer's, or that are not finite."""
    for what, key in (("shared value", "base"), ("value", "own"), ("displacement", "displacements")):
        state = {(what, name): tensor for name, tensor in ((updates or {}).get(key) or {}).items()}
        nonfinite.refuse(state)
        _check_shapes(reducer, state, None)


def common_part(updates: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are equal on all ranks in those that one of them has saved: shared parameters."""
    return displaced(updates, {})


def _put_into_parameters(restored: Restored) -> None:
    """Move residuals into displacements of the parameters: this worker's memory has no place for them."""
    residuals = {name: tensor for (kind, name), tensor in restored.carried.tensors.items() if kind == "residual"}
    if restored.updates is None or not residuals:
        return
    moved = displacements(restored.updates, residuals)
    moved |= {name: moved[name] + residual if name in moved else residual for name, residual in residuals.items()}
    restored.updates = displaced(restored.updates, moved)
    restored.carried.tensors = {key: tensor for key, tensor in restored.carried.tensors.items() if key[0] != "residual"}


def _own_part(exchange: GradientExchange, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's section of a consolidated one, redistributed if another number of ranks has saved it."""
    ranks: list[dict[str, Any]] = section[RANKS]
    comm = exchange.group.comm or workers.world()
    in_shards = exchange.group.shard is not None or any(part["shard"] is not None for part in ranks)
    if len(ranks) == comm.size or in_shards:  # shards are not redistributed
        return ranks[min(comm.rank, len(ranks) - 1)]
    return redistribute(ranks, comm.rank, comm.size, exchange.agreed.config.sync.op)


def _window(reducer: AnyReducer) -> dict[str, Any]:
    """Return the gradients of the step under way: by name, the number of backward passes and a copy of the gradient.

    Those accumulated in no_sync() are included, and those of parameters without a hook so far.
    """
    counted = {} if reducer.passes is None else reducer.passes.window()
    return {
        reducer.members.name_of(p): (counted.get(p, 0), _copy(p.grad))
        for p in (reducer.members.name_all() if counted else [])
        if p in counted or (p.requires_grad and p.grad is not None)
    }


def _reopen_step(reducer: AnyReducer, window: Mapping[str, Any]) -> None:
    """Collective. Resume the step that had begun: restore its gradients, and count its backward passes."""
    for parameter in reducer.members.name_all():
        if reducer.members.name_of(parameter) in window:
            fired, gradient = window[reducer.members.name_of(parameter)]
            set_gradient(parameter, None if gradient is None else gradient.clone().to(parameter.device))
            if reducer.passes is not None:
                reducer.passes.resume(parameter, fired)


def _copies(state: CarriedState, kind: str) -> dict[str, Any]:
    """Return copies of the tensors of one kind, by name."""
    return {name: tensor.clone() for (its_kind, name), tensor in state.tensors.items() if its_kind == kind}


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else local_of(gradient).detach().clone()


def _rank_and_size(exchange: GradientExchange) -> tuple[int, int] | None:
    """Return (rank, size); None for an optimizer that was unpickled before ``init()``."""
    comm = exchange.group.comm or (workers.world() if workers.is_initialized() else None)
    return (comm.rank, comm.size) if comm else None


def _shard_text(shard: tuple[int, int] | None) -> str:
    """Return the text of a warning that names a shard."""
    return "" if shard is None else f" (shard {shard[0]} of {shard[1]}, exchange='two-level')"
