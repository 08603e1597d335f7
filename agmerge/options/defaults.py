# SPDX-License-Identifier: Apache-2.0
"""Defaults of options that a script leaves out, by compressor and optimizer; plain constants are in ``Options``.

The compressor is one that costs its optimizer less than 1 % of the loss: ``auto`` takes, of the candidates for an
optimizer, the most exact one with a step of about the time of the fastest one's. Which candidates these are was
measured: benchmarks/notebook/parity.md, "Defaults".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import sparsifiers
from agmerge.backends import timeouts
from agmerge.errors import warn
from agmerge.exchanges.send_mode import SUMS
from agmerge.options.arguments import Options
from agmerge.options.meaning import SELECTING, has_codecs
from agmerge.runtime import workers
from agmerge.step import momentum
from agmerge.step.config import AUTO
from agmerge.step.density_policy import DENSITY
from agmerge.step.updates import APPLY, UPDATES
from agmerge.tensors.nonfinite import RAISE, SKIP
from agmerge.tensors.parameters import optimizers_of
from sparsifiers.quantising.choice import NONE, Choice
from sparsifiers.registry import spelling

# Candidates, the most exact one first.
FOUR = (NONE, "int8", "eden-4", "eden-2")
TO_4_BITS = FOUR[:3]  # of one that 2 bits have cost 1 % or more, or that was not measured at several rates
TO_8_BITS = FOUR[:2]  # where a step mixes elements, so that noise counts as much as signal
UNTIL_CHOSEN = "eden-4"

# By class of torch.optim, as it was measured. All of them divide by a mean of squares, which noise makes larger: SGD,
# which does not, lost up to a tenth with 2 bits at twice its best rate, unclipped.
MEASURED = {
    "Adam": FOUR,
    "AdamW": FOUR,
    "RAdam": FOUR,
}
# Words in the names of optimizers with steps that mix the elements of a tensor.
MIXING = ("muon", "shampoo", "soap", "dion", "lbfgs", "galore", "kfac", "psgd")

ASKS = "AGM713: {given} requires a sparsifier; using compression={name!r}. Set compression= to silence this warning."
DENSITY_OF_UPDATES = 0.05  # see benchmarks/notebook/parity.md, as for the next two
WIRE_OF_UPDATES = "sign"  # where an exchange has codecs
EVERY, WIRE_OF_LOCAL_STEPS = 8, "int4"
NO_OPTIMIZER = (
    "AGM712: ddp.compress() was called without optimizer=, so gradients are sent uncompressed or with 8 bits. Pass "
    "optimizer= to allow fewer bits."
)


def timeout_of(options: Options) -> Any:
    """Return the seconds of every wait, as given, or of the environment."""
    return timeouts.default() if options.timeout is None else options.timeout


def nonfinite_of(options: Options, *, scaled: bool) -> Any:
    """Return the policy for gradients that are not finite. ``scaled``: by a GradScaler, which skips steps by itself."""
    return (SKIP if scaled else RAISE) if options.nonfinite is None else options.nonfinite


def carry_of(options: Options) -> Any:
    """Return where unsent updates stay."""
    return APPLY if options.carry is None else options.carry


def density_of(options: Options) -> Any:
    """Return the density that is asked for, that of a compressor object, or the default one."""
    if options.density is not None:
        return options.density
    own = own_density(options.compression)
    return default_density(options) if own is None else own


def own_density(compression: Any) -> float | None:
    """Return the density of a sparsifier that a script gives as an object, by pattern too; None where it gives none."""
    return next((float(part.density) for part in objects(compression) if part.selects), None)


def objects(compression: Any) -> list[sparsifiers.Compressor]:
    """Return the compressors that a script gives as objects, by pattern too."""
    parts = list(compression.values()) if isinstance(compression, Mapping) else [compression]
    return [part for part in parts if isinstance(part, sparsifiers.Compressor)]


def default_density(options: Options) -> float:
    """Return the density where the script gives none."""
    return DENSITY_OF_UPDATES if options.sync == UPDATES else DENSITY


def wire_of(options: Options, compressor: sparsifiers.Compressor) -> str:
    """Return the value codec that is asked for, or the default one: of updates where an exchange has codecs signs."""
    codecs = compressor.kinds == {sparsifiers.Kind.SPARSE} and options.exchange not in SUMS
    return WIRE_OF_UPDATES if options.sync == UPDATES and options.wire == "auto" and codecs else options.wire


def of_local_steps(
    every: int, compression: Any, density: Any, codec: str | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments of :class:`agmerge.LocalOptimizer` as those of :class:`agmerge.DistributedOptimizer`.

    Quantisers and factors get no codec.
    """
    if density is None and own_density(compression) is None:
        density = 1.0
    if "sync" in options:
        raise TypeError("sync= is not supported: local steps always exchange updates. Remove sync=.")
    if codec is None:
        has_one = has_codecs(compression) and options.get("exchange") not in SUMS
        codec = WIRE_OF_LOCAL_STEPS if has_one else "auto"
    return {**options, "every": every, "compression": compression, "density": density, "wire": codec, "sync": UPDATES}


def _about_selection(options: Options) -> list[str]:
    """Return those arguments, but ``density``, that have no meaning without a selection, as a script writes them."""
    given = [name for name in ("warmup", "memory") if getattr(options, name) not in (None, "none")]
    given += [name for name in ("wire", "sparsify") if getattr(options, name) != "auto"]
    given += ["exchange"] if options.exchange in SELECTING else []
    given += ["dense"] if isinstance(options.dense, str) else []
    return [f"{name}={getattr(options, name)!r}" for name in given]


def resolve_auto(options: Options, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the compression that ``options`` name, or the one of ``"auto"`` with this optimizer.

    A list of names is a choice among these. ``"auto"`` is a choice among compressors without loss for this optimizer,
    see :mod:`agmerge.options.defaults`; with ``exchange="sparse"`` the one of these that sends fewest bits. Where a
    script has options about selection, it is a sparsifier: ``"dgc"``, which applies momentum before selection, where
    there is an SGD's momentum to apply, or a memory that does so is asked for; else ``"topk"``. With
    ``sync="updates"``, where momentum is the optimizer's business, it is ``"topk"``.

    ``optimizer`` None: it is not known; ``ValueError`` where it matters.
    """
    compression = options.compression
    if isinstance(compression, (list, tuple)):
        return among(compression)
    if not isinstance(compression, str) or spelling(compression) != AUTO:
        return compression
    if options.sync == UPDATES:
        return "topk"
    about_selection = _about_selection(options)
    if about_selection or options.density is not None:
        name = sparsifier_for(optimizer, options.memory)
        if options.density is None:
            _say_once(ASKS.format(given=" and ".join(about_selection), name=name))
        return name
    return choice_for(optimizer, options)


def sparsifier_for(optimizer: torch.optim.Optimizer | None, memory: Any = None) -> str:
    """Return the sparsifier that goes with an optimizer, and a memory, None where the script gives none."""
    if memory is None:
        if optimizer is None:
            what = "the best sparsifier depends on the optimizer's momentum"
            raise ValueError(momentum.UNKNOWN.format(what=what))
        return "dgc" if momentum.applies(optimizer) else "topk"
    asked = sparsifiers.memory(memory) if isinstance(memory, str) else memory
    return "dgc" if getattr(asked, "has_momentum", False) else "topk"


def choice_for(optimizer: torch.optim.Optimizer | None, options: Options) -> Choice | str:
    """Return the choice that ``compression="auto"`` is with this optimizer, or the one name that is left.

    ``optimizer`` None: it is not known, and counts as one that mixes elements.
    """
    if options.model is not None:  # merging="dear" halves an all-reduce
        return NONE
    if optimizer is None:
        _say_once(NO_OPTIMIZER)
    candidates = TO_8_BITS if optimizer is None else candidates_for(optimizer)
    if options.exchange == "sparse":  # always compressed
        return candidates[-1]
    if options.exchange == "two-level":  # between nodes, where nothing goes dense
        candidates = candidates[1:]
    return choice(candidates)


def candidates_for(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the compressors that cost this optimizer no loss, most exact first: of several those that all allow."""
    return min(map(_candidates_for_one, optimizers_of(optimizer)), key=len)  # all begin with the shortest one


def _candidates_for_one(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the candidates of one optimizer, by its class."""
    kinds = type(optimizer).__mro__
    if any(word in kind.__name__.casefold() for kind in kinds for word in MIXING):
        return TO_8_BITS
    for kind in kinds:
        known = MEASURED.get(kind.__name__)
        if known is not None and kind.__module__.startswith("torch.optim"):
            step: Any = getattr(kind, "step")  # noqa: B009  of a class that is known by name alone
            same = inspect.unwrap(type(optimizer).step) is inspect.unwrap(step)
            return known if same else TO_4_BITS
    return TO_4_BITS


def among(names: Iterable[Any]) -> Choice | str:
    """Return the choice among these names, the most exact one first. Raises ``ValueError`` for other names."""
    given = [names] if isinstance(names, str) else list(names)
    for name in given:
        if name != NONE and not (isinstance(name, str) and sparsifiers.is_quantiser(name)):
            raise ValueError(
                f"compression={given!r}: a list must consist of 'none' and quantizers "
                f"({', '.join(sparsifiers.quantisers())}), got {name!r}"
            )
    made = {name: sparsifiers.quantiser(name) for name in given if name != NONE}
    for name, quantiser in made.items():
        if quantiser.needs_feedback:
            raise ValueError(
                f"compression={given!r}: {name!r} needs error feedback, which the other entries do not use. Set it "
                "alone, not in a list."
            )
    bits = {NONE: float("inf"), **{name: quantiser.bits for name, quantiser in made.items()}}
    ordered = sorted(dict.fromkeys(given), key=lambda name: -bits[name])
    canonical = [name if name == NONE else made[name].name for name in ordered]
    return choice(tuple(dict.fromkeys(canonical)))


def choice(candidates: Sequence[str]) -> Choice | str:
    """Return a choice among names, or the one that there is. Raises ``ValueError`` for none."""
    if not candidates:
        raise ValueError("compression=[]: expected at least one name")
    quantisers = [name for name in candidates if name != NONE]
    if len(candidates) == 1:
        return candidates[0]
    return Choice(candidates, UNTIL_CHOSEN if UNTIL_CHOSEN in quantisers else quantisers[0])


def _say_once(text: str) -> None:
    """Warn on rank 0; where there is no rank yet, do nothing."""
    if workers.is_initialized():
        warn(text, workers.rank())
