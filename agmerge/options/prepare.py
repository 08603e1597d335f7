# SPDX-License-Identifier: Apache-2.0
"""Preparation of a script's options, the same for every wrapper: checks, decisions, and the config of a step.

An option that is None has not been given, so nothing can disagree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import sparsifiers
from agmerge.errors import warn
from agmerge.options import defaults
from agmerge.options.arguments import Options
from agmerge.options.compressors import compressor_of, named
from agmerge.options.defaults import resolve_auto
from agmerge.options.meaning import check_meaning
from agmerge.options.resolve import resolve
from agmerge.runtime import process_sets, workers
from agmerge.step import momentum
from agmerge.step.config import Config
from agmerge.step.density_policy import DENSITY, IMPORTANCE
from agmerge.step.updates import UPDATES
from sparsifiers import Kind, catalogue

KEPT = (
    "AGM707: compression={name!r} uses memory='residual' with {optimizer}, because memory={memory!r} cannot apply the "
    "momentum of {optimizer}. Pass memory='residual' to silence this warning."
)


class Prepared(NamedTuple):
    """Checked options of a script, and what a step needs of them."""

    options: Options  # with the compressor, its density and the memory decided; others as the script gave them
    config: Config


def prepare(options: Options, optimizer: torch.optim.Optimizer | None, *, are_new: bool = True) -> Prepared:
    """Check the options of a script, decide the open ones, and return them with the config of a step.

    All wrappers call this, so that the first mistake of several is the same on each of them. Raises ``ValueError`` or
    ``TypeError``. Nothing communicates.

    Args:
        options: as the script gave them, or those in use.
        optimizer: the one that steps; None: it is not known.
        are_new: the script has just given them; those in use may have some of an earlier compressor.
    """
    if are_new:
        check_meaning(options.compression, vars(options))
        _check_agreement(options.compression, options.density, options.rank)
    if options.sync == UPDATES and optimizer is not None:
        _check_outer(options.outer, optimizer)
    options = replace(options, process_set=process_sets.by_ranks(options.process_set))  # torch's groups do not pickle
    return _decided(replace(options, compression=resolve_auto(options, optimizer)), optimizer)


def prepare_change(
    options: Options,
    optimizer: torch.optim.Optimizer | None,
    compression: Any,
    given: Mapping[str, Any],
    own: Mapping[str, Any],
) -> Prepared:
    """Return the options, and the config, of a wrapper that compresses otherwise from now on.

    Args:
        options: those in use.
        optimizer: which ``compression="auto"`` goes by; None: it is not known.
        compression: as the constructor takes it.
        given: ``density``, ``rank``, ``memory`` and ``warmup``; a density or rank that is None is the one in use.
        own: options of the compressor, by name.
    """
    asked = replace(Options(), sync=options.sync, exchange=options.exchange, compression=compression, **given)
    _check_agreement(asked.compression, asked.density, asked.rank)
    compression = resolve_auto(asked, optimizer)  # earlier options do not count
    check_meaning(compression, {name: getattr(asked, name) for name in ("density", "rank", "warmup")})
    density = options.density if asked.density is None else asked.density
    rank = options.rank if asked.rank is None else asked.rank
    if own and not isinstance(compression, str):
        raise TypeError(
            f"{', '.join(own)}: options of a compressor require the compressor's name, got compression={compression!r}"
        )
    if own:
        compression = named(compression, DENSITY if density == IMPORTANCE else density, rank, **own)
    density = density if density == IMPORTANCE else defaults.own_density(compression) or density
    if own or asked.rank is None:
        rank = next((part.rank for part in defaults.objects(compression) if part.rank is not None), rank)
    said = {"memory": asked.memory, "warmup": asked.warmup, "density": density, "rank": rank}
    return _decided(replace(options, compression=compression, **said), optimizer)


def _decided(options: Options, optimizer: torch.optim.Optimizer | None) -> Prepared:
    """Return options of which the compression is decided, with density and memory decided too, and their config."""
    options = replace(options, density=defaults.density_of(options), memory=memory_beside(options, optimizer))
    return Prepared(options, with_momentum_of(resolve(options), optimizer))


def with_momentum_of(config: Config, optimizer: torch.optim.Optimizer | None, groups: Any = None) -> Config:
    """Return ``config`` with the momentum of this optimizer's groups, where its memory applies that.

    ``optimizer``: None: it is not known. ``groups``: those that the optimizer is about to load; None:
    its own. Raises as :func:`agmerge.step.momentum.rates` does.
    """
    return config.changed(rates=momentum.rates(optimizer, config.compression.memory, groups))


def _check_agreement(compression: Any, density: Any, rank: Any) -> None:
    """Raise ``ValueError`` if a density or a rank was given (not None) that is not that of a compressor object.

    ``compression``: as the script gives it. ``density="importance"`` goes around the object's own.
    """
    for part in defaults.objects(compression):
        if part.selects and density is not None and density not in (IMPORTANCE, part.density):
            if isinstance(density, dict):
                raise ValueError(
                    f"density={density!r} requires a compressor's name or a single density, got "
                    f"compression={compression!r}"
                )
            raise ValueError(
                f"density={density!r} and compression={compression!r} disagree. Pass the density to the compressor "
                "only."
            )
        if part.rank is not None and rank not in (None, part.rank):
            raise ValueError(f"rank={rank!r} and compression={compression!r} disagree. Pass the rank to one of them.")


def _check_outer(outer: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``TypeError`` if a script's ``outer=`` does not make an optimizer: it is asked once, of the parameters."""
    if not callable(outer) or type(outer).__module__.partition(".")[0] == "agmerge":
        return  # no function is refused later; ours makes one
    made = outer([p.detach() for group in optimizer.param_groups for p in group["params"] if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer={outer!r} returned {made!r}, expected a torch.optim.Optimizer")


def memory_beside(options: Options, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the memory that the script asks for; where it asks for none, one that goes with the optimizer.

    That is None, the compressor's own, unless this applies momentum, and the optimizer has one that it cannot apply in
    the optimizer's place. Then it is ``"residual"``, and rank 0 says so.
    """
    if options.memory is not None or options.sync == UPDATES or optimizer is None:
        return options.memory
    named = isinstance(options.compression, str) and catalogue.is_sparsifier(options.compression)
    if not named and not defaults.objects(options.compression):
        return None
    compressor = compressor_of(options.compression, DENSITY, options.rank)
    memory = sparsifiers.memory(compressor.memory)
    if not memory.has_momentum or compressor.kinds != {Kind.SPARSE}:  # beside factors it is refused, by name
        return None
    try:
        momentum.rates(optimizer, memory)
    except ValueError:
        if workers.is_initialized():
            text = KEPT.format(name=compressor.name, optimizer=type(optimizer).__name__, memory=memory.name)
            warn(text, workers.rank())
        return "residual"
    return None
