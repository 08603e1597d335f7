# SPDX-License-Identifier: Apache-2.0
"""Judge for ``benchmarks/gpu.py``: figures with their limits, and the rules that make them from what was measured.

Nothing here needs a GPU. U(n) is the time of ``torch.add(r, g, out=w)`` over n elements of fp32 on the same GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LARGE = (16_000_000, 100_000_000)  # elements from which on a pass is bound by memory
SMALL = 1_000_000  # elements at which launches count, not bytes
HOOK, LAUNCHES = 2e-6, 18  # a tensor's hook, host seconds; launches of a message in hooks (docs/dev/gpu_checks.md)


@dataclass(frozen=True)
class Figure:
    """Hold one thing that was measured or checked."""

    check: int  # its number in the list of checks, 1 to 10
    what: str
    value: float  # NaN: it could not be found out, which fails
    unit: str = ""
    limit: float | None = None  # the most that is right; None: told, and not judged
    note: str = ""  # what went wrong, in words

    @property
    def failed(self) -> bool:
        """Tell whether it is over its limit."""
        return self.limit is not None and not self.value <= self.limit

    def line(self) -> str:
        """Return the line that is printed."""
        word = "FAILED" if self.failed else "      " if self.limit is None else "ok    "
        limit = "" if self.limit is None else f"  (limit {shown(self.limit)})"
        return (
            f"{word} {self.check}  {self.what}: {shown(self.value)} {self.unit}".rstrip()
            + limit
            + (f"  {self.note}" if self.note else "")
        )


def shown(value: float) -> str:
    """Return a number in as many digits as are of use."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else f"{value:.3g}"


def must(check: int, what: str, right: bool, note: str = "") -> Figure:
    """Judge something that is right or not: 0 faults are allowed."""
    return Figure(check, what, 0 if right else 1, "faults", 0, "" if right else note)


def broke(check: int, what: str, error: BaseException) -> Figure:
    """Report a check that ended with an error."""
    return Figure(check, what, math.nan, "", 0, f"{type(error).__name__}: {error}".splitlines()[0])


def exit_code(figures: Sequence[Figure]) -> int:
    """Return 1 if one has failed, or none was judged."""
    judged = [figure for figure in figures if figure.limit is not None]
    return 1 if not judged or any(figure.failed for figure in judged) else 0


def as_json(about: Mapping[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return what ``--json`` writes: the machine, and each figure with whether it failed. NaN becomes None."""
    rows = [{**asdict(figure), "failed": figure.failed} for figure in figures]
    found = [{**row, "value": None if math.isnan(row["value"]) else row["value"]} for row in rows]
    return {"about": dict(about), "figures": found, "exit_code": exit_code(figures)}


# -- rules ----------------------------------------------------------------------------------------------------------


def of_bandwidth(n: int, took: Mapping[str, tuple[float, float]]) -> list[Figure]:
    """Judge check 1. ``took``: by name (microseconds, bytes moved). The add is U."""
    return [
        Figure(1, f"{name}, {n:,} elements", size / micros / 1e3, f"GB/s in {shown(micros)} us")
        for name, (micros, size) in took.items()
    ]


def of_kernels(n: int, what: str, took: Mapping[str, float], unit: float) -> list[Figure]:
    """Judge check 2. ``took``: microseconds by name ("K1" to "K4" and sums). ``what``: data, density. ``unit``: U."""
    limits = {"K1": 1.10, "K3": 0.45, "K1+K2+K3": 1.5, "K4": 1.0}  # of U
    if n in LARGE:
        return [
            Figure(2, f"{name}, {n:,}, {what}", took[name] / unit, f"U = {shown(took[name])} us", limits.get(name))
            for name in took
        ]
    whole = Figure(2, f"K1+K2+K3, {n:,}, {what}", took["K1+K2+K3"], "us", 60.0)
    return [Figure(2, f"{name}, {n:,}, {what}", took[name], "us") for name in took if name != "K1+K2+K3"] + [whole]


def of_compressor(n: int, name: str, micros: float, launches: float, unit: float, *, judged: bool) -> list[Figure]:
    """Judge check 3: one selection of a compressor. ``unit``: U(n). ``judged``: kernels of the library make it."""
    return [
        Figure(3, f"{name}, {n:,}: time", micros / unit, f"U = {shown(micros)} us", 3.0 if judged else None),
        Figure(3, f"{name}, {n:,}: kernels", launches, "launches", 10 if judged else None),
    ]


def of_hooks(model: str, plain: float, wrapped: float, tensors: int, messages: int, launch: float) -> list[Figure]:
    """Judge check 5. ``plain``, ``wrapped``: seconds of the host in a backward without and with hooks.

    ``launch``: seconds of the host for a small kernel of torch's. One of ours, with its arguments, may take twice that.
    """
    allowed = HOOK * tensors + LAUNCHES * messages * 2 * launch
    return [
        Figure(5, f"{model}: host time of backward", 100 * (wrapped / plain - 1), "% more"),
        Figure(5, f"{model}: host time of {tensors} hooks, {messages} messages", 1e3 * (wrapped - plain), "ms",
               1e3 * allowed),
    ]  # fmt: skip


def finish_of(ready: Sequence[float], travel: Sequence[float]) -> float:
    """Return when the last is there, in seconds: each message leaves when ready and the one before has arrived."""
    end = 0.0
    for start, seconds in zip(ready, travel, strict=True):
        end = max(end, start) + seconds
    return end


def of_overlap(model: str, predicted: float, exposed: float, travel: float) -> list[Figure]:
    """Judge check 6: seconds the exchange adds to a step, predicted and measured; ``travel``: of all its messages."""
    hidden = 100 * (1 - exposed / travel) if travel else 0.0
    return [
        Figure(6, f"{model}: exchange under backward", hidden, "%"),
        Figure(6, f"{model}: exposed", 1e3 * exposed, "ms", 1.1e3 * predicted + 0.05),  # 50 us: of the clock
    ]


def of_memory(model: str, elements: int, base: int, peak: int, more: float) -> list[Figure]:
    """Judge check 7. ``base``, ``peak``: bytes of a step without and with the library; ``more``: cudaMalloc a step."""
    return [
        Figure(7, f"{model}: memory beside model and optimizer", (peak - base) / elements, "bytes an element", 12.6),
        Figure(7, f"{model}: memory taken from the device in steps 3 to 5", more, "times a step", 0),
    ]


def of_world(took: Mapping[str, float], *, judged: bool = True) -> list[Figure]:
    """Judge check 8. ``took``: seconds a step by contender. "ours, auto" is held against "DDP, dense".

    ``judged``: every worker has a GPU of its own.
    """
    dense = took["DDP, dense"]
    limits = {"ours, auto": 1.05} if judged else {}
    return [Figure(8, f"step, {name}", took[name] / dense, f"of DDP's = {1e3 * took[name]:.3g} ms", limits.get(name))
            for name in took]  # fmt: skip
