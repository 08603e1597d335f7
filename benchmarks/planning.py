"""How long planning takes, and how far the greedy is from the optimum, on the shapes of well-known models.

    python benchmarks/planning.py                  # times at 600 tensors, then the greedy over the whole grid
    python benchmarks/planning.py --no-grid --tensors 1000

Costs are alpha-beta (ring) and depend on the number of workers; backward is spread over tensors by size, with a
floor. None of it is measured: it says how good planners are under the model, not how fast training is.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shapes  # noqa: E402

import merging  # noqa: E402

DENSITIES = (1.0, 0.1, 0.01, 0.001)
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
ALPHA, BETA = 1.5e-5, 8e-11  # seconds a step, seconds a byte: 100 Gbit/s Ethernet
SELECT, LAUNCH = 2e-10, 3e-5  # seconds an element and a call of selection
PER_ELEMENT, FLOOR = 1.2e-9, 2e-5  # seconds of backward an element, and at least a tensor


def profile(sizes: list[int]) -> merging.Profile:
    """A profile whose backward is proportional to size, above a floor, at most 0.1 s in all."""
    share = PER_ELEMENT * np.minimum(1.0, 0.1 / (PER_ELEMENT * sum(sizes)))
    return merging.Profile([f"t{i}" for i in range(len(sizes))], sizes, [FLOOR + share * size for size in sizes])


def costs(workers: int, density: float, dense: bool = False) -> merging.Costs:
    """Ring costs: an all-gather of 8 bytes an element selected, or an all-reduce of 4 bytes an element."""
    steps = workers - 1

    def reduce(x: Any) -> Any:
        return 2 * steps * ALPHA + 2 * steps / workers * 4 * BETA * x

    def gather(x: Any) -> Any:
        return steps * ALPHA + steps * 8 * BETA * density * x

    def select(x: Any) -> Any:
        return np.where(np.asarray(x) > 0, LAUNCH + SELECT * np.asarray(x), 0.0)

    if density == 1:
        return merging.Costs(lambda x: 0.0 * x, reduce)
    return merging.Costs(select, gather, reduce if dense else None)


def grid(workers: tuple[int, ...] = WORKERS) -> Iterator[tuple[str, float, int, str]]:
    """Yield model, density, workers and mode; density 1 is dense, the others are ahead and behind."""
    for model in shapes.MODELS:
        for density in DENSITIES:
            for count in workers:
                for mode in ("dense",) if density == 1 else ("ahead", "behind"):
                    yield model, density, count, mode


def stretched(model: str, tensors: int) -> list[int]:
    """The shapes of `model`, repeated or cut to `tensors`."""
    sizes = shapes.sizes(model)
    return (sizes * math.ceil(tensors / len(sizes)))[:tensors]


def seconds(planner: merging.Planner, model: merging.Profile, cost: merging.Costs, mode: str, repeat: int) -> float:
    """The median time of one plan."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        planner.plan(model, cost, mode)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def print_times(tensors: int, repeat: int) -> None:
    """Print milliseconds per plan: model, mode, with and without dense merge buffers, over workers."""
    print(f"exact, {tensors} tensors, density 0.01 (dense: 1): median ms over {repeat} plans for P = 8, 64, 512")
    planner = merging.get("exact")
    for model in ("resnet50", "gpt2"):
        data = profile(stretched(model, tensors))
        for mode, dense in (("dense", False), ("ahead", False), ("behind", False), ("ahead", True), ("behind", True)):
            took = []
            for workers in (8, 64, 512):
                cost = costs(workers, 1 if mode == "dense" else 0.01, dense)
                took.append(f"{1e3 * seconds(planner, data, cost, mode, repeat):8.1f}")
            print(f"  {model:10} {mode:7} {'or dense' if dense else '':9}", *took)


def print_grid() -> None:
    """Print how much later than the optimum the plans of `agmerge`'s greedy end, over the whole grid."""
    exact, greedy = merging.get("agmerge", solver="exact"), merging.get("agmerge", solver="greedy")
    excess: list[tuple[float, tuple[str, float, int, str]]] = []
    for case in grid():
        model, density, workers, mode = case
        data, cost = profile(shapes.sizes(model)), costs(workers, density)
        best = merging.predict(exact.plan(data, cost, mode), data, cost, mode).finish
        found = merging.predict(greedy.plan(data, cost, mode), data, cost, mode).finish
        excess.append((100 * (found / best - 1), case))
    for model in shapes.MODELS:
        mine = [value for value, case in excess if case[0] == model]
        print(f"  {model:10} median {statistics.median(mine):6.2f} %  worst {max(mine):6.2f} %  of {len(mine)}")
    values = [value for value, _ in excess]
    print(f"  all        median {statistics.median(values):6.2f} %  worst {max(values):6.2f} %  at {max(excess)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="time of planning, and the greedy against the optimum")
    parser.add_argument("--tensors", type=int, default=600)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-grid", action="store_true", help="only the times")
    options = parser.parse_args()
    print_times(options.tensors, options.repeat)
    if not options.no_grid:
        print("agmerge(solver='greedy') later than the optimum")
        print_grid()


if __name__ == "__main__":
    main()
