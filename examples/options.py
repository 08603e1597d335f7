# SPDX-License-Identifier: Apache-2.0
"""The command-line options of :class:`agmerge.DistributedOptimizer` that examples share."""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from torch import nn

import merging
import sparsifiers

CASTS = ("none", "fp16", "bf16")  # nothing is compressed; density and exchange are for what compresses
DEAR = "dear"  # the planner whose updates are applied in the model's next forward
NAMES = ("compression", "density", "rank", "exchange", "merging")
OF_UPDATES = ("sync", "wire", "carry", "every", "overlap", "fragments")


def add_options(parser: ArgumentParser, compression: str = "the library's default") -> None:
    """Add the flags. One that is not given is None, and left to the library; ``compression``: to whom, for that one."""
    add = parser.add_argument
    add("--compression", help=f"a compressor's name, or one of {', '.join(CASTS)}; without it: {compression}")
    add("--density", type=float, help="elements sent / elements, for a sparsifier; without it the library's")
    add("--rank", type=int, help="number of columns of the factors, for powersgd and acpsgd; without it the library's")
    add("--exchange", help="how messages are combined, for a compressor; without it sparse: always compressed")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--merging", help="which gradients share a message: a planner's name, or a saved plan. dear sends all elements")
    add("--threshold", type=megabytes, metavar="MB", help="--merging threshold of so many MB (2^20 bytes) of gradients")


def megabytes(text: str) -> float:
    """Read a number of MB; argparse's error for one that is negative or not finite."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ArgumentTypeError(f"{text} is no number of MB; for one message in all: --merging single")
    return value


def count(text: str) -> int:
    """Read a number of things; argparse's error for one that is not positive."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{value} is less than 1")
    return value


def add_update_options(parser: ArgumentParser) -> None:
    """Add the flags about exchanging what the optimizer did. One that is not given is None, and left to the library."""
    add = parser.add_argument
    add("--sync", choices=("gradients", "updates"), default="updates", help="what is exchanged; without it updates")
    add("--wire", help="the codec of values: sign, 2bit, int4, int8, fp16, ...; without it sign, of updates")
    add("--carry", choices=("apply", "hold"), help="where a worker keeps what it has not sent; without it apply")
    add("--every", type=int, help="steps from one exchange to the next; without it 1")
    add("--overlap", type=int, help="steps that messages may take; without it 0")
    add("--fragments", type=int, help="groups of parameters that take turns; without it 1")


def given(args: Namespace, model: nn.Module) -> dict[str, Any]:
    """Return what the command line says, as arguments for the optimizer of ``model``.

    Five things follow from others. The exchange is named for what compresses, because the library's default sends dense
    where the network is fast, as it is on one machine. ``--merging dear`` takes the model; it halves an all-reduce, so
    without ``--compression`` everything is sent. ``--threshold`` is a planner and its size. Of ``--each`` and ``--opt``
    only what sends factors has a rank.
    """
    found = {name: value for name in (*NAMES, *OF_UPDATES) if (value := getattr(args, name, None)) is not None}
    if getattr(args, "threshold", None) is not None:
        planner = DEAR if found.get("merging") == DEAR else "threshold"  # the first is of --opt dear
        found["merging"] = merging.get(planner, bytes=round(args.threshold * 2**20))
    if DEAR in (found.get("merging"), getattr(args, "merging", None)):
        found["model"] = model
        found.setdefault("compression", "none")
    published = getattr(args, "each", None) or getattr(args, "opt", None)
    if published and not sparsifiers.is_low_rank(str(found.get("compression"))):
        found.pop("rank", None)  # published lines give it to every name, and it is of those that have factors
    if found.get("compression") not in CASTS:
        found.setdefault("exchange", "sparse")
    return found


def described(settings: dict[str, str]) -> str:
    """Return the compressor of an optimizer with these ``settings``, for people."""
    name = settings["compression"]
    if name in CASTS:
        return name
    said = [name]
    if "rank" in settings:
        said.append(f"rank {settings['rank']}")
    elif name != "auto" and not sparsifiers.is_quantiser(name):  # these send every element, in few bits
        said.append(f"density {float(settings['density']):.4g}")
    memory = settings["memory"].partition("(")[0]
    return ", ".join([*said, f"{settings['exchange']} exchange", f"memory {memory}"])


def planned(settings: dict[str, str], buffers: int) -> str:
    """Where the plan of an optimizer with these ``settings`` comes from, and how many messages a step has."""
    return f"{settings['merging'].partition('(')[0]}, {buffers} merge buffer{'s' if buffers > 1 else ''}"
