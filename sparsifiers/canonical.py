# SPDX-License-Identifier: Apache-2.0
"""Write one text for one configuration: ranks compare these texts to find out that their settings differ."""

from __future__ import annotations

from collections.abc import Mapping


def canonical(name: str, options: Mapping[str, object]) -> str:
    """Return `name(option=value, ...)`, with the options in the order given: the same text in all processes.

    Values are None, bool, int, float, str or (nested) tuples of these; anything else is a TypeError, because
    the text of an arbitrary object may hold its address.
    """
    return f"{name}({', '.join(f'{option}={_text(name, option, value)}' for option, value in options.items())})"


def _text(name: str, option: str, value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(name, option, part) for part in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, float):
        return float.__repr__(value)  # a numpy scalar is a float, and its own text names numpy
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    raise TypeError(
        f"{name}: option {option!r} is {value!r}, but options() must return plain values (None, bool, int, float, "
        "str, tuple), which are written in the same way on every rank"
    )
