# SPDX-License-Identifier: Apache-2.0
"""Checks 5, 6, 7 and 9 of ``benchmarks/gpu.py``: what a training step costs the host, the link and memory; graphs."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from agmerge import testing
from agmerge.runtime import workers
from device.gpu_bench import Bench, Job, alone, resnet, transformer, wrapped
from device.gpu_figures import Figure, finish_of, must, of_hooks, of_memory, of_overlap
from device.gpu_link import Link

WARM, STEPS = 5, 30
BANDWIDTH = 1.25e9  # bytes a second of the pretended link: 10 Gbit/s
GRAPH_STEPS = 5
TAKEN = "segment.all.allocated"  # not "allocation": what torch keeps and gives out again costs no time
Step = Callable[[], object]


def step_of(job: Job, optimizer: torch.optim.Optimizer) -> Step:
    """Do a whole step."""

    def step() -> None:
        optimizer.zero_grad()
        job.loss().backward()
        optimizer.step()

    return step


def backward_seconds(bench: Bench, job: Job, optimizer: torch.optim.Optimizer) -> float:
    """Measure seconds of the host for one backward that begins with an idle device: the median."""
    took = []
    for step in range(WARM + STEPS):
        optimizer.zero_grad()
        loss = job.loss()
        bench.synchronize()
        start = time.perf_counter()
        loss.backward()
        if step >= WARM:
            took.append(time.perf_counter() - start)
        optimizer.step()
    return statistics.median(took)


def hooks(bench: Bench) -> Iterator[Figure]:
    """Run check 5: the host's time of a backward with and without hooks."""
    launch = bench.launch_seconds()
    for make in (resnet, transformer):
        job = make(bench)
        plain = backward_seconds(bench, job, torch.optim.SGD(job.model.parameters(), lr=1e-3))
        optimizer = wrapped(job)
        with_hooks = backward_seconds(bench, job, optimizer)
        messages = len(testing.inspect(optimizer).plan.counts)
        optimizer.close()
        yield from of_hooks(job.name, plain, with_hooks, job.tensors, messages, launch)


def seconds_of(bench: Bench, step: Step) -> float:
    """Measure seconds of a whole step, device included: the median."""
    took = []
    for number in range(WARM + STEPS):
        bench.synchronize()
        start = time.perf_counter()
        step()
        bench.synchronize()
        if number >= WARM:
            took.append(time.perf_counter() - start)
    return statistics.median(took)


def overlap(bench: Bench) -> Iterator[Figure]:
    """Run check 6: with a pretended link: what of the exchange is not under backward."""
    alone()
    own = workers.bound()
    for make in (resnet, transformer):
        job, link = make(bench), Link(workers.world(), BANDWIDTH, bench)
        optimizer = wrapped(job)
        without = seconds_of(bench, step_of(job, optimizer))
        optimizer.close()
        workers.bind(link)
        try:
            optimizer = wrapped(job)
            taken = seconds_of(bench, step_of(job, optimizer))
            predicted = exposed_by(link, job, optimizer) if bench.is_gpu else 0.0
            optimizer.close()
        finally:
            workers.bind(own)
        yield from of_overlap(job.name, predicted, max(0.0, taken - without), sum(seconds for _, seconds in link.sent))


def exposed_by(link: Link, job: Job, optimizer: torch.optim.Optimizer) -> float:
    """Return the seconds that the last message of one step is on its way after backward, by when each was ready."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    link.sent.clear()
    optimizer.zero_grad()
    begun.record()
    job.loss().backward()
    ended.record()
    optimizer.step()
    torch.cuda.synchronize()
    ready = [begun.elapsed_time(event) / 1e3 for event, _ in link.sent]
    finish = finish_of(ready, [seconds for _, seconds in link.sent])
    return max(0.0, finish - begun.elapsed_time(ended) / 1e3)


def memory(bench: Bench) -> Iterator[Figure]:
    """Run check 7: the most that was allocated, and how often, beside a step without the library."""
    for make in (resnet, transformer):
        found = []
        for with_library in (False, True):
            job = make(bench)
            plain = torch.optim.SGD(job.model.parameters(), lr=1e-3)
            optimizer = wrapped(job) if with_library else plain
            found.append(allocated(bench, step_of(job, optimizer)))
            if with_library:
                optimizer.close()
            del optimizer, plain
        (base, usual), (peak, more) = found
        yield from of_memory(job.name, job.elements, base, peak, more - usual)


def allocated(bench: Bench, step: Step) -> tuple[int, float]:
    """Measure bytes at the peak of steps 3 to 5, and how often one of them took memory of the device (cudaMalloc)."""
    for _ in range(2):
        step()
    if not bench.is_gpu:
        step()
        return 0, 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()[TAKEN]
    for _ in range(3):
        step()
    return torch.cuda.max_memory_allocated(), (torch.cuda.memory_stats()[TAKEN] - before) / 3


def graph(bench: Bench) -> Iterator[Figure]:
    """Run check 9: forward and backward as a CUDA graph, then ``step()``: eager bits, or an error that names graphs."""
    if not bench.is_gpu:
        return
    eager = resnet(bench)
    captured = Job(eager.name, copy.deepcopy(eager.model), eager.loss)
    x = torch.randn(2, 3, 64, 64, device=bench.device)
    jobs = [Job(job.name, job.model, lambda job=job: job.model(x).square().mean()) for job in (eager, captured)]
    optimizers = [wrapped(job, merging="layerwise") for job in jobs]
    steps = [step_of(job, optimizer) for job, optimizer in zip(jobs, optimizers, strict=True)]
    what = "a captured backward, then step(): eager bits, or an error that says so"
    for step in steps:
        step()
    try:
        replay = capture(jobs[1], optimizers[1])
        for _ in range(GRAPH_STEPS):
            steps[0]()
            replay()
            optimizers[1].step()
    except Exception as error:
        yield must(9, what, "CUDA graph" in str(error), f"{type(error).__name__}: {error}")
        return
    pairs = zip(jobs[0].model.parameters(), jobs[1].model.parameters(), strict=True)
    yield must(9, what, all(torch.equal(one, other) for one, other in pairs), "parameters differ")


def capture(job: Job, optimizer: torch.optim.Optimizer) -> Step:
    """Capture a graph of forward and backward; gradients keep their place."""
    optimizer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()

    def loss() -> Tensor:
        value = job.loss()
        value.backward()
        return value

    with torch.cuda.graph(recorded):
        loss()

    def replay() -> None:
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        recorded.replay()

    return replay
