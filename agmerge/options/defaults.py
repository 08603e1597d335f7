# SPDX-License-Identifier: Apache-2.0
"""Defaults of options that a script leaves out, by compressor and optimizer, and warnings about what was chosen.

The compressor is one that costs its optimizer less than 1 % of the loss: ``auto`` takes, of the candidates for an
optimizer, the most exact one with a step of about the time of the fastest one's. Which candidates these are was
measured: benchmarks/notebook/parity.md, "Defaults". Plain constants are in ``Options``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

import sparsifiers
from agmerge.backends import timeouts
from agmerge.errors import warn
from agmerge.exchanges.table import EXCHANGES
from agmerge.options import momentum
from agmerge.options.meaning import has_codecs, selecting
from agmerge.options.typed import Options, is_whole
from agmerge.runtime import workers
from agmerge.step.config import APPLY, AUTO, SPARSE, TWO_LEVEL, UPDATES
from agmerge.step.density_policy import DENSITY
from agmerge.tensors.nonfinite import RAISE, SKIP
from agmerge.tensors.parameters import optimizers_of
from sparsifiers import Kind
from sparsifiers.catalogue import spelling
from sparsifiers.quantising.base import NONE, Choice

# Candidates, the most exact one first.
FOUR = (NONE, "int8", "eden-4", "eden-2")
OF_UPDATES = (*FOUR, "eden-1")  # unsent updates act on their own worker, so one bit costs less than with gradients
FEW = {"eden-1": 4}  # workers: with eight it increased the loss by 1.8 %, see docs/evidence.md
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
IN_TIME = 40  # first steps in which updates arrive before the next one, see docs/adaptive.md
FRAGMENTS = 2  # of updates in few bits: a step codes, sends and applies every second run of blocks
DENSITY_OF_UPDATES = 0.05  # see benchmarks/notebook/parity.md, as for the next two
WIRE_OF_UPDATES = "sign"  # where an exchange has codecs
EVERY, WIRE_OF_LOCAL_STEPS = 4, "int4"
# Steps between two exchanges up to which updates in few bits arrive late and moments follow the mean. With four workers
# and 4 bits, the loss rose by -0.1 % after 4 steps (own moments in time: 3.8 %), but by 9.7 % after 8 (5.6 %).
FEW_STEPS = 4
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
    codecs = compressor.kinds == {sparsifiers.Kind.SPARSE} and _chooses_codec(options.exchange)
    return WIRE_OF_UPDATES if options.sync == UPDATES and options.wire == "auto" and codecs else options.wire


def _chooses_codec(name: str) -> bool:
    """Return whether values of this exchange may have a codec that no script names. An unknown one is refused later."""
    return name in EXCHANGES and EXCHANGES[name].chooses_codec


def of_local_steps(
    every: int, compression: Any, density: Any, codec: str | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments of :class:`agmerge.LocalOptimizer` as those of :class:`agmerge.DistributedOptimizer`.

    ``"auto"`` is 2 bits if ``FEW_STEPS`` or fewer lie between two exchanges and the script has no options about
    selection, else a selection of everything with a codec. Quantisers and factors get no codec.
    """
    if "sync" in options:
        raise TypeError("sync= is not supported: local steps always exchange updates. Remove sync=.")
    settings = {**options, "every": every, "compression": compression, "density": density, "sync": UPDATES}
    if isinstance(compression, str) and spelling(compression) == AUTO and codec is None:
        known = {name: value for name, value in settings.items() if name in Options.__dataclass_fields__}
        if in_few_bits(Options(**known)) and are_few(every, options.get("fragments") or 1):
            return {**settings, "compression": FOUR[-1]}
    if density is None and own_density(compression) is None:
        settings["density"] = 1.0
    if codec is None:
        has_one = has_codecs(compression) and _chooses_codec(options.get("exchange", AUTO))
        codec = WIRE_OF_LOCAL_STEPS if has_one else "auto"
    return {**settings, "wire": codec}


def are_few(every: Any, fragments: Any) -> bool:
    """Return whether at most ``FEW_STEPS`` steps lie between two exchanges. Anything but numbers is refused later."""
    return is_whole(every, 1) and is_whole(fragments, 1) and every // fragments <= FEW_STEPS


def _about_selection(options: Options) -> list[str]:
    """Return those arguments, but ``density``, that have no meaning without a selection, as a script writes them."""
    given = [name for name in ("warmup", "memory") if getattr(options, name) not in (None, "none")]
    given += [name for name in ("wire", "sparsify") if getattr(options, name) != "auto"]
    given += ["exchange"] if options.exchange in selecting() else []
    given += ["dense"] if isinstance(options.dense, str) else []
    return [f"{name}={getattr(options, name)!r}" for name in given]


def resolve_auto(options: Options, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the compression that ``options`` name, or the one of ``"auto"`` with this optimizer.

    A list of names is a choice among these. ``"auto"`` is a choice among compressors without loss for this optimizer,
    see :mod:`agmerge.options.defaults`; with ``exchange="sparse"`` the one of these that sends fewest bits. Where a
    script has options about selection, it is a sparsifier: ``"dgc"``, which applies momentum before selection, where
    there is an SGD's momentum to apply, or a memory that does so is asked for; else ``"topk"``. With
    ``sync="updates"``, where momentum is the optimizer's business, it is ``"topk"`` then, and else a choice, see
    :func:`in_few_bits`.

    ``optimizer`` None: it is not known; ``ValueError`` where it matters.
    """
    compression = options.compression
    if isinstance(compression, (list, tuple)):
        return among(compression)
    if not isinstance(compression, str) or spelling(compression) != AUTO:
        return compression
    if options.sync == UPDATES:
        if not in_few_bits(options):
            return "topk"
        return FOUR[-1] if options.exchange == SPARSE else Choice(OF_UPDATES, UNTIL_CHOSEN, FEW)
    about_selection = _about_selection(options)
    if about_selection or options.density is not None:
        name = sparsifier_for(optimizer, options.memory)
        if options.density is None:
            _say_once(ASKS.format(given=" and ".join(about_selection), name=name))
        return name
    return choice_for(optimizer, options)


def in_few_bits(options: Options) -> bool:
    """Return whether ``compression="auto"`` with ``sync="updates"`` sends updates in few bits, in two fragments.

    It does unless the script has options about selection, or keeps unsent updates beside the shared parameters.
    """
    asks = _about_selection(options) or options.density is not None or options.outer is not None
    return not asks and carry_of(options) == APPLY and options.exchange in (AUTO, SPARSE)


def schedule_of(options: Options) -> dict[str, int]:
    """Return ``every`` and ``fragments``: two of them if ``compression="auto"`` may send updates in few bits, else 1.

    If the script gives one of both, the default of the other is 1.
    """
    given, compression = {"every": options.every, "fragments": options.fragments}, options.compression
    is_auto = isinstance(compression, str) and spelling(compression) == AUTO
    is_open = options.sync == UPDATES and is_auto and not any(value is not None for value in given.values())
    usual = FRAGMENTS if is_open and in_few_bits(options) else 1
    return {name: usual if value is None else value for name, value in given.items()}


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
    if options.exchange == SPARSE:  # always compressed
        return candidates[-1]
    if options.exchange == TWO_LEVEL:  # between nodes, where nothing goes dense
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


# Measured costs of compressors by optimizer. The figures are data, in one table: docs/compressor_reference.md shows it,
# and a test holds the two against each other.

WARNED = 5.0  # % of the loss from which on a script that names the compressor is warned
MOMENTUM = "SGD with momentum"


class Cost(NamedTuple):
    """Cost of one compressor with one kind of optimizer: % of the held-out loss of small language models."""

    compressor: str  # its canonical name
    optimizer: str  # the name of its class, or MOMENTUM
    bound: float | None  # the density or the rank at which; smaller ones cost no less. None: it has neither
    least: float  # %, in several runs
    most: float

    @property
    def percent(self) -> str:
        """Return the figures as text."""
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"

    @property
    def size(self) -> str:
        """Return the density or the rank as text; empty: there is neither."""
        if self.bound is None:
            return ""
        return f"rank {self.bound:g}" if sparsifiers.is_low_rank(self.compressor) else f"density {self.bound:g}"

    @property
    def text(self) -> str:
        """Return it as a sentence without an end."""
        what = f"compression={self.compressor!r} increased the loss of a small language model by {self.percent} %"
        return f"{what} in our tests with {self.optimizer}{f' at {self.size}' if self.size else ''}"


COSTS = (
    Cost("topk", "AdamW", 0.01, 22, 40),
    Cost("topk", "AdamW", 0.1, 0.1, 5.7),
    Cost("topk", "Muon", 0.01, 25, 25),
    Cost("topk", "Lion", 0.01, 25, 25),
    Cost("topk", "NAdam", 0.01, 7.5, 7.5),
    Cost("topk", "Adafactor", 0.01, 5.7, 5.7),
    Cost("topk", MOMENTUM, 0.01, 7.9, 18),
    Cost("topk", "SGD", 0.01, 12, 12),
    Cost("dgc", MOMENTUM, 0.01, 0, 1.3),
    Cost("adtopk", "AdamW", 0.01, 29, 29),
    Cost("sidco-gp", "AdamW", 0.01, 24, 24),
    Cost("powersgd", "AdamW", 4, 3.9, 7.7),
    Cost("powersgd", MOMENTUM, 4, 1.9, 1.9),
    Cost("acpsgd", "AdamW", 4, 12, 12),
    Cost("acpsgd", "AdamW", 16, 2.9, 2.9),
    Cost("acpsgd", MOMENTUM, 4, 16, 16),
    Cost("acpsgd", MOMENTUM, 16, 5, 5),
    Cost("eden-1", "AdamW", None, 0.3, 3.0),
    Cost("eden-2", MOMENTUM, None, 0, 10),
    Cost("eden-2", "RMSprop", None, 1.2, 1.2),
    Cost("eden-2", "Muon", None, 1.7, 6.2),
    Cost("eden-4", "Muon", None, 1.5, 2.6),
)


def known_cost(config: Any, optimizer: torch.optim.Optimizer) -> Cost | None:
    """Return the highest cost of ``config``'s compressors with ``optimizer``; None: there is nothing to warn of.

    Args:
        config: a ``Config``.
        optimizer: the one that steps, or one that stands for several.
    """
    if config.sync.updates is not None:
        return None
    high = [
        cost._replace(compressor=own)
        for own, name, bound in _named(config)
        for each in optimizers_of(optimizer)
        if (cost := cost_of(name, bound, each)) is not None and cost.most >= WARNED
    ]
    return max(high, key=lambda cost: cost.most, default=None)


def cost_of(name: str, bound: float | None, optimizer: torch.optim.Optimizer) -> Cost | None:
    """Return the cost of a compressor at the smallest ``bound`` that is no smaller. ``bound``: its density or rank."""
    for kind in kinds_of(optimizer):
        about = [cost for cost in COSTS if (cost.compressor, cost.optimizer) == (name, kind)]
        if found := [cost for cost in about if bound is None or cost.bound is None or bound <= cost.bound]:
            return min(found, key=lambda cost: cost.bound or 0)
    return None


def kinds_of(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield the names in the table that an optimizer may have, its own class first. Adam counts as AdamW."""
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    for kind in type(optimizer).__mro__:
        name = "Muon" if "muon" in kind.__name__.casefold() else {"Adam": "AdamW"}.get(kind.__name__, kind.__name__)
        yield MOMENTUM if name == "SGD" and momentum else name


def told_cost(name: str, bound: float | None, optimizer: torch.optim.Optimizer) -> str:
    """Return in words how much a compressor increases the loss. ``bound``: its density or rank."""
    cost = cost_of(name, bound, optimizer)
    if cost is not None:
        return f"{cost.percent} % higher in our tests"
    if name in candidates_for(optimizer):
        return "less than 1 % higher in our tests" if name != NONE else "none"
    return "not measured with this optimizer"


def _named(config: Any) -> Iterator[tuple[str, str, float | None]]:
    """Yield the names of a config's compressors, theirs in the table, and the smallest density or rank given."""
    compressor, memory = config.compression.compressor, config.compression.memory
    sparse, low_rank, quantised = map(compressor.part, (Kind.SPARSE, Kind.LOW_RANK, Kind.QUANTISED))
    if sparse is not None and memory.has_residual:
        # Without the memory of its paper dgc selects what topk does, and with it topk what dgc does.
        same = "dgc" if memory.has_momentum else "topk"
        name = same if sparse.name in ("topk", "dgc") else sparse.name
        yield sparse.name, name, config.compression.density.least
    if low_rank is not None and low_rank.rank is not None:
        rank = low_rank.rank
        yield low_rank.name, low_rank.name, rank if isinstance(rank, int) else min(rows for _, rows in rank)
    if quantised is not None:
        yield quantised.name, quantised.name, None


# Warnings, given once and on one rank, of effects of compression that a script may not expect.

TAKEN = (
    "AGM707: memory={memory!r} applies the momentum of {optimizer} ({momenta}) before selection, and {optimizer} does "
    "not apply it again. param_groups stay unchanged.{decay}"
)
DECAY = (
    " Weight decay then acts without momentum, as with SGD(momentum=0): with momentum m, it is 1 - m times as strong "
    "as in plain {optimizer} (docs/compressors.md)."
)
OWN = (
    "AGM405: The loaded parameter groups have no momentum, so memory={memory!r} applies its default, 0.9. Set another "
    "momentum in the groups, or pass memory='residual' for none."
)
NAMED = "AGM705: {what}. Use the default{other}, which increased it less. See docs/compressors.md."
OR_UPDATES = " or sync='updates'"  # with AdamW


def warn_of_changes(exchange: Any, optimizer: torch.optim.Optimizer | None, before: Any) -> None:
    """Warn, on rank 0, of effects that are new with this config, since ``before`` (None: there was none).

    All ranks call this, see :func:`agmerge.errors.warn`. Nothing communicates.

    Args:
        exchange: the ``GradientExchange`` of the wrapper, with its config of now.
        optimizer: the one that steps; None: it is not known, and there is no warning.
        before: a ``Config``, or None.
    """
    alone = exchange.group.comm is None and workers.is_initialized()  # elastic: not connected yet
    if optimizer is None or exchange.group.outside or not (alone or exchange.group.comm is not None):
        return
    rank = workers.rank() if alone else exchange.group.comm.rank
    config, name, groups = exchange.agreed.config, type(optimizer).__name__, optimizer.param_groups
    followed = before is not None and before.compression.rates is not None
    if config.compression.rates is not None and not followed:
        momenta = ", ".join(f"{value:g}" for value in dict.fromkeys(float(group["momentum"]) for group in groups))
        decay = DECAY.format(optimizer=name) if any(group.get("weight_decay") for group in groups) else ""
        text = TAKEN.format(memory=config.compression.memory.name, optimizer=name, momenta=momenta, decay=decay)
        warn(text, rank)
    if followed and config.compression.rates is None and config.compression.memory.has_momentum:
        warn(OWN.format(memory=config.compression.memory.name), rank)
    cost = known_cost(config, optimizer)
    if cost is not None and (before is None or known_cost(before, optimizer) != cost):
        warn(NAMED.format(what=cost.text, other=OR_UPDATES if cost.optimizer == "AdamW" else ""), rank)
