"""Tables for people."""

from __future__ import annotations

import merging
from agmerge.config import Config
from agmerge.session import Session


def compression(plan: merging.Plan, session: Session | None, config: Config, step: int) -> str:
    """What happens to each tensor, in readiness order: one line each, and a last one with the totals."""
    assert session is not None
    rows = [("buffer", "tensor", "shape", "lane", "density", "elements")]
    sparse = 0
    for slot in session.layout.slots:
        density = "1"
        if slot.lane.sparse:
            density, sparse = f"{config.density(slot.lane.density, step):g}", sparse + slot.numel
        shape = "x".join(map(str, slot.shape)) or "scalar"
        lane = "sparse" if slot.lane.sparse else "dense"
        rows.append((str(session.buffer_of[slot.index]), slot.name, shape, lane, density, str(slot.numel)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = session.layout.numel
    compressor = config.sparsifier or config.cast or "none"
    lines.append(f"{compressor}: {sparse} of {total} elements ({sparse / max(total, 1):.1%}) are selected from")
    return "\n".join(lines)
