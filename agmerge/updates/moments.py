# SPDX-License-Identifier: Apache-2.0
"""Moments of optimizers with ``sync="updates"``, in which each worker steps with its own gradients.

The second moment of Adam's kind holds the square of the worker's own gradient, which is too large:
:meth:`OptimizerMoments.before_step` counts only the share that the workers' mean gradient has. The first moment holds
the noise of one worker: :meth:`Departure.momentum` moves it to the mean of the workers' momenta, which follows from how
the mean of their parameters differs from the own ones. Only this file knows the keys of optimizers' states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agmerge.backends.streams import HostCopies, streams_of
from agmerge.tensors.parameters import optimizers_of
from sparsifiers.quantising.moving import Momentum

# Facts about the classes of torch.optim.

ADAM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
WITHOUT_SQUARES = frozenset(("SGD", "ASGD", "Lion", "Muon"))  # classes of any library; they have no second moment
WIDE = (torch.float32, torch.float64)  # a small change of a moment in 16 bits would be rounded away


def squares_of(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the key of the second moment in the states of a group, and its decay factor per step.

    None: the class has none, or one that cannot be changed from outside.
    """
    if isinstance(optimizer, ADAM):
        return "exp_avg_sq", float(group["betas"][1])
    if isinstance(optimizer, torch.optim.RMSprop) and not group["centered"]:
        return "square_avg", float(group["alpha"])
    return None


def momentum_of(optimizer: Any, group: Mapping[str, Any]) -> str | None:
    """Return the key of the momentum in the states of a group; None: there is none that steps are proportional to.

    A step of Lion is the sign of its momentum, and one of Muon is orthogonal. How far the mean has moved then does not
    say, to first order and by element, how the momenta differ.
    """
    if isinstance(optimizer, ADAM):
        return "exp_avg"
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.RMSprop)) and group["momentum"]:
        return "momentum_buffer"
    return None


def _l2_decay(optimizer: Any, group: Mapping[str, Any]) -> float:
    """Return by how much of the parameter an optimizer adds to the gradient; negative: it subtracts the gradient."""
    if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
        return 0.0
    decay = float(group.get("weight_decay", 0.0))
    return -decay if group.get("maximize") else decay


def _moment(state: Mapping[str, Any] | None, key: str, parameter: Tensor) -> Tensor | None:
    """Return a moment of a parameter, in 32 or 64 bits and of the parameter's shape; None: there is no such one."""
    moment = state.get(key) if state else None
    if not isinstance(moment, Tensor) or moment.shape != parameter.shape:
        return None  # as of optimizers that project gradients to a smaller space
    return moment if _real(moment).dtype in WIDE else None


def _real(tensor: Tensor) -> Tensor:
    """Return a tensor itself, or a complex one as real numbers: optimizers have moments of both parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


# Second moments in the scale of the mean gradient.


@dataclass(frozen=True)
class _Squares:
    """Second moment of one parameter in a step, with the gradient and the L2 decay that the optimizer squares."""

    moment: Tensor
    gradient: Tensor
    parameter: Tensor
    decay: float  # of the parameter, which is added to the gradient
    factor: float  # of the square, which is subtracted

    def summand(self, scale: Tensor | float | None, left_out: Tensor | None) -> Tensor:
        """Return the sum that the optimizer squares, in the moment's dtype; 0 if ``left_out``.

        ``scale``: loss scale that the gradient still contains.
        """
        value = self.gradient.to(self.moment.dtype)
        if scale is not None:
            value = value / (scale.to(value.device) if isinstance(scale, Tensor) else scale)
        if self.decay:
            value = value.add(self.parameter, alpha=self.decay)
        return value if left_out is None else torch.where(left_out.to(value.device), 0.0, value)


def _lower(squares: list[_Squares], scale: Tensor | float | None, left_out: Tensor | None) -> None:
    """Subtract the squares of all gradients, times their factors, from the moments: one pass."""
    plain = [each for each in squares if not each.decay and each.gradient.dtype == each.moment.dtype]
    if scale is not None or left_out is not None:
        plain = []
    if plain:
        gradients = [each.gradient for each in plain]
        factors = [-each.factor for each in plain]
        torch._foreach_addcmul_([each.moment for each in plain], gradients, gradients, factors)
    done = {id(each) for each in plain}
    for each in squares:  # one temporary at a time
        if id(each) not in done:
            summand = each.summand(scale, left_out)
            each.moment.addcmul_(summand, summand, value=-each.factor)


class OptimizerMoments:
    """First and second moments of a torch optimizer, or of those that step with it (:func:`optimizers_of`).

    Args:
        optimizer: a ``torch.optim.Optimizer``, or a group of several.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._steps = 0  # so many calls of before_step
        self._own: set[Tensor] = set()  # parameters with a second moment in the scale of the worker's own gradient

    @torch.no_grad()
    def before_step(
        self,
        ratio: Callable[[Tensor], float | None],
        scale: Tensor | float | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Lower second moments so that the step about to be made counts ``ratio * g * g`` in place of ``g * g``.

        The optimizer's own update of a moment ``v``, ``b2 * v + (1 - b2) * g * g``, makes ``b2 * v + (1 - b2) * ratio *
        g * g`` of ``v - (1 - b2) / b2 * (1 - ratio) * g * g``, in each of its implementations. ``g`` includes L2 decay.
        A moment that the first step of a parameter has made is multiplied by its ratio once, when this is known. Call
        this only before steps with finite gradients, or pass ``found_inf``. Waits for no device.

        Args:
            ratio: of a parameter, as of :meth:`MomentScales.measured`. None: not known.
            scale: loss scale that the gradients still contain, for fused optimizers under a ``GradScaler``.
            found_inf: 1.0 where the optimizer will leave this step out itself, then nothing is lowered, bitwise.
        """
        self._steps += 1
        squares = [each for one in optimizers_of(self._optimizer) for each in self._squares(one, ratio)]
        left_out = None if found_inf is None else found_inf.bool().reshape(())
        if left_out is not None and left_out.device.type == "cpu":
            if left_out:
                return
            left_out = None
        _lower(squares, scale, left_out)

    def _squares(self, optimizer: Any, ratio: Callable[[Tensor], float | None]) -> list[_Squares]:
        """Return the second moments of one optimizer that are to be lowered; scale those of first steps."""
        made: list[_Squares] = []
        for group in optimizer.param_groups:
            known = squares_of(optimizer, group)
            if known is None:
                continue
            (key, kept), decay = known, _l2_decay(optimizer, group)
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None or gradient.layout is not torch.strided:
                    continue
                state = optimizer.state.get(parameter)
                if not state:
                    self._own.add(parameter)  # this step makes it
                    continue
                moment, of_mean = _moment(state, key, parameter), ratio(parameter)
                if moment is None or of_mean is None:
                    continue
                if parameter in self._own:
                    self._own.discard(parameter)
                    for each in (moment, _moment(state, "max_exp_avg_sq", parameter)):
                        if each is not None:
                            each.mul_(of_mean)
                # With a ratio from 1 - b2 on no more is subtracted than the optimizer adds, whatever rounding and
                # underflow do to both products: a second moment never becomes negative, the root of it not NaN.
                of_mean = max(of_mean, 1 - kept)
                if of_mean < 1:
                    factor = (1 - kept) / kept * (1 - of_mean)
                    made.append(_Squares(_real(moment), _real(gradient), _real(parameter), decay, factor))
        return made

    def in_own_scale(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """Return the names of parameters of which the second moment waits for its first ratio, for checkpoints."""
        return [name for name, parameter in parameters.items() if parameter in self._own]

    def load_in_own_scale(self, names: list[str], parameters: Mapping[str, Tensor]) -> None:
        """Go on from the names of :meth:`in_own_scale`, after the optimizer has loaded its state."""
        self._own = {parameters[name] for name in names if name in parameters}

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Return texts that name the optimizers whose moments cannot be reached, such as "Adafactor".

        There second moments count the worker's own gradient, and no momentum follows. An optimizer of an unknown class
        is named once it has a state. SGD, Lion and Muon have no second moment and are not named.
        """
        return tuple(dict.fromkeys(text for one in optimizers_of(self._optimizer) for text in _beyond_reach(one)))

    # -- momentum ---------------------------------------------------------------------------------------------------

    def departing(self, rates: Sequence[float] = ()) -> Departure:
        """Return the settings of the last step, at the moment when a fragment leaves. Waits for no device.

        ``rates``: of :meth:`Departure.rates`, if the fragment leaves again; schedulers have changed them since.
        """
        settings: dict[Tensor, tuple[_Settings, int]] = {}
        scalars, places = _Scalars(), list[int]()
        for optimizer in optimizers_of(self._optimizer):
            for group in optimizer.param_groups:
                if "lr" not in group:
                    continue
                number = len(places)
                places.append(scalars.add(rates[number] if number < len(rates) else group["lr"]))
                its_own = _settings(optimizer, group, places[number])
                if its_own is None:
                    continue
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter)
                    if _moment(state, its_own.momentum, parameter) is not None and not parameter.is_complex():
                        settings[parameter] = its_own, scalars.add(state.get("step", 0))
        return Departure(settings, scalars, places, lambda: self._steps)


def _beyond_reach(optimizer: Any) -> list[str]:
    """Return a text for each reason why moments of one optimizer cannot be reached."""
    kind = type(optimizer).__name__
    if WITHOUT_SQUARES.intersection(each.__name__ for each in type(optimizer).__mro__):
        return []
    reasons: list[str] = []
    for group in optimizer.param_groups:
        known = squares_of(optimizer, group)
        if known is not None:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                # A moment that is not there yet gets the parameter's dtype.
                is_wide = _moment(state, known[0], parameter) is not None if state else _real(parameter).dtype in WIDE
                if not is_wide:
                    reasons.append(f"{kind} with moments of another shape or in 16 bits")
        elif isinstance(optimizer, torch.optim.RMSprop):
            reasons.append(f"{kind} with centered=True")
        elif any(optimizer.state.get(parameter) for parameter in group["params"]):
            reasons.append(kind)
    return reasons


class _Scalars:
    """Numbers of optimizers' settings, some of which are on devices: these are copied to the host without a wait."""

    def __init__(self) -> None:
        self._values: list[float | None] = []  # None: on a device, not read
        self._waiting: list[tuple[int, Tensor]] = []
        self._copies: list[tuple[list[int], HostCopies]] = []

    def add(self, number: Any) -> int:
        """Add a number, or a tensor that has one, and return its place."""
        is_elsewhere = isinstance(number, Tensor) and number.device.type != "cpu"
        if is_elsewhere:
            self._waiting.append((len(self._values), number))
        self._values.append(None if is_elsewhere else float(number))
        return len(self._values) - 1

    def queue(self) -> None:
        """Queue the copies: later changes of the numbers on the devices do not count."""
        waiting, self._waiting = self._waiting, []
        for device in dict.fromkeys(tensor.device for _, tensor in waiting):
            places = [place for place, tensor in waiting if tensor.device == device]
            together = torch.stack([t.detach().reshape(()).float() for _, t in waiting if t.device == device])
            streams = streams_of(device)
            if streams is None:
                self._put(places, together.cpu())
            else:
                self._copies.append((places, HostCopies([together], streams)))

    def read(self, place: int) -> float:
        """Return a number. Waits for the copies that :meth:`queue` has queued, once."""
        copies, self._copies = self._copies, []
        for places, each in copies:
            each.arrive(math.inf)
            self._put(places, each.tensors()[0])
        value = self._values[place]
        assert value is not None
        return value

    def _put(self, places: list[int], values: Tensor) -> None:
        for place, value in zip(places, values.tolist(), strict=True):
            self._values[place] = value


@dataclass(frozen=True)
class _Settings:
    """Settings of one param group in the step after which a fragment leaves."""

    optimizer: Any
    momentum: str  # its key in the states
    squares: str | None  # key of the second moment that divides a step; None: the momentum is added as it is
    rate: int  # place of the learning rate among the scalars
    beta1: float  # decay factors of both moments
    beta2: float
    eps: float
    is_rectified: bool  # as RAdam's steps
    momentum_decay: float | None  # NAdam's


def _settings(optimizer: Any, group: Mapping[str, Any], rate: int) -> _Settings | None:
    """Return the settings of a param group, with the ``rate`` at that place; None: it has no momentum to follow."""
    key = momentum_of(optimizer, group)
    if key is None:
        return None
    if not isinstance(optimizer, ADAM):
        return _Settings(optimizer, key, None, rate, 0.0, 0.0, 0.0, False, None)
    beta1, beta2 = map(float, group["betas"])
    is_rectified = isinstance(optimizer, torch.optim.RAdam)
    decay = float(group["momentum_decay"]) if isinstance(optimizer, torch.optim.NAdam) else None
    return _Settings(optimizer, key, "exp_avg_sq", rate, beta1, beta2, float(group["eps"]), is_rectified, decay)


def rectification(beta2: float, steps: float) -> float | None:
    """Return the factor of RAdam's adaptive step (Liu et al. 2020, algorithm 2); None: it is not adaptive yet."""
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * steps * beta2**steps / (1 - beta2**steps)
    if length <= 5:
        return None
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


ALMOST_HALF = 0.45  # found by simulation, for b1 from 0.8 to 0.95: straying is smallest there, and flat


def followed_share(period: int, overlap: int) -> float:
    """Return which share of a difference momenta should follow, for :meth:`Departure.momentum`.

    A fragment that arrives only when it leaves again tells of a momentum that the arrival before has changed meanwhile.
    To take the whole difference then counts it twice. The difference ``d`` of momenta obeys ``d[t + 1] = b1 * (d[t] -
    share * d[t - 1]) + noise``, which swings with a share of 1 and is unstable from ``1 / b1`` on.

    Args:
        period: steps from one departure of a fragment to the next.
        overlap: steps from the departure to the arrival, at most ``period``.
    """
    return ALMOST_HALF if overlap >= period else 1.0


class Departure:
    """Settings of an optimizer's step after which a fragment left, for when the mean of this fragment arrives."""

    def __init__(
        self,
        settings: dict[Tensor, tuple[_Settings, int]],
        scalars: _Scalars,
        rates: Sequence[int],
        steps: Callable[[], int],
    ) -> None:
        self._settings, self._scalars, self._rates = settings, scalars, rates  # the last: places of learning rates
        self._steps, self._left_at = steps, steps()  # of the optimizer, now and at the departure
        scalars.queue()

    def rates(self) -> list[float]:
        """Return the learning rates of the departure, by param group. Waits for devices that have them."""
        return [self._scalars.read(place) for place in self._rates]

    def momentum(self, parameter: Tensor, period: int, share: float = 1.0) -> Momentum | None:
        """Return the momentum of ``parameter``, as it follows the parameter to the mean of all workers; None: it stays.

        To first order ``moved = -period * rate / (1 - b1^t) * (mean momentum - own momentum) / (sqrt(v^) + eps)``, so
        ``momentum -= moved * (sqrt(v^) + eps) * (1 - b1^t) / (period * rate)``. The second moment ``v^`` is the present
        one, and other numbers are those of the departure. A step of SGD, and of RMSprop with momentum, is ``rate *
        momentum``: the same formula without the factors between. Where ``moved`` of all workers is 0 in the sum, and
        they have the same ``v``, the mean of their momenta stays. If there is no momentum, or the rate was 0, nothing
        follows.

        Args:
            parameter: of the optimizer, contiguous. It moves by the mean of all workers minus what this worker sent.
            period: steps of which a fragment holds the difference: 1 if every step sends every element.
            share: of the difference that is followed: see :func:`followed_share`.
        """
        settings, place = self._settings.get(parameter, (None, 0))
        state = None if settings is None else settings.optimizer.state.get(parameter)
        if settings is None or not state:
            return None
        rate, momentum = self._scalars.read(settings.rate), _moment(state, settings.momentum, parameter)
        if rate == 0 or momentum is None or not momentum.is_contiguous():
            return None
        if settings.squares is None:
            return Momentum(momentum.view(-1), None, share / (period * rate), 0.0)
        steps = self._scalars.read(place)
        squares = _moment(state, "max_exp_avg_sq" if "max_exp_avg_sq" in state else settings.squares, parameter)
        if steps < 1 or squares is None or not squares.is_contiguous():
            return None
        factor = share * (1 - settings.beta1**steps) / (period * rate)
        if settings.is_rectified:
            rectified = rectification(settings.beta2, steps)
            if rectified is None:  # these steps are not divided by a second moment
                return Momentum(momentum.view(-1), None, factor, 0.0)
            factor /= rectified
        if settings.momentum_decay is not None:
            # Of NAdam's step the momentum makes up this share (Dozat 2016, its mu): early on, half is the new gradient.
            factor *= settings.beta1 * (1 - 0.5 * 0.96 ** (steps * settings.momentum_decay))
        bias = math.sqrt(1 - settings.beta2 ** self._present_steps(state, steps))
        # (sqrt(v^) + eps) * bias. In RAdam's steps eps is added before the bias is corrected.
        eps = settings.eps * (1 if settings.is_rectified else bias)
        return Momentum(momentum.view(-1), squares.view(-1), factor / bias, eps)

    def _present_steps(self, state: Mapping[str, Any], steps: float) -> float:
        """Return how many steps the second moment holds. On a device it is counted, not read."""
        now = state["step"]
        if isinstance(now, Tensor) and now.device.type != "cpu":
            return steps + self._steps() - self._left_at
        return float(now)
