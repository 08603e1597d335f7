# SPDX-License-Identifier: Apache-2.0
"""Compressors and memories by name, their own or a published one.

A new one is a file of its own, and an import and a line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from typing import Any, Generic, TypeVar

from sparsifiers.base import Sparsifier
from sparsifiers.dgc import DGC
from sparsifiers.largest import TopK
from sparsifiers.low_rank import ACPSGD, RANK, LowRank, PowerSGD, Ranks
from sparsifiers.memories import DGCMemory, Memory, NoMemory, Residual, ResidualGTopK
from sparsifiers.papers.adtopk import AdTopK, AdTopKFill, AdTopKRow
from sparsifiers.papers.gaussiank import GaussianK
from sparsifiers.papers.redsync import RedSync, RedSyncTrim
from sparsifiers.papers.sidco import SIDCoE, SIDCoGamma, SIDCoGP
from sparsifiers.papers.threshold import Threshold
from sparsifiers.quantising.base import Quantizer
from sparsifiers.quantising.eden import Eden
from sparsifiers.quantising.linear import Float8, Int4, Int8
from sparsifiers.quantising.onebit import OneBit
from sparsifiers.quantising.stochastic import QSGD, TernGrad
from sparsifiers.randomk import RandomK

# Names in papers and their code: the one table of these, for scripts and command lines. Keys are spelled as `spelling`
# does. Names of planners and exchanges are the business of other packages.

# Other names for the canonical ones: accepted, not listed.
SPARSIFIERS = {
    "tradtopk": "topk",
    "globaltopk": "topk",
    "eftopk": "topk",
    "topkef": "topk",
    "topka": "topk",
    "adtopki": "adtopk",
    "allchanneltopk": "adtopk-row",
    "adtopkf": "adtopk-fill",
    "gaussian": "gaussiank",
    "dgcsampling": "dgc",
    "sidco": "sidco-e",
    "sidcoexp": "sidco-e",
    "sidcogam": "sidco-gamma",
}
LOW_RANK = {
    "powersgdhook": "powersgd",
    "rankk": "powersgd",
    "rankkreducer": "powersgd",
    "acp": "acpsgd",
    "halfrankkreducer": "acpsgd",
}
QUANTISERS = {
    "eden": "eden-2",
    "drive": "eden-1",
    "8bit": "int8",
    "u8bit": "int8",
    "bytegrad": "int8",
    "qgz": "int8",
    "4bit": "int4",
    "float8": "fp8",
    "e4m3": "fp8",
    "signsgd": "onebit",
    "efsignsgd": "onebit",
    "signum": "onebit",
    "1bit": "onebit",
}
# Names that are none of ours, with the nearest one: they are refused, with that name.
NEAREST_SPARSIFIER = {
    "deepgradientcompression": "dgc",
    # Sums of top-k selections: Ok-Topk's and SparCML's names.
    **dict.fromkeys(("oktopk", "gtopk", "gtopksgd", "topksa", "topkdsa", "topka2", "topkaopt"), "topk"),
    **dict.fromkeys(("lags", "lagssgd"), "topk"),
    **dict.fromkeys(("gaussianksa", "gaussiankconcat"), "gaussiank"),
}
NEAREST_LOW_RANK = {"batchedpowersgd": "powersgd", "batchedpowersgdhook": "powersgd", "atomo": "powersgd"}
NEAREST_QUANTISER = {
    # GRACE's, which are rounded to powers of two, or to the bits beside an exponent.
    **dict.fromkeys(("natural", "naturalcuda", "inceptionn", "u8", "uint8", "uniform8bit", "quantile8bit"), "int8"),
    **dict.fromkeys(("blockwise8bit", "quantizationpertensor", "quantizationperchannel"), "int8"),
    **dict.fromkeys(("qsgdcuda", "dithering"), "qsgd"),
    **dict.fromkeys(("sketch", "sketchml"), "int4"),
    "adaq": "onebit",
    "1bitsgd": "onebit",
    "fp8e4m3": "fp8",
}


# The registry.

Made = TypeVar("Made")
ALIKE = 0.7  # how similar two names are, at least, for the one to be a slip of the pen for the other


def spelling(name: str) -> str:
    """Return the common form of all spellings of a name: without case, hyphens, underscores and blanks."""
    return "".join(letter for letter in name.casefold() if letter not in "-_ ")


def alike(name: str, known: Iterable[str]) -> str | None:
    """Return which of the known names is written most nearly as `name`; None: none is alike.

    That every other method is called "something-SGD" makes no two of them alike.
    """
    best = max(known, key=lambda each: _likeness(name, each), default=None)
    return None if best is None or _likeness(name, best) < ALIKE else best


def _likeness(first: str, second: str) -> float:
    """Return how much two names are alike, from 0 to 1; a common ending "SGD" is left out."""
    pair = spelling(first), spelling(second)
    if all(each.endswith("sgd") for each in pair):
        pair = pair[0].removesuffix("sgd"), pair[1].removesuffix("sgd")
    return SequenceMatcher(None, *pair).ratio()


class Registry(Generic[Made]):
    """Factories of objects of one kind, called by a name, positional arguments and named options.

    kind: their name in errors.
    base: the class that each factory must return an instance of.
    aliases: other names for the canonical ones; accepted, not listed.
    nearest: names that are not accepted, as `spelling` has them, and the nearest accepted name to each.

    Names are accepted in any spelling, see `spelling`.
    """

    def __init__(
        self,
        kind: str,
        base: type,
        aliases: Mapping[str, str] | None = None,
        nearest: Mapping[str, str] | None = None,
    ) -> None:
        self._kind = kind
        self._base = base
        self._aliases = dict(aliases or {})
        self._nearest = dict(nearest or {})
        self._factories: dict[str, Callable[..., Made]] = {}

    def names(self) -> tuple[str, ...]:
        """Return the canonical names, in the order in which they were registered."""
        return tuple(self._factories)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.canonical(name) is not None

    def register(self, name: str, factory: Callable[..., Made]) -> None:
        """Add a factory. ValueError for a taken name, TypeError for other arguments."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"a {self._kind}'s name must be a non-empty string, got {name!r}")
        if not callable(factory):
            raise TypeError(f"the factory of {self._kind} {name!r} must be callable, got {factory!r}")
        if self.canonical(name) is not None:
            raise ValueError(
                f"the {self._kind} name {name!r} is already used. Choose a name other than {self._known()}."
            )
        self._factories[name] = factory

    def create(self, name: str, /, *arguments: object, **options: object) -> Made:
        """Return factory(*arguments, **options). ValueError for an unknown name, TypeError for an unknown option."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a {self._kind} must be a string, got {name!r}. Choose from: {self._known()}")
        known = self.canonical(name)
        if known is None:
            near = self.published(name) or alike(name, [*self._factories, *self._aliases])
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"unknown {self._kind} {name!r}. Choose from: {self._known()}{hint}")
        factory = self._factories[known]
        self._check_options(name, factory, len(arguments), options)
        made = factory(*arguments, **options)
        if not isinstance(made, self._base):
            raise TypeError(f"the factory of {self._kind} {name!r} returned {made!r}, expected a {self._base.__name__}")
        return made

    def canonical(self, name: str) -> str | None:
        """Return the canonical name, from any spelling of it or of an alias; None: there is none."""
        aliases = {spelling(alias): known for alias, known in self._aliases.items()}
        return {**aliases, **{spelling(known): known for known in self._factories}}.get(spelling(name))

    def published(self, name: str) -> str | None:
        """Return the nearest name here to a published one; None: that is not known, or accepted itself."""
        return self._nearest.get(spelling(name))

    def _known(self) -> str:
        return ", ".join(self._factories)

    def _check_options(
        self, name: str, factory: Callable[..., Made], given: int, options: Mapping[str, object]
    ) -> None:
        parameters = list(inspect.signature(factory).parameters.values())
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return  # the factory judges its options itself
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        accepted = [parameter.name for parameter in parameters[given:] if parameter.kind in named]
        unknown = [option for option in options if option not in accepted]
        if unknown:
            raise TypeError(
                f"{self._kind} {name!r} has no option {', '.join(map(repr, unknown))}. Its options: "
                f"{', '.join(accepted) or 'none'}"
            )


# Sparsifiers, low-rank compressors, quantizers and memories.

_sparsifiers: Registry[Sparsifier] = Registry("sparsifier", Sparsifier, SPARSIFIERS, NEAREST_SPARSIFIER)
_sparsifiers.register("topk", TopK)
_sparsifiers.register("randomk", RandomK)
_sparsifiers.register("threshold", Threshold)
_sparsifiers.register("dgc", DGC)
_sparsifiers.register("gaussiank", GaussianK)
_sparsifiers.register("redsync", RedSync)
_sparsifiers.register("redsync-trim", RedSyncTrim)
_sparsifiers.register("sidco-e", SIDCoE)
_sparsifiers.register("sidco-gp", SIDCoGP)
_sparsifiers.register("sidco-gamma", SIDCoGamma)
_sparsifiers.register("adtopk", AdTopK)
_sparsifiers.register("adtopk-row", AdTopKRow)
_sparsifiers.register("adtopk-fill", AdTopKFill)
_low_rank: Registry[LowRank] = Registry("low-rank compressor", LowRank, LOW_RANK, NEAREST_LOW_RANK)
_low_rank.register("powersgd", PowerSGD)
_low_rank.register("acpsgd", ACPSGD)
_quantisers: Registry[Quantizer] = Registry("quantizer", Quantizer, QUANTISERS, NEAREST_QUANTISER)
_quantisers.register("eden-1", lambda: Eden(1))
_quantisers.register("eden-2", lambda: Eden(2))
_quantisers.register("eden-3", lambda: Eden(3))
_quantisers.register("eden-4", lambda: Eden(4))
_quantisers.register("int8", Int8)
_quantisers.register("int4", Int4)
_quantisers.register("fp8", Float8)
_quantisers.register("qsgd", QSGD)
_quantisers.register("terngrad", TernGrad)
_quantisers.register("onebit", OneBit)
_memories: Registry[Memory] = Registry("memory", Memory)
_memories.register("none", NoMemory)
_memories.register("residual", Residual)
_memories.register("dgc", DGCMemory)
_memories.register("residualgtopk", ResidualGTopK)


def names() -> tuple[str, ...]:
    """Return the names of the sparsifiers. Registered ones come last."""
    return _sparsifiers.names()


def get(name: str, density: float = 0.01, **options: object) -> Sparsifier:
    """Make a sparsifier, by name.

    Args:
        name (str): A name of :func:`names`, or an alias. Case, hyphens and underscores do not matter.
        density (float): Fraction of the values to select, above 0 and at most 1. Default: 0.01.
        **options: Options of this sparsifier, such as ``tau=0.1`` for ``"threshold"``.

    Raises:
        ValueError: For an unknown name, or a density outside (0, 1].
        TypeError: For an option that the sparsifier does not have.
    """
    if name in _quantisers and name not in _sparsifiers:
        raise ValueError(f"{name!r} is a quantizer, not a sparsifier. Use sparsifiers.quantizer({name!r}).")
    if isinstance(name, str) and name not in _sparsifiers and (near := _quantisers.published(name)):
        raise ValueError(f"{name!r} is not a sparsifier. Use sparsifiers.quantizer({near!r}).")
    return _sparsifiers.create(name, density, **options)


def is_sparsifier(name: str) -> bool:
    """Return whether this is the name of a sparsifier, or an alias, in any spelling."""
    return name in _sparsifiers


def register(name: str, factory: Callable[..., Sparsifier]) -> None:
    """Register your own sparsifier, for ``compression=name``. Do it on every rank.

    Args:
        name (str): A new name.
        factory (callable): Makes the sparsifier: ``factory(density, **options)``. A subclass of :class:`Sparsifier` is
            one.

    Raises:
        ValueError: If the name is taken.
    """
    _refuse_taken(name, _low_rank, _quantisers)
    _sparsifiers.register(name, factory)


def low_rank_names() -> tuple[str, ...]:
    """Return the names of the low-rank compressors."""
    return _low_rank.names()


def is_low_rank(name: str) -> bool:
    """Return whether this is the name of a low-rank compressor, or an alias, in any spelling."""
    return name in _low_rank


def low_rank(name: str, rank: Ranks = RANK, **options: object) -> LowRank:
    """Make a low-rank compressor, by name.

    Args:
        name (str): ``"powersgd"`` or ``"acpsgd"``, or an alias. Case, hyphens and underscores do not matter.
        rank (int or dict): Rank of the factors. Or ``{pattern: rank}``, with regular expressions that must match the
            full parameter name. The first match wins. Default: 4.
        **options: ``seed``, an integer, of the first basis.

    Raises:
        ValueError: For an unknown name, or a rank that is not a whole number above 0.
        TypeError: For an unknown option.
    """
    return _low_rank.create(name, rank, **options)


def quantizers() -> tuple[str, ...]:
    """Return the names of the quantizers. Registered ones come last."""
    return _quantisers.names()


def is_quantizer(name: str) -> bool:
    """Return whether this is the name of a quantizer, or an alias, in any spelling."""
    return name in _quantisers


def quantizer(name: str, **options: object) -> Quantizer:
    """Make a quantizer, by name.

    Args:
        name (str): A name of :func:`quantizers`, or an alias. Case, hyphens and underscores do not matter.
        **options: Options of this quantizer, such as ``bits=8`` for ``"qsgd"``.

    Raises:
        ValueError: For an unknown name or a wrong value, or if this version of PyTorch lacks a dtype.
        TypeError: For an option that the quantizer does not have.
    """
    return _quantisers.create(name, **options)


def register_quantizer(name: str, factory: Callable[..., Quantizer]) -> None:
    """Register your own quantizer, for ``compression=name``. Do it on every rank.

    Args:
        name (str): A new name.
        factory (callable): Makes the quantizer: ``factory(**options)``. A subclass of :class:`Quantizer` is one.

    Raises:
        ValueError: If the name is taken.
    """
    _refuse_taken(name, _sparsifiers, _low_rank)
    _quantisers.register(name, factory)


def canonical(name: str) -> str | None:
    """Return the canonical name of a compressor of any kind, or of the nearest to a published name; None: none.

    A name that is taken comes before one that is only near.
    """
    kinds: tuple[Registry[Any], ...] = (_sparsifiers, _low_rank, _quantisers)
    known = next(filter(None, (kind.canonical(name) for kind in kinds)), None)
    return known or next(filter(None, (kind.published(name) for kind in kinds)), None)


def memory(name: str, **options: object) -> Memory:
    """Make a memory, by name, for ``memory=``.

    Args:
        name (str): ``"none"``, ``"residual"``, ``"dgc"`` or ``"residualgtopk"``.
        **options: Options of this memory, such as ``clipping=1.0`` for ``"dgc"``.

    Raises:
        ValueError: For an unknown name.
        TypeError: For an option that the memory does not have.
    """
    return _memories.create(name, **options)


def _refuse_taken(name: object, *others: Registry[Any]) -> None:
    """Raise ValueError if compressors of another kind have this name: `compression=name` means one of all kinds."""
    if any(name in other for other in others):
        raise ValueError(f"the name {name!r} belongs to a compressor of another kind. Use another name.")


# The old spelling of these names: scripts have it.
quantiser, quantisers = quantizer, quantizers
is_quantiser, register_quantiser = is_quantizer, register_quantizer
