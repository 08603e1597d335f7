# SPDX-License-Identifier: Apache-2.0
"""Check ``dense=``: which parameters are always sent uncompressed, or, as ``"partial"``, up to which size."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import sparsifiers
from agmerge.options.arguments import Options
from agmerge.step.config import is_small
from agmerge.step.dense_cutoff import NAME, DenseCutoff
from agmerge.step.records import DenseRule
from sparsifiers import Kind
from sparsifiers.name_patterns import compiled

Patterns = tuple[re.Pattern[str], ...]


def parse_dense(
    options: Options, compressor: sparsifiers.Compressor, density: Any
) -> tuple[DenseRule, Patterns, DenseCutoff | None]:
    """Return the rule for parameters that are always sent uncompressed, its patterns, and where ``"partial"`` starts.

    ``compressor`` and ``density``: those of the options. Raises ``TypeError`` for anything but a rule, ``ValueError``
    for what is no pattern, and for ``"partial"`` beside options with which it has no meaning.
    """
    dense = options.dense
    if isinstance(dense, str) and dense == NAME:
        return is_small, (), _cutoff(options, compressor, density)
    if dense is None:
        return is_small, (), None
    if callable(dense):
        return lambda name, parameter: bool(dense(name, parameter)), (), None
    if isinstance(dense, str) or not isinstance(dense, Iterable):
        raise TypeError(
            f"dense={dense!r}: expected a list of patterns for full parameter names, a callable (name, parameter) -> "
            f"bool, or {NAME!r}"
        )
    patterns = _patterns(dense)
    return lambda name, parameter: any(pattern.fullmatch(name) for pattern in patterns), patterns, None


def _cutoff(options: Options, compressor: sparsifiers.Compressor, density: Any) -> DenseCutoff:
    """Return the cutoff that ``dense="partial"`` starts with; ``ValueError`` for options without meaning beside it."""
    if compressor.kinds != {Kind.SPARSE}:
        how = "factors are sent" if Kind.LOW_RANK in compressor.kinds else "every element is sent"
        raise ValueError(
            f"dense='partial' has no effect with compression={options.compression!r}: {how}. Remove dense=, or use a "
            "sparsifier."
        )
    if isinstance(density, (dict, str)):
        raise ValueError(
            f"dense='partial' is not supported with density={density!r}, because both set the size of each "
            "parameter's message. Pass one number as density."
        )
    if callable(options.warmup):
        raise ValueError(
            "dense='partial' is not supported with a callable warmup=, which returns one density for all parameters. "
            "Pass warmup='dgc' or a number of steps."
        )
    return DenseCutoff()


def _patterns(dense: Iterable[Any]) -> Patterns:
    """Return the patterns of ``dense=``; ``ValueError`` for anything else."""
    patterns = []
    for pattern in dense:
        try:
            patterns.append(compiled(pattern))
        except ValueError as error:
            raise ValueError(f"dense: {error}") from None
    return tuple(patterns)
