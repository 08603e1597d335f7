# SPDX-License-Identifier: Apache-2.0
"""Cost curves of measured points: seconds as a function of element counts, by straight lines between the points."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from merging import storage
from merging.checks import Elements, Reals, whole
from merging.checks import seconds as _checked

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
