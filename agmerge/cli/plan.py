# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge plan MEASUREMENTS.json``: every planner on one measured model, side by side.

Each command has a file of its own, however short: ``python -m agmerge`` imports the one that it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import merging
from agmerge.options import published
from agmerge.step.agreed_state import with_mode
from merging import drawing

LEGEND = """finish: predicted time from the start of the backward pass to the end of the last exchange of a step.
    With measurements of merging="dear", it ends with the next forward pass.
exposed: the part of this time in which the step only waits for communication.
merge buffers: messages per step. uncompressed: the number of merge buffers that are sent uncompressed."""


def main(path: str, picture: str | None, save: str | None, planner: str) -> int:
    """Print the table of all planners; return the exit code.

    Args:
        path: measurements, as ``optimizer.measurements.save`` has written them.
        picture: where to draw the timelines, as SVG; None: nowhere.
        save: where to save a plan; None: nowhere.
        planner: the name of the planner that makes it.
    """
    try:
        measured = merging.Measurements.load(path)
        rows = drawing.compare(measured)
        facts = "; ".join(f"{name} {value}" for name, value in measured.facts)
        elements = int(measured.profile.numel.sum())
        sys.stdout.write(f"{len(measured.profile)} tensors, {elements} elements, {measured.workers} workers; {facts}\n")
        sys.stdout.write(f"{drawing.comparison_table(rows)}\n\n{LEGEND}\n")
        if picture:
            Path(picture).write_text(drawing.svg(rows, measured), encoding="utf-8")
            sys.stdout.write(f"\nThe timelines of all planners are in {picture}.\n")
        if save:
            with_mode(*merging.best(published.planner(planner), measured)).save(save)
            sys.stdout.write(f"\nThe plan of {planner} is in {save}. To use it, pass merging={save!r}.\n")
    except (ValueError, TypeError, OSError) as error:
        sys.stderr.write(f"agmerge plan: {error}\n")
        return 1
    return 0
