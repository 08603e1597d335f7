# SPDX-License-Identifier: Apache-2.0
"""Advice from measured step times: whether agmerge is of use here, and the lines for the script.

Pure functions; ``python -m agmerge advise`` measures and prints, see ``cli/advise.py``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agmerge.step.config import UPDATES
from sparsifiers.quantising.base import NONE

WORTH = 1.1  # times as fast: less is no reason to change a script
NOT_HERE = "do not use agmerge here"
UNSURE = (
    "no reliable speedup. A step takes {now} now and {then} with {name}, depending on the trial. Run it again when "
    "nothing else runs on this machine."
)
ABOUT_LOSS = "Effect on the loss: of small language models in our tests, compared with uncompressed gradients."
DDP, TRAINER, ACCELERATE, LIGHTNING = "DistributedDataParallel", "Trainer", "Accelerate", "Lightning"
OURS, PLAIN = "agmerge", "plain PyTorch"
# Where to paste what, by what the script uses. A word in braces stands for a name of the script's.
LINES = {
    DDP: (
        "below DistributedDataParallel(...) and the optimizer{also}, and start the script as before",
        ("import agmerge", "compressed = agmerge.integrations.ddp.compress({model}, optimizer={optimizer}{scaling})"),
    ),
    TRAINER: (
        "below Trainer(...), above its train()",
        ("import agmerge", "compression = agmerge.integrations.transformers.compress({trainer})"),
    ),
    ACCELERATE: (
        "below accelerator.prepare(...)",
        ("import agmerge", "compressed = agmerge.integrations.accelerate.compress({accelerator}, {model})"),
    ),
    LIGHTNING: (
        "above Trainer(...), and write Trainer(strategy=strategy, ...)",
        ("import agmerge", "strategy = agmerge.integrations.lightning.CompressedDDPStrategy()"),
    ),
    OURS: (
        "in place of the line with agmerge.DistributedOptimizer(...)",
        ("{optimizer} = agmerge.DistributedOptimizer({plain}, {model}.named_parameters(){scaling})",),
    ),
    PLAIN: (
        "below the optimizer{also}, and start the script with torchrun",
        (
            "import agmerge",
            "agmerge.init()",
            "{optimizer} = agmerge.DistributedOptimizer({optimizer}, {model}.named_parameters(){scaling})",
            "agmerge.broadcast_parameters({model}.state_dict(), root_rank=0)",
        ),
    ),
}
# Where the script has a GradScaler.
SCALING = ", scaler={scaler}"
ALSO = " and GradScaler(...)"
# What the words stand for where the script's own names are not known: lines have gaps there then.
WORDS = {
    "model": "the model (the DistributedDataParallel, if there is one)",
    "optimizer": "the optimizer whose step() the script calls",
    "plain": "the optimizer that agmerge wraps",
    "scaler": "the GradScaler",
    "trainer": "the Trainer",
    "accelerator": "the Accelerator",
}


@dataclass(frozen=True)
class Candidate:
    """Compressor that was tried in steps of the script."""

    name: str
    seconds: float  # of a step: the median of the slowest worker
    is_default: bool  # the default chooses among these; others are had by name
    cost: str  # what it costs of the loss, in words
    turns: tuple[float, ...] = ()  # seconds of a step in each of its turns
    use: str = ""  # what it is for, in words; empty: it is the default's

    @property
    def argument(self) -> str:
        """Return the argument that names it."""
        return f"sync={self.name!r}" if self.name == UPDATES else f"compression={self.name!r}"


@dataclass(frozen=True)
class Facts:
    """What was found in a script and measured of it. ``now``: seconds of a step as the script is, ``turns`` by turn."""

    framework: str  # one of LINES
    optimizer: str  # the name of its class
    workers: int
    parameters: int
    now: float
    candidates: tuple[Candidate, ...]
    turns: tuple[float, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # of the script's, by word of WORDS; empty: not known
    scaled: bool = False  # a GradScaler makes its steps
    has_default: bool = False  # it has this library's default already
    link: str = ""  # the rate of a simulated network, which delays this library's messages only

    @property
    def beside_dense(self) -> bool:
        """Return whether ``now`` is agmerge without compression: the script's own exchange cannot be timed."""
        return self.framework == OURS or bool(self.link)


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

    The default is advised if one of its candidates is ``WORTH`` times as fast as the script is now, in the slowest of
    its turns and beside the fastest of the script's. What costs more of the loss is never advised, only told.
    """
    best = min((one for one in facts.candidates if one.is_default), key=lambda one: one.seconds)
    gain = facts.now / best.seconds
    fastest = min(facts.candidates, key=lambda one: one.seconds)
    told = ""
    if not fastest.is_default and best.seconds / fastest.seconds >= WORTH and _least(facts, fastest) >= WORTH:
        speed, use = times(facts.now / fastest.seconds), f"To {fastest.use}, set" if fastest.use else "You can also set"
        told = f" {use} {fastest.argument}: {speed} (effect on the loss: {fastest.cost})."
    if best.name == NONE:
        why = f"{NOT_HERE}: uncompressed gradients, as the script sends them now, are the fastest."
        return Advice(False, why + told, gain, "", ())
    if gain < WORTH:
        base = "with uncompressed gradients" if facts.beside_dense else "now"
        why = f"{NOT_HERE}: a step takes {milliseconds(facts.now)} {base}, and {milliseconds(best.seconds)} at best."
        return Advice(False, why + told, gain, "", ())
    if _least(facts, best) < WORTH:
        why = f"{NOT_HERE}: {UNSURE.format(now=ranged(facts.turns), name=best.name, then=ranged(best.turns))}"
        return Advice(False, why, gain, "", ())
    why = f"Use the default: {milliseconds(best.seconds)} per step instead of {milliseconds(facts.now)}, {times(gain)}."
    if facts.has_default:
        why = (
            f"Change nothing, the script already uses the default: {milliseconds(best.seconds)} per step instead of "
            f"{milliseconds(facts.now)} with uncompressed gradients, {times(gain)}."
        )
        return Advice(True, why + told, gain, "", ())
    where, lines = filled(facts.framework, facts.names, scaled=facts.scaled)
    return Advice(True, why + told, gain, where, lines)


def _least(facts: Facts, one: Candidate) -> float:
    """Return how many times as fast a step was at the least: the slowest turn beside the script's fastest."""
    return min(facts.turns, default=facts.now) / max(one.turns, default=one.seconds)


def filled(framework: str, names: Mapping[str, str], *, scaled: bool) -> tuple[str, tuple[str, ...]]:
    """Return where to paste what for a framework, with the script's names, or gaps. ``scaled``: it has a GradScaler."""
    where, lines = LINES[framework]
    known = {**{word: f"<{word}>" for word in WORDS}, **names}
    scaling = SCALING.format(**known) if scaled else ""
    return where.format(also=ALSO if scaled else ""), tuple(line.format(**known, scaling=scaling) for line in lines)


def words(framework: str, *, scaled: bool) -> tuple[str, ...]:
    """Return the words of WORDS in the lines for a framework."""
    text = "".join(LINES[framework][1]).replace("{scaling}", SCALING if scaled else "")
    return tuple(word for word in WORDS if f"{{{word}}}" in text)


def pasted(framework: str, names: Mapping[str, str], *, scaled: bool) -> list[str]:
    """Return the printed lines for a script: where to paste them, the lines, and the meaning of words in them."""
    where, lines = filled(framework, names, scaled=scaled)
    if names or not words(framework, scaled=scaled):
        return [f"Put this {where}:", "", *(f"    {line}" for line in lines)]
    return template(framework, scaled=scaled)


def template(framework: str, *, scaled: bool) -> list[str]:
    """Return what is printed where a script's names are not known: lines with gaps, which do not run as they are."""
    where, lines = filled(framework, {}, scaled=scaled)
    stand = [f"<{word}> is {WORDS[word]}" for word in words(framework, scaled=scaled)]
    return [f"With your own names, put this {where}:", "", *(f"  {line}" for line in lines), "", f"{', '.join(stand)}."]


def plain_lines(pairs: Sequence[tuple[str, str]], passes: Sequence[int], scaler: str = "") -> tuple[str, ...]:
    """Return the lines for a script of plain PyTorch with several optimizers, say.

    Args:

        pairs: the script's names of each optimizer and of its model.
        passes: the backward passes of each in a step.
        scaler: the script's name of its GradScaler; empty: it has none.
    """
    scaling = SCALING.format(scaler=scaler) if scaler else ""
    wrapped = []
    for (optimizer, model), count in zip(pairs, passes, strict=True):
        more = f", backward_passes_per_step={count}" if count > 1 else ""
        made = f"agmerge.DistributedOptimizer({optimizer}, {model}.named_parameters(){more}{scaling})"
        wrapped.append(f"{optimizer} = {made}")
    models = dict.fromkeys(model for _, model in pairs)
    sent = [f"agmerge.broadcast_parameters({model}.state_dict(), root_rank=0)" for model in models]
    return ("import agmerge", "agmerge.init()", *wrapped, *sent)


def changes(lines: Sequence[str], edits: Sequence[str], *, several: bool, scaled: bool) -> list[str]:
    """Return what is printed of ``lines`` for a script of plain PyTorch, and of ``edits`` that it needs besides."""
    where = LINES[PLAIN][0].format(also=ALSO if scaled else "")
    where = where.replace("the optimizer", "the optimizers") if several else where
    if not edits:
        return [f"Put this {where}:", "", *(f"    {line}" for line in lines)]
    told = ["Make these changes:", "", *(f"{number}. {edit}" for number, edit in enumerate(edits, 1))]
    return [*told, f"{len(edits) + 1}. Put this {where}:", "", *(f"       {line}" for line in lines)]


def milliseconds(seconds: float) -> str:
    """Return seconds as text."""
    return f"{1e3 * seconds:.3g} ms"


def ranged(turns: Sequence[float]) -> str:
    """Return the seconds of turns as text."""
    return f"{milliseconds(min(turns))} to {milliseconds(max(turns))}"


def times(gain: float) -> str:
    """Return a gain as text."""
    return f"a speedup of {gain:.2g}x"


def table(facts: Facts) -> list[str]:
    """Return the lines of the table of what was measured."""
    about = f"{facts.parameters / 1e6:.3g} million parameters, {facts.optimizer}, {facts.framework}"
    link = f", simulated network of {facts.link}" if facts.link else ""
    head = f"{'':26}{'ms per step':>12} {'speedup':>8}  effect on the loss"
    lines = [f"{about}, {facts.workers} workers{link}", "", head]
    if not facts.beside_dense:
        lines.append(f"{'unmodified script':26}{1e3 * facts.now:12.1f} {1:8.2f}")
    for one in sorted(facts.candidates, key=lambda one: one.seconds):
        name = one.argument if one.name == UPDATES else f"{one.name}{' (default)' if one.is_default else ''}"
        lines.append(f"{name:26}{1e3 * one.seconds:12.1f} {facts.now / one.seconds:8.2f}  {one.cost}")
    base = "uncompressed gradients (compression='none')" if facts.beside_dense else "the unmodified script"
    return [*lines, "", f"Speedup: compared with {base}.", ABOUT_LOSS]


def text(facts: Facts, advice: Advice) -> str:
    """Return the table of what was measured, and the advice."""
    lines = [*table(facts), "", advice.why]
    if advice.lines:
        lines += ["", *pasted(facts.framework, facts.names, scaled=facts.scaled)]
    return "\n".join(lines)


def median_of_slowest(seconds: Sequence[Sequence[float]]) -> float:
    """Return the largest of the workers' medians. ``seconds``: of steps, by worker."""
    return max(map(statistics.median, seconds))
