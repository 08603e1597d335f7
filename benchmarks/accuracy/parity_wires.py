# SPDX-License-Identifier: Apache-2.0
"""Hold few bits a value against the gradient's own dtype, everything else alike: ``parity.py --cases wires``.

What rounding leaves behind is sent later, so it is a loss of time at most; these runs say whether it is one. Plans go
by sizes: those by times would differ from run to run in where they select, and might round values of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from accuracy import parity_report
from accuracy.parity_report import Records
from accuracy.parity_tasks import HIGHER_IS_BETTER, Case
from accuracy.parity_updates import settings, updates

WIRES = ("int8", "int4", "2bit", "sign")


def in_wires(base: Case, wires: Sequence[str]) -> list[Case]:
    """Return ``base`` with the values exact, and in each of ``wires``."""
    return [replace(base, wire=wire, merging="threshold") for wire in ("fp32", *wires)]


def stages(count: int) -> Iterator[tuple[list[Case], Sequence[int]]]:
    """Yield cases of fold 0 and seed 0, and the seeds to run them with, the most important ones first."""
    digits, lm, adamw = Case(task="digits"), Case(task="lm"), Case(task="lm", optimizer="adamw")
    topk = {"compressor": "topk", "density": 0.01, "memory": "residual"}
    dgc = {"compressor": "dgc", "density": 0.01, "memory": "dgc"}  # the default for an SGD with momentum
    language = [replace(lm, **topk), replace(lm, **dgc)]
    yield [one for base in language for one in in_wires(base, WIRES[:1])], range(count + 1)
    yield in_wires(updates(adamw), ("int8", "int4", "sign")), range(count)
    yield [one for base in language for one in in_wires(base, WIRES[:1])], range(2 * count + 2)
    yield [one for base in language for one in in_wires(base, WIRES)], range(count + 1)
    yield in_wires(updates(adamw), WIRES), range(count)
    yield [one for way in (topk, dgc) for one in in_wires(replace(digits, **way), WIRES)], range(count)


def exact(case: Case) -> Case:
    """Return the case with which one is compared."""
    return replace(case, wire="fp32")


def tables(records: Records) -> Iterator[str]:
    """Yield the lines of a Markdown table for each setting: differences to the exact values, in pairs."""
    for part in settings(records):
        case, record = next(iter(part.items()))
        better = HIGHER_IS_BETTER[case.task]
        yield f"{parity_report.TITLES[case.task]}, {case.optimizer}, {record['recipe']['steps']} steps:\n"
        yield f"| exchanged | wire | {'points' if better else '% of the loss'} | Student, 95 % | pairs |"
        yield "|---|---|---|---|---|"
        for group in parity_report.groups(part):
            pairs = [one for one in group if exact(one) in part and one.wire != "fp32"]
            if len(pairs) > 1:
                yield row(part, pairs)
        yield ""


def row(records: Records, pairs: Sequence[Case]) -> str:
    """Return a line of a table: the differences of these cases to exact values."""
    case, differences = pairs[0], []
    for one in pairs:
        score, reference = records[one]["score"], records[exact(one)]["score"]
        differences.append(100 * (score - reference if HIGHER_IS_BETTER[one.task] else score / reference - 1))
    mean, half = parity_report.interval(differences)
    way = f"{case.compressor}, {100 * case.density:g} %" + (", updates" if case.sync == "updates" else "")
    return f"| {way} | {case.wire} | {mean:+.2f} | {mean - half:+.2f} to {mean + half:+.2f} | {len(pairs)} |"
