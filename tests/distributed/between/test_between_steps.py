# SPDX-License-Identifier: Apache-2.0
"""One table: acts of a script between two steps, on every road, with gradients and with updates; two real workers.

A cell is a short training with one act more (`acts.py`), held against plain DistributedDataParallel in the same loop
(`roads.py`): bitwise equal with ``compression="none"``, unharmed with the default, with a compressor by
name and with ``sync="updates"``, or a clear error on all ranks. All cells of a road are one launch.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from acts import ACTS, Act  # noqa: E402
from launching import launch  # noqa: E402

pytestmark = pytest.mark.timeout(400)
NEEDS = {"trainer": ("transformers", "accelerate"), "accelerate": ("accelerate",), "lightning": ("lightning",)}
WAYS = {
    "wrapper": ("plain", "none", "default", "topk", "updates"),
    "ddp": ("plain", "none", "default", "topk", "updates"),
    "accelerate": ("plain", "none", "topk", "updates"),
    "trainer": ("plain", "none", "topk"),
    "lightning": ("plain", "none", "topk"),
}
WORSE = {"none": 1e-6, "default": 0.1, "topk": 0.35, "updates": 0.35}  # of the loss, at most, than plain training's
# Horovod's own errors, in Horovod's words: a wrapper's gradients leave in backward().
HOROVOD = {
    "several passes": "Gradients were computed more than backward_passes_per_step times",
    "throw a pass away": "Gradients were computed more than backward_passes_per_step times",
    "sam": "Gradients were computed more than backward_passes_per_step times",
    "skip a step": "optimizer.zero_grad() was called after loss.backward() but before optimizer.step()",
}
REFUSED = {("wrapper", act, way): text for act, text in HOROVOD.items() for way in ("none", "default", "topk")}
# Cells in which plain DistributedDataParallel ends in an error of torch's; the same error is right then.
ENDS = {"replace same shape", "replace ten times", "replace longer"}
# With updates a layer goes on for a while when it is frozen or has no gradient: some updates have not been sent yet.
GOES_ON = {("freeze", "updates"), ("toggle requires grad", "updates"), ("gradient none", "updates")}
# Roads on which a group cannot be added while a scheduler of the framework's counts them.
NO_GROUPS = {("trainer", "add a group"), ("trainer", "unfreeze")}


def takes(road: str, name: str) -> bool:
    """Return whether the loop of a road can do this."""
    frameworks = road in ("trainer", "lightning")
    return not (frameworks and (name in ENDS or ACTS[name].skips is not Act.skips)) and (road, name) not in NO_GROUPS


SHORT = {("ddp", "none"), ("ddp", "updates")}  # roads and ways of `make test`
CELLS = [(road, name, way) for road in WAYS for name in ACTS for way in WAYS[road][1:] if takes(road, name)]


@functools.cache
def launched(road: str, folder: Path, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train all cells of a road in these ways; return what both ranks found."""
    names = [name for name in ACTS if takes(road, name)]
    more = {"WAYS": " ".join(("plain", *ways))}
    ended = launch("torchrun", 2, HERE / "roads.py", str(folder), road, *names, timeout=300, **more)
    assert ended.code == 0, ended.output[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {road: tmp_path_factory.mktemp(road) for road in WAYS}


@pytest.fixture(scope="module")
def ways(request: pytest.FixtureRequest) -> dict[str, tuple[str, ...]]:
    """By road, the ways of the cells that were selected."""
    cells = [item.callspec.params for item in request.session.items if "way" in _parameters(item)]  # type: ignore[attr-defined]
    return {road: tuple(dict.fromkeys(cell["way"] for cell in cells if cell["road"] == road)) for road in WAYS}


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if item.path == Path(__file__) and hasattr(item, "callspec") else {}


@pytest.mark.parametrize(
    ("road", "name", "way"),
    [pytest.param(*cell, marks=[pytest.mark.long] * ((cell[0], cell[2]) not in SHORT)) for cell in CELLS],
)
def test_a_script_may(
    folders: dict[str, Path], ways: dict[str, tuple[str, ...]], road: str, name: str, way: str
) -> None:
    for module in NEEDS.get(road, ()):
        pytest.importorskip(module)
    ranks = launched(road, folders[road], ways[road])
    cells, act = [rank[name][way] for rank in ranks], ACTS[name]
    plain = [rank[name]["plain"] for rank in ranks]
    errors = {cell["error"] for cell in cells}
    expected = REFUSED.get((road, name, way))
    if expected is not None:
        assert all(expected in error for error in errors), errors
        return
    if errors != {""}:
        ours = all(cell["clear"] for cell in cells) and len({error.split(":")[0] for error in errors}) == 1
        theirs = all(cell["error"] == one["error"] for cell, one in zip(cells, plain, strict=True))
        assert (act.drifts and ours) or theirs, errors
        return
    assert cells[0]["bits"] == cells[1]["bits"], "replicas differ"
    assert (name, way) in GOES_ON or all(all(cell["facts"].values()) for cell in cells), cells[0]["facts"]
    assert all(all(one["facts"].values()) for one in plain), "plain training itself"
    if way != "updates":
        assert cells[0]["teacher"] == cells[1]["teacher"]
    if act.drifts:
        return
    if way == "none":
        assert cells[0]["bits"] == plain[0]["bits"]
    assert cells[0]["loss"] <= plain[0]["loss"] + WORSE[way]
    if act.harmless and way != "default":
        assert cells[0]["bits"] == ranks[0]["nothing"][way]["bits"], "the act has changed what is trained"


@pytest.mark.parametrize("road", [pytest.param("wrapper", marks=pytest.mark.long), "ddp"])
def test_an_average_of_weights_is_warned_of_with_updates(
    folders: dict[str, Path], ways: dict[str, tuple[str, ...]], road: str
) -> None:
    """Each rank averages its own parameters then, unless it asks for the shared ones."""
    said = launched(road, folders[road], ways[road])[0]["average of weights"]["updates"]["said"]
    assert any("shared()" in text for text in said), said


def test_the_table_has_about_ninety_cells() -> None:
    """A road, an act and a kind of exchange each."""
    assert len({(road, name, way == "updates") for road, name, way in CELLS}) >= 90
