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
                    f"{name}={getattr(options, name)!r} requires sync='updates'. Pass sync='updates', or remove "
                    f"{name}=."
                )
        return None
    for name, problem in _refused(options):
        raise ValueError(f"{name}={getattr(options, name)!r} is not supported with sync='updates': {problem}")
    carry = defaults.carry_of(options)
    check_choice("carry", carry, CARRIES)
    for name, least in (("every", 1), ("fragments", 1), ("overlap", 0)):
        value = getattr(options, name)
        if not is_whole(value, least):
            raise ValueError(f"{name}={value!r}: expected a whole number >= {least}")
    if not is_number(options.decay) or not 0.0 < options.decay <= 1.0:
        raise ValueError(f"decay={options.decay!r}: expected a number in (0, 1]")
    if options.outer is not None and not callable(options.outer):
        raise TypeError(
            f"outer={options.outer!r}: expected agmerge.Nesterov(), or a function that returns a "
            "torch.optim.Optimizer for a list of parameters"
        )
    _check_together(options, carry)
    given = {name: getattr(options, name) for name in ("every", "fragments", "overlap", "outer")}
    return Updates(carry=carry, decay=float(options.decay), **given)


def _refused(options: Options) -> Iterable[tuple[str, str]]:
    """Yield the options that mean nothing where no gradient is exchanged, each with the reason."""
    if options.op is not Average and getattr(options.op, "value", options.op) != Average.value:
        yield "op", "the updates of the workers are averaged, because their sum would be as large as several steps"
    if options.backward_passes_per_step != 1:
        yield (
            "backward_passes_per_step",
            "backward passes start no exchange. Accumulate gradients in the script, then call step()",
        )
    if options.gradient_predivide_factor != 1.0:
        yield "gradient_predivide_factor", "no gradients are exchanged. Remove it"
    if options.sparse_as_dense:
        yield "sparse_as_dense", "the optimizer receives sparse gradients unchanged. Remove it"
    if options.unused != "none":
        yield "unused", "p.grad stays this worker's own gradient. Remove it"
    memory = getattr(options.memory, "name", options.memory)
    if memory is not None and (not isinstance(memory, str) or memory.casefold() != "residual"):
        yield "memory", "residuals are always kept, and the optimizer applies the momentum. Remove it"
    if options.model is not None or getattr(options.merging, "name", options.merging) == "dear":
        yield "merging", "DeAR exchanges gradients of a backward pass. Use overlap=1 instead"


def _check_together(options: Options, carry: str) -> None:
    """Raise ``ValueError`` for options of this file that contradict each other, or the exchange."""
    two_level = options.exchange == topology.EXCHANGE
    if two_level and carry == APPLY:
        raise ValueError(
            "exchange='two-level' is not supported with carry='apply', because a rank selects from a shard of its "
            "node's values. Pass carry='hold'."
        )
    if two_level and options.fragments > 1:
        raise ValueError(
            "exchange='two-level' is not supported with fragments, because a node sums all parameters at once. Remove "
            "fragments=."
        )
    if options.fragments > options.every:
        raise ValueError(
            f"fragments={options.fragments} must not exceed every={options.every}, because each fragment is exchanged "
            "in a separate step"
        )
    gap = options.every // options.fragments
    if options.overlap > gap:
        raise ValueError(
            f"overlap={options.overlap} must be at most {gap} steps (every={options.every} / "
            f"fragments={options.fragments}), because messages must arrive before the next ones are sent"
        )
    if carry == HOLD and options.overlap:
        raise ValueError(
            "overlap is not supported with carry='hold', because a worker would compute with parameters that lack its "
            "last steps. Pass carry='apply'."
        )
    if carry == APPLY and options.decay != 1.0:
        raise ValueError(
            "decay is not supported with carry='apply', because the carried values are part of the parameters. Pass "
            "carry='hold'."
        )
