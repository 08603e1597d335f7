# SPDX-License-Identifier: Apache-2.0
"""No function of the library starts a collective without saying so in its docstring."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from agmerge import testing
from agmerge.backends import base, local
from agmerge.backends.base import docstring, require_marks
from agmerge.errors import AGMergeError
from agmerge.runtime import workers

LIBRARY = str(base.PACKAGE / "engine" / "made_up.py")

# Of an imaginary file of the library: `start` is the collective.
SOURCE = '''
def marked(start):
    """Collective. Start it."""
    return start()

def unmarked(start):
    """Start it. Collective."""
    return start()

def bare(start):
    return start()

def _private(start):
    return start()

def outer(start):
    """Collective. Start it from within."""
    def inner():
        return start()
    return [one for one in (lambda: inner(),)][0]()

def hidden(start):
    """Call what is marked."""
    return marked(start)

class Base:
    def send(self, start):
        """Collective. Send it."""
    def receive(self, start):
        """Return at once."""

class Heir(Base):
    def __init__(self, start):
        self.start = start
    def send(self, start):
        return start()
    def receive(self, start):
        return start()
    def __call__(self):
        return self.start()
    @property
    def value(self):
        return self.start()

class Hook(Heir):
    def on_gradient(self, gradient):
        """Hear of a gradient."""
        self.start()
'''
MADE_UP: dict[str, Any] = {}
exec(compile(SOURCE, LIBRARY, "exec"), MADE_UP)


def in_strict_group(body: Callable[[], object]) -> None:
    """Call ``body`` on two ranks whose group checks marks; raise what it raises."""
    testing.run(2, lambda rank: body())


def barrier() -> None:
    workers.world().barrier("b").wait(60)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_fine", {})


FINE: dict[str, Callable[[], object]] = {
    "a marked function": lambda: MADE_UP["marked"](barrier),
    "a private function": lambda: MADE_UP["_private"](barrier),
    "functions in a marked function": lambda: MADE_UP["outer"](barrier),
    "a method that overrides a marked one": lambda: MADE_UP["Heir"](barrier).send(barrier),
    "a dunder": lambda: MADE_UP["Heir"](barrier)(),
    "a property": lambda: MADE_UP["Heir"](barrier).value,
    "what is no part of the library": barrier,
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_marked_or_need_not_be_passes(case: str) -> None:
    in_strict_group(FINE[case])


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("unmarked", lambda: MADE_UP["unmarked"](barrier)),  # the mark is elsewhere in its docstring
        ("bare", lambda: MADE_UP["bare"](barrier)),
        ("hidden", lambda: MADE_UP["hidden"](barrier)),  # above a marked one
        ("receive", lambda: MADE_UP["Heir"](barrier).receive(barrier)),
        ("unmarked", lambda: MADE_UP["marked"](lambda: MADE_UP["unmarked"](barrier))),
    ],
)
def test_a_function_that_hides_a_collective_is_named(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(AGMergeError, match=rf"^b: {name}\(\) in .*made_up.py, line \d+, starts a collective; let its"):
        in_strict_group(call)


def test_a_message_that_is_only_started_counts() -> None:
    def start() -> None:
        workers.world().all_reduce(torch.zeros(1), "message")

    with pytest.raises(AGMergeError, match=r"message: unmarked\(\)"):
        in_strict_group(lambda: MADE_UP["unmarked"](start))


def test_a_hook_that_autograd_calls_counts() -> None:
    def body() -> None:
        parameter = torch.ones(2, requires_grad=True)
        parameter.register_post_accumulate_grad_hook(MADE_UP["Hook"](barrier).on_gradient)
        parameter.sum().backward()

    with pytest.raises(AGMergeError, match=r"b: on_gradient\(\)"):
        in_strict_group(body)


def test_users_groups_and_ranks_that_are_alone_check_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.run(1, lambda rank: MADE_UP["bare"](barrier))
    monkeypatch.undo()
    assert not local.CHECKS_MARKS
    in_strict_group(lambda: MADE_UP["bare"](barrier))


def test_a_group_can_be_told_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "CHECKS_MARKS", False)
    MADE_UP["bare"](lambda: local.LocalBackend(local.Group(2), [0, 1], 0).barrier("b"))
    with pytest.raises(AGMergeError, match="bare"):
        MADE_UP["bare"](lambda: local.LocalBackend(local.Group(2, checks_marks=True), [0, 1], 0).barrier("b"))


def test_the_docstring_of_a_code_object() -> None:
    def codes(source: str) -> Iterator[CodeType]:
        yield from (one for one in compile(source, "x", "exec").co_consts if isinstance(one, CodeType))

    assert [docstring(code) for code in codes("def f():\n    'text'\ndef g():\n    return 'no'\ndef h(): pass")] == [
        "text",
        None,
        None,
    ]


def test_a_second_look_costs_microseconds() -> None:
    def deep(depth: int) -> float:
        if depth:
            return deep(depth - 1)
        frame: FrameType = sys._getframe()
        require_marks("b", frame)
        begin = time.perf_counter()
        for _ in range(1000):
            require_marks("b", frame)
        return time.perf_counter() - begin

    assert min(deep(50) for _ in range(5)) < 1000 * 500e-6  # about 5 microseconds each where nothing else runs
