# SPDX-License-Identifier: Apache-2.0
"""Measurements and planning problems, drawn by a seed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st

from merging import Costs, Curve, Measurements, Plan, Profile


def measured(seed: int = 0, n: int = 12, **changes: Any) -> Measurements:
    rng = random.Random(seed)
    backward = [1e-3 * rng.random() for _ in range(n)]
    numel = [rng.choice([64, 4096, 10**6]) for _ in range(n)]
    profile = Profile([f"p{i}" for i in range(n)], numel, backward, forward=np.divide(backward, 3), work=numel)
    sizes = [2**k for k in range(6, 24, 3)]
    select = Curve.fit({size: [2e-5 + 1e-10 * size * rng.random() for _ in range(3)] for size in sizes}, zero=True)
    wire = Curve.fit({size: [3e-4 + 1e-9 * size * rng.random() for _ in range(3)] for size in sizes})
    values: dict[str, Any] = {
        "profile": profile,
        "sparsify": select,
        "exchange": wire,
        "dense": wire.scaled(1.3),
        "message": wire.scaled(0.2),
        "modes": ("ahead", "behind"),
        "workers": 4,
        "facts": {"density": "0.01", "backend": "torch", "compressor": "ädtopk"},
    }
    return Measurements(**{**values, **changes})


def instance(rng: random.Random, n: int, dense: bool, message: bool = False) -> tuple[Profile, Costs]:
    """Sizes and times over three decades, with zeros; linear, piecewise linear, or stepped and superlinear costs."""
    numel = [rng.choice([1, 5, 20, 100]) * rng.randint(1, 9) for _ in range(n)]
    backward = [rng.choice([0.0, 1.0, 3.3, 10.0]) * rng.random() for _ in range(n)]
    work = [rng.choice([0, size, size]) for size in numel] if rng.random() < 0.3 else None
    model = Profile([f"p{i}" for i in range(n)], numel, backward, work=work)
    start, rate, pick = rng.choice([0, 1, 5, 20]), rng.choice([0.001, 0.01, 0.1]), rng.choice([0.001, 0.01, 0.1])
    other = rng.choice([0.2, 0.5, 1, 2]) * rate
    knots = [0, 10, 100, 1000, 1e9]
    wire = np.cumsum([start, *(5 * rng.random() for _ in knots[1:])])
    choose = np.cumsum([0, *(5 * rng.random() for _ in knots[1:])])
    sparsify, exchange = rng.choice(
        [
            (lambda x: pick * x, lambda x: start + rate * x),
            (lambda x: np.interp(x, knots, choose), lambda x: np.interp(x, knots, wire)),
            (
                lambda x: pick * np.asarray(x) * np.log2(np.maximum(x, 1)),
                lambda x: start + np.floor(np.asarray(x) / 50) * 50 * rate,
            ),
        ]
    )
    wire_dense = (lambda x: 2 * start + other * x) if dense else None
    if not message:
        return model, Costs(sparsify, exchange, wire_dense)
    begin, each = rng.choice([0.0, 0.5, 3.0]), rng.choice([0.0, 0.01])
    return model, Costs(sparsify, exchange, wire_dense, message=lambda x: begin + each * x)


@st.composite
def plans_and_profiles(
    draw: st.DrawFn, most: int = 1000, work: st.SearchStrategy[int] | None = None
) -> tuple[Plan, Profile]:
    """Up to six merge buffers of up to four tensors, any of them dense. Sizes are ``most`` at most."""
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    m, n = len(counts), sum(counts)

    def numbers(each: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(each, min_size=n, max_size=n))

    profile = Profile(
        [f"p{i}" for i in range(n)],
        numbers(st.integers(1, most)),
        numbers(st.floats(0.0, 3.0)),
        work=numbers(st.integers(0, most) if work is None else work),
        load=numbers(st.integers(0, 1000)),
    )
    return Plan(tuple(counts), tuple(draw(st.lists(st.booleans(), min_size=m, max_size=m)))), profile
