# SPDX-License-Identifier: Apache-2.0
"""How long planning takes, and how far planners are from the optimum, on the shapes of well-known models.

    python benchmarks/planning.py                  # times at 600 tensors, then all planners over a grid
    python benchmarks/planning.py --no-grid --tensors 1000
    python benchmarks/planning.py --no-grid --choice --budget 0     # how long an unbounded search can take: minutes
    python benchmarks/planning.py --no-grid --every --tensors 2000   # every planner, and the choice for a partition
    python benchmarks/planning.py --training       # all that one step of training waits for, with curves as it has them

Costs are alpha-beta (ring) and depend on the number of workers; backward is spread over tensors by size, with a
floor. None of it is measured: it says how good planners are under the model, not how fast training is.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import numpy as np

# isort: split

from speed import shapes

import merging
from merging.measured import sent_whole
from merging.planners.exact import BUDGET
from merging.timeline import choose_dense

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
    """Return the median time of one plan, of the processor: a busy machine does not count."""
    return taking(lambda: planner.plan(model, cost, mode), repeat)


def taking(plan: Callable[[], object], repeat: int) -> float:
    """The median time of the processor."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        plan()
        times.append(time.process_time() - start)
    return statistics.median(times)


def measured(sizes: list[int], backward: float, bits: float) -> merging.Measurements:
    """Return what training might measure: so many seconds of backward, two workers, 1 % of what is not small."""
    elements = np.array(sizes)
    small = elements < 1024
    rng = np.random.default_rng(0)

    def curve(start: float, each: float, powers: int, zero: bool = False) -> merging.Curve:
        points = {2**power: [start + each * 2**power * (1 + 0.2 * rng.random())] for power in range(4, powers)}
        return merging.Curve.fit(points, zero=zero)

    times = backward * (0.8 * elements / elements.sum() + 0.2 / len(sizes))
    load = np.where(small, elements, np.ceil(0.01 * elements).astype(int))
    return merging.Measurements(
        profile=merging.Profile(
            [f"t{i}" for i in range(len(sizes))], sizes, times, work=np.where(small, 0, elements), load=load
        ),
        sparsify=curve(2e-5, 3e-10, 24, zero=True),
        exchange=curve(4e-4, 2 * 5.1 * 8 / bits, 18),
        dense=curve(5e-4, 2 * 4 * 8 / bits, 24),
        message=curve(2e-4, 8e-9, 18),
        modes=("ahead", "behind"),
        workers=2,
    )


def plans_of_a_step(planner: merging.Planner, known: merging.Measurements) -> None:
    """Make the plans that rank 0 makes after the tenth step: the best, all compressed, all dense."""
    for one in (known, replace(known, dense=None)):
        plan, mode = merging.best(planner, one)
        merging.divide(plan, one.profile, one.costs, mode, planner.max_messages)
    whole = sent_whole(known)
    planner.plan(whole.profile, whole.costs, "dense")


def print_training(tensors: int, repeat: int) -> None:
    """Print the milliseconds of all plans of a step, on shared links of several rates."""
    cases = {
        "the small gpt2": ([math.prod(shape) for shape in shapes.small_gpt2()[::-1]], 0.1),
        "resnet50": (shapes.sizes("resnet50"), 0.3),
        **{f"{model}, {tensors}": (stretched(model, tensors), 1.0) for model in ("gpt2", "resnet50")},
    }
    print("ms for all plans of a step at 200 Mbit/s, 1, 10 and 25 Gbit/s")
    planner = merging.get("agmerge")
    for name, (sizes, backward) in cases.items():
        problems = [measured(sizes, backward, bits) for bits in (2e8, 1e9, 1e10, 2.5e10)]
        took = [1e3 * taking(partial(plans_of_a_step, planner, problem), repeat) for problem in problems]
        print(f"  {name:15} {len(sizes):4} tensors", *(f"{ms:8.1f}" for ms in took), flush=True)


def print_every(tensors: int, repeat: int) -> None:
    """Print milliseconds per plan of every planner in each of its modes, P = 64, and of what follows a partition."""
    data = profile(stretched("resnet50", tensors))
    data = merging.Profile(**{**data.plain(), "forward": data.backward / 2})
    for name in merging.names():
        planner = merging.get(name)
        took = []
        for mode in planner.modes:
            cost = costs(64, 1 if mode in ("dense", "dear") else 0.01)
            took.append(f"{mode} {1e3 * seconds(planner, data, cost, mode, repeat):.1f}")
        print(f"  {name:10} {', '.join(took)}")
    layerwise, cost = merging.Plan((1,) * tensors), costs(64, 0.01, True)
    choice = taking(lambda: choose_dense(layerwise, data, cost, "behind"), repeat)
    parts = taking(lambda: merging.divide(layerwise, data, cost, "behind"), repeat)
    print(f"  of layerwise: which go dense {1e3 * choice:.1f}, parts {1e3 * parts:.1f}")


def print_times(tensors: int, repeat: int, choice: bool, budget: int) -> None:
    """Print milliseconds per plan: model, mode, with and without dense merge buffers, over workers."""
    print(f"{tensors} tensors, density 0.01 (dense: 1): median ms over {repeat} plans for P = 8, 64, 512")
    bounded = merging.get("exact", budget=budget or None)
    cases = [("exact", mode, False) for mode in merging.MODES] + [("greedy", mode, False) for mode in merging.MODES]
    if choice:
        cases += [(solver, mode, True) for solver in ("exact", "greedy") for mode in merging.MODES[1:]]
    planners = {"exact": merging.get("exact"), "greedy": merging.get("agmerge", solver="greedy")}
    worst: dict[tuple[str, bool], float] = {}
    for model in ("resnet50", "gpt2"):
        data = profile(stretched(model, tensors))
        for solver, mode, dense in cases:
            planner = bounded if dense and solver == "exact" else planners[solver]
            took = []
            for workers in (8, 64, 512):
                cost = costs(workers, 1 if mode == "dense" else 0.01, dense)
                took.append(1e3 * seconds(planner, data, cost, mode, repeat))
            worst[solver, dense] = max(*took, worst.get((solver, dense), 0.0))
            print(f"  {solver:7} {model:10} {mode:7} {'or dense' if dense else '':9}", *(f"{ms:8.1f}" for ms in took))
    for (solver, dense), ms in worst.items():
        print(f"  worst of {solver}{' or dense' * dense}: {ms:.1f} ms")


def print_grid(workers: tuple[int, ...]) -> None:
    """Print how much later than the optimum the plans of every other planner end, over the grid."""
    exact = merging.get("exact")
    planners = {name: merging.get(name) for name in merging.names()}
    planners["agmerge, greedy"] = merging.get("agmerge", solver="greedy")
    planners["agmerge, inter"] = merging.get("agmerge", intra=False)
    excess: dict[str, list[tuple[float, tuple[str, float, int, str]]]] = {}
    for case in grid(workers):
        model, density, count, mode = case
        data, cost = profile(shapes.sizes(model)), costs(count, density)
        best = merging.predict(exact.plan(data, cost, mode), data, cost, mode).finish
        for name, planner in planners.items():
            found = merging.predict(planner.plan(data, cost, mode), data, cost, mode).finish
            excess.setdefault(name, []).append((100 * (found / best - 1), case))
    for name, cases in excess.items():
        worst, where = max(cases)
        median = statistics.median(value for value, _ in cases)
        print(f"  {name:15} median {median:7.2f} %  worst {worst:8.2f} % at {where}")


def main() -> None:
    parser = argparse.ArgumentParser(description="time of planning, and all planners against the optimum")
    parser.add_argument("--tensors", type=int, default=600)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--choice", action="store_true", help="time the choice of dense merge buffers too")
    parser.add_argument("--budget", type=int, default=BUDGET, help="of exact with that choice; 0: none")
    parser.add_argument("--every", action="store_true", help="time every planner too")
    parser.add_argument("--no-grid", action="store_true", help="only the times")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="of the grid")
    parser.add_argument("--training", action="store_true", help="time what a step of training waits for, and no more")
    options = parser.parse_args()
    if options.training:
        print_training(options.tensors, options.repeat)
        return
    print_times(options.tensors, options.repeat, options.choice, options.budget)
    if options.every:
        print_every(options.tensors, options.repeat)
    if not options.no_grid:
        print("predicted finish, later than the optimum")
        print_grid(tuple(options.workers))


if __name__ == "__main__":
    main()
