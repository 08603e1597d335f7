# SPDX-License-Identifier: Apache-2.0
"""How much of the tests is run. The place of this file matters: pytest puts this folder on the path, so tests can say
``from support import ...``.

Tests outside of ``distributed`` are marked ``training`` where they make an optimizer of workers, and ``unit`` where
they neither do nor start a process (see support/kind_of_test.py): ``make unit`` runs these alone, within a minute.

``make test`` leaves out what is marked ``long``. Of a test that is marked ``training``, and of one of the examples, it
runs the first case; of any other test, and of one that is marked ``values``, as few cases as hold each value of each
parameter (support/grid_cover.py); of one that is marked ``whole`` all cases. ``--once`` runs the first case of every
test that starts no processes. Drawn examples are the same in every run; ``--hypothesis-profile=long`` draws more, and
others each time.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from side_by_side import SideBySide
from support.grid_cover import RUN, cover
from support.kind_of_test import TESTS, kind_of

settings.register_profile("short", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("once", deadline=None, derandomize=True, max_examples=10)
settings.register_profile("long", deadline=None, max_examples=300)
settings.load_profile("short")

NO_PROCESSES = "--once starts no processes"
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which torch.compile does, and while kernels run
# Where there are GPUs, tests leave them alone, and `make gpu` judges them: the device that tests pretend takes the
# place of torch's accelerator, and then no backward pass on a GPU works in that process.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
started: list[bool] = []  # by the test that runs, in vain


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--once`` and ``--processes``."""
    parser.addoption("--once", action="store_true", help="run the first case of every test that starts no processes")
    parser.addoption("--processes", type=int, default=0, help="run so many files at a time (side_by_side.py)")


def pytest_configure(config: pytest.Config) -> None:
    """``--processes``."""
    if processes := config.getoption("--processes"):
        config.pluginmanager.register(SideBySide(config, processes))


@pytest.fixture
def device() -> Iterator[Any]:
    """A pretended device of this thread (``pretend.device.Device``)."""
    from pretend import streams  # not before a test asks for it: it imports torch
    from pretend.device import Device

    device = Device()
    device.use()
    with streams.installed():
        yield device


@pytest.fixture(scope="session", autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """With ``--once`` a test that starts a process is skipped as soon as it does, in whichever thread."""

    def start(*_: object, **__: object) -> None:
        started.append(True)
        pytest.skip(NO_PROCESSES)

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--once"):
            patch.setattr(subprocess.Popen, "__init__", start)
        yield


@pytest.fixture(autouse=True)
def no_python_in_collections() -> None:
    """Drop callbacks of the garbage collector, such as hypothesis's, which times it.

    Ranks are threads. A thread that collects garbage may run such a callback in the midst of torch's loop over hooks
    of all modules; another thread adds a hook then, and torch raises "OrderedDict mutated during iteration".
    """
    gc.callbacks.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What fails because a thread of it could not start a process was skipped."""
    report = yield
    if report.failed and started:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, NO_PROCESSES)
    started.clear()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the pretended device known before any backward pass, if a test names it.

    autograd makes a thread for each kind of device that there is at its first pass, and none later.
    """
    if any(_names_device(item.path) for item in session.items):
        from pretend import registration  # imports torch, which not every test does

        registration.install()


@functools.cache
def _names_device(path: Path) -> bool:
    return path.parent.name == "device" or "pretend" in path.read_text(encoding="utf-8")


def enough(grid: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of a test that ``make test`` runs."""
    if len(grid) < 2 or grid[0].get_closest_marker("whole"):
        return grid
    dear = grid[0].get_closest_marker("training") or grid[0].path.name.startswith("test_example")
    if dear and not grid[0].get_closest_marker("values"):
        return grid[:1]
    return [grid[place] for place in cover([item.callspec._idlist for item in grid])]  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)  # before -m selects by the marks that are set here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what trains, and what a cover of a grid leaves out; with ``--once``, keep one case of each test."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        kind = kind_of(item.path, item.nodeid.split("::")[1].partition("[")[0])
        if kind is not None and TESTS / "distributed" not in item.path.parents:
            item.add_marker(kind)
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for grid in grids.values():
        short = [item for item in grid if item.get_closest_marker("long") is None]
        kept = {id(item) for item in enough(short)}
        for item in grid:
            if id(item) not in kept:
                item.add_marker(pytest.mark.long)
    config.stash[RUN] = {item.nodeid: item.get_closest_marker("long") is None for item in items}
    # Files with few tests that take long, of which none should be left alone at the end (run_tests.py).
    items.sort(key=lambda item: item.path.parent != TESTS)
    if config.getoption("--once"):
        short = [[item for item in grid if item.get_closest_marker("long") is None] for grid in grids.values()]
        kept = {id(grid[0]) for grid in short if grid}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]
