# SPDX-License-Identifier: Apache-2.0
"""Scale of second moments with ``sync="updates"``: by how much the workers' mean gradient is smaller than their own.

The square of one worker's gradient holds its noise, of which the mean of W workers has only a W-th. The ratio of their
energies is measured on few coordinates of each gradient, which change with each step. The caller averages one small
vector per step over the workers: nothing here communicates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agmerge.backends.streams import HostCopies, streams_of
from agmerge.exchanges.message.format import write_numbers

# Sampled coordinates.

SHARE, LEAST, MOST = 640, 32, 256  # one coordinate of so many, and limits of their number per tensor
GOLDEN = (math.sqrt(5) - 1) / 2  # consecutive multiples of it, modulo 1, are far from each other


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of a tensor of ``size`` elements that steps sample: ``count`` at a time, ``stride`` apart in C order.

    The first is one of ``starts``, by turns: in so many steps each coordinate is sampled.
    """

    size: int
    count: int
    stride: int
    starts: int
    turn: int  # from the start of one step to that of the next, modulo `starts`, to which it is coprime

    def start(self, step: int) -> int:
        """Return the first coordinate of a step."""
        return step * self.turn % self.starts

    def sample(self, tensor: Tensor, step: int) -> Tensor:
        """Return the elements of ``tensor`` that ``step`` samples, ``(count,)``: a view if it is contiguous."""
        if tensor.is_contiguous():
            place = tensor.storage_offset() + self.start(step)
            return tensor.as_strided((self.count,), (self.stride,), place)
        first = self.start(step)
        flat = torch.arange(first, first + self.count * self.stride, self.stride, device=tensor.device)
        return tensor[torch.unravel_index(flat, tensor.shape)]


def coordinates_of(size: int) -> Coordinates:
    """Return the coordinates to sample of a tensor of ``size`` elements."""
    count = min(size, max(LEAST, min(MOST, size // SHARE)))
    if count == size:
        return Coordinates(size, count, 1, 1, 1)
    widest = size // count
    # Without a common divisor, samples lie in different columns of a matrix. The starts must not become many more.
    stride = next((s for s in range(widest, widest - widest // 8 - 1, -1) if math.gcd(s, size) == 1), widest)
    starts = size - (count - 1) * stride
    turn = max(1, round(GOLDEN * starts))
    while math.gcd(turn, starts) > 1:
        turn += 1
    return Coordinates(size, count, stride, starts, turn)


# The ratios.

KEPT = 0.8**0.1  # of a moving average, by each measurement


class MomentScales:
    """Ratios of the mean gradient's energy to the mean energy of the workers' gradients, by parameter and over all.

    Every rank has the same ones, because all are given the same averages. Squares are summed in float64 on the host.

    Args:
        numels: names and numbers of elements of the parameters, the same on all ranks, in the same order.
    """

    def __init__(self, numels: Mapping[str, int]) -> None:
        self._numbers = {name: number for number, name in enumerate(numels)}
        self._coordinates = [coordinates_of(size) for size in numels.values()]
        counts = [each.count for each in self._coordinates]
        self._lengths = {torch.device("cpu"): torch.tensor(counts, dtype=torch.int64)}  # copies on devices, likewise
        self._ends = list(itertools.accumulate(counts))
        self._samples = sum(counts)
        self.length = self._samples + 2 * len(numels)  # float32 numbers of a measurement
        # Elements that a sampled one stands for.
        self._weights = torch.tensor([each.size / max(each.count, 1) for each in self._coordinates]).double()
        self._workers = 0  # for which the averages hold; 0: nothing is measured
        # Moving averages of both energies, by parameter. Both begin at 0, which their ratio does not see.
        self._of_mean = torch.zeros(len(numels), dtype=torch.float64)
        self._of_own = torch.zeros(len(numels), dtype=torch.float64)
        self._ratios: list[float | None] = [None] * len(numels)  # None: not measured
        self._overall = 1.0
        self._arriving: tuple[HostCopies, int] | None = None  # a measurement, on its way from a device, and its workers

    # -- a measurement ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(
        self, gradients: Mapping[str, Tensor], step: int, out: Tensor, scale: Tensor | float | None = None
    ) -> None:
        """Write a measurement of one worker's gradients, to be averaged over all workers. Waits for no device.

        A parameter that is missing does not count, and neither do sparse and complex gradients. If a sampled element
        is not finite, the worker does not count: zeros are written.

        Args:
            gradients: by name, before clipping, on the device of ``out``. Empty: this worker does not count.
            step: number of the step, the same on all ranks, which chooses the coordinates.
            out: float32, ``(length,)``, contiguous: the samples, sums of their squares by parameter, and 1 or 0 by
                parameter, whether it has a gradient.
            scale: loss scale that the gradients still contain.
        """
        out.zero_()
        given = [
            (number, gradient)
            for name, number in self._numbers.items()
            if (gradient := gradients.get(name)) is not None
            and gradient.layout is torch.strided
            and gradient.is_floating_point()
            and gradient.numel()
        ]
        if not given:
            return
        coordinates, ends = self._coordinates, self._ends
        samples, squares, present = out.split_with_sizes([self._samples, len(coordinates), len(coordinates)])
        to = [samples[ends[number] - coordinates[number].count : ends[number]] for number, _ in given]
        torch._foreach_copy_(to, [coordinates[number].sample(gradient, step) for number, gradient in given])
        if scale is not None:
            samples.div_(scale)
        squares.copy_(self._sums(samples.square()))
        there = [0.0] * len(coordinates)
        for number, _ in given:
            there[number] = 1.0
        write_numbers(there, present)
        out.copy_(torch.where(squares.sum().isfinite(), out, 0.0))

    def _sums(self, values: Tensor) -> Tensor:
        """Return the sums of ``values``, one for each sample, by parameter."""
        lengths = self._lengths.get(values.device)
        if lengths is None:
            lengths = torch.empty(len(self._coordinates), dtype=torch.int64, device=values.device)
            write_numbers([each.count for each in self._coordinates], lengths)
            self._lengths[values.device] = lengths
        # Without its checks, for which the host would wait.
        return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0.0)

    def take(self, mean: Tensor, workers: int) -> None:
        """Count the average over all ``workers`` of their measurements of one step.

        Ratios change with it. If ``mean`` is on a device, it is copied to the host without a wait, and the next reading
        of a ratio waits for this copy.
        """
        self._arrive()
        streams = streams_of(mean.device)
        if streams is None:
            self._count(mean.cpu(), workers)
        else:
            self._arriving = HostCopies([mean], streams), workers

    def _arrive(self) -> None:
        """Wait for the measurement that comes from a device, and count it."""
        if self._arriving is not None:
            (copies, workers), self._arriving = self._arriving, None
            copies.arrive(math.inf)
            self._count(copies.tensors()[0], workers)

    def _count(self, mean: Tensor, workers: int) -> None:
        """Move the averages on by one measurement, on the host. Other ``workers`` than before begin them anew."""
        if workers != self._workers:
            self._begin(workers)
        count = len(self._coordinates)
        samples, squares, present = mean.double().split_with_sizes([self._samples, count, count])
        # `present` is the share of workers with a gradient: sums over these become averages over these.
        share = present.clamp_min(0.5 / workers)
        there = present > 0
        self._of_mean.lerp_(self._sums(samples.square()) / share.square(), (1 - KEPT) * there.double())
        self._of_own.lerp_(squares / share, (1 - KEPT) * there.double())
        self._divide()

    def _begin(self, workers: int) -> None:
        """Forget the averages: they are of another number of workers."""
        self._workers = workers
        self._of_mean.zero_()
        self._of_own.zero_()

    def _divide(self) -> None:
        """Compute the ratios."""
        least, measured = 1 / max(self._workers, 1), (self._of_own > 0).tolist()
        ratios = (self._of_mean / self._of_own).clamp(least, 1.0).tolist()
        self._ratios = [ratio if there else None for ratio, there in zip(ratios, measured, strict=True)]
        own = float(self._weights.dot(self._of_own))
        self._overall = min(max(float(self._weights.dot(self._of_mean)) / own, least), 1.0) if own > 0 else 1.0

    # -- readings ---------------------------------------------------------------------------------------------------

    def measured(self, name: str) -> float | None:
        """Return the ratio of a parameter, from 1 / workers to 1; None: it has not been measured."""
        self._arrive()
        return self._ratios[self._numbers[name]]

    @property
    def overall(self) -> float:
        """Return the ratio over all parameters, from 1 / workers to 1: 1 until the first measurement."""
        self._arrive()
        return self._overall

    def state(self) -> Tensor:
        """Return what :meth:`load` needs, for checkpoints: float64 on the host, ``(1 + 2 parameters,)``."""
        self._arrive()
        return torch.cat([torch.tensor([float(self._workers)], dtype=torch.float64), self._of_mean, self._of_own])

    def load(self, state: Tensor) -> None:
        """Go on from a :meth:`state`. Raises ``ValueError`` for that of another number of parameters."""
        count = len(self._coordinates)
        if state.shape != (1 + 2 * count,):
            raise ValueError(f"moment scales: expected {1 + 2 * count} numbers, got shape {list(state.shape)}")
        workers, of_mean, of_own = state.to("cpu", torch.float64).split_with_sizes([1, count, count])
        self._arriving, self._workers = None, int(workers)
        self._of_mean, self._of_own = of_mean.clone(), of_own.clone()
        self._divide()
