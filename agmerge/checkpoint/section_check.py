# SPDX-License-Identifier: Apache-2.0
"""Check of a checkpoint's section before it is loaded: errors name the key that is missing or of a wrong type.

A rank that loads changes much, and cannot go back half-way. The meaning of the keys is in
:mod:`agmerge.checkpoint.rank_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Test = Callable[[Any], bool]
DAMAGED = (
    "the checkpoint's 'agmerge' section is damaged, or not from agmerge: {where} {problem}. Load another checkpoint."
)
OTHER_VERSION = (
    "the checkpoint's 'agmerge' section has version {saved}, but this agmerge supports version {own} only. Load it "
    "with the agmerge that saved it, or remove the section to start with zero residuals."
)


def whole(value: Any) -> bool:
    """Return whether a value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def tensors(value: Any) -> bool:
    """Return whether a value has tensors by name."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )


def flag(value: Any) -> bool:
    """Return whether a value is a truth value."""
    return isinstance(value, bool)


def text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def counted(value: Any) -> bool:
    """Return whether a value has pairs by name: how many passes a parameter has seen, and its gradient or None."""
    return isinstance(value, Mapping) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and whole(pair[0]) and isinstance(pair[1], torch.Tensor | None)
        for pair in value.values()
    )


def pair_of(first: Test, second: Test) -> Test:
    """Return a test for two values."""
    return lambda value: isinstance(value, Sequence) and len(value) == 2 and first(value[0]) and second(value[1])


def mapping(value: Any) -> bool:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def or_none(test: Test) -> Test:
    """Return a test that also accepts None."""
    return lambda value: value is None or test(value)


REQUIRED: dict[str, Test] = {
    "rank": whole,
    "size": whole,
    "steps": whole,
    "merging": text,
    "plan": or_none(text),
    **dict.fromkeys(("residuals", "momenta", "averaged_momenta", "left_bases", "right_bases"), tensors),
    "shard": or_none(pair_of(whole, whole)),
    "dtensors": mapping,
    "partial": or_none(pair_of(whole, flag)),
    "shares": or_none(mapping),
    "compressor": or_none(pair_of(text, mapping)),
    "window": counted,
    "updates": or_none(mapping),
}
OPTIONAL: dict[str, Test] = {
    "inner": or_none(mapping),  # where ranks' own optimizers differ
    "trial": text,  # of plans, which was under way
}
OF_UPDATES: dict[str, Test] = {
    "carry": text,
    "steps": whole,
    "base": tensors,
    "own": tensors,
    "displacements": tensors,
    "outer": or_none(mapping),
}


def check_section(section: Any, ranks: str, version: int) -> None:
    """Raise ``ValueError`` for a section of another version, or its first key that is missing or has a wrong type.

    ``section``: of one rank, or of all of them, under the key ``ranks``.
    """
    _check(section, "it", {"version": whole}, {})
    if section["version"] != version:
        raise ValueError(OTHER_VERSION.format(saved=section["version"], own=version))
    if ranks not in section:
        _check_rank(section, "")
        return
    parts = section[ranks]
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError(DAMAGED.format(where=repr(ranks), problem="lists no rank"))
    for number, part in enumerate(parts):
        _check_rank(part, f"{ranks}[{number}]: ")


def _check_rank(section: Any, where: str) -> None:
    """Raise ``ValueError`` as :func:`check_section` does, for the section of one rank."""
    _check(section, f"{where}it", REQUIRED, OPTIONAL)
    if section["rank"] >= section["size"]:
        problem = f"is rank {section['rank']}'s of {section['size']}"
        raise ValueError(DAMAGED.format(where=f"{where}it", problem=problem))
    if section["updates"] is not None:
        _check(section["updates"], f"{where}'updates'", OF_UPDATES, {})


def _check(found: Any, where: str, required: Mapping[str, Test], optional: Mapping[str, Test]) -> None:
    """Raise ``ValueError`` unless ``found`` is a mapping with all required keys, and its values pass their tests."""
    if not isinstance(found, Mapping):
        raise ValueError(DAMAGED.format(where=where, problem=f"is {found!r:.40}"))
    for key, test in {**required, **optional}.items():
        if key not in found and key in required:
            raise ValueError(DAMAGED.format(where=where, problem=f"has no {key!r}"))
        if key in found and not test(found[key]):
            raise ValueError(DAMAGED.format(where=where, problem=f"has {key!r}: {found[key]!r:.40}"))
