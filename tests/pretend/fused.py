# SPDX-License-Identifier: Apache-2.0
"""Let a pretended device have kernels: a call of ``sparsifiers.gpu`` is the launches and bytes that it says.

What it computes is computed by its reference, in torch's operations of which none is counted.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from pretend.kernels import one_launch
from pretend.registration import NAME
from sparsifiers.gpu import choice
from sparsifiers.quantising.eden import Eden


class Fused(NamedTuple):
    """Say what stands for a kernel, and what that is on a GPU: the table of ``sparsifiers.gpu``."""

    module: str  # of sparsifiers.gpu
    reference: str  # the function in torch's operations
    launches: int  # kernels, and copies of what the host says
    bytes: Callable[[dict[str, Any]], float]  # of device memory moved, from the arguments


def elements(arguments: dict[str, Any], name: str) -> int:
    """The elements of a tensor among the arguments."""
    return int(arguments[name].numel())


def passes(arguments: dict[str, Any]) -> int:
    """Bytes an element of K1."""
    return 8 + 4 * (arguments["residual"] is not None) + 8 * (arguments["momenta"] is not None)


TABLE = (
    Fused("compensation", "compensate_reference", 2, lambda a: passes(a) * elements(a, "work")),
    Fused("selection", "count_digits_reference", 1, lambda a: 4 * elements(a, "work")),
    Fused("selection", "count_ties_reference", 1, lambda a: 0.125 * elements(a, "work")),
    Fused("selection", "find_edge_reference", 1, lambda a: 16_384),
    Fused("selection", "mark_reference", 1, lambda a: 4.25 * elements(a, "work")),
    Fused("selection", "settle_reference", 1, lambda a: 0.5 * elements(a, "work")),
    Fused("selection", "gather_reference", 2, lambda a: 0.25 * elements(a, "work") + 72 * a["slots"].indices.numel()),
    Fused("selection", "rows_reference", 2, lambda a: 20 * elements(a, "work")),
    Fused("codec", "encode_reference", 1, lambda a: 8 * elements(a, "indices")),
    Fused("codec", "decode_reference", 2, lambda a: 8 * elements(a, "out")),
    Fused("combining", "whole_reference", 1, lambda a: 4 * elements(a, "update") + 4 * elements(a, "rows")),
    Fused("combining", "heads_reference", 1, lambda a: 4 * elements(a, "words")),
    Fused("combining", "add_reference", 1, lambda a: 4 * elements(a, "update") + 8 * elements(a, "values")),
)

# Of `eden`: what its kernels do, by the method that does it in torch's operations. A kernel, and a copy of its table.
QUANTISING: tuple[tuple[str, int, Callable[[dict[str, Any]], float]], ...] = (
    ("_encode_in_torch", 2, lambda a: 4 * elements(a, "values") + elements(a, "out")),
    ("_decode_sum_in_torch", 2, lambda a: 4 * elements(a, "out") + sum(one.numel() for one in a["messages"])),
    ("_encode_sum_in_torch", 2, lambda a: elements(a, "out") + sum(one.numel() for one in a["messages"])),
    ("_encode_each", 2, lambda a: 4 * covered(a) + covered(a) * a["self"].bits / 8),
    ("_decode_each", 2, lambda a: 4 * covered(a) + len(a["rows"]) * covered(a) * a["self"].bits / 8),
    ("_encode_sum_each", 2, lambda a: (len(a["rows"]) + 1) * covered(a) * a["self"].bits / 8),
)


def covered(arguments: dict[str, Any]) -> int:
    """The elements of all runs of a table."""
    return sum(run.length for run in arguments["table"].runs)


@contextmanager
def installed() -> Iterator[None]:
    """Let pretended devices have kernels, inside."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(choice, "FUSED", choice.FUSED | {NAME}))
        for fused in TABLE:
            module = importlib.import_module(f"sparsifiers.gpu.{fused.module}")
            size = sized(getattr(module, fused.reference), fused.bytes)
            stack.enter_context(one_launch(module, fused.reference, size, fused.launches))
        for name, launches, bytes_of in QUANTISING:
            size = sized(getattr(Eden, name), bytes_of)
            stack.enter_context(one_launch(Eden, name, size, launches))
        yield


def sized(reference: Callable[..., None], size: Callable[[dict[str, Any]], float]) -> Callable[..., float]:
    """``size`` of the arguments that ``reference`` is called with."""
    signature = inspect.signature(reference)
    return lambda *args, **kwargs: size(signature.bind(*args, **kwargs).arguments)
