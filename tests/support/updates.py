# SPDX-License-Identifier: Apache-2.0
"""What a worker has of the parameters when ``sync="updates"``, as tests of it look at them from outside.

With x of a worker its parameters (``carry="apply"``) or what they would be with all that it has not sent (``"hold"``),
the mean of x over workers is what their optimizers have made of it: exchanges leave it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agmerge.engine.update_reducer import UpdateReducer
from support import agreed, backward, digest, wrap

Tensors = dict[str, Tensor]


def reducer_of(optimizer: Any) -> UpdateReducer:
    """Return what is below a wrapper, with its replica and its exchange."""
    assert isinstance(optimizer._reducer, UpdateReducer)
    return optimizer._reducer


def base_of(optimizer: Any) -> Tensors:
    """Return what all workers have in common: views."""
    return reducer_of(optimizer).replica.shared.base


def exact(tensor: Tensor) -> Tensor:
    """Return a copy in twice the precision, flat and real."""
    tensor = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


def updating(model: nn.Module, inner: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """Return a wrapper with ``sync="updates"``: AdamW and top-k unless the test says otherwise."""
    inner = inner or torch.optim.AdamW(model.parameters(), lr=0.01)
    return wrap(model, inner, **{"sync": "updates", "compression": "topk", **options})


@dataclass(frozen=True)
class Seen:
    """Hold what one rank has seen of one step: of x before and after its exchange, and bits after it."""

    before: Tensors  # x once the optimizer has stepped, float64, flat
    after: Tensors  # x after the exchange
    magnitude: Tensors  # of the numbers that have been added up
    base: str  # bits of what all have in common
    parameters: str  # bits of the parameters
    carried: float  # the sum of all magnitudes that this rank has not sent


def x_of(optimizer: Any) -> Tensors:
    """Return x of this worker, float64, flat: what is common to all, less all that it has done beyond that."""
    reducer = reducer_of(optimizer)
    unsent = reducer.replica.unsent()
    return {name: exact(base) - exact(unsent[name]) for name, base in reducer.replica.shared.base.items()}


class Watch:
    """Look at x between the optimizer's own step and the exchange, and after it."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.seen: list[Seen] = []
        self._before: Tensors = {}
        self._sizes: Tensors = {}
        optimizer.register_step_post_hook(self._note)

    def _note(self, *_: object) -> None:
        self._before = x_of(self.optimizer)
        unsent = reducer_of(self.optimizer).replica.unsent()
        self._sizes = {n: exact(b).abs() + exact(unsent[n]).abs() for n, b in base_of(self.optimizer).items()}

    def step(self) -> None:
        """Step the optimizer, and remember."""
        self.optimizer.step()
        after, unsent = x_of(self.optimizer), reducer_of(self.optimizer).replica.unsent()
        base = base_of(self.optimizer)
        self.seen.append(
            Seen(
                before=self._before,
                after=after,
                magnitude={name: self._sizes[name] + exact(base[name]).abs() for name in self._before},
                base=digest(base.values()),
                parameters=digest(parameter for parameter in reducer_of(self.optimizer).replica.shared.own.values()),
                carried=sum(float(tensor.abs().sum()) for tensor in unsent.values()),
            )
        )


def watched(
    rank: int,
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int],
    backward: Callable[[Any, int, int], None] = backward,
) -> list[Seen]:
    """Train and watch."""
    watch = Watch(optimizer)
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        watch.step()
    return watch.seen


def assert_kept(
    runs: Sequence[Sequence[Seen]], *, equal: bool = False, roundings: float = 2.0, rounded: Mapping[str, float] = {}
) -> None:
    """Assert of every rank's steps that exchanges leave the sum of x as it is, and that ``base`` is equal to the bit.

    ``equal``: parameters are too. ``roundings``: of float32, of each number that is added up. ``rounded``: parameters
    that have another machine epsilon, by name.
    """
    for step, ranks in enumerate(zip(*runs, strict=True)):
        agreed([seen.base for seen in ranks])
        if equal:
            agreed([seen.parameters for seen in ranks])
        for name in ranks[0].before:
            difference = sum(seen.after[name] - seen.before[name] for seen in ranks)
            epsilon = rounded.get(name, torch.finfo(torch.float32).eps)
            bound = sum(seen.magnitude[name] for seen in ranks) * roundings * epsilon
            over = (difference.abs() - bound).max() if difference.numel() else torch.tensor(-1.0)
            assert over <= 0, (step, name, float(over), float(difference.abs().max()))


def assert_common(optimizer: Any) -> None:
    """Collective. Assert that after ``consolidate()`` every parameter is what all have in common, to the bit."""
    optimizer.consolidate()
    for name, base in base_of(optimizer).items():
        parameter = reducer_of(optimizer).replica.shared.own[name].detach()
        assert torch.equal(parameter, base.to(parameter.dtype)), name
