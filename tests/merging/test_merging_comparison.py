# SPDX-License-Identifier: Apache-2.0
"""All planners side by side: complete, sorted, told in a table and drawn in one picture."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from support.planning_problems import measured

import merging
from merging import Curve, Measurements, Plan, Profile, predict
from merging.drawing import Row, compare, comparison_table, svg
from merging.measured import step_end

SVG = "{http://www.w3.org/2000/svg}"
MODES = [("dense",), ("ahead", "behind"), ("dear", "dense"), ("dear",)]


def allowed(modes: tuple[str, ...]) -> Measurements:
    return measured(modes=modes, dense=None if "dear" in modes else measured().dense)


@pytest.mark.parametrize("modes", MODES, ids=repr)
def test_rows_are_complete_sorted_and_as_predicted(modes: tuple[str, ...]) -> None:
    given = allowed(modes)
    rows = compare(given)
    wanted = {(name, mode) for name in merging.names() for mode in modes if mode in merging.get(name).modes}
    assert {(row.planner, row.mode) for row in rows} == wanted and len(rows) == len(wanted)
    assert [row.finish for row in rows] == sorted(row.finish for row in rows) and rows[0].ratio == 1.0
    for row in rows:
        assert row.plan == merging.get(row.planner).plan(given.profile, given.costs, row.mode)
        assert row.finish == step_end(row.plan, given, row.mode) and row.buffers == len(row.plan.counts)
        assert row.ratio == row.finish / rows[0].finish
    assert compare(given) == rows
    exact = min((row.finish for row in rows if row.planner == "exact"), default=rows[0].finish)
    assert exact == min(row.finish for row in rows if row.mode != "dear" or modes == ("dear",))


def test_exposed_time_is_what_nothing_hides() -> None:
    profile = Profile(["a", "b"], [10, 10], [1.0, 1.0], forward=[1.0, 1.0])
    given = Measurements(
        profile=profile,
        sparsify=Curve((0, 1, 10), (0.0, 0.25, 0.25)),
        exchange=Curve((0, 10), (0.0, 2.0)),
        dense=None,
        modes=("behind", "dense"),
        workers=2,
    )
    rows = {(row.planner, row.mode): row for row in compare(given)}
    # One by one: selected at 1.25 and 2.5, exchanged until 3.25 and 5.25.
    assert (rows["layerwise", "behind"].finish, rows["layerwise", "behind"].exposed) == (5.25, 2.75)
    assert (rows["layerwise", "dense"].finish, rows["layerwise", "dense"].exposed) == (5.0, 3.0)
    assert (rows["single", "dense"].finish, rows["single", "dense"].exposed) == (6.0, 4.0)
    with_dear = dataclasses.replace(given, sparsify=None, modes=("dense", "dear"))
    rows = {(row.planner, row.mode): row for row in compare(with_dear)}
    assert (rows["layerwise", "dense"].finish, rows["layerwise", "dense"].exposed) == (7.0, 3.0)
    dear = rows["dear", "dear"]
    assert dear.finish == predict(dear.plan, profile, given.costs, "dear").finish == 2.0 + dear.exposed + 2.0


def test_nothing_takes_no_time_and_divides_by_nothing() -> None:
    free = Curve((0,), (0.0,))
    nothing: dict[str, Any] = {"sparsify": None, "exchange": free, "dense": None, "message": None}
    given = measured(profile=Profile(["a"], [1], [0.0]), modes=("dense",), **nothing)
    rows = compare(given)
    assert {(row.finish, row.ratio, row.exposed) for row in rows} == {(0.0, 1.0, 0.0)}
    assert [row.planner for row in rows] == [name for name in merging.names() if "dense" in merging.get(name).modes]
    ElementTree.fromstring(svg(rows, given))


def test_table_is_aligned_and_says_what_the_rows_say() -> None:
    rows = (
        Row("agmerge", "ahead", Plan((2, 1), (True, False)), 0.0125, 1.0, 0.001),
        Row("single", "behind", Plan((3,)), 0.12, 9.6, 0.0),
    )
    assert comparison_table(rows).splitlines() == [
        "planner  mode    finish (ms)  finish / best  exposed (ms)  merge buffers  uncompressed",
        "agmerge  ahead        12.500          1.000         1.000              2             1",
        "single   behind      120.000          9.600         0.000              1             0",
    ]
    given = allowed(("ahead", "behind"))
    lines = comparison_table(compare(given)).splitlines()
    assert len(lines) == 1 + len(compare(given)) and len({len(line) for line in lines}) == 1
    assert len(comparison_table(()).splitlines()) == 1


@pytest.mark.parametrize("modes", MODES, ids=repr)
def test_picture_has_a_group_a_row_and_every_bar_in_it(modes: tuple[str, ...]) -> None:
    given = allowed(modes)
    rows = compare(given)
    text = svg(rows, given)
    assert svg(compare(given), given) == text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(text)
    groups = root.findall(f"{SVG}g[@class='row']")
    assert len(groups) == len(rows)
    width, cut = float(root.get("width", 0)), 3 * rows[0].finish
    for row, group in zip(rows, groups, strict=True):
        labels = [label.text or "" for label in group.findall(f"{SVG}text")]
        assert labels[0] == row.planner and labels[1].startswith(f"{row.mode}, {row.buffers} merge buffer")
        assert labels[2] == ("\u2192 " if row.finish > cut else "") + f"{1e3 * row.finish:.4g} ms"
        bars = group.findall(f"{SVG}rect")
        forward = row.buffers if row.mode == "dear" else int("dear" in modes)
        if row.finish <= cut:
            gathers = row.buffers if row.mode == "dear" else 0
            assert len(bars) == 2 * row.buffers + gathers + forward
        for bar in bars:
            x, wide = float(bar.get("x", -1)), float(bar.get("width", -1))
            assert 150 <= x and wide >= 0 and x + wide <= width - 89
    keys = {rect.get("fill") for rect in root.findall(f"{SVG}rect[@class='key']")}
    assert {rect.get("fill") for group in groups for rect in group.findall(f"{SVG}rect")} <= keys
