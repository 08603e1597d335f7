# SPDX-License-Identifier: Apache-2.0
"""Plans side by side on the same measurements: a table of all planners, and a picture of overlap and exposed time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from merging.measured import Measurements, forward_after, step_end
from merging.plan import Plan
from merging.planners.exact import BUDGET
from merging.registry import get, names
from merging.timeline import predict

# The table.

_HEADS = ("planner", "mode", "finish (ms)", "finish / best", "exposed (ms)", "merge buffers", "uncompressed")


@dataclass(frozen=True)
class Row:
    """Prediction for one planner in one mode.

    finish: seconds from the start of backward to the end of the last exchange. Where mode "dear" is among the
        modes of the measurements, to the end of the next forward pass, in every row.
    ratio: finish over the smallest finish of all rows; 1.0 is the best.
    exposed: exposed time, in seconds: finish less the last merge buffer's ready, that is less backward and the
        selection of this plan, and less forward where finish has it. Selection is no communication, so a plan
        that selects for longer may be exposed for less time and yet finish later.
    """

    planner: str
    mode: str
    plan: Plan
    finish: float
    ratio: float
    exposed: float

    @property
    def buffers(self) -> int:
        """Return the number of merge buffers."""
        return len(self.plan.counts)


def compare(measurements: Measurements) -> tuple[Row, ...]:
    """Return a row per planner, with its defaults, and mode of the measurements that it plans for; best first.

    Of rows that finish together, the one with fewer merge buffers comes first, then the order of `names()` and
    of the modes. Only dear plans for mode "dear". exact has ten times the work of agmerge before it
    settles for the best plan so far, some ten seconds instead of minutes. agtf keeps to its limit
    on noise only where the profile has noise.
    """
    profile, costs = measurements.profile, measurements.costs
    predicted = []
    for name in names():
        planner = get(name, budget=10 * BUDGET) if name == "exact" else get(name)
        for mode in measurements.modes:
            if mode in planner.modes:
                plan = planner.plan(profile, costs, mode)
                ready = predict(plan, profile, costs, mode).spans[-1].ready
                finish = step_end(plan, measurements, mode)
                predicted.append((finish, plan, name, mode, max(finish - ready - forward_after(measurements), 0.0)))
    best = min(finish for finish, *_ in predicted)
    predicted.sort(key=lambda row: (row[0], len(row[1].counts)))
    return tuple(
        Row(name, mode, plan, finish, finish / best if best else 1.0, exposed)
        for finish, plan, name, mode, exposed in predicted
    )


def comparison_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned lines of text, in their order, under a line of headings; times in ms."""
    lines = [_HEADS]
    for row in rows:
        times = f"{1e3 * row.finish:.3f}", f"{row.ratio:.3f}", f"{1e3 * row.exposed:.3f}"
        lines.append((row.planner, row.mode, *times, str(row.buffers), str(sum(row.plan.dense))))
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADS))]
    text = []
    for line in lines:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        text.append("  ".join((*left, *right)))
    return "\n".join(text)


# The picture.

_LEFT, _WIDTH, _RIGHT = 150, 800, 90  # labels, the time axis, finish times; in pixels
_TOP, _ROW, _BAR = 84, 40, 13
_LONGEST = 3
# Two shades each, in turn, so that neighbours are told apart; hues after Okabe and Ito, for colour-blind readers.
_COLOURS = {
    "backward and selection": ("#0072b2", "#5aa9d6"),
    "sparse exchange": ("#d55e00", "#f0a468"),
    "dense exchange": ("#8a5a9e", "#c3a1d0"),
    "all-gather": ("#009e73", "#6fcbb0"),
    "forward": ("#7f7f7f", "#b5b5b5"),
}
Bar = tuple[int, str, int, float, float]
"""Which of the two lines of a row it is on, what it shows, its merge buffer, from when to when in seconds."""


def svg(rows: Sequence[Row], measurements: Measurements) -> str:
    """Return one self-contained SVG picture: per row, computation above communication, over time.

    Per merge buffer: from the ready of the one before to its own (backward and selection), and its exchange
    from start to end; in mode "dear" the all-gathers and forward too. All rows share a time axis in ms from the
    start of backward; the number at the right is the finish. The axis goes to three times the best finish at
    most, so that one slow plan does not flatten the others: later bars are cut, with an arrow at the
    finish. The same rows give the same text. Raises ValueError where there is no row.
    """
    if not rows:
        raise ValueError("svg: there are no rows to draw. Pass the result of compare().")
    ends = [step_end(row.plan, measurements, row.mode) for row in rows]
    last = min(max(ends), _LONGEST * min(ends)) or max(ends) or 1e-3
    drawn = [list(_bars(row, measurements)) for row in rows]
    kinds = [kind for kind in _COLOURS if any(bar[1] == kind for bars in drawn for bar in bars)]
    bottom = _TOP + _ROW * len(rows)
    width, height = _LEFT + _WIDTH + _RIGHT, bottom + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_heading(measurements, kinds),
        *_axis(last, bottom),
    ]
    for i, (row, bars) in enumerate(zip(rows, drawn, strict=True)):
        parts += _row(row, bars, _TOP + _ROW * i, last)
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(last: float, most: int = 10) -> list[float]:
    """Return the round times from 0 to `last`, at most `most` + 1 of them, in steps of 1, 2 or 5 times 10^k."""
    power = 10.0 ** math.floor(math.log10(last / most))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if last / step <= most * (1 + 1e-9))
    return [step * i for i in range(int(last / step * (1 + 1e-9)) + 1)]


def _bars(row: Row, measurements: Measurements) -> Iterator[Bar]:
    """Yield the bars of a row, merge buffer by merge buffer."""
    profile = measurements.profile
    timeline = predict(row.plan, profile, measurements.costs, row.mode)
    before = 0.0
    for buffer, (span, dense) in enumerate(zip(timeline.spans, row.plan.dense, strict=True)):
        yield 0, "backward and selection", buffer, before, span.ready
        kind = "dense" if dense or row.mode in ("dense", "dear") else "sparse"
        yield 1, f"{kind} exchange", buffer, span.start, span.end
        before = span.ready
    if row.mode == "dear" and profile.forward is not None:
        clock = 0.0
        for buffer in reversed(range(row.buffers)):
            start, stop = row.plan.bounds[buffer]
            gather = timeline.gathers[buffer]
            clock = max(clock, gather.end)
            through = clock + float(profile.forward[start:stop].sum())
            yield 1, "all-gather", buffer, gather.start, gather.end
            yield 0, "forward", buffer, clock, through
            clock = through
    elif "dear" in measurements.modes and profile.forward is not None:
        finish = timeline.finish
        yield 0, "forward", row.buffers - 1, finish, finish + float(profile.forward.sum())


def _row(row: Row, bars: list[Bar], top: int, last: float) -> Iterator[str]:
    """Yield the SVG of one row, `top` pixels from the top; the time axis ends at `last` seconds."""
    yield f'<g class="row"><text x="{_LEFT - 10}" y="{top + 13}" text-anchor="end">{escape(row.planner)}</text>'
    many = f"{row.buffers} merge buffer{'s' * (row.buffers > 1)}"
    yield (
        f'<text x="{_LEFT - 10}" y="{top + 27}" text-anchor="end" font-size="11" fill="#555555">'
        f"{escape(row.mode)}, {many}</text>"
    )
    bounds = row.plan.bounds
    for line, kind, buffer, start, end in bars:
        if start >= last:
            continue
        y = top + 2 + line * (_BAR + 1)
        x, wide = _LEFT + _WIDTH * start / last, _WIDTH * (min(end, last) - start) / last
        says = f"merge buffer {buffer}, tensors {bounds[buffer][0]} to {bounds[buffer][1] - 1}: {kind},"
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BAR}" fill="{_COLOURS[kind][buffer % 2]}">'
            f"<title>{says} {1e3 * start:.3f} to {1e3 * end:.3f} ms</title></rect>"
        )
    arrow = "\u2192 " * (row.finish > last * (1 + 1e-9))
    yield (
        f'<text x="{_LEFT + _WIDTH * min(row.finish / last, 1.0) + 6:.2f}" y="{top + 20}" font-size="12">'
        f"{arrow}{1e3 * row.finish:.4g} ms</text></g>"
    )


def _axis(last: float, bottom: int) -> Iterator[str]:
    """Yield the SVG of the time axis from 0 to `last` seconds, `bottom` pixels from the top."""
    marks = ticks(last)
    digits = max(0, -math.floor(math.log10(1e3 * (marks[1] if len(marks) > 1 else last)) + 1e-9))
    for mark in marks:
        x = _LEFT + _WIDTH * mark / last
        yield f'<line x1="{x:.2f}" y1="{_TOP - 6}" x2="{x:.2f}" y2="{bottom + 4}" stroke="#dddddd"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 18}" text-anchor="middle" font-size="12">{1e3 * mark:.{digits}f}</text>'
    yield (
        f'<text x="{_LEFT + _WIDTH / 2:.2f}" y="{bottom + 36}" text-anchor="middle" font-size="12">'
        "ms since backward began</text>"
    )


def _heading(measurements: Measurements, kinds: list[str]) -> Iterator[str]:
    """Yield the SVG of the title, of the measurements' facts, and of the key to the colours of `kinds`."""
    what = [f"{len(measurements.profile)} tensors", f"{measurements.workers} workers"]
    text = ", ".join(what + [f"{name} {value}" for name, value in measurements.facts])
    text = "".join(letter if letter.isprintable() else "?" for letter in text)  # XML has no control characters
    yield '<text x="10" y="24" font-size="16" font-weight="bold">Predicted timelines</text>'
    yield f'<text x="10" y="44" fill="#555555">{escape(text)}</text>'
    x = _LEFT
    for kind in kinds:
        for shade, colour in enumerate(_COLOURS[kind]):
            yield f'<rect class="key" x="{x + 8 * shade}" y="56" width="8" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 22}" y="67" font-size="12">{kind}</text>'
        x += 46 + 7 * len(kind)
