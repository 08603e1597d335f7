# SPDX-License-Identifier: Apache-2.0
"""Check 4 of ``benchmarks/gpu.py``: what has to be right, whatever it takes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import agmerge
import sparsifiers
from device.gpu_bench import HOST, Bench, child_env, resnet, wrapped
from device.gpu_figures import Figure, must
from device.gpu_kernels import kernel_calls, selection

EXACT = ("topk", "dgc")  # what they select is a function of the vector: the k largest
STEPS = 4


def right(bench: Bench) -> Iterator[Figure]:
    """Run check 4: selections, sums, conservation, what is not finite, host waits, and torch's sanitizer."""
    n = bench.sizes[0]
    for name in sparsifiers.names():
        yield from selections(bench, name, n)
    yield from sums(bench, n)
    yield from conservation(bench)
    yield from nonfinite(bench)
    if bench.is_gpu:
        yield waits(bench)
        yield sanitized()


def selections(bench: Bench, name: str, n: int) -> Iterator[Figure]:
    """Check selections: equal to the host's where that is the promise, within the contract, and the same twice."""
    k = max(1, n // 100)
    for data, make in bench.data().items():
        vector = make(n)
        found, again = (selection(name, vector, k)().trimmed().cpu() for _ in range(2))
        yield must(4, f"{name}, {data}: two runs select the same", torch.equal(found, again))
        ascending = bool((found[1:] > found[:-1]).all()) and 0 <= int(found[0]) and int(found[-1]) < n
        good = ascending and 0.8 * k <= len(found) <= k
        yield must(4, f"{name}, {data}: 0.8 k to k, ascending", good, f"{len(found)} of {k}")
        if name in EXACT:
            host = selection(name, vector.cpu(), k)().trimmed()
            yield must(4, f"{name}, {data}: as on the host", torch.equal(found, host))


def sums(bench: Bench, n: int) -> Iterator[Figure]:
    """Check the sum of W pretended ranks, added in rank order: the host's bits."""
    for ranks in (1, 2, 8):
        gradient = bench.normal(n)
        found, expected = (
            kernel_calls(gradient.to(place), max(1, n // 100), ranks)["K4"]().cpu() for place in (bench.device, HOST)
        )
        right = torch.equal(found, expected) and bool(expected.any())
        yield must(4, f"{ranks} ranks added: the host's bits", right)


def conservation(bench: Bench) -> Iterator[Figure]:
    """Check that nothing is lost or invented: what is unsent and what was sent are what there was, to the bit."""
    job = resnet(bench)
    optimizer = wrapped(job)
    parameters = dict(job.model.named_parameters())
    compared, good = 0, True
    for _ in range(STEPS):
        before = agmerge.testing.inspect(optimizer).residuals
        optimizer.zero_grad()
        job.loss().backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        after = agmerge.testing.inspect(optimizer).residuals
        for name, residual in after.items():
            had = before[name] + gradients[name] if name in before else gradients[name]
            good = good and torch.equal(residual + parameters[name].grad, had)
            compared += 1
    optimizer.close()
    yield must(4, "residual + sent is residual before + gradient, to the bit", good and compared > 0)


def nonfinite(bench: Bench) -> Iterator[Figure]:
    """Check that an infinity or a NaN in one gradient is an error that names its parameter."""
    job = resnet(bench)
    optimizer = wrapped(job)
    name, parameter = next((n, p) for n, p in job.model.named_parameters() if p.dim() > 1)
    for value in (float("inf"), float("nan")):
        for step in range(2):
            optimizer.zero_grad()
            hook = parameter.register_hook(lambda grad, bad=value, at=step: grad * bad if at else grad)
            job.loss().backward()
            hook.remove()
            said = ""
            try:
                optimizer.step()
            except agmerge.NonFiniteError as error:
                said = str(error)
        yield must(4, f"{value} is found", name in said, said or "no error")
    optimizer.close()


def waits(bench: Bench) -> Figure:
    """Check that nothing waits in a hook, and ``synchronize()`` does once."""
    job = resnet(bench)
    optimizer = wrapped(job)
    for _ in range(STEPS):  # ranks agree, plan and allocate
        optimizer.zero_grad()
        job.loss().backward()
        optimizer.step()
    optimizer.zero_grad()
    loss = job.loss()
    try:
        torch.cuda.set_sync_debug_mode("error")
        loss.backward()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    optimizer.close()
    waited = sum("synchronizing" in str(one.message) for one in said)  # torch's word, not the library's
    return Figure(4, "host waits in synchronize(), none in hooks", waited, "waits", 1)


def sanitized() -> Figure:
    """Check that torch's sanitizer of streams has nothing to say about a training of some steps."""
    code = "from device import gpu_rules; gpu_rules.some_steps()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=child_env(TORCH_CUDA_SANITIZER="1"),
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    silent = ended.returncode == 0 and "CSAN" not in ended.stderr
    return must(4, "torch's CUDA sanitizer is silent", silent, ended.stderr[-300:].replace("\n", " "))


def some_steps(bench: Bench | None = None) -> None:
    """Train, for the sanitizer."""
    bench = bench or Bench(torch.device("cuda", torch.cuda.current_device()))
    job = resnet(bench)
    optimizer = wrapped(job)
    for _ in range(STEPS):
        optimizer.zero_grad()
        job.loss().backward()
        optimizer.step()
    bench.synchronize()
