# SPDX-License-Identifier: Apache-2.0
"""Check the options of ``sync="updates"``: the optimizer's updates of parameters are exchanged, not gradients."""

from __future__ import annotations

from collections.abc import Iterable

from agmerge.backends import topology
from agmerge.ops import Average
from agmerge.options import defaults
from agmerge.options.arguments import Options, check_choice, is_number, is_whole
from agmerge.step.updates import APPLY, CARRIES, GRADIENTS, HOLD, SYNCS, Updates

# Options of sync="updates" alone, with their neutral values.
_OWN = {"carry": ("apply", None), "every": (1,), "fragments": (1,), "overlap": (0,), "decay": (1.0,), "outer": (None,)}


def parse_updates(options: Options) -> Updates | None:
    """Return how updates are exchanged; None with ``sync="gradients"``.

    Raises ``ValueError`` or ``TypeError`` for options without meaning, by themselves or with others.
    """
    check_choice("sync", options.sync, SYNCS)
    if options.sync == GRADIENTS:
        for name, usual in _OWN.items():
            if getattr(options, name) not in usual:
                raise ValueError(
                    f"{name}={getattr(options, name)!r} is about sync='updates': pass that, or leave it out"
                )
        return None
    for name, problem in _refused(options):
        raise ValueError(f"{name}={getattr(options, name)!r} and sync='updates': {problem}")
    carry = defaults.carry_of(options)
    check_choice("carry", carry, CARRIES)
    for name, least in (("every", 1), ("fragments", 1), ("overlap", 0)):
        value = getattr(options, name)
        if not is_whole(value, least):
            raise ValueError(f"{name}={value!r}: give a whole number >= {least}")
    if not is_number(options.decay) or not 0.0 < options.decay <= 1.0:
        raise ValueError(f"decay={options.decay!r}: give a number in (0, 1]")
    if options.outer is not None and not callable(options.outer):
        raise TypeError(
            f"outer={options.outer!r}: give agmerge.Nesterov(), or a function of a list of parameters that returns a "
            "torch.optim.Optimizer of them"
        )
    _check_together(options, carry)
    given = {name: getattr(options, name) for name in ("every", "fragments", "overlap", "outer")}
    return Updates(carry=carry, decay=float(options.decay), **given)


def _refused(options: Options) -> Iterable[tuple[str, str]]:
    """Yield the options that mean nothing where no gradient is exchanged, each with the reason."""
    if options.op is not Average and getattr(options.op, "value", options.op) != Average.value:
        yield "op", "the ways that workers have made are averaged; their sum would be that many steps at once"
    if options.backward_passes_per_step != 1:
        yield "backward_passes_per_step", "no exchange hangs on a backward pass: accumulate in the script, then step()"
    if options.gradient_predivide_factor != 1.0:
        yield "gradient_predivide_factor", "no gradients are added up; leave it out"
    if options.sparse_as_dense:
        yield "sparse_as_dense", "the optimizer takes gradients as they are, sparse ones too; leave it out"
    if options.unused != "none":
        yield "unused", "p.grad stays this worker's own; leave it out"
    memory = getattr(options.memory, "name", options.memory)
    if memory is not None and (not isinstance(memory, str) or memory.casefold() != "residual"):
        yield "memory", "what is not sent is always kept, and momentum is the optimizer's; leave it out"
    if options.model is not None or getattr(options.merging, "name", options.merging) == "dear":
        yield "merging", "DeAR is about gradients that come in a backward pass; use overlap=1 instead"


def _check_together(options: Options, carry: str) -> None:
    """Raise ``ValueError`` for options of this file that contradict each other, or the exchange."""
    two_level = options.exchange == topology.EXCHANGE
    if two_level and carry == APPLY:
        raise ValueError(
            "exchange='two-level' and carry='apply': a rank selects from a shard of what its node has in common, so "
            "its own parameters cannot hold the rest; pass carry='hold'"
        )
    if two_level and options.fragments > 1:
        raise ValueError("exchange='two-level' and fragments: a node adds up everything at once; leave fragments out")
    if options.fragments > options.every:
        raise ValueError(
            f"fragments={options.fragments} and every={options.every}: each fragment takes a step of its own, so "
            "there cannot be more of them than steps"
        )
    gap = options.every // options.fragments
    if options.overlap > gap:
        raise ValueError(
            f"overlap={options.overlap}: the next messages leave after {gap} steps, every={options.every} / "
            f"fragments={options.fragments}, and these must have arrived by then"
        )
    if carry == HOLD and options.overlap:
        raise ValueError(
            "overlap and carry='hold': a worker would compute with parameters that lack its own last steps; pass "
            "carry='apply'"
        )
    if carry == APPLY and options.decay != 1.0:
        raise ValueError("decay and carry='apply': what is carried is part of the parameters; pass carry='hold'")
