"""Hold few bits a value against the gradient's own dtype, everything else alike: ``parity.py --cases wires``.

What rounding leaves behind is sent later, so it is a loss of time at most; these runs say whether it is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parity_tasks import Case
from parity_updates import updates

WIRES = ("int4", "sign", "int8", "2bit")  # the ones that say most first


def in_wires(base: Case, exact: str = "auto", wires: Sequence[str] = WIRES) -> list[Case]:
    """Return ``base`` with the values exact, and in each of ``wires``."""
    return [replace(base, wire=wire) for wire in (exact, *wires)]


def stages(count: int) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield cases of fold 0 and seed 0, and the seeds to run them with, the most important ones first."""
    seeds = range(count)
    digits, sgd, adamw = Case(task="digits"), Case(task="lm"), Case(task="lm", optimizer="adamw")
    topk = {"compressor": "topk", "density": 0.01, "memory": "residual"}
    dgc = {"compressor": "dgc", "density": 0.01, "memory": "dgc"}  # the default for an SGD with momentum
    yield in_wires(replace(sgd, **topk), wires=WIRES[:2]), seeds
    yield in_wires(replace(digits, **topk)), seeds
    yield in_wires(replace(sgd, **dgc)), seeds
    yield in_wires(updates(adamw), "fp32"), seeds
    yield in_wires(replace(sgd, **topk)), seeds
    yield in_wires(replace(digits, **dgc)), seeds
    yield [sgd, adamw], seeds
    yield in_wires(replace(adamw, **topk)), seeds
