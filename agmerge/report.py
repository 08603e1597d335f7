"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence

import merging
from agmerge.adaptation import mode
from agmerge.config import Config
from agmerge.recorder import Times
from agmerge.session import Session
from merging import Measurements


def compression(plan: merging.Plan, session: Session | None, config: Config, step: int) -> str:
    """What happens to each tensor, in readiness order: one line each, and a last one with the totals."""
    assert session is not None
    rows = [("buffer", "tensor", "shape", "lane", "density", "elements")]
    sparse = 0
    for slot in session.tensors.slots:
        density = "1"
        if slot.lane.sparse:
            sent = config.density(slot.lane.density, step)
            if session.shares is not None:
                sent = session.tensor_budget(slot, step) / slot.numel
            density, sparse = f"{sent:.3g}", sparse + slot.numel
        shape = "x".join(map(str, slot.shape)) or "scalar"
        lane = "sparse" if slot.lane.sparse else "dense"
        rows.append((str(session.buffer_of[slot.index]), slot.name, shape, lane, density, str(slot.numel)))
    lines = _aligned(rows)
    total = session.tensors.numel
    compressor = config.sparsifier or config.cast or "none"
    lines.append(f"{compressor}: {sparse} of {total} elements ({sparse / max(total, 1):.1%}) are selected from")
    return "\n".join(lines)


def merge_buffers(session: Session | None, measured: Measurements | None, times: Times | None) -> str:
    """Each merge buffer as it was in a typical step, beside what was predicted, in ms since the first tensor."""
    assert session is not None
    plan, slots = session.plan, session.tensors.slots
    spans: Sequence[merging.Span] = ()
    if measured is not None:
        spans = merging.predict(plan, measured.profile, measured.costs, mode(plan, measured)).spans
    rows = [["buffer", "tensors", "elements", "ready", "start", "end", "exposed", "predicted ready", "start", "end"]]
    for index, (start, stop) in enumerate(plan.bounds):
        elements = sum(slot.numel for slot in slots[start:stop])
        row = [str(index), str(stop - start), str(elements)]
        if times is not None:
            ready, end = times.handed[index], times.arrived[index]
            free = times.arrived[index - 1] if index else 0.0
            row += [_ms(ready), _ms(max(ready, free)), _ms(end), _ms(times.exposed[index])]
        row += ["-"] * (7 - len(row))
        row += [_ms(seconds) for seconds in spans[index]] if spans else ["-"] * 3
        rows.append(row)
    if max(plan.parts) > 1:
        for row, parts in zip(rows, ("parts", *map(str, plan.parts)), strict=True):
            row.insert(3, parts)
    lines = _aligned(rows)
    if spans and times is not None:
        ratio = times.finish / spans[-1].end if spans[-1].end else 1.0
        lines.append(f"measured / predicted finish: {ratio:.2f}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
