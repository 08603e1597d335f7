# SPDX-License-Identifier: Apache-2.0
"""Write the pages of docs/ that are made of the code: ``python tests/support/reference_pages.py``.

arguments.md: of the optimizer's signature and docstring. command_line.md: of the parser of ``python -m agmerge``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import agmerge
from agmerge.__main__ import parser

DOCS = Path(__file__).resolve().parents[2] / "docs"
GROUPS = {  # heading, and its arguments
    "Model and optimizer": "optimizer named_parameters process_set",
    "Choose a compressor": "compression density rank warmup memory dense",
    "Merge and exchange": "merging groups num_groups model sparsify exchange wire dense_sum",
    "Accumulate and average": "backward_passes_per_step op gradient_predivide_factor sparse_as_dense unused",
    "Checks and timeouts": "scaler nonfinite timeout check_every diverged",
    "Exchange updates instead of gradients": "sync carry every fragments overlap decay outer moments",
}
ENTRY = re.compile(r"^(\w+) \(([^)]+)\): (.*?)(?=^\w+ \(|\Z)", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":\w+:`([^`]*)`")
PAGE = re.compile(r"\bdocs/(\w+)\.md\b")


def described(of: object = agmerge.DistributedOptimizer) -> dict[str, tuple[str, str]]:
    """Return the type and the Markdown text of each argument in the section ``Args:`` of a docstring."""
    text = (inspect.getdoc(of) or "").partition("\nArgs:\n")[2]
    section = textwrap.dedent(re.split(r"^(?=\w)", text, maxsplit=1, flags=re.MULTILINE)[0])
    return {name: (kind, paragraphs(words)) for name, kind, words in ENTRY.findall(section)}


def paragraphs(text: str) -> str:
    """Return paragraphs and lists of an argument as Markdown, a line for each."""
    made: list[str] = []
    for line in textwrap.dedent(f"{' ' * 4}{text}").strip().splitlines():
        if not line.strip() or not made or not made[-1] or line.startswith("* "):
            made.append(line.strip())
        else:
            made[-1] += f" {line.strip()}"
    return markdown("\n".join(made))


def markdown(text: str) -> str:
    """Return reStructuredText of a docstring as Markdown."""
    return PAGE.sub(r"[details](\1.md)", ROLE.sub(r"`\1`", text).replace("``", "`"))


def defaults() -> dict[str, str]:
    """Return the default of each argument, as it is written; empty: there is none."""
    signature = inspect.signature(agmerge.DistributedOptimizer.__init__)
    kept = [one for one in signature.parameters.values() if one.name not in ("self", "unknown")]
    return {one.name: "" if one.default is one.empty else written(one.default) for one in kept}


def written(default: object) -> str:
    return "Average" if default is agmerge.Average else f'"{default}"' if isinstance(default, str) else str(default)


def arguments() -> str:
    """Return arguments.md."""
    said, given = described(), defaults()
    assert sorted(said) == sorted(given) == sorted(" ".join(GROUPS.values()).split())
    positional = ", ".join(f"`{name}`" for name in list(given)[:10])
    lines = [
        "<!-- Made by tests/support/reference_pages.py: change the docstring, and run it. -->",
        "# DistributedOptimizer",
        "",
        "```python",
        "optimizer = agmerge.DistributedOptimizer(optimizer, model.named_parameters())",
        "```",
        "",
        "You can leave out every argument but the optimizer. `agmerge.integrations.*.compress` and",
        "`agmerge.LocalOptimizer` accept the same arguments, except those that have no effect there. For the methods,",
        "see the [API](api.md#the-optimizer).",
        "",
        f"* The first ten may be positional, in Horovod's order: {positional}.",
        "  Pass all others by name.",
        "* Patterns are regular expressions that must match the full parameter name, such as `.*\\.bias`. The first",
        "  match wins.",
        "* An argument that has no effect, by itself or together with others, raises a `ValueError`.",
        "* All ranks must pass the same arguments. Otherwise all of them raise `agmerge.RankMismatchError`.",
    ]
    for heading, names in GROUPS.items():
        lines += ["", f"## {heading}"]
        for name in names.split():
            kind, text = said[name]
            default = f", default `{given[name]}`" if given[name] else ", required"
            lines += ["", f"### `{name}`", "", f"*{kind}*{default}", "", text]
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
