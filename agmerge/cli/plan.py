# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge plan MEASUREMENTS.json``: every planner on one measured model, side by side.

Each command has a file of its own, however short: ``python -m agmerge`` imports the one that it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import merging
from agmerge.options import published
from agmerge.step.agreement import with_mode
from merging import comparison, drawing


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
        rows = comparison.compare(measured)
        facts = "; ".join(f"{name} {value}" for name, value in measured.facts)
        elements = int(measured.profile.numel.sum())
        sys.stdout.write(f"{len(measured.profile)} tensors, {elements} elements, {measured.workers} workers; {facts}\n")
        sys.stdout.write(comparison.table(rows) + "\n")
        if picture:
            Path(picture).write_text(drawing.svg(rows, measured), encoding="utf-8")
        if save:
            with_mode(*merging.best(published.planner(planner), measured)).save(save)
    except (ValueError, TypeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
