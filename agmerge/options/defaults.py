"""Choose the compressor of a script that names none: one that costs its optimizer less than 1 % of the loss.

``auto`` then takes, of the candidates for an optimizer, the most exact one with a step of about the time of the
fastest one's. Which candidates these are was measured: docs/parity.md, "Defaults".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import sparsifiers
from agmerge.errors import warn
from agmerge.options.arguments import Options
from agmerge.runtime import workers
from agmerge.tensors.parameters import optimizers_of
from sparsifiers.quantising.choice import NONE, Choice

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

SELECTING = ("oktopk", "masked", "fastest")  # exchanges of selections
ASKS = (
    "{given} asks for selection, and no compressor is named: this is compression={name!r}. To name one ends this line"
)
NO_OPTIMIZER = (
    "nobody has said which optimizer steps, so gradients travel whole or in 8 bits: pass optimizer=, with which fewer "
    "may do"
)


def asks_for_selection(options: Options) -> bool:
    """Return whether arguments beside ``compression="auto"`` are about selection."""
    return options.density is not None or bool(_about_selection(options))


def _about_selection(options: Options) -> list[str]:
    """Return those arguments, but ``density``, that have no meaning without a selection, as a script writes them."""
    given = [name for name in ("warmup", "memory") if getattr(options, name) not in (None, "none")]
    given += [name for name in ("wire", "sparsify") if getattr(options, name) != "auto"]
    given += ["exchange"] if options.exchange in SELECTING else []
    given += ["dense"] if isinstance(options.dense, str) else []
    return [f"{name}={getattr(options, name)!r}" for name in given]


def warn_of_selection(options: Options, name: str) -> None:
    """Warn, on rank 0, that arguments were taken to ask for the sparsifier ``name``; not for a density."""
    given = _about_selection(options)
    if options.density is None and given:
        _say_once(ASKS.format(given=" and ".join(given), name=name))


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
                f"compression={given!r}: a choice is among 'none' and quantisers ({', '.join(sparsifiers.quantisers())}"
                f"), and {name!r} is none of them"
            )
    made = {name: sparsifiers.quantiser(name) for name in given if name != NONE}
    for name, quantiser in made.items():
        if quantiser.needs_feedback:
            raise ValueError(
                f"compression={given!r}: {name!r} needs error feedback, which the others have no memory for; name it "
                "alone"
            )
    bits = {NONE: float("inf"), **{name: quantiser.bits for name, quantiser in made.items()}}
    ordered = sorted(dict.fromkeys(given), key=lambda name: -bits[name])
    canonical = [name if name == NONE else made[name].name for name in ordered]
    return choice(tuple(dict.fromkeys(canonical)))


def choice(candidates: Sequence[str]) -> Choice | str:
    """Return a choice among names, or the one that there is. Raises ``ValueError`` for none."""
    if not candidates:
        raise ValueError("compression=[]: give at least one name")
    quantisers = [name for name in candidates if name != NONE]
    if len(candidates) == 1:
        return candidates[0]
    return Choice(candidates, UNTIL_CHOSEN if UNTIL_CHOSEN in quantisers else quantisers[0])


def _say_once(text: str) -> None:
    """Warn on rank 0; where there is no rank yet, do nothing."""
    if workers.is_initialized():
        warn(text, workers.rank())
