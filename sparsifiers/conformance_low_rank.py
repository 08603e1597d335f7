# SPDX-License-Identifier: Apache-2.0
"""Check that a low-rank compressor keeps the contract: its answers to the exchange, and its options, which remake it.

`sparsifiers.conformance.check` calls this for a name, or a class, of that kind.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

from sparsifiers.base import Kind
from sparsifiers.catalogue import low_rank, memory
from sparsifiers.low_rank import RANK, LowRank

NO_RANKS: tuple[object, ...] = (0, -1, 1.5, True, "4", {}, {"(": 4}, {".*": 0})
NO_SEEDS = (-1, 0.5, True, "0")


def check_low_rank(compressor: str | Callable[..., LowRank], **options: object) -> None:
    """Raise AssertionError, with what was wrong, unless the compressor keeps the contract.

    compressor: a registered name, or a factory: factory(rank, **options), where `seed` is an option.
    options: hyper-parameters, passed on to the compressor; its own exceptions pass through.
    """

    def make(rank: object = RANK, **more: object) -> LowRank:
        chosen = {**options, **more}
        if isinstance(compressor, str):
            return low_rank(compressor, rank, **chosen)  # type: ignore[arg-type]
        return compressor(rank, **chosen)

    _properties(make())
    _ranks(make)
    for made in (make(), make(1), make({"a": 2, ".*": 3}), make(7, seed=5)):
        _round_trips(made, make)
        _has_no_state(made)
    for refused in NO_RANKS:
        _refuses(lambda value: make(value), "rank", refused)
    for refused in NO_SEEDS:
        _refuses(lambda value: make(seed=value), "seed", refused)


def _properties(made: LowRank) -> None:
    """Check the attributes of a compressor."""
    _require(isinstance(made, LowRank), "this is no sparsifiers.LowRank", made)
    _require(isinstance(made.name, str) and bool(made.name), f"its name is {made.name!r}", made)
    _require(made.kind is Kind.LOW_RANK and made.kinds == {Kind.LOW_RANK}, f"its kind is {made.kind}", made)
    _require(made.compresses and not made.selects, "it must compress, and select nothing", made)
    _require(made.density == 1.0, f"its density is {made.density}, and it selects nothing", made)
    _require(isinstance(made.alternates, bool), "it must say whether its sides alternate", made)
    _require(made.of_tensor("a") is made and made.part(Kind.LOW_RANK) is made, "it consists of others", made)
    _require(made.part(Kind.SPARSE) is None, "it has a part that selects", made)
    own = memory(made.memory)
    _require(own.has_residual and not own.has_momentum, f"memory {made.memory!r} must keep a residual, no more", made)


def _ranks(make: Callable[..., LowRank]) -> None:
    """Check that ranks are those that are asked for: by the first pattern that matches a full name."""
    expected = {5: (5, 5, 5), "by pattern": (1, 2, RANK)}
    given = {5: 5, "by pattern": {"a": 1, "ab?": 2}}
    for what, rank in given.items():
        made = make(rank)
        found = tuple(made.rank_of(name) for name in ("a", "ab", "abc"))
        _require(found == expected[what], f"ranks of 'a', 'ab' and 'abc' are {found}, not {expected[what]}", made)
        _require(made.seed == 0, f"its seed is {made.seed} where none is given", made)


def _round_trips(made: LowRank, make: Callable[..., LowRank]) -> None:
    """Check that its options, a copy and a pickle are the same compressor again."""
    options = made.options()
    _require({"rank", "seed"} <= options.keys(), f"options() lacks rank or seed: {sorted(options)}", made)
    again = {
        "options()": make(**options),
        "copy.deepcopy": copy.deepcopy(made),
        "pickle": pickle.loads(pickle.dumps(made)),
    }
    for how, other in again.items():
        same = repr(other) == repr(made) and other.rank_of("a") == made.rank_of("a") and other.seed == made.seed
        _require(same, f"{how} makes {other!r} of it", made)


def _has_no_state(made: LowRank) -> None:
    """Check that it keeps nothing: bases are the exchange's."""
    _require(made.state_dict() == {} and made.snapshot() == {}, "it keeps state: ranks may differ", made)
    made.load_state_dict({})
    made.retain(["a"])
    try:
        made.load_state_dict({"no such state": 1})
    except ValueError:
        return
    raise AssertionError(f"the state of something else is accepted, which must be a ValueError: {made!r}")


def _refuses(make: Callable[[object], LowRank], what: str, value: object) -> None:
    try:
        made = make(value)
    except (TypeError, ValueError):
        return
    raise AssertionError(f"{what}={value!r} is accepted, which must be a ValueError: {made!r}")


def _require(holds: bool, what: str, made: LowRank) -> None:
    if not holds:
        raise AssertionError(f"{what}: {made!r}")
