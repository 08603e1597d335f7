# SPDX-License-Identifier: Apache-2.0
"""Training as data: events that are drawn, by a seed or by hypothesis, and a player that carries them out on a rank.

An event says what every rank does, each its own part. Whatever a program holds, nothing may be lost, replicas must
stay equal to the bit, and all ranks must make the same calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import agmerge
import merging
from agmerge.exchanges.routing import AHEAD
from agmerge.planning.replanner import Decision
from agmerge.step.merge_buffers import MergeBuffers
from support import through_a_file

LAYERS = ("a", "b")  # that a rank may leave out, and that may be frozen
STEP, CLIP, DISCARD, BREAK = ENDINGS = ("step", "clip", "discard", "break")
PLAIN, LOOK, FILL, TWICE, MORE, DROP, LATE, IDLE = HABITS = (
    "plain",
    "look",  # at its own state, while others go on
    "fill",  # gradients with zeros instead of dropping them
    "twice",  # zero_grad()
    "more",  # a backward pass in no_sync() before the others
    "drop",  # what was accumulated before the last backward pass
    "late",
    "idle",  # no backward pass at all
)

HYBRID = "hybrid"  # top-k for one layer, low rank for the others
LOW_RANK = ("powersgd", "acpsgd", HYBRID)  # what rounds what it keeps


@dataclass(frozen=True)
class Train:
    """A step. ``use``: the layers of :data:`LAYERS` that each rank's loss depends on; ``habits``: by rank.

    ``ending``: step; clip before it; discard the update after synchronize(); break: a NaN on rank ``bad``, so all skip.
    ``restart``: with several backward passes, between the first and the second.
    """

    use: tuple[str, ...]
    habits: tuple[str, ...]
    ending: str = STEP
    bad: int = 0
    restart: bool = False


@dataclass(frozen=True)
class Passes:
    """Another ``backward_passes_per_step``."""

    count: int


@dataclass(frozen=True)
class Replan:
    """The next step that is made ends with another plan, as if the planner had found one."""

    seed: int


@dataclass(frozen=True)
class Compress:
    """``set_compressor()``, or :data:`HYBRID`."""

    name: str
    density: float


@dataclass(frozen=True)
class Toggle:
    """Freeze a layer, or let it learn again."""

    layer: str


@dataclass(frozen=True)
class Restart:
    """A checkpoint, and a new optimizer and wrapper that load it."""


Event = Train | Passes | Replan | Compress | Toggle | Restart


def drawn(seed: int, size: int, compressors: tuple[str, ...]) -> Iterator[Event]:
    """Events without end for ``size`` ranks, mostly plain steps."""
    source = random.Random(seed)
    while True:
        kind = source.random()
        if kind < 0.02:
            yield Restart()
        elif kind < 0.05:
            yield Toggle(source.choice(LAYERS))
        elif kind < 0.08:
            yield Compress(source.choice(compressors), source.choice((0.01, 0.05, 0.3)))
        elif kind < 0.13:
            yield Replan(source.randrange(1 << 30))
        elif kind < 0.16:
            yield Passes(source.choice((1, 1, 1, 2, 3)))
        yield Train(
            use=tuple(source.choice(("", "a", "b", "ab", "ab", "ab")) for _ in range(size)),
            habits=tuple(source.choice(HABITS) if source.random() < 0.2 else PLAIN for _ in range(size)),
            ending=source.choice(ENDINGS) if source.random() < 0.2 else STEP,
            bad=source.randrange(size),
            restart=source.random() < 0.05,
        )


@dataclass
class Player:
    """One rank. ``model`` has ``loss(rank, number of the pass, layers)``; ``inner`` makes the wrapped optimizer.

    ``updates``: the sum of all that the exchange gave, before clipping, by name; ``taken``: of what the inner optimizer
    was given. Both float64.
    """

    model: Any
    rank: int
    inner: Callable[[nn.Module], torch.optim.Optimizer]
    options: dict[str, Any]
    clip: Callable[[list[Tensor]], object] = lambda gradients: [gradient.mul_(0.5) for gradient in gradients]
    updates: dict[str, Tensor] = field(default_factory=dict)
    taken: dict[str, Tensor] = field(default_factory=dict)
    passes: int = 0  # backward passes of the program so far, the same number on every rank

    def __post_init__(self) -> None:
        self.optimizer = self._wrapped()
        for name, parameter in self.model.named_parameters():
            self.updates[name] = torch.zeros(parameter.shape, dtype=torch.float64)
            self.taken[name] = torch.zeros(parameter.shape, dtype=torch.float64)

    def _wrapped(self) -> agmerge.DistributedOptimizer:
        options = dict(self.options)
        if options["compression"] in ("none", "fp16", "bf16"):  # what is about selection would be refused
            options |= {"exchange": "sparse", "wire": "auto"}
        if options["compression"] in ("powersgd", "acpsgd") and options["exchange"] != "auto":
            options |= {"exchange": "sparse"}
        options["compression"] = compression_of(options["compression"])
        return agmerge.DistributedOptimizer(self.inner(self.model), self.model.named_parameters(), **options)

    def play(self, event: Event) -> None:
        """Carry out one event."""
        if isinstance(event, Train):
            self.train(event)
        elif isinstance(event, Passes):
            self.optimizer.set_backward_passes_per_step(event.count)
            self.options["backward_passes_per_step"] = event.count
        elif isinstance(event, Replan):
            self.replan(event.seed)
        elif isinstance(event, Compress):
            self.optimizer.set_compressor(compression_of(event.name), density=event.density)
            self.options |= {"compression": event.name, "density": event.density}
        elif isinstance(event, Toggle):
            for parameter in getattr(self.model, event.layer).parameters():
                parameter.grad = None  # else its inner optimizer would go on with the last one
                parameter.requires_grad_(not parameter.requires_grad)
        else:
            self.restart()

    def train(self, event: Train) -> None:
        """One step, or one that comes to nothing."""
        optimizer, use, habit = self.optimizer, event.use[self.rank], event.habits[self.rank]
        optimizer.zero_grad(set_to_none=habit != FILL)
        if habit == TWICE:
            optimizer.zero_grad()
        if habit == LATE:
            time.sleep(0.002)
        if habit == MORE:
            with optimizer.no_sync():
                self.model.loss(self.rank, -1 - self.passes, use).backward()
        count = self.options.get("backward_passes_per_step", 1)
        for one in range(count):
            last = one == count - 1
            if habit == DROP and last and one:
                optimizer.zero_grad()
            if habit != IDLE:
                loss = self.model.loss(self.rank, self.passes + one, use)
                (loss * torch.nan if event.ending == BREAK and event.bad == self.rank and last else loss).backward()
            if event.restart and not last and one == 0:
                self.restart()
                optimizer = self.optimizer
        self.passes += count
        if habit == LOOK:
            optimizer.state_dict()
            optimizer.stats()
        self.end(event.ending)

    def end(self, ending: str) -> None:
        """Combine, and step unless the update is discarded."""
        if ending in (STEP, BREAK):
            before = self.optimizer.stats()["steps_skipped"]
            self.optimizer.step()
            if self.optimizer.stats()["steps_skipped"] == before:
                self._enter(self.updates)
                self._enter(self.taken)
            return
        self.optimizer.synchronize()
        if ending == DISCARD:
            self.optimizer.zero_grad()
            return
        self._enter(self.updates)
        self.clip([p.grad for p in self.model.parameters() if p.grad is not None])
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self._enter(self.taken)

    def _enter(self, into: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                into[name] += parameter.grad

    def replan(self, seed: int) -> None:
        """Let the planner find another plan once, if there are merge buffers that it could be for."""
        adaptation = self.optimizer._reducer.exchange.agreed.plans
        if adaptation is None:
            return
        plan = plan_for(adaptation.buffers, seed)

        def found(step: int) -> Iterator[Decision]:
            del adaptation.after_step  # type: ignore[method-assign]
            yield Decision(plan=plan)

        adaptation.after_step = found  # type: ignore[method-assign]

    def restart(self) -> None:
        """Save, close, and go on from what was saved."""
        parameters, state = through_a_file((self.model.state_dict(), self.optimizer.state_dict()))
        self.optimizer.close()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)
                parameter.grad = None
        self.optimizer = self._wrapped()
        self.model.load_state_dict(parameters)
        self.optimizer.load_state_dict(state)

    def residuals(self) -> dict[str, Tensor]:
        """Of every parameter that has one, frozen ones too."""
        residuals: dict[str, Tensor] = self.optimizer.state_dict()["agmerge"]["residuals"]
        return residuals


def compression_of(name: str) -> Any:
    """Return the argument that a name stands for."""
    return {"trunk.*": "topk", ".*": "acpsgd"} if name == HYBRID else name


def plan_for(session: MergeBuffers, seed: int) -> merging.Plan:
    """Return any plan that these merge buffers can use."""
    source, names, config = random.Random(seed), session.plan.names or (), session.config
    counts: list[int] = []
    while sum(counts) < len(names):
        counts.append(source.randint(1, len(names) - sum(counts)))
    ahead = AHEAD in config.modes and source.random() < 0.5
    dense = tuple(config.merging.exchange == "auto" and source.random() < 0.3 for _ in counts)
    parts = tuple(1 if whole or ahead else source.randint(1, 3) for whole in dense)
    labels = (AHEAD if ahead else "",) * len(counts)
    return replace(session.plan, counts=tuple(counts), dense=dense, labels=labels, parts=parts)
