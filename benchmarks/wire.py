# SPDX-License-Identifier: Apache-2.0
"""What a message costs: bytes of a slot against the published formats and the entropy, and the time of its codecs.

    python benchmarks/wire.py --sizes 1 16 --densities 0.1 0.01 0.001 --json wire.json

Bytes are of a whole message, header and padding included. Times are in in-place additions over the dense vector,
``a.add_(b)``, timed in the same loop so that both see the same neighbours; one thread, medians. What encodes and
decodes is what an exchange does for one rank's message: indices, values, checks, checksum.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import numpy as np
import torch

# isort: split

from agmerge.exchanges.message import ValueCodec, candidates, smallest
from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.exchanges.sparse import without_zeros
from agmerge.tensors.layout import Layout, Segment, TensorClass
from sparsifiers import Kind, Selection

WIRES = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int8": 1,
    "int4": 1 / 2,
    "2bit": 1 / 4,
    "sign": 1 / 8,
}  # bytes a value, scales apart
PUBLISHED = {"int64 + fp32": 12.0, "int32 + fp32": 8.0}
SHOWN = ("int32", "bitmap", "8-bit", "12-bit", "16-bit")  # beside the smallest
PARTS = ("indices", "values", "seal", "check", "read indices", "read values")


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="bytes and time of messages")
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[1, 16], help="elements, in units of 2**20")
    add("--densities", type=float, nargs="+", default=[0.1, 0.01, 0.001])
    add("--wires", nargs="+", choices=list(WIRES), default=list(WIRES))
    add("--repeats", type=int, default=15)
    add("--json", type=Path, metavar="PATH", help="write every number there")
    return parser.parse_args(argv)


def entropy(n: int, k: int) -> float:
    """Bytes that k of n indices take at least, on average, per index."""
    logs = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return logs / math.log(2) / 8 / k


def segment_of(n: int) -> Segment:
    """One tensor of n elements, in a sparse tensor class."""
    tensor_class = TensorClass(torch.device("cpu"), torch.float32, Kind.SPARSE)
    return Layout([("x", (n,), tensor_class)]).segments(0, 1)[0]


def selection(n: int, k: int) -> Selection:
    """k of n indices, at random."""
    chosen = np.random.default_rng(k).choice(n, k, replace=False)
    return Selection(torch.from_numpy(np.sort(chosen).astype(np.int32)), k)


def sizes(n: int, density: float, wires: Sequence[str]) -> dict[str, Any]:
    """Bytes of a slot, of every codec and of whole messages."""
    segment, k = segment_of(n), math.ceil(density * n)
    indices = {codec.name: codec.size / k for codec in candidates(segment.length, k) if codec.name in SHOWN}
    best = smallest(segment.length, k)
    return {
        "indices": {**indices, f"smallest: {best.name}": best.size / k, "entropy": entropy(n, k)},
        "messages": {wire: Format([segment], [k], wire).size / k for wire in wires},
    }


def write(value: ValueCodec, offer: Selection, values: torch.Tensor, room: torch.Tensor) -> None:
    """Do with values what an exchange does: look for zeros where there is no code for them."""
    if not value.has_zero:
        offer, values = without_zeros(offer, values)
    value.encode(values, room, offer.count)


def times(n: int, density: float, wire: str, repeats: int) -> dict[str, float]:
    """What the parts of one message take, in in-place additions over the n elements."""
    segment, k = segment_of(n), math.ceil(density * n)
    offer, layout = selection(n, k), Format([segment], [k], wire)
    section, message = layout.sections[0], torch.zeros(layout.size, dtype=torch.uint8)
    values = torch.randn(k)
    control = RoundHeader(1, 2, 3, 0, (True,))
    layout.write_header(message, control, [k])
    index, value = section.index, section.value
    assert index is not None and value is not None
    places, room = message[section.indices], message[section.values]
    parts: dict[str, Callable[[], object]] = {
        "indices": lambda: index.encode(offer.indices, k, places),
        "values": lambda: write(value, offer, values, room),
        "seal": lambda: layout.seal(message),
        "check": lambda: layout.check_payloads(message[None], "message"),
        "read indices": lambda: index.decode(places, k),
        "read values": lambda: value.decode(room, k, torch.float32),
        "all that is read": lambda: (index.decode(places, k), value.decode(room, k, torch.float32)),
    }
    a, b = torch.zeros(n), torch.ones(n)
    took: dict[str, list[float]] = {name: [] for name in ("add", *parts)}
    for _ in range(repeats):
        for name, part in {"add": lambda: a.add_(b), **parts}.items():
            begin = time.perf_counter()
            part()
            took[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(one) for name, one in took.items()}
    found = {name: medians[name] / medians["add"] for name in PARTS}
    # The order of the indices is checked in between.
    order = medians["all that is read"] - medians["read indices"] - medians["read values"]
    return {**found, "order": max(order, 0.0) / medians["add"], "add_seconds": medians["add"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    args = arguments(argv)
    torch.set_num_threads(1)
    results = []
    for n in (size * 2**20 for size in args.sizes):
        for density in args.densities:
            size = sizes(n, density, args.wires)
            row = {"n": n, "density": density, **size, "times": {}}
            print(f"\n{n >> 20} Mi elements, density {density:g}")
            print("  indices, bytes a slot:  " + "  ".join(f"{name} {b:.3f}" for name, b in size["indices"].items()))
            print("  published messages:     " + "  ".join(f"{name} {b:g}" for name, b in PUBLISHED.items()))
            for wire in args.wires:
                cost = row["times"][wire] = times(n, density, wire, args.repeats)
                write = cost["indices"] + cost["values"]
                read = cost["read indices"] + cost["read values"] + cost["order"]
                million = cost["add_seconds"] * 1e9 / math.ceil(density * n)  # ms an addition takes, for so many values
                bound = entropy(n, math.ceil(density * n)) + WIRES[wire]
                print(
                    f"  {wire:5} {size['messages'][wire]:6.3f} bytes a slot (bound {bound:.3f}); in additions of "
                    f"{cost['add_seconds'] * 1e3:.2f} ms: write {write:.3f}, read {read:.3f}, "
                    f"checksum {cost['seal']:.3f} + {cost['check']:.3f}; a million values: "
                    f"write {cost['values'] * million:.2f} ms, read {cost['read values'] * million:.2f} ms"
                )
            results.append(row)
    if args.json:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        args.json.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
