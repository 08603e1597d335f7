# SPDX-License-Identifier: Apache-2.0
"""Every argument that takes patterns says of a glob which regular expression to write, on all ranks the same."""

from __future__ import annotations

from typing import Any

import pytest
from support import agreed, mlp, on_ranks, seeded, wrap
from torch import nn

from agmerge import testing

MODEL = seeded(mlp)

# The argument, by a pattern.
ARGUMENTS: dict[str, Any] = {
    "compression": lambda pattern: {"compression": {pattern: "topk", ".*": "powersgd"}},
    "density": lambda pattern: {"compression": "topk", "density": {pattern: 0.1}},
    "rank": lambda pattern: {"compression": "powersgd", "rank": {pattern: 2}},
    "rank beside a sparsifier": lambda pattern: {"compression": {"0.*": "topk", ".*": "acpsgd"}, "rank": {pattern: 2}},
    "dense": lambda pattern: {"compression": "topk", "dense": [pattern]},
    "dense with low rank": lambda pattern: {"compression": "powersgd", "dense": [pattern]},
    "dense with bits": lambda pattern: {"compression": "eden-4", "dense": [pattern]},
}
# A glob, and the regular expression: one that is no expression, and one that is, but matches no name.
GLOBS = {"*.weight": r".*\.weight", "?.weight": r".\.weight", "0*weight": "0.*weight"}


@pytest.mark.parametrize("glob", GLOBS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_glob_is_answered_with_the_regular_expression(argument: str, glob: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(ValueError) as raised:
            wrap(model, **ARGUMENTS[argument](glob))
        assert testing.calls() == []
        wrap(model, **ARGUMENTS[argument](GLOBS[glob])).close()  # as the error says
        return str(raised.value)

    text = agreed(on_ranks(2, MODEL, body))
    assert argument.split()[0] in text
    assert f"{glob!r} looks like a glob, write {GLOBS[glob]!r}" in text


@pytest.mark.parametrize("glob", GLOBS)
def test_set_compressor_answers_the_same(glob: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = wrap(model, compression="topk", density=0.1)
        with pytest.raises(ValueError) as raised:
            optimizer.set_compressor({glob: "topk", ".*": "powersgd"})
        optimizer.set_compressor({GLOBS[glob]: "topk", ".*": "powersgd"})
        return str(raised.value)

    assert f"{glob!r} looks like a glob, write {GLOBS[glob]!r}" in agreed(on_ranks(2, MODEL, body))
