"""The command-line options of :class:`agmerge.DistributedOptimizer` that examples share."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from torch import nn

CASTS = ("none", "fp16", "bf16")  # these send every element; density and exchange are for sparsifiers
DEAR = "dear"  # the planner whose updates are applied in the model's next forward


def add_options(parser: ArgumentParser, compression: str = "the library's default") -> None:
    """Add the flags. One that is not given is None, and left to the library; ``compression``: to whom, for that one."""
    add = parser.add_argument
    add("--compression", help=f"a sparsifier's name, or one of {', '.join(CASTS)}; without it: {compression}")
    add("--density", type=float, help="elements sent / elements, for a sparsifier; without it the library's, 0.01")
    add("--exchange", help="how messages are combined, for a sparsifier; without it sparse: always compressed")
    add("--merging", help="which gradients share a message: a planner's name, or a saved plan. dear sends all elements")


def given(args: Namespace, model: nn.Module) -> dict[str, Any]:
    """Return what the command line says, as arguments for the optimizer of ``model``.

    Three things follow from others. The exchange is named for a sparsifier, because the library's default sends dense
    where the network is fast, as it is on one machine. ``--merging dear`` takes the model; it halves an all-reduce, so
    without ``--compression`` everything is sent.
    """
    names = ("compression", "density", "exchange", "merging")
    found = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if found.get("merging") == DEAR:
        found["model"] = model
        found.setdefault("compression", "none")
    if found.get("compression") not in CASTS:
        found.setdefault("exchange", "sparse")
    return found


def described(settings: dict[str, str]) -> str:
    """Return the compressor of an optimizer with these ``settings``, for people."""
    name = settings["compression"]
    if name in CASTS:
        return name
    memory = settings["memory"].partition("(")[0]
    return f"{name}, density {float(settings['density']):.4g}, {settings['exchange']} exchange, memory {memory}"


def planned(settings: dict[str, str], buffers: int) -> str:
    """Where the plan of an optimizer with these ``settings`` comes from, and how many messages a step has."""
    return f"{settings['merging'].partition('(')[0]}, {buffers} merge buffer{'s' if buffers > 1 else ''}"
