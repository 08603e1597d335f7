# SPDX-License-Identifier: Apache-2.0
"""A worker dies, and the others go on: equal to the bit after each step, with nothing lost or counted twice.

The workers are threads (``tests/support/elastic.py``). An unlucky one receives less than others before the death, so
that the three outcomes occur: everything of a round counts, a part of it, nothing.
"""

from __future__ import annotations

import builtins
import errno
import math
import os
import random
from typing import Any

import pytest
import torch

import agmerge
from agmerge.backends.local import Call
from tests.support import elastic
from tests.support.surviving import SETTINGS, STEPS, Training, check, first_call_of_step, note_outcomes


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_survivors_go_on_equal_to_the_bit(setting: str, size: int) -> None:
    options = SETTINGS[setting]
    quiet = Training(options, size, size - 1, None)
    quiet.run()
    begin = first_call_of_step(quiet.calls, 1)
    for victim, ahead in ((0, 1), (size - 1, 4)):  # in the second message of the step; behind its last one
        results = Training(options, size, victim, begin + ahead).run()
        check(results, victim, size)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("sick", [0, 2])
@pytest.mark.parametrize("setting", ["dense", "sparse", "quantised", "auto", "updates"])
def test_a_nan_in_the_step_of_a_death_is_the_same_for_all_survivors(setting: str, sick: int, nonfinite: str) -> None:
    """All refuse that step, or all repeat it without the one that died; no NaN is ever applied."""
    options = {**SETTINGS[setting], "nonfinite": nonfinite}
    quiet = Training(options, 3, 0, None)
    quiet.run()
    for call in range(first_call_of_step(quiet.calls, 1), first_call_of_step(quiet.calls, 2) + 1):
        results = Training(options, 3, 0, call, sick).run()
        check(results, 0, 3)
        assert all(torch.isfinite(parameters).all() for result in results[1:] for _, parameters in result)
        refused = sum(int(parameters[-1]) for _, parameters in results[1])
        if sick == 2:
            assert refused == (nonfinite == "raise")
        else:  # its NaN may have arrived before it died, or not
            assert refused <= (nonfinite == "raise")


def test_nothing_is_written_to_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one, or one that cannot be written to, is in nobody's way (F16)."""
    quiet = Training({}, 3, 0, None)
    quiet.run()
    originals = {io: io.open for io in (builtins, os)}

    def full(file: Any, mode: Any = "r", *more: Any, **options: Any) -> Any:
        writes = mode & (os.O_WRONLY | os.O_RDWR) if isinstance(mode, int) else set(mode) & set("wax+")
        if writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)
        return originals[os if isinstance(mode, int) else builtins](file, mode, *more, **options)

    for io in originals:
        monkeypatch.setattr(io, "open", full)
    with pytest.raises(OSError, match="No space left"):
        open("/tmp/none", "w")  # noqa: SIM115  # never opened
    check(Training({}, 3, 0, first_call_of_step(quiet.calls, 1) + 1).run(), 0, 3)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "auto"])
def test_whoever_is_behind_gets_what_others_have(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unlucky worker loses the result of the first, second ... message of a step, which the others have received."""
    options, outcomes = SETTINGS[setting], note_outcomes(monkeypatch)
    quiet = Training(options, 3, 0, None)
    quiet.run()
    for call in range(first_call_of_step(quiet.calls, 1), first_call_of_step(quiet.calls, 2)):
        for dies_at in (None, call + 1):  # when the unlucky one waits, or before its own next message
            check(Training(options, 3, 0, dies_at).run(elastic.BadLuck(of=1, call=call, victim=0)), 0, 3)
    assert {"all", "part"} <= outcomes, outcomes


@pytest.mark.parametrize("setting", ["dense", "sparse", "hold"])
def test_the_sum_of_all_gradients_is_applied_or_kept(setting: str) -> None:
    """With one gradient for ever, and steps of 1: what was applied, and the mean of what is kept, is their sum."""
    size, steps, dies_in = 3, 8, 3
    gradients = [torch.randn(64, generator=torch.Generator().manual_seed(worker)) for worker in range(size)]
    began: list[int] = []

    def kill(worker: int, generation: int, call: Call) -> None:
        if worker == 0 and call.name == "buffer 0":
            began.append(generation)
            if len(began) > dies_in:
                raise elastic.Killed

    def train(worker: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        parameter = torch.nn.Parameter(torch.zeros(64, 32))
        inner = torch.optim.SGD([parameter], lr=1.0)
        optimizer = agmerge.DistributedOptimizer(
            inner, [("p", parameter)], timeout=20.0, check_every=1, **SETTINGS[setting]
        )
        for _ in range(steps):
            parameter.grad = None
            parameter.backward(gradients[worker][:, None].expand(64, 32).contiguous())
            optimizer.step()
        unsent = optimizer._reducer.replica.unsent().get("p", torch.zeros(64, 32))
        shared = (
            parameter.detach() if optimizer._reducer.combines_gradients else optimizer._reducer.replica.shared.base["p"]
        )
        return shared[:, 0].double(), unsent.double()[:, 0], steps

    results = elastic.run(size, train, kill)
    assert isinstance(results[0], elastic.Killed)
    (shared, one, _), (_, other, _) = results[1:]  # type: ignore[misc]
    first, rest = sum(gradients) / size * dies_in, (gradients[1] + gradients[2]) / 2 * (steps - dies_in)
    applied_and_kept = -shared + (one + other) / 2
    # The dead one has its own residual with it: what it had not sent, a third of it.
    if setting == "dense":
        assert torch.allclose(applied_and_kept.float(), first + rest, atol=1e-4)
    else:
        lost = (first + rest) - applied_and_kept.float()
        share = gradients[0] * dies_in / size
        assert bool(((lost.abs() <= share.abs() + 1e-4) & (lost * share >= -1e-4)).all())
        assert not math.isclose(float(lost.norm()), 0.0)


@pytest.mark.parametrize("setting", ["dense", "sparse", "dgc", "quantised", "hold", "few bits"])
def test_several_die_one_of_them_while_others_regroup(setting: str) -> None:
    """Of five workers four die, each in another call, until one trains alone: also in calls that settle and connect."""
    options, size, source = SETTINGS[setting], 5, random.Random(setting)
    for _ in range(3):
        training = Training(options, size, victim=-1, dies_at=None)
        ends = {worker: source.randrange(12, 60) for worker in range(1, size)}
        made = dict.fromkeys(range(size), 0)

        def kill(worker: int, generation: int, call: Call, ends: Any = ends, made: Any = made) -> None:
            made[worker] += 1
            if made[worker] > ends.get(worker, math.inf):
                raise elastic.Killed

        results: list[Any] = elastic.run(size, training.train, kill)
        survivors = [result for result in results if not isinstance(result, elastic.Killed)]
        for result in survivors:
            if isinstance(result, BaseException):
                raise result
        assert results[0] in survivors
        for step in range(STEPS):
            for result in survivors[1:]:
                assert torch.equal(result[step][1], survivors[0][step][1]), f"parameters differ after step {step}"
