# SPDX-License-Identifier: Apache-2.0
"""Workers of an elastic job that are killed, stopped and started: the others go on, and one that comes is a peer."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from elastic_job import STEPS, job
from lab import network
from launching import HERE

WITHOUT_END = 10**6  # steps


def files(worker: subprocess.Popen[str]) -> int:
    """Return how many open files a worker has."""
    return len(os.listdir(f"/proc/{worker.pid}/fd"))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "setting",
    [
        {},
        pytest.param({"sync": "updates"}, marks=pytest.mark.long),
        pytest.param({"sync": "updates", "exchange": "sparse", "overlap": 1}, marks=pytest.mark.long),
        pytest.param({"compression": "dgc", "density": 0.1}, marks=pytest.mark.long),
    ],
    ids=["default", "updates", "late", "dgc"],
)  # fmt: skip
def test_the_others_go_on_and_who_comes_is_a_peer(tmp_path: Path, setting: dict[str, Any]) -> None:
    """The oldest, which serves the group's store, is killed; one comes; one is stopped, and goes on too late."""
    with job(tmp_path, setting) as here:
        first, second, third = here.start(), here.start(), here.start()
        here.wait_for(lambda: all(len(here.lines(one)) >= 20 for one in (first, second, third)))
        oldest = first  # any of them: which one is it says the lighthouse, not the order of starts
        oldest.kill()
        here.wait_for(lambda: here.size(third) == 2)
        fourth = here.start()
        here.wait_for(lambda: len(here.lines(fourth)) >= 10)
        second.send_signal(signal.SIGSTOP)
        here.wait_for(lambda: here.size(third) == 2)
        second.send_signal(signal.SIGCONT)
        for worker in (third, fourth):
            assert worker.wait(200) == 0, here.logs()
        assert second.wait(200) != 0 and "AGM210" in here.logs()

        assert here.differing() == {}
        steps = [line[0] for line in here.lines(third)]
        assert steps == list(range(steps[0], STEPS + 1))  # it may have come later than the others
        assert [line[0] for line in here.lines(fourth)][0] > 20
        sizes = [size for _, size, *_ in here.lines(third)]
        assert sizes[-1] == 2 and {2, 3} == set(sizes)
        generations = {generation for *_, generation in here.lines(third)}
        assert max(generations) - min(generations) <= 4  # that of a change, and of one who is let in, and no more


@pytest.mark.long
@pytest.mark.timeout(500)  # the pretended device quantizes by torch's operations: a step may take seconds
@pytest.mark.parametrize(
    "setting",
    [{}, *(pytest.param(one, marks=pytest.mark.long) for one in ({"sync": "updates"}, {"compression": "none"}))],
    ids=["default", "updates", "none"],
)
def test_tensors_of_devices_go_through_the_host(tmp_path: Path, setting: dict[str, Any]) -> None:
    """One is killed, one leaves, one comes, which gets the others' tensors onto its own device."""
    with job(tmp_path, {**setting, "place": "pretend"}, script=HERE / "going_on_devices.py") as here:
        first, second, third = here.start(), here.start(), here.start()
        here.wait_for(lambda: all(len(here.lines(one)) >= 10 for one in (first, second, third)), 120)
        first.kill()
        here.wait_for(lambda: here.size(third) == 2, 120)
        fourth = here.start()
        here.wait_for(lambda: len(here.lines(fourth)) >= 5, 120)
        second.send_signal(signal.SIGTERM)
        for worker in (second, third, fourth):
            assert worker.wait(200) == 0, here.logs()
        assert here.differing() == {}
        assert {size for _, size, *_ in here.lines(third)} == {2, 3}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_that_is_told_to_end_leaves_after_a_whole_step(tmp_path: Path) -> None:
    """Nothing is repeated, and nothing is lost (F12)."""
    with job(tmp_path, {"compression": "dgc", "density": 0.1}) as here:
        first, second = here.start(), here.start()
        here.wait_for(lambda: all(len(here.lines(one)) >= 5 and here.size(one) == 2 for one in (first, second)))
        first.send_signal(signal.SIGTERM)
        assert first.wait(200) == 0 and second.wait(200) == 0, here.logs()
        assert here.differing() == {}
        assert [line[0] for line in here.lines(second)] == list(range(here.lines(second)[0][0], STEPS + 1))
        assert here.size(second) == 1 and "A worker left; training continues with 1 workers" in here.logs()
        assert "A worker failed" not in here.logs()
        assert "This worker left its elastic job" in here.log(first)
        late = here.start()
        assert late.wait(200) != 0 and "AGM217" in here.logs()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_that_is_left_alone_lets_others_in(tmp_path: Path) -> None:
    """With updates it exchanges nothing: no message of its own tells it of a newcomer."""
    with job(tmp_path, {"sync": "updates"}) as here:
        first, second = (here.start(steps=WITHOUT_END) for _ in range(2))
        here.wait_for(lambda: here.size(first) == 2)
        here.wait_for_steps(3, first)
        held, generation = files(first), here.lines(first)[-1][4]
        second.kill()
        here.wait_for(lambda: here.size(first) == 1)
        here.wait_for_steps(10, first)
        third = here.start(steps=WITHOUT_END)
        here.wait_for_steps(10, first, third)
        assert here.size(first) == here.size(third) == 2 and here.lines(third)[0][0] > 10
        assert here.differing() == {}
        assert here.lines(first)[-1][4] == generation + 2  # one for the death, one for the arrival
        # Those of the groups before are given back: a group has at least five, and who becomes the oldest serves the
        # group's store, with two more.
        here.wait_for(lambda: files(first) < held + 5)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_whose_workers_are_all_killed_begins_anew_at_its_lighthouse(tmp_path: Path) -> None:
    with job(tmp_path, {}) as here:
        dead = [here.start() for _ in range(2)]
        here.wait_for(lambda: all(len(here.lines(one)) >= 5 for one in dead))
        for one in dead:
            one.kill()
        new = [here.start() for _ in range(2)]
        for one in new:
            assert one.wait(200) == 0, here.logs()
        assert here.lines(new[0])[-1][0] == STEPS and here.lines(new[0])[0][0] <= 2


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_lighthouse_may_end_and_be_started_again(tmp_path: Path) -> None:
    """Training goes on without it; then a worker dies, another comes, and both are seen as ever (F8)."""
    with job(tmp_path, {}) as here:
        first, second = (here.start(steps=WITHOUT_END) for _ in range(2))
        here.wait_for_steps(10, first, second)
        here.lighthouse.kill()
        here.lighthouse.wait()
        here.wait_for_steps(30, first, second)
        second.kill()
        here.shine()
        here.wait_for(lambda: here.size(first) == 1)
        third = here.start(steps=WITHOUT_END)
        here.wait_for(lambda: here.size(first) == 2)
        here.wait_for_steps(10, first, third)
        assert here.differing() == {}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_too_few_workers_wait_in_memory_and_one_of_other_options_is_sent_away(tmp_path: Path) -> None:
    """With one of at least two nothing trains; a newcomer with another compressor raises, alone (F9, F14)."""
    with job(tmp_path, {"elastic": {"min_workers": 2}}) as here:
        first, second = (here.start(steps=WITHOUT_END) for _ in range(2))
        here.wait_for_steps(10, first, second)
        second.kill()
        second.wait()
        here.wait_for(lambda: "waits for the next group of workers, of at least 2" in here.log(first))
        assert "continues with 1 workers (before: 2), fewer than min_workers. The next commit() waits" in here.log(
            first
        )
        stranger = here.start(steps=WITHOUT_END, compression="eden-8")
        assert stranger.wait(200) != 0 and "compression" in here.log(stranger), here.logs()
        steps = here.lines(first)[-1][0]
        third = here.start(steps=WITHOUT_END)
        here.wait_for_steps(10, third)
        assert here.size(first) == 2 and here.differing() == {}
        assert here.lines(third)[0][0] <= steps + 2, "went on from where it was"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_one_that_is_cut_off_ends_and_the_others_go_on(tmp_path: Path) -> None:
    """Its packets are dropped, not refused; without the lighthouse it trains no more (F6, F7)."""
    if why := network.usable():
        pytest.skip(f"no hosts on this machine: {why}")
    with network.Network(3) as hosts:

        def at(host: int) -> list[str]:
            return ["ip", "netns", "exec", hosts.space(host)]

        with job(tmp_path, {"elastic": {"min_workers": 2, "patience": 8.0}}, at, hosts.address) as here:
            workers = [here.start(host, WITHOUT_END) for host in range(3)]
            here.wait_for_steps(10, *workers)
            switch = ["ip", "netns", "exec", hosts.space("s")]
            subprocess.run([*switch, *"ip link set p2 down".split()], check=True)
            here.wait_for(lambda: here.size(workers[0]) == 2)
            here.wait_for_steps(10, *workers[:2])
            assert workers[2].wait(120) != 0, here.logs()  # once its collective has timed out, and its patience
            assert "AGM014" in here.log(workers[2]) or "at least 2 workers" in here.log(workers[2])
            assert here.differing() == {}
