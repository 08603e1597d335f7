# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks/gpu.py`` does on GPUs alone, by a recorded ``torch.cuda``: each check can pass, and can fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import gpu_world
import pytest
import torch
from device import gpu_rules, gpu_training
from device.gpu_bench import Bench, child_env, free_port, place, settle
from device.gpu_figures import Figure
from device.gpu_link import Link
from support.recorded_cuda import RATE, Cuda

import agmerge
from agmerge import testing
from agmerge.runtime import workers
from agmerge.step.gradient_exchange import GradientExchange


class Recorded(Bench):
    """A bench that takes the ways of a GPU, with tensors of the CPU."""

    is_gpu = True  # type: ignore[assignment]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    made.install(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)  # the host's time is virtual, too
    return made


@pytest.fixture
def bench() -> Bench:
    return Recorded(torch.device("cpu"), sizes=(1000,), runs=3, warm=5, tiny=True)


def alone(check: Callable[[Bench], Any], bench: Bench) -> list[Figure]:
    """The figures of a check, in a world of one rank."""

    def body(rank: int) -> list[Figure]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(gpu.found_by(0, check, bench))

    (figures,) = testing.run(1, body)
    return figures


# -- the command and its clock ----------------------------------------------------------------------------------------


def test_checks_run_on_a_device_with_its_number(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(gpu, "about", dict)
    monkeypatch.setattr(os, "environ", {**os.environ, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    gpu.main(["--world"], {8: lambda bench: iter([seen.append(bench.device) or Figure(8, "a", 1.0, "", 2.0)])})  # type: ignore[func-returns-value]
    assert seen == [torch.device("cuda", 1)]  # "cuda" alone is no device of any tensor
    assert "NCCL_HOSTID" not in os.environ


def test_where_workers_share_a_gpu_nccl_is_told_that_each_has_a_host(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert [settle(rank, 3) for rank in range(3)] == [0, 1, 0] and cuda.device == 0
    assert os.environ["NCCL_HOSTID"] == "rank 2" and "NCCL_HOSTID" not in child_env()


@pytest.mark.parametrize("there", [True, False])
def test_a_machine_is_described_with_and_without_nvidias_tool(
    cuda: Cuda, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tool(*command: Any, **how: Any) -> Any:
        if not there:
            raise FileNotFoundError("nvidia-smi")
        return SimpleNamespace(stdout="580.1\n580.1\n")

    monkeypatch.setattr(subprocess, "run", tool)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    about = gpu.about()
    assert about["driver"] == ("580.1" if there else "unknown") and about["NCCL"] == "none"
    assert about["device"] == "Recorded, sm_90" and about["devices"] == "2"


@pytest.mark.parametrize("queueing", [0.0, 1e-3, 20e-3])
def test_the_hosts_time_is_not_in_a_kernels(cuda: Cuda, bench: Bench, queueing: float) -> None:
    def call() -> None:
        cuda.now += queueing
        cuda.spin(int(30e-6 * RATE))

    assert bench.micros(call) == pytest.approx(30.0)


def test_what_waits_for_the_device_is_measured_with_its_wait(cuda: Cuda, bench: Bench) -> None:
    def call() -> None:
        cuda.synchronize()
        cuda.now += 1e-3

    assert bench.micros(call) == pytest.approx(1000.0)


def test_launches_are_those_of_the_device(cuda: Cuda, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = torch.autograd.DeviceType

    @contextmanager
    def profile(activities: Any) -> Iterator[Any]:
        yield SimpleNamespace(
            events=lambda: [SimpleNamespace(device_type=k) for k in (kinds.CUDA, kinds.CPU, kinds.CUDA)]
        )

    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert bench.launches(lambda: None) == 2


# -- check 4 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits, failed", [(0, False), (1, False), (2, True)])
def test_waits_of_the_host_are_counted(
    cuda: Cuda, bench: Bench, waits: int, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = agmerge.DistributedOptimizer.synchronize

    def synchronize(self: Any) -> None:
        for _ in range(waits if cuda.modes[-1:] == ["warn"] else 0):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        warnings.warn("of the library", stacklevel=2)
        own(self)

    monkeypatch.setattr(agmerge.DistributedOptimizer, "synchronize", synchronize)
    (figure,) = alone(lambda bench: iter([gpu_rules.waits(bench)]), bench)
    assert (figure.value, figure.failed) == (waits, failed) and cuda.modes == ["error", "warn", "default"]


def test_a_wait_in_a_hook_fails(cuda: Cuda, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GradientExchange.ready

    def ready(self: Any, *given: Any, **how: Any) -> Any:
        if cuda.modes[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")
        return own(self, *given, **how)

    monkeypatch.setattr(GradientExchange, "ready", ready)
    (figure,) = alone(lambda bench: iter([gpu_rules.waits(bench)]), bench)
    assert figure.failed and "synchronizing" in figure.note and cuda.modes[-1] == "default"


@pytest.mark.parametrize(
    "code, said, failed", [(0, "", False), (0, "CSAN detected a possible data race", True), (1, "broken", True)]
)
def test_the_sanitizer_is_believed(
    code: int, said: str, failed: bool, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def run(command: Any, **how: Any) -> Any:
        given.update(how)
        return SimpleNamespace(returncode=code, stderr=said)

    for name, value in place(0, 1, 4711).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_rules.sanitized().failed is failed
    assert given["env"]["TORCH_CUDA_SANITIZER"] == "1" and not set(place(0, 1, 4711)) & set(given["env"])


@pytest.mark.long
def test_a_child_makes_a_world_of_its_own_beside_a_served_one(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    served = torch.distributed.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    for name, value in place(0, 1, port).items():
        monkeypatch.setenv(name, value)
    code = "from device.gpu_bench import alone; alone(); import agmerge; print(agmerge.size())"
    ended = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True, check=False)
    assert ended.stdout == "1\n", ended.stderr
    del served


# -- checks 6, 7 and 9 --------------------------------------------------------------------------------------------


def test_messages_travel_one_after_the_other_while_the_device_works(cuda: Cuda, bench: Bench) -> None:
    def body(rank: int) -> None:
        link = Link(workers.world(), 1e6, bench)
        cuda.now = 10.0
        one, two = (link.all_reduce(torch.zeros(250_000), name) for name in "ab")
        assert [seconds for _, seconds in link.sent] == [1.0, 1.0] and cuda.now == 10.0
        assert not one.done() and cuda.current_stream().end < 10.0  # what does not wait for it goes on
        one.wait(5.0)
        assert cuda.current_stream().end == pytest.approx(11.0)
        two.wait(5.0)
        assert cuda.current_stream().end == pytest.approx(12.0)

    testing.run(1, body)


@pytest.mark.parametrize("late, failed", [(0.0, []), (50e-3, ["exposed", "exposed"])])
def test_overlap_is_held_against_what_the_link_allows(
    cuda: Cuda, bench: Bench, late: float, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = agmerge.DistributedOptimizer.step

    def step(self: Any, *given: Any) -> Any:
        found = own(self, *given)
        if type(workers.bound()) is Link:
            cuda.spin(int(late * RATE))  # a library that waits too long for its messages
        return found

    monkeypatch.setattr(agmerge.DistributedOptimizer, "step", step)
    monkeypatch.setattr(gpu_training, "BANDWIDTH", 1e6)
    monkeypatch.setattr(gpu_training, "STEPS", 3)
    figures = alone(gpu_training.overlap, bench)
    exposed = [figure for figure in figures if figure.limit is not None]
    assert [figure.what.split(": ")[1] for figure in figures if figure.failed] == failed
    assert len(exposed) == 2 and all(figure.limit is not None and figure.limit > 1.0 for figure in exposed)  # ms


@pytest.mark.parametrize("what, failed", [("allocation.all.allocated", False), ("segment.all.allocated", True)])
def test_only_memory_that_is_taken_from_the_device_counts(
    cuda: Cuda, bench: Bench, what: str, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = agmerge.DistributedOptimizer.step

    def step(self: Any, *given: Any) -> Any:
        cuda.stats[what] += 1
        return own(self, *given)

    monkeypatch.setattr(agmerge.DistributedOptimizer, "step", step)
    figures = alone(gpu_training.memory, bench)
    assert [figure.failed for figure in figures] == [False, failed] * 2


def test_memory_beside_the_model_is_the_most_that_was_in_use(
    cuda: Cuda, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = agmerge.DistributedOptimizer.__init__

    def made(self: Any, *given: Any, **how: Any) -> None:
        cuda.peak += 10**12
        own(self, *given, **how)

    monkeypatch.setattr(agmerge.DistributedOptimizer, "__init__", made)
    assert [figure.failed for figure in alone(gpu_training.memory, bench)] == [True, False] * 2


@pytest.mark.parametrize(
    "error, failed", [("backward() in a CUDA graph", False), ("operation not permitted when stream is capturing", True)]
)
def test_a_captured_backward_may_be_refused_by_an_error_that_says_so(
    cuda: Cuda, bench: Bench, error: str, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(job: Any, optimizer: Any) -> Any:
        raise RuntimeError(error)

    monkeypatch.setattr(gpu_training, "capture", capture)
    (figure,) = alone(gpu_training.graph, bench)
    assert figure.failed is failed


@pytest.mark.parametrize("replays", [True, False])
def test_a_replayed_backward_has_to_leave_the_bits_of_an_eager_one(
    cuda: Cuda, bench: Bench, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(job: Any, optimizer: Any) -> Any:
        def replay() -> None:
            optimizer.zero_grad()
            if replays:
                job.loss().backward()

        return replay

    monkeypatch.setattr(gpu_training, "capture", capture)
    (figure,) = alone(gpu_training.graph, bench)
    assert figure.failed is not replays


# -- check 8: failures ------------------------------------------------------------------------------------------------

FOUND = "FOUND 2.5 buffer 0: rank 1 has ended\n"


@pytest.mark.parametrize(
    "said, after, failed",
    [
        (FOUND, 9.0, [False, False]),
        (FOUND, 21.0, [False, True]),  # its process hung
        ("FOUND 16.0 buffer 0: rank 1 has ended\n", 17.0, [True, False]),
        ("FOUND 2.5 no answer\n", 9.0, [True, False]),  # not named
        ("", 9.0, [True, False]),
    ],
)
def test_a_lost_rank_is_named_in_time_and_the_other_process_ends(
    said: str, after: float, failed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_world, "ended", lambda what: [(1, said, 100.0 + after), (-9, "KILLED 100.0\n", 100.1)])
    assert [figure.failed for figure in gpu_world.lost_peer()] == failed


@pytest.mark.parametrize(
    "codes, said, failed",
    [
        ((0, 0), "UserWarning: 2 workers share one GPU here", False),
        ((0, 0), "", True),
        ((0, 1), "UserWarning: 2 workers share one GPU here; then Duplicate GPU detected", True),
    ],
)
def test_two_ranks_with_one_gpu_train_and_say_so(
    codes: tuple[int, int], said: str, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(codes[0], said, 1.0), (codes[1], "", 1.0)]
    monkeypatch.setattr(gpu_world, "ended", lambda what, **more: found)
    assert gpu_world.one_gpu().failed is failed


def test_ranks_are_started_by_hand_so_that_the_other_one_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('KILLED', time.time(), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(0.5)\n"
        "print('FOUND 0.5 rank 1', sys.argv[1], os.environ['WORLD_SIZE'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    monkeypatch.setattr(gpu_world, "__file__", str(script))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # of the launcher of this process
    (code, said, end), (lost, _, before) = gpu_world.ended("killed", CUDA_VISIBLE_DEVICES="0")
    assert (code, said, lost) == (0, "FOUND 0.5 rank 1 killed 2 0\n", -9) and end >= before


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_of_the_failures_closes_its_optimizer_as_scripts_do(
    fails: bool, cuda: Cuda, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []

    def step(self: Any) -> None:
        raise agmerge.PeerLost("buffer 0: rank 1 has ended")

    monkeypatch.setattr(gpu_world, "Bench", lambda device: bench)
    monkeypatch.setattr(gpu_world, "STEPS", 3)
    monkeypatch.setattr(agmerge, "init", lambda backend: None)
    monkeypatch.setattr(agmerge.DistributedOptimizer, "close", lambda self: closed.append(True))
    monkeypatch.setenv("LOCAL_RANK", "3")
    if fails:
        monkeypatch.setattr(agmerge.DistributedOptimizer, "step", step)
    (error,) = testing.run(1, lambda rank: gpu_world.child("crowded"), return_errors=True)
    assert isinstance(error, agmerge.PeerLost) is fails and closed == [True] and cuda.device == 1
    assert ("FOUND 0.0 buffer 0: rank 1" in capsys.readouterr().out) is fails
