# SPDX-License-Identifier: Apache-2.0
"""Workers of an elastic job with tensors on devices: they go through the host, and the others go on as on the host.

Each worker has a pretended device, and a thread that copies late. What a device has queued of a round that breaks may
be there already when the results of others are given to it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from pretend import streams
from pretend.copies import LateCopies
from pretend.device import Device
from pretend.tensors import PLACE

from agmerge.backends.local import LocalBackend
from agmerge.backends.staging import Line, Queued, StagedBackend
from agmerge.backends.streams import Call as Started
from agmerge.errors import PeerLost
from agmerge.step.kept_results import KeptResults
from tests.support import elastic
from tests.support.surviving import SETTINGS, Training, check, first_call_of_step, note_outcomes

pytestmark = pytest.mark.filterwarnings("ignore:AGM703")


class MortalLine(Line):
    """Thread of a worker that may die in a call that the thread makes: then ``dies`` is called, and the call fails."""

    def __init__(self, copies: LateCopies, dies: Callable[[], None]) -> None:
        super().__init__("local", copies)
        self._dies = dies

    def start(self, queued: Queued, device: torch.device) -> Started:
        begin = queued.begin

        def begun() -> Queued:
            try:
                return begin()
            except elastic.Killed as error:
                self._dies()
                raise PeerLost("this worker dies") from error

        queued.begin = begun  # type: ignore[method-assign]
        return super().start(queued, device)

    def end(self) -> None:
        """End the thread: in memory, calls that an unlucky worker gave up are never known to have ended."""
        if self._progress is not None:
            self._progress.end()


class OnDevices(Training):
    """The same training with tensors on a pretended device for each worker."""

    def run(self, luck: elastic.BadLuck | None = None) -> list[Any]:
        with ExitStack() as until, streams.installed():
            copies = [until.enter_context(LateCopies().running(worker)) for worker in range(self.size)]
            lines: dict[int, MortalLine] = {}

            def around(worker: int, backend: LocalBackend, lighthouse: elastic.Lighthouse) -> StagedBackend:
                dies = lambda: lighthouse.end(worker, "is lost")  # noqa: E731
                if worker not in lines:
                    lines[worker] = MortalLine(copies[worker], dies)
                    until.callback(lines[worker].end)
                return StagedBackend(backend, lines[worker], range(backend.size))

            return elastic.run(self.size, self.train_on_device, self.kill, luck, around)

    def train_on_device(self, worker: int) -> list[tuple[int, torch.Tensor]]:
        """Train on one rank; hooks come on its own thread."""
        Device(is_watched=False).use()
        with torch.autograd.set_multithreading_enabled(False):
            return self.train(worker, PLACE)


class Split(OnDevices):
    """The same training with one layer on the host: of a round some messages are queued, and others waited for."""

    def __init__(self, on_host: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.on_host = on_host

    def placed(self, model: torch.nn.Sequential, place: str) -> torch.nn.Module:
        return InBothMemories(model, place, self.on_host)


class InBothMemories(torch.nn.Module):
    """Model with its "first" or "last" layer on the host, and the other one at ``place``, as inputs and outputs."""

    def __init__(self, model: torch.nn.Sequential, place: str, on_host: str) -> None:
        super().__init__()
        self.place, self.last_place = place, place if on_host == "first" else "cpu"
        self.first_place = "cpu" if on_host == "first" else place
        self.first, self.last = model[0].to(self.first_place), model[-1].to(self.last_place)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs.to(self.first_place)))
        return self.last(hidden.to(self.last_place)).to(self.place)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_survivors_go_on_equal_to_the_bit(setting: str, size: int) -> None:
    options = SETTINGS[setting]
    quiet = OnDevices(options, size, size - 1, None)
    quiet.run()
    begin = first_call_of_step(quiet.calls, 1)
    for victim, ahead in ((0, 1), (size - 1, 4)):
        check(OnDevices(options, size, victim, begin + ahead).run(), victim, size)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "auto"])
def test_whoever_is_behind_gets_what_others_have(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlucky worker loses the result of the first, second ... message of a step, which the others have received."""
    options, outcomes = SETTINGS[setting], note_outcomes(monkeypatch)
    quiet = OnDevices(options, 3, 0, None)
    quiet.run()
    for call in range(first_call_of_step(quiet.calls, 1), first_call_of_step(quiet.calls, 2)):
        check(OnDevices(options, 3, 0, None).run(elastic.BadLuck(of=1, call=call, victim=0)), 0, 3)
    assert "all" in outcomes


@pytest.mark.parametrize(
    ("setting", "on_host"), [("dense", "first"), ("quantised", "first"), ("updates", "first"), ("quantised", "last")]
)
def test_parts_of_a_round_count_where_parameters_are_in_both_memories(
    setting: str, on_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One dies, or an unlucky one loses a result, at each call of a step."""
    options, outcomes = SETTINGS[setting], note_outcomes(monkeypatch)
    quiet = Split(on_host, options, 3, 2, None)
    quiet.run()
    for call in range(first_call_of_step(quiet.calls, 1), first_call_of_step(quiet.calls, 2)):
        check(Split(on_host, options, 3, 2, call).run(), 2, 3)
        check(Split(on_host, options, 3, 0, None).run(elastic.BadLuck(of=1, call=call, victim=0)), 0, 3)
    # The device's buffers are looked at first: where they are the last ones, no others are known to have arrived.
    assert outcomes == ({"all", "part", "nothing"} if on_host == "first" else {"all", "nothing"})


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_undisturbed_training_has_the_bits_of_the_host(setting: str) -> None:
    place, host = OnDevices(SETTINGS[setting], 3, 0, None), Training(SETTINGS[setting], 3, 0, None)
    host.model = place.model
    for ours, theirs in zip(place.run(), host.run(), strict=True):
        for (_, own), (_, other) in zip(ours, theirs, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_are_kept_from_the_memory_of_the_host(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have come through it: none is copied down from a device once more."""
    kept: list[str] = []
    keep = KeptResults.keep

    def noted(self: KeptResults, name: str, out: torch.Tensor) -> None:
        kept.append(out.device.type)
        keep(self, name, out)

    monkeypatch.setattr(KeptResults, "keep", noted)
    OnDevices(SETTINGS[setting], 3, 0, None).run()
    assert set(kept) == {"cpu"}
