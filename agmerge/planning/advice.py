# SPDX-License-Identifier: Apache-2.0
"""Advice from measured step times: whether agmerge is of use here, and the lines for the script.

Pure functions; ``python -m agmerge advise`` measures and prints, see ``cli/advise.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sparsifiers.quantising.choice import NONE

WORTH = 1.1  # times as fast: less is no reason to change a script
NOT_HERE = "do not use agmerge here"
DDP, TRAINER, ACCELERATE, LIGHTNING, OURS = "DistributedDataParallel", "Trainer", "Accelerate", "Lightning", "agmerge"
# Where to paste what, by what the script uses.
LINES = {
    DDP: (
        "after DistributedDataParallel(...) and the optimizer, and start the script as ever",
        ("import agmerge", "compressed = agmerge.integrations.ddp.compress(model, optimizer=optimizer)"),
    ),
    TRAINER: (
        "between Trainer(...) and trainer.train()",
        ("import agmerge", "compression = agmerge.integrations.transformers.compress(trainer)"),
    ),
    ACCELERATE: (
        "after accelerator.prepare(...)",
        ("import agmerge", "compressed = agmerge.integrations.accelerate.compress(accelerator, model)"),
    ),
    LIGHTNING: (
        "as the Trainer's strategy",
        ("import agmerge", "strategy = agmerge.integrations.lightning.CompressedDDPStrategy()"),
    ),
    OURS: (
        "in place of the optimizer's line",
        ("optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters())",),
    ),
}


@dataclass(frozen=True)
class Candidate:
    """Compressor that was tried in steps of the script."""

    name: str
    seconds: float  # of a step: the median of the slowest worker
    is_default: bool  # the default chooses among these; others are had by name
    cost: str  # what it costs of the loss, in words


@dataclass(frozen=True)
class Facts:
    """What was found in a script and measured of it. ``now``: seconds of a step as the script is."""

    framework: str  # one of LINES
    optimizer: str  # the name of its class
    workers: int
    parameters: int
    now: float
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Advice:
    """What to do. ``gain``: how many times as fast a step would be. ``lines``: to paste; none where it is of no use."""

    use: bool
    why: str
    gain: float
    where: str
    lines: tuple[str, ...]


def choose(facts: Facts) -> Advice:
    """Return the advice for a script.

    The default is advised if one of its candidates is ``WORTH`` times as fast as the script is now. What costs more of
    the loss is never advised, only told.
    """
    best = min((one for one in facts.candidates if one.is_default), key=lambda one: one.seconds)
    gain = facts.now / best.seconds
    fastest = min(facts.candidates, key=lambda one: one.seconds)
    told = ""
    if not fastest.is_default and best.seconds / fastest.seconds >= WORTH:
        speed = times(facts.now / fastest.seconds)
        told = f" By name there is compression={fastest.name!r}, {speed} (loss: {fastest.cost})."
    if gain < WORTH or best.name == NONE:
        why = f"{NOT_HERE}: a step takes {milliseconds(facts.now)} now, and {milliseconds(best.seconds)} at best."
        return Advice(False, why + told, gain, "", ())
    where, lines = LINES[facts.framework]
    why = (
        f"use the default: steps of {milliseconds(best.seconds)} in place of {milliseconds(facts.now)}, {times(gain)}."
    )
    return Advice(True, why + told, gain, where, lines)


def milliseconds(seconds: float) -> str:
    """Return seconds as text."""
    return f"{1e3 * seconds:.3g} ms"


def times(gain: float) -> str:
    """Return a gain as text."""
    return f"{gain:.2g} times as fast"


def text(facts: Facts, advice: Advice) -> str:
    """Return the table of what was measured, and the advice."""
    about = f"{facts.parameters / 1e6:.3g} million parameters, {facts.optimizer}, {facts.framework}"
    lines = [f"{about}, {facts.workers} workers", "", f"{'':26}{'ms a step':>10}  {'x now':>6}  costs of the loss"]
    if facts.framework != OURS:  # there it is compared with dense
        lines.append(f"{'as it is':26}{1e3 * facts.now:10.1f}  {1:6.2f}")
    for one in sorted(facts.candidates, key=lambda one: one.seconds):
        name = f"{one.name}{' (of the default)' if one.is_default else ''}"
        lines.append(f"{name:26}{1e3 * one.seconds:10.1f}  {facts.now / one.seconds:6.2f}  {one.cost}")
    lines += ["", advice.why]
    if advice.lines:
        lines += ["", f"Put this {advice.where}:", "", *(f"    {line}" for line in advice.lines)]
    return "\n".join(lines)


def median_of_slowest(seconds: Sequence[Sequence[float]]) -> float:
    """Return the largest of the workers' medians. ``seconds``: of steps, by worker."""
    return max(map(statistics.median, seconds))
