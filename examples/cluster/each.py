# SPDX-License-Identifier: Apache-2.0
"""Make one run of every combination of settings: what ``--each key=v1,v2`` of the launcher says, as arguments.

runs(["compression=none,topk", "density=0.01,0.001"], ["digits"])    # three: without compression there is no density
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DENSE = ("none", "fp16", "bf16")  # compressions that send every element
# These send every element, too, in few bits.
BITS = ("auto", "eden", "eden-1", "eden-2", "eden-3", "eden-4", "int8", "int4", "fp8", "qsgd", "terngrad", "onebit")
LOW_RANK = ("powersgd", "acpsgd")
WITHOUT = {  # flags that a compression has no use for; any other one has none for a rank
    **dict.fromkeys(DENSE, ("density", "exchange", "memory", "rank")),
    **dict.fromkeys(LOW_RANK, ("density",)),
    **dict.fromkeys(BITS, ("density", "rank")),
}


def runs(texts: Iterable[str], arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the arguments of every run by its name, in the order of the texts: ``arguments``, settings and name.

    texts: each "flag=value,value". Where ``arguments`` have a --checkpoint-dir, every run has its own folder there.
    Raises ``ValueError`` for a text that is not so.
    """
    found: dict[str, list[str]] = {}
    kept = value_of("--checkpoint-dir", arguments)
    for settings in product(choices(texts)):
        name = named(job(arguments), settings)
        flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
        own = ["--checkpoint-dir", f"{kept}/{name}"] if kept else []  # argparse takes the last one
        found[name] = [*arguments, *flags, "--run-name", name, *own]
    return found


def choices(texts: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of every flag, without its dashes; a flag that comes again adds values."""
    found: dict[str, list[str]] = {}
    for text in texts:
        parts = re.fullmatch(r"(?:--)?([\w-]+)=(.+)", text)
        values = [value for value in parts[2].split(",") if value] if parts else []
        if parts is None or not values:
            raise ValueError(f"--each {text}: write flag=value,value, such as compression=none,topk")
        found.setdefault(parts[1].replace("_", "-"), []).extend(values)
    return found


def product(values: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return every combination once, without the flags that its compression has no use for."""
    found: list[dict[str, str]] = []
    for combination in itertools.product(*values.values()):
        settings = dict(zip(values, combination, strict=True))
        if "compression" in settings:
            for flag in WITHOUT.get(settings["compression"], ("rank",)):
                settings.pop(flag, None)
        if settings not in found:
            found.append(settings)
    return found


def job(arguments: Sequence[str]) -> str:
    """Return the job, or published script, that ``arguments`` of ``train.py`` begin with; "run" for a flag."""
    return Path(arguments[0]).stem if arguments and not arguments[0].startswith("-") else "run"


def named(start: str, settings: Mapping[str, str]) -> str:
    """Return a name for a run, which is a folder's too."""
    return re.sub(r"[^\w.=-]+", "-", "_".join([start, *(f"{key}={value}" for key, value in settings.items())]))


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return what ``arguments`` say for ``flag``, as ``--flag value`` or ``--flag=value``; the last time counts."""
    found = None
    for number, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if key == flag:
            found = value if equals else next(iter(arguments[number + 1 :]), None)
    return found
