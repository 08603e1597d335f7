# SPDX-License-Identifier: Apache-2.0
"""G2, G7, G9 in any order of events: hypothesis draws programs, one to four ranks in memory play them.

Gradients are small whole numbers, so that no sum is rounded, and what went in can be compared with what came out and
what is kept to the bit; with low rank, whose factors are no whole numbers, to rounding. What went in is computed here,
from the program alone.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support import agreed, digest, on_ranks
from support.random_program import (
    BREAK,
    DISCARD,
    DROP,
    ENDINGS,
    HABITS,
    IDLE,
    LAYERS,
    LOW_RANK,
    MORE,
    STEP,
    Compress,
    Event,
    Passes,
    Player,
    Replan,
    Restart,
    Toggle,
    Train,
)
from torch import Tensor, nn

import agmerge
from agmerge import testing

COMPRESSORS = ("topk", "adtopk", "randomk", "redsync", "none", *LOW_RANK)
EXCHANGES = ("sparse", "oktopk", "masked", "auto")


class Whole(nn.Module):
    """Its gradients are whole numbers that rank, pass and name decide."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(32, 33), nn.Linear(40, 32), nn.Linear(32, 32)

    def loss(self, rank: int, number: int, use: str) -> Tensor:
        """A sum over the layers in use, and the trunk."""
        layers = ["trunk", *use]
        with torch.no_grad():
            given = {name: gradient(name, p.shape, rank, number) for name, p in self.named_parameters()}
        return sum((p * given[name]).sum() for name, p in self.named_parameters() if name.split(".")[0] in layers)


@lru_cache(1 << 12)  # of ranks and of the account
def gradient(name: str, shape: torch.Size, rank: int, number: int) -> Tensor:
    """Of one tensor in one backward pass: within -8 and 8, a quarter of them 0."""
    source = torch.Generator().manual_seed(zlib.crc32(f"{name} {rank} {number}".encode()))
    drawn = torch.randint(-8, 9, shape, generator=source)
    return (drawn * (torch.rand(shape, generator=source) < 0.75)).float()


def began() -> Whole:
    model = Whole()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


class Account:
    """What a program hands in, over all ranks: the sum of all gradients by name, in float64."""

    def __init__(self, size: int, compression: str) -> None:
        self.size, self.passes, self.count, self.frozen = size, 0, 1, set[str]()
        self.compression, self.stepped = compression, False
        self.shapes = {name: p.shape for name, p in Whole().named_parameters()}
        self.total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        self.rounds, self.magnitude = False, dict.fromkeys(self.shapes, 0.0)  # of all gradients that a tensor has had

    def enter(self, event: Event) -> None:
        """The next event. ``stepped``: whether it ends with a step that is made; ``rounds``: whether one rounded."""
        self.stepped = False
        self.rounds |= self.compression in LOW_RANK
        if isinstance(event, Passes):
            self.count = event.count
        elif isinstance(event, Toggle):
            self.frozen ^= {event.layer}
        elif isinstance(event, Compress):
            self.compression = event.name
        elif isinstance(event, Train):
            first, self.passes = self.passes, self.passes + self.count
            broken = event.ending == BREAK and event.habits[event.bad] != IDLE
            if event.ending == DISCARD or broken:
                return
            self.stepped = True
            for rank in range(self.size):
                for number in self.numbers(event.habits[rank], first):
                    self._add(rank, number, event.use[rank])

    def numbers(self, habit: str, first: int) -> list[int]:
        """The backward passes of which the step has the gradients."""
        numbers = [] if habit == IDLE else list(range(first, first + self.count))
        return numbers[-1:] if habit == DROP else [-1 - first, *numbers] if habit == MORE else numbers

    def _add(self, rank: int, number: int, use: str) -> None:
        for name, total in self.total.items():
            layer = name.split(".")[0]
            if layer in ("trunk", *use) and layer not in self.frozen:
                total += gradient(name, self.shapes[name], rank, number)
                self.magnitude[name] += 8

    def same(self, name: str, found: Tensor, expected: Tensor) -> bool:
        """Tell whether two sums over a tensor's gradients are equal, to the bit where nothing was rounded."""
        if not self.rounds:
            return torch.equal(found, expected)
        return float((found - expected).abs().max()) <= 1e-5 * self.magnitude[name]


def play(rank: int, model: Any, program: list[Event], options: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank has after every event."""
    player = Player(model, rank, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), dict(options))
    seen = []
    for event in program:
        player.play(event)
        seen.append(
            {
                "bits": digest(model),
                "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
                "updates": {name: sum_.clone() for name, sum_ in player.updates.items()},
                "taken": {name: sum_.clone() for name, sum_ in player.taken.items()},
                "residuals": player.residuals(),
                "calls": len(testing.calls()),
                "plan": testing.inspect(player.optimizer).plan,
            }
        )
    seen[-1]["called"] = testing.calls()
    return seen


def check(size: int, program: list[Event], options: dict[str, Any]) -> None:
    """Play a program, and see that it keeps what is promised."""
    ranks = on_ranks(size, began(), lambda rank, model: play(rank, model, program, options))
    account, across = Account(size, options["compression"]), 1 if options["op"] is agmerge.Sum else size
    for number, event in enumerate(program):
        account.enter(event)
        seen = [rank[number] for rank in ranks]
        agreed([one["bits"] for one in seen])
        agreed([one["plan"] for one in seen])
        agreed([one["calls"] for one in seen])
        for name, total in account.total.items():
            kept = sum(one["residuals"].get(name, torch.zeros(())).double() for one in seen)
            if account.stepped and account.compression == "none" and name.split(".")[0] not in account.frozen:
                assert not kept.any(), (number, event, name)
            for one in seen:
                found = one["updates"][name] * across + kept
                assert account.same(name, found, total), (number, event, name, (found - total).abs().max())
                # The inner optimizer has stepped with this and with nothing else; zeros have no sign here.
                assert account.same(name, one["parameters"][name].double(), -one["taken"][name]), (number, event, name)
    varies = options["exchange"] == "oktopk"  # how much goes to whom is a rank's own affair there
    agreed([[call[: 2 if varies else 3] for call in rank[-1]["called"]] for rank in ranks])


class Training(RuleBasedStateMachine):
    """Rules write a program; it is played at the end, so that ranks need not wait for hypothesis."""

    size = 1

    @initialize(
        size=st.integers(1, 4),
        compression=st.sampled_from(COMPRESSORS),
        density=st.sampled_from((0.01, 0.1)),
        exchange=st.sampled_from(EXCHANGES),
        wire=st.sampled_from(("auto", "fp16", "bf16")),
        ordered=st.booleans(),
        summed=st.booleans(),
        zero=st.booleans(),
        merged=st.booleans(),
    )
    def begin(self, size: int, compression: str, density: float, exchange: str, wire: str, **more: bool) -> None:
        self.size, self.program = size, list[Event]()
        if compression in ("none", "fp16", "bf16"):  # what is about selection would be refused
            exchange, wire = "sparse", "auto"
        if compression in ("powersgd", "acpsgd") and exchange != "auto":
            exchange = "sparse"
        self.options: dict[str, Any] = {
            "compression": compression,
            "density": density,
            "exchange": exchange,
            "wire": wire if exchange in ("sparse", "auto") else "auto",
            "dense_sum": "ordered" if more["ordered"] else "native",
            "op": agmerge.Sum if more["summed"] or size == 3 else agmerge.Average,  # a third is rounded
            "unused": "zero" if more["zero"] else "none",
            "merging": "threshold" if more["merged"] else "layerwise",
            "nonfinite": "skip",
            "timeout": 20.0,
        }

    @rule(data=st.data(), ending=st.sampled_from((STEP, STEP, *ENDINGS)), restart=st.booleans())
    def train(self, data: st.DataObject, ending: str, restart: bool) -> None:
        use = data.draw(st.tuples(*[st.sampled_from(("", "a", "b", "ab"))] * self.size))
        habits = data.draw(st.tuples(*[st.sampled_from(HABITS)] * self.size))
        self.program.append(Train(use, habits, ending, data.draw(st.integers(0, self.size - 1)), restart))

    @rule(steps=st.integers(1, 3))
    def train_plainly(self, steps: int) -> None:
        self.program += [Train(("ab",) * self.size, (HABITS[0],) * self.size)] * steps

    @rule(count=st.integers(1, 3))
    def passes(self, count: int) -> None:
        self.program.append(Passes(count))

    @rule(seed=st.integers(0, 1000))
    def replan(self, seed: int) -> None:
        self.program.append(Replan(seed))

    @rule(name=st.sampled_from(COMPRESSORS), density=st.sampled_from((0.01, 0.1, 1.0)), restart=st.booleans())
    def compress(self, name: str, density: float, restart: bool) -> None:
        self.program += [Compress(name, density), *([Restart()] if restart else [])]

    @rule(layer=st.sampled_from(LAYERS))
    def toggle(self, layer: str) -> None:
        self.program.append(Toggle(layer))

    @precondition(lambda self: not self.program or self.program[-1] != Restart())
    @rule()
    def restart(self) -> None:
        self.program.append(Restart())

    def teardown(self) -> None:
        if getattr(self, "program", None):
            names = {event.name for event in self.program if isinstance(event, Compress)}
            if {self.options["compression"], *names} & set(LOW_RANK):
                self.options["wire"] = "auto"  # a sum of factors of 16 bits is rounded on its way
            check(self.size, self.program, self.options)


SILENT = pytest.mark.filterwarnings("ignore:AGM112")
# Shrinking would take minutes, and a test ends after two: the long profile does it.
QUICK = settings(
    max_examples=40,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    print_blob=True,
)
LONG = settings(QUICK, max_examples=1500, stateful_step_count=50, phases=tuple(Phase))


@pytest.mark.timeout(400)  # a program after the other: on a busy machine two minutes may not do
@SILENT
def test_whatever_happens_nothing_is_lost() -> None:
    run_state_machine_as_test(Training, settings=QUICK)


@pytest.mark.long
@pytest.mark.timeout(1800)
@SILENT
def test_whatever_happens_nothing_is_lost_for_long() -> None:
    run_state_machine_as_test(Training, settings=LONG)
