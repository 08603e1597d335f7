# SPDX-License-Identifier: Apache-2.0
"""Measure the codec work of a step with quantisers, as a multiple of adding the gradient up in place.

    python benchmarks/quantising.py --only eden-2 int8 --json quantising.json

The unit is `gradient.add_(other)` on as many float32 elements. Each quantiser runs at every instruction set that the
processor has loops for, and as torch's operations, "torch". All are timed in turns, the unit before each, so that they
see the same neighbours and the same caches. One thread's processor time, medians.

| column | what is done by one rank |
|---|---|
| encode | its gradient as records, and the sum of its squares |
| decode | one sender's records as float32 |
| W = 2 | one phase: encode, and decode the sum of two senders |
| W = 4 | two phases: encode, write the sum of four senders for a quarter of the blocks, decode what all have written |
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch
from torch import Tensor

# isort: split

import sparsifiers
from sparsifiers import native
from sparsifiers.quantising.base import Quantiser, blocks_in
from sparsifiers.quantising.draws import Draws

NAMES = ("eden-1", "eden-2", "eden-3", "eden-4", "int8", "int4")
COLUMNS = ("encode", "decode", "W = 2", "W = 4")
TORCH = "torch"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SENDERS = 4

Work = dict[str, Callable[[], object]]


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="codec work of a step with quantisers, in additions of the gradient")
    add = parser.add_argument
    add("--elements", type=int, default=1 << 24, help="a multiple of four blocks")
    add("--block", type=int, default=256, choices=(64, 128, 256), help="coordinates of a block")
    add("--dtype", default="float32", choices=sorted(DTYPES), help="of the gradient")
    add("--repeats", type=int, default=15)
    add("--only", nargs="+", default=list(NAMES), metavar="NAME", help="quantisers")
    add("--levels", nargs="+", metavar="NAME", help="instruction sets, and torch; all of them, if it is not given")
    add("--json", type=Path, metavar="PATH", help="write every number there")
    args = parser.parse_args(argv)
    if args.elements % (SENDERS * args.block):
        parser.error(f"--elements {args.elements}: must be a multiple of {SENDERS} blocks of {args.block}")
    return args


def work_of(made: Quantiser, gradient: Tensor, size: int) -> Work:
    """Return what is timed, by column. gradient: 1-D, of whole blocks."""
    n = gradient.numel()
    record, quarter = made.record_bytes(size), n // SENDERS
    draws = [Draws(number) for number in range(SENDERS)]
    messages = [torch.empty(blocks_in(n, size) * record, dtype=torch.uint8) for _ in draws]
    for message, each in zip(messages, draws, strict=True):
        made.encode(gradient, size, each, message)
    update, squares = torch.empty_like(gradient), torch.zeros(1, dtype=torch.float64)
    shards = [message[: quarter // size * record] for message in messages]
    summed = torch.empty_like(shards[0])

    def encode() -> None:
        made.encode(gradient, size, draws[0], messages[0], squares)

    def decode(senders: int = 1) -> None:
        made.decode_sum(messages[:senders], draws[:senders], size, 1 / senders, update)

    def two() -> None:
        encode()
        decode(2)

    def four() -> None:
        encode()
        made.encode_sum(shards, draws, size, 1 / SENDERS, made, draws[0], summed)
        decode()

    return dict(zip(COLUMNS, (encode, decode, two, four), strict=True))


LIBRARY = native.library


def use(level: str) -> None:
    """Use the loops of one instruction set, or torch's operations."""
    native.library = None if level == TORCH else LIBRARY
    if level != TORCH:
        native.set_level(native.LEVELS.index(level))


def seconds(run: Callable[[], object]) -> float:
    """Return this thread's processor time: what others do to the processor does not count."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def measure(work: Work, unit: Callable[[], object], levels: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Return how many units each column takes, by level: medians of so many turns, three of torch's operations."""
    took: dict[str, dict[str, list[float]]] = {level: {column: [] for column in work} for level in levels}
    units = [seconds(unit)]
    for turn in range(repeats + 1):
        for level in levels:
            if level == TORCH and turn > 3:
                continue
            use(level)
            for column, run in work.items():
                units.append(seconds(unit))
                now = seconds(run)
                if turn:  # the first touches memory for the first time
                    took[level][column].append(now)
    typical = statistics.median(units)
    return {
        level: {column: statistics.median(some) / typical for column, some in columns.items()}
        for level, columns in took.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every quantiser and print the table."""
    args = arguments(argv)
    torch.set_num_threads(1)
    known = (*native.names(), TORCH)
    levels = [level for level in known if args.levels is None or level in args.levels]
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(args.elements, generator=generator).to(DTYPES[args.dtype])
    total, other = torch.zeros(args.elements), torch.randn(args.elements, generator=generator)
    about = {
        "machine": platform.machine(),
        "torch": f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
        "elements": args.elements,
        "block": args.block,
        "dtype": args.dtype,
        "levels": levels,
    }
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    print(f"\n| quantiser | by | {' | '.join(COLUMNS)} |\n{'|---' * (2 + len(COLUMNS))}|")
    results, before = [], native.LEVELS[native.level()] if native.available() else TORCH
    try:
        for name in args.only:
            work = work_of(sparsifiers.quantiser(name), gradient, args.block)
            found = measure(work, lambda: total.add_(other), levels, args.repeats)
            for level, columns in found.items():
                print(f"| `{name}` | {level} | {' | '.join(f'{columns[c]:.2f}' for c in COLUMNS)} |", flush=True)
            results.append({"quantiser": name, "additions": found})
    finally:
        use(before)
    if args.json:
        args.json.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
