# SPDX-License-Identifier: Apache-2.0
"""Moments of a worker's optimizers that are kept in the scale of the mean gradient and follow the mean of all workers.

A worker that steps by itself has the noise of its own gradient in both moments of Adam. The averaged updates say how
the mean differs, see :mod:`agmerge.updates.moments`. A small measurement travels with each message as one more dense
tensor, see :mod:`agmerge.updates.moment_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agmerge.errors import warn
from agmerge.step.config import Updates
from agmerge.tensors.parameters import ParameterInfo, ParameterTable, local_of, optimizers_of
from agmerge.updates.moment_scales import MomentScales
from agmerge.updates.moments import Departure, OptimizerMoments, followed_share
from sparsifiers.quantising.moving import Momentum

UNREACHABLE = (
    "AGM714: The moments of {names} stay each worker's own, so steps are shorter than with the averaged gradient. With "
    "AdamW this increased the loss by 1 to 5 % in our tests. Pass moments='own' to silence this warning."
)
NAME = "agmerge: measured moments of {length} numbers"  # of the dense tensor; another length is another tensor


class MeanMoments:
    """Moments of the optimizers of ``members``, and the measurement of their gradients that travels with each message.

    ``updates``: when an element is sent, and how late it arrives.
    """

    def __init__(self, members: ParameterTable, updates: Updates) -> None:
        self._members = members
        self._moments = {id(one): OptimizerMoments(one) for one in optimizers_of(members.optimizer)}
        self._period = updates.every
        self._share = followed_share(updates.every, updates.overlap)
        self._scales = MomentScales({})
        self._numels: dict[str, int] = {}
        self._measurement: ParameterInfo | None = None
        self._has_told = False  # of optimizers of which moments cannot be reached
        self._measured = -1  # the step that was measured last
        # Of the next message: with clipping it is made while another message is under way.
        self._next: torch.Tensor | None = None
        self._loss_scale: torch.Tensor | None = None  # that gradients still contain, of a fused optimizer
        self._departures: list[Departure] = []  # of the message under way, by optimizer
        self._rates: list[list[float]] | None = None  # learning rates of a saved departure

    # -- the measurement --------------------------------------------------------------------------------------------

    def measurement(self, parameters: Sequence[ParameterInfo]) -> ParameterInfo | None:
        """Return the dense tensor to be averaged with the updates of ``parameters``; None: there are none."""
        numels = {one.name: one.local.numel() for one in parameters if one.local.numel()}
        if not numels:
            return None
        device = next(one.device for one in parameters if one.local.numel())
        if numels != self._numels or self._measurement is None or self._measurement.device != device:
            self._numels, self._scales = numels, MomentScales(numels)
            length = self._scales.length
            values = torch.zeros(length, device=device)
            name = NAME.format(length=length)
            self._measurement = ParameterInfo(name, values, values.dtype, device, (length,), is_figure=True)
        return self._measurement

    def sent(self, name: str) -> torch.Tensor | None:
        """Return the values of the measurement of this name; None: a parameter has this name."""
        measurement = self._measurement
        return measurement.parameter if measurement is not None and measurement.name == name else None

    def measure(self, step: int, *, counts: bool = True) -> None:
        """Measure this worker's gradients of a step, once; one with an overflow, or left out, does not count."""
        if self._measurement is None or (counts and step == self._measured):
            return
        self._measured = step
        members, device = self._members, self._measurement.device
        given = {members.name_of(p): local_of(p.grad) for p in members.name_all() if p.grad is not None}
        gradients = {name: gradient for name, gradient in given.items() if counts and gradient.device == device}
        if self._next is None or self._next.shape != self._measurement.shape or self._next.device != device:
            self._next = torch.zeros_like(self._measurement.parameter)
        self._scales.measure(gradients, step, self._next, self._loss_scale)

    def take(self, updates: Mapping[str, torch.Tensor | None], workers: int) -> None:
        """Count the average over ``workers`` of a measurement, if it is among the combined ``updates``."""
        if self._measurement is None:
            return
        mean = updates.get(self._measurement.name)
        if mean is not None:
            self._scales.take(mean, workers)
        self._measurement.parameter.zero_()  # it does not count again

    @property
    def energy_ratio(self) -> float:
        """Return the ratio of the mean gradient's energy to that of the workers' own, in [1 / workers, 1]."""
        return self._scales.overall

    def _ratio(self, parameter: torch.Tensor) -> float | None:
        name = self._members.name_of(parameter)
        return self._scales.measured(name) if name in self._numels else None

    # -- steps --------------------------------------------------------------------------------------------------------

    def stepping(self, optimizer: Any) -> None:
        """Prepare the second moments for a step of ``optimizer``, of finite gradients, which follows at once.

        A fused one may leave the step out itself, if its ``found_inf`` says so.
        """
        for one in optimizers_of(optimizer):
            attributes = vars(one)
            self._loss_scale = attributes.get("grad_scale")
            self._moments[id(one)].before_step(self._ratio, self._loss_scale, attributes.get("found_inf"))

    def depart(self) -> None:
        """Record the settings of the step after which a message leaves, and put its measurement into that."""
        measured, self._next = self._next, None
        if self._measurement is not None and measured is not None and len(measured) == self._scales.length:
            self._measurement.parameter.copy_(measured)
        rates, self._rates = self._rates, None
        self._departures = [
            moments.departing(() if rates is None else rates[number])
            for number, moments in enumerate(self._moments.values())
        ]

    def follow(self, parameter: torch.Tensor) -> Momentum | None:
        """Return the momentum of ``parameter`` that follows its movement to the mean; None: there is none."""
        found = (departure.momentum(parameter, self._period, self._share) for departure in self._departures)
        return next((momentum for momentum in found if momentum is not None), None)

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Return the optimizers of which moments cannot be reached, see :attr:`OptimizerMoments.unreachable`."""
        return tuple(dict.fromkeys(text for each in self._moments.values() for text in each.unreachable))

    def tell(self, rank: int) -> None:
        """Warn, once and on rank 0, of optimizers of which moments cannot be reached."""
        if not self._has_told and (names := self.unreachable):
            self._has_told = True
            warn(UNREACHABLE.format(names=" and ".join(names)), rank)

    def status(self) -> dict[str, Any]:
        """Return how the moments are kept, for statistics."""
        return {"kept": "mean", "energy_ratio": self.energy_ratio, "unreachable": list(self.unreachable)}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return the state between two steps, for :meth:`restore`."""
        parameters = {self._members.name_of(p): p for p in self._members.name_all()}
        return {
            "numels": dict(self._numels),
            "scales": self._scales.state(),
            "waiting": [each.in_own_scale(parameters) for each in self._moments.values()],
            "measured": None if self._measurement is None else self._measurement.parameter.cpu().clone(),
            "rates": [departure.rates() for departure in self._departures],
        }

    def restore(self, saved: Mapping[str, Any], parameters: Sequence[ParameterInfo], *, is_under_way: bool) -> None:
        """Go on from :meth:`saved`, if it is of the same parameters."""
        measurement = self.measurement(parameters)
        if measurement is None or saved["numels"] != self._numels:
            return
        own = {self._members.name_of(p): p for p in self._members.name_all()}
        self._scales.load(saved["scales"])
        for each, names in zip(self._moments.values(), saved["waiting"], strict=False):
            each.load_in_own_scale(names, own)
        if is_under_way and saved["measured"] is not None:
            measurement.parameter.copy_(saved["measured"])
            self._rates = saved["rates"] if len(saved["rates"]) == len(self._moments) else None
