# SPDX-License-Identifier: Apache-2.0
"""Measurements of a training run for planning, as one value that can be saved, sent and planned from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from merging import storage
from merging.costs import Costs, Profile
from merging.pieces import Pieces, in_pieces, pieces_of
from merging.plan import Elements, Plan, Reals, whole
from merging.plan import seconds as _checked
from merging.planner import Planner
from merging.timeline import MODES, check_mode, choose_dense, predict

# Curves: seconds as a function of element counts, by straight lines between measured points.

_CURVE = "merging.Curve"
_FAR = 4  # the slope beyond the last point is over the last factor of 4 in elements: one noisy point does not set it


@dataclass(frozen=True)
class Curve:
    """Interpolate measured seconds over numbers of elements. Immutable and hashable, and usable in :class:`Costs`.

    The curve is linear between points, and constant before the first one. After the last one it continues with the
    average slope of its last part. A single point is a constant. The points (0, 0.0) and (1, s) describe a start-up of
    s seconds that 0 elements do not pay.

    Args:
        elements (tuple of int): Numbers of elements, in ascending order.
        seconds (tuple of float): Seconds for each, never decreasing.

    Raises:
        TypeError: For anything but numbers.
        ValueError: Without points, for different lengths, or if the values are not ascending.
    """

    elements: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        elements = tuple(whole(f"curve: elements[{i}]", count, least=0) for i, count in enumerate(self.elements))
        seconds = tuple(_checked(f"curve: seconds[{i}]", value) for i, value in enumerate(self.seconds))
        if not elements or len(elements) != len(seconds):
            raise ValueError(
                f"curve: {len(elements)} elements and {len(seconds)} seconds: expected the same number of both, at "
                "least one"
            )
        for i in range(1, len(elements)):
            if elements[i] <= elements[i - 1]:
                raise ValueError(
                    f"curve: elements[{i}] is {elements[i]} after {elements[i - 1]}: expected ascending numbers "
                    "without duplicates"
                )
            if seconds[i] < seconds[i - 1]:
                raise ValueError(
                    f"curve: seconds[{i}] is {seconds[i]} after {seconds[i - 1]}, but must not decrease. Use Curve.fit."
                )
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "seconds", seconds)

    @classmethod
    def fit(cls, samples: Mapping[int, Sequence[float]], *, zero: bool = False) -> Curve:
        """Fit a curve to measured times.

        Each size gets the median of its runs. Medians that decrease with size are averaged, weighted by the number of
        runs (pool adjacent violators, Ayer et al., 1955).

        Args:
            samples (dict): ``{elements: [seconds of each run]}``.
            zero (bool): 0 elements cost nothing, and one element costs as much as the smallest size. Use it for a
                start-up that is only paid if there is work. Default: False.

        Raises:
            ValueError: Without samples, or for a negative or infinite one.
        """
        sizes = sorted(whole("curve: a sampled size", size, least=1 if zero else 0) for size in samples)
        if not sizes:
            raise ValueError("curve: there are no samples. Measure at least one size.")
        runs = {size: [_checked(f"curve: a sample of {size} elements", run) for run in samples[size]] for size in sizes}
        for size in sizes:
            if not runs[size]:
                raise ValueError(f"curve: size {size} has no samples. Measure it, or remove it.")
        seconds = isotonic([float(np.median(runs[size])) for size in sizes], [len(runs[size]) for size in sizes])
        points = {0: 0.0, 1: seconds[0]} if zero else {}
        points.update(zip(sizes, seconds, strict=True))
        return cls(tuple(points), tuple(points.values()))

    def scaled(self, factor: float) -> Curve:
        """Return the curve with all seconds multiplied by ``factor``."""
        factor = _checked("curve: factor", factor, unit="")
        return Curve(self.elements, tuple(factor * value for value in self.seconds))

    @overload
    def __call__(self, elements: float | np.integer[Any]) -> float: ...
    @overload
    def __call__(self, elements: Elements | Reals) -> Reals: ...
    def __call__(self, elements: float | np.integer[Any] | Elements | Reals) -> float | Reals:
        """Return the seconds for a number of elements, or for an array of any shape, elementwise."""
        at, values, slopes = self._lines
        x = np.asarray(elements, dtype=np.float64)
        left = np.maximum(np.searchsorted(at, x, side="right") - 1, 0)
        # A line may overshoot its end by a rounding, and the curve must not fall there.
        ceiling = np.append(values, np.inf)[left + 1]
        seconds = np.minimum(values[left] + slopes[left] * np.maximum(x - at[left], 0.0), ceiling)
        return seconds if seconds.ndim else float(seconds)

    @cached_property
    def _lines(self) -> tuple[Reals, Reals, Reals]:
        """Return the points, and the slope to the right of each, as float64 of shape (m,)."""
        at, values = np.array(self.elements, dtype=np.float64), np.array(self.seconds, dtype=np.float64)
        slopes = np.zeros(len(at))
        if len(at) > 1:
            slopes[:-1] = np.diff(values) / np.diff(at)
            far = max(int(np.searchsorted(at, at[-1] / _FAR, side="right")) - 1, 0)
            slopes[-1] = (values[-1] - values[far]) / (at[-1] - at[far])
        return at, values, slopes

    def dumps(self) -> str:
        """Return the curve as JSON. Equal curves give equal text, on every rank and machine."""
        return storage.seal(_CURVE, asdict(self))

    @classmethod
    def loads(cls, text: str) -> Curve:
        """Return the curve of a text from ``dumps``. Raises ``ValueError`` if the text is damaged or edited."""
        return storage.unseal(text, _CURVE, cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve to a file, atomically."""
        storage.write(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Curve:
        """Return the curve in a file. Raises ``ValueError``, with the path, if the file is damaged or not a curve."""
        return storage.read(path, _CURVE, cls)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the never decreasing values with the least weighted squared distance to `values`, as many.

    Pool adjacent violators: a value below the one before forms a pool with it, which has their weighted mean.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pool = (value, float(weight), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, many = pools.pop()
            both = heavy + pool[1]
            pool = (mean + (pool[0] - mean) * (pool[1] / both), both, many + pool[2])
        pools.append(pool)
    return [mean for mean, _, many in pools for _ in range(many)]


# Measurements.

_KIND = "merging.Measurements"
CURVES = ("sparsify", "exchange", "dense", "message")


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Keep a profile, cost curves and facts about a training run. Immutable and hashable.

    Args:
        profile (Profile): Sizes and times of the tensors.
        sparsify (Curve): Cost of selection, with 0 seconds for 0 elements. None if nothing is selected.
        exchange (Curve): Cost of a compressed message.
        dense (Curve): Cost of an uncompressed message. None if no merge buffer may be uncompressed.
        modes (tuple of str): Modes that the training may use, preferred ones first: ``"dense"``, ``"ahead"``,
            ``"behind"``, ``"dear"``.
        workers (int): Number of ranks in the measurements.
        facts (dict): Other conditions, for example the backend. They are only kept. Default: none.
        message (Curve): Processor seconds of a message. Default: None, no time.

    Raises:
        TypeError: For a value of the wrong kind.
        ValueError: For an unknown, missing or repeated mode, a repeated fact, or a curve that :class:`Costs` does not
            accept. Also for mode ``"dear"`` without ``profile.forward``.
    """

    profile: Profile
    sparsify: Curve | None
    exchange: Curve
    dense: Curve | None
    modes: tuple[str, ...]
    workers: int
    facts: tuple[tuple[str, str], ...] = ()
    message: Curve | None = None

    def __post_init__(self) -> None:
        _expect("profile", self.profile, Profile)
        for what in CURVES:
            if what == "exchange" or getattr(self, what) is not None:
                _expect(what, getattr(self, what), Curve)
        if isinstance(self.modes, str):
            raise TypeError(f"measurements: modes is the single string {self.modes!r}: expected a sequence of modes")
        modes = tuple(self.modes)
        for mode in modes:
            check_mode(mode, (*MODES, "dear"))
        if not modes or len(set(modes)) < len(modes):
            raise ValueError(f"measurements: modes is {modes}: expected at least one, and each once")
        if "dear" in modes and self.profile.forward is None:
            raise ValueError("measurements: mode 'dear' requires profile.forward. Measure it, or remove the mode.")
        object.__setattr__(self, "modes", modes)
        object.__setattr__(self, "workers", whole("measurements: workers", self.workers, least=1))
        object.__setattr__(self, "facts", _pairs(self.facts))
        self.costs  # noqa: B018  a wrong curve is refused here, not in the first plan

    @property
    def costs(self) -> Costs:
        """Return the curves as :class:`Costs`. Without ``sparsify`` selection takes no time."""
        sparsify = _nothing if self.sparsify is None else self.sparsify
        return Costs(sparsify, self.exchange, self.dense, message=self.message)

    def dumps(self) -> str:
        """Return the measurements as JSON. Equal ones give equal text, on every rank and machine."""
        curves = {what: _plain(getattr(self, what)) for what in CURVES}
        others = {"modes": self.modes, "workers": self.workers, "facts": self.facts}
        return storage.seal(_KIND, {"profile": self.profile.plain(), **curves, **others})

    @classmethod
    def loads(cls, text: str) -> Measurements:
        """Return the measurements of a text from ``dumps``, bitwise equal. Raises ``ValueError`` if it is damaged or
        edited."""
        return storage.unseal(text, _KIND, _build)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the measurements to a file, atomically. ``python -m agmerge plan`` reads it."""
        storage.write(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Measurements:
        """Return the measurements in a file. Raises ``ValueError``, with the path, if the file is damaged or of another
        kind."""
        return storage.read(path, _KIND, _build)


@in_pieces
def best(planner: Planner, measurements: Measurements) -> Pieces[tuple[Plan, str]]:
    """Return the plan with the earliest predicted end of a step, and its mode.

    All modes of the measurements that the planner supports are compared. If several are equal, the first is used. If
    merge buffers may be uncompressed and the plan has none that are, its best choice of them is compared, too. The
    result depends only on the arguments.

    Args:
        planner (Planner): Computes a plan for each mode.
        measurements (Measurements): What to plan for.

    Returns:
        A pair of :class:`Plan` and mode.

    Raises:
        ValueError: If the planner supports none of the modes.
    """
    earliest: tuple[float, Plan, str] | None = None
    costs = measurements.costs
    for mode in measurements.modes:
        if mode in planner.modes:
            plan = yield from pieces_of(planner.plan, measurements.profile, costs, mode)
            plans = [plan]
            if costs.dense is not None and mode in ("ahead", "behind") and not any(plan.dense):
                plans.append((yield from pieces_of(choose_dense, plan, measurements.profile, costs, mode)))
            for candidate in plans:
                yield
                end = step_end(candidate, measurements, mode)
                if earliest is None or end < earliest[0]:
                    earliest = (end, candidate, mode)
    if earliest is None:
        raise ValueError(
            f"planner {planner.name!r} supports the modes {', '.join(planner.modes)}, but the measurements have "
            f"{', '.join(measurements.modes)}. Choose another planner or mode."
        )
    return earliest[1], earliest[2]


def sent_whole(measurements: Measurements) -> Measurements:
    """Return the measurements as they would be if all tensors were sent by the dense exchange.

    A load is then a tensor's elements, and a message takes its start-up alone. Raises ValueError without a dense
    curve.
    """
    if measurements.dense is None:
        raise ValueError("measurements: there are no times of a dense exchange. Measure with exchange='auto'.")
    start = None if measurements.message is None else Curve((0,), (measurements.message(0),))
    return replace(
        measurements,
        profile=Profile(**{**measurements.profile.plain(), "load": measurements.profile.numel}),
        sparsify=None,
        exchange=measurements.dense,
        dense=None,
        modes=("dense",),
        message=start,
    )


def step_end(plan: Plan, measurements: Measurements, mode: str) -> float:
    """Return the predicted finish in seconds; among modes with "dear", that of the next forward pass.

    Mode "dear" hides communication under the next forward pass, so its finish is that pass's end. Where it
    is among the modes, the others are compared by the same event: the pass follows their finish.
    """
    finish = predict(plan, measurements.profile, measurements.costs, mode).finish
    return finish if mode == "dear" else finish + forward_after(measurements)


def forward_after(measurements: Measurements) -> float:
    """Return the seconds of the forward pass where it counts, with "dear" among the modes; else 0."""
    forward = measurements.profile.forward
    return float(forward.sum()) if "dear" in measurements.modes and forward is not None else 0.0


def _build(*, profile: Any, **others: Any) -> Measurements:
    """Return the measurements of a record, which has their fields as plain values."""
    curves = {what: None if others.get(what) is None else Curve(**others[what]) for what in CURVES}
    return Measurements(**{**others, "profile": Profile(**profile), **curves})


def _plain(curve: Curve | None) -> dict[str, Any] | None:
    """Return the points of a curve for a record."""
    return None if curve is None else {"elements": curve.elements, "seconds": curve.seconds}


def _nothing(elements: Any) -> float:
    """Return 0 seconds for any number of elements."""
    return 0.0


def _expect(what: str, value: Any, kind: type) -> None:
    """Raise TypeError unless the field `what` is of this class."""
    if not isinstance(value, kind):
        raise TypeError(f"measurements: {what} is {value!r}: expected a merging.{kind.__name__}")


def _pairs(facts: Mapping[str, str] | Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    """Return the facts as sorted pairs of strings. Raises TypeError for others, ValueError for one given twice."""
    pairs = [tuple(pair) for pair in (facts.items() if isinstance(facts, Mapping) else facts)]
    checked: dict[str, str] = {}
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TypeError(f"measurements: the fact {pair!r} is not a pair of strings")
        if pair[0] in checked:
            raise ValueError(f"measurements: the fact {pair[0]!r} appears twice")
        checked[pair[0]] = pair[1]
    return tuple(sorted(checked.items()))
