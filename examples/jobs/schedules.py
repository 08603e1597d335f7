# SPDX-License-Identifier: Apache-2.0
"""Define learning rates over time, as the published experiments have them: each makes a scheduler of torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

Scheduler = LRScheduler | ReduceLROnPlateau


class Schedule(Protocol):
    """Make a scheduler for an optimizer whose rate is the highest one."""

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        """Return a scheduler that is stepped after every optimizer step; ``steps``: in an epoch.

        One of torch's ``ReduceLROnPlateau`` is stepped after every epoch, with the metric on what is held out.
        """


@dataclass(frozen=True)
class Constant:
    """Leave the rate as it is."""

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        return LambdaLR(optimizer, lambda step: 1.0)


@dataclass(frozen=True)
class Steps:
    """Divide the rate at epochs, after a warm-up from the rate of one worker to that of all (Goyal et al., 2017)."""

    at: tuple[tuple[float, float], ...]  # (epoch, what the highest rate is multiplied by from then on)
    warmup: float = 0.0  # epochs

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        def factor(step: int) -> float:
            epoch = step / steps
            if epoch < self.warmup:
                return 1 / workers + (1 - 1 / workers) * epoch / self.warmup
            return next((by for start, by in reversed(self.at) if epoch >= start), 1.0)

        return LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class Linear:
    """Rise to the rate, and fall to zero at the end, both in proportion to the steps."""

    warmup: float = 0.0  # of all steps

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        return LambdaLR(optimizer, linear(steps * epochs, self.warmup))


def linear(total: int, warmup: float) -> Callable[[int], float]:
    """Return the factor of the rate at a step, of ``total``, of which a part ``warmup`` is for the rise."""
    rise = round(total * warmup)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return max(0.0, (total - step) / max(1, total - rise))

    return factor


@dataclass(frozen=True)
class Noam:
    """Rise to the rate in some steps, and fall with the root of their number (Vaswani et al., NeurIPS 2017)."""

    warmup: int  # steps

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        return LambdaLR(optimizer, lambda step: min((step + 1) / self.warmup, (self.warmup / (step + 1)) ** 0.5))


@dataclass(frozen=True)
class Plateau:
    """Multiply the rate after epochs in which the metric, such as perplexity, has not fallen on what is held out."""

    by: float  # what the rate is multiplied by
    after: int  # epochs without a gain

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        return ReduceLROnPlateau(optimizer, factor=self.by, patience=self.after - 1)


@dataclass(frozen=True)
class OneCycle:
    """Rise to the rate and fall again along cosines (Smith and Topin, "Super-Convergence", 2018)."""

    rise: float = 0.2  # the part of all steps before the highest rate

    def of(self, optimizer: Optimizer, steps: int, epochs: int, workers: int) -> Scheduler:
        rates = [group["lr"] for group in optimizer.param_groups]
        return OneCycleLR(optimizer, rates, steps * epochs, pct_start=self.rise, cycle_momentum=False)
