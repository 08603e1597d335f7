# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/ that are made of the code: ``python tests/support/reference_pages.py``.

arguments.md: of the optimizer's signature and docstring. command_line.md: of the parser of ``python -m agmerge``.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import agmerge
from agmerge.__main__ import parser

DOCS = Path(__file__).resolve().parents[2] / "docs"
# (heading, its first argument): arguments stand in the order of the signature
GROUPS = (
    ("As Horovod has them", "optimizer"),
    ("Compression", "density"),
    ("Merging and messages", "merging"),
    ("Guards", "scaler"),
    ("Local steps and updates", "sync"),
)
BULLET = re.compile(r"^\* ``(\w+)``: (.*?)(?=^\* ``|\Z)", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":\w+:`([^`]*)`")
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


def meanings() -> dict[str, str]:
    """Return what the docstring says of each argument, as Markdown on one line."""
    text = inspect.getdoc(agmerge.DistributedOptimizer) or ""
    return {name: markdown(" ".join(words.split("\n\n")[0].split())) for name, words in BULLET.findall(text)}


def markdown(text: str) -> str:
    """Return reStructuredText of a docstring as Markdown for a table."""
    return PAGE.sub(r"[\1](\1.md)", ROLE.sub(r"`\1`", text).replace("``", "`").replace("|", "\\|"))


def defaults() -> dict[str, str]:
    """Return the default of each argument, as it is written; empty: there is none."""
    signature = inspect.signature(agmerge.DistributedOptimizer.__init__)
    kept = [one for one in signature.parameters.values() if one.name not in ("self", "unknown")]
    return {one.name: "" if one.default is one.empty else written(one.default) for one in kept}


def written(default: object) -> str:
    return "Average" if default is agmerge.Average else f'"{default}"' if isinstance(default, str) else str(default)


def arguments() -> str:
    """Return arguments.md."""
    said, given = meanings(), defaults()
    lines = [
        "<!-- Made by tests/support/reference_pages.py: change the docstring, and run it. -->",
        "# Arguments of DistributedOptimizer",
        "",
        "All by name but the first ten, which are Horovod's. `agmerge.integrations.*.compress` and `LocalOptimizer`",
        "take those that mean something there. What means nothing, by itself or with the others, is an error.",
    ]
    starts = {first: heading for heading, first in GROUPS}
    for name, default in given.items():
        if name in starts:
            lines += ["", f"## {starts[name]}", "", "| argument | default | |", "|---|---|---|"]
        lines.append(f"| `{name}` | {f'`{default}`' if default else ''} | {said[name]} |")
    return "\n".join(lines) + "\n"


def commands() -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yield name, parser and help of each command."""
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield name, command, helps[name]


def command_line() -> str:
    """Return command_line.md."""
    lines = [
        "<!-- Made by tests/support/reference_pages.py: change agmerge/__main__.py, and run it. Before that, run",
        "tests/support/command_examples.py for the output of the examples. -->",
        "# Command line",
        "",
        "Run `python -m agmerge COMMAND`, or `agmerge COMMAND`. To see the options of a command, add `--help`. Your",
        "output differs from the examples, because it depends on your machine and network.",
    ]
    for name, command, help_ in commands():
        shown = (DOCS / "_data" / "command_line" / f"{name}.txt").read_text(encoding="utf-8")
        lines += ["", f"## {name}", "", f"{help_[0].upper()}{help_[1:]}. For example:", ""]
        lines += ["```console", *shown.rstrip().splitlines(), "```", ""]
        actions = [one for one in command._actions if one.help and one.help != argparse.SUPPRESS]
        for action in (one for one in actions if "--help" not in one.option_strings):
            metavar = action.metavar if action.option_strings and action.metavar else ""
            named = " ".join(filter(None, [", ".join(action.option_strings) or action.dest, str(metavar)]))
            lines.append(f"* `{named}`: {action.help}")
        if command.epilog:
            lines += ["", command.epilog]
    return "\n".join(lines) + "\n"


PAGES = {"arguments.md": arguments, "command_line.md": command_line}

if __name__ == "__main__":
    for file, page in PAGES.items():
        (DOCS / file).write_text(page(), encoding="utf-8")
