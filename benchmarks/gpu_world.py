# SPDX-License-Identifier: Apache-2.0
"""Check 8 of ``benchmarks/gpu.py``: several workers beside DDP, and what is said where a rank is missing.

    python benchmarks/gpu_world.py --backend horovod [--workers 4] [--cpu]

trains the mission's five sparsifiers by name through Horovod's NCCL, beside torch's and DDP (``device/transports.py``).
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from device import transports
from device.gpu_bench import Bench, Job, child_env, free_port, join, place, resnet, settle, wrapped
from device.gpu_figures import Figure, must, of_world
from torch import nn

import agmerge

BLOCKS, BLOCK, WARM = 20, 5, 15  # blocks in turn, steps of one, steps before
TIMEOUT, GRACE = 10.0, 5.0  # seconds that a wait may take, and that its error may take longer
LONGEST, STEPS = 300.0, 20  # seconds that a child process may take, and its steps
SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes of messages alone


def world(bench: Bench) -> Iterator[Figure]:
    """Collective. Run check 8: steps, messages, replicas, and two failures."""
    join(bench)
    yield from steps(bench)
    yield from messages(bench)
    if agmerge.rank() == 0 and agmerge.size() > 1:
        yield from lost_peer()
        yield one_gpu()
    agmerge.barrier()


def contenders(bench: Bench) -> dict[str, tuple[Job, torch.optim.Optimizer]]:
    """Make a job of its own for each, from the same parameters."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    base = resnet(bench)
    x = torch.randn(32, 3, 224, 224, device=bench.device)

    def job(wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Job:
        model = wrap(copy.deepcopy(base.model))
        return Job(base.name, model, lambda: model(x).square().mean())

    def ddp(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])

    plain, cast, ours = job(ddp), job(ddp), job()
    cast.model.register_comm_hook(None, fp16_compress_hook)
    found = {name: (one, torch.optim.SGD(one.model.parameters(), lr=1e-3)) for name, one in
             (("DDP, dense", plain), ("DDP, fp16", cast))}  # fmt: skip
    found["ours, auto"] = (ours, wrapped(ours, exchange="auto", merging="agmerge"))
    return found


def steps(bench: Bench) -> Iterator[Figure]:
    """Measure seconds a step, in turn; then whether replicas are equal."""
    running = contenders(bench)
    took: dict[str, list[float]] = {name: [] for name in running}

    def block(name: str, count: int) -> float:
        job, optimizer = running[name]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            job.loss().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    for name in running:
        block(name, WARM)
    for _ in range(BLOCKS):
        for name, seconds in took.items():
            seconds.append(block(name, BLOCK))
    each_has_one = torch.cuda.device_count() >= agmerge.local_size()
    yield from of_world({name: statistics.median(seconds) for name, seconds in took.items()}, judged=each_has_one)
    model = running["ours, auto"][0].model
    own = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    first = agmerge.broadcast(own, 0)
    yield must(8, "replicas are equal to the bit", torch.equal(own, first))
    launcher = "not run: it has a launcher of its own (python benchmarks/gpu_world.py --backend horovod)"
    yield Figure(8, "Horovod", float("nan"), note=launcher)


def messages(bench: Bench) -> Iterator[Figure]:
    """Measure NCCL's all-gather and all-reduce of messages alone."""
    for size in SIZES:
        sent = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        summed = torch.zeros(size // 4, device=bench.device)
        yield Figure(8, f"all-gather of {size:,} bytes", bench.micros(lambda sent=sent: agmerge.allgather(sent)), "us")
        took = bench.micros(lambda summed=summed: agmerge.allreduce_(summed, op=agmerge.Sum))
        yield Figure(8, f"all-reduce of {size:,} bytes", took, "us")


def ended(what: str, **more: str) -> list[tuple[int, str, float]]:
    """Run two ranks of :func:`child`; return of each its exit code, what it printed, and when it ended.

    By hand: torchrun would end the other rank as soon as one is lost, before that has seen anything.
    """
    port, running = free_port(), []
    for rank in range(2):
        env = child_env(AGMERGE_TIMEOUT=str(TIMEOUT), **place(rank, 2, port), **more)
        command = [sys.executable, str(Path(__file__).resolve()), what]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    found = []
    for process in reversed(running):  # rank 1 may be lost, and ends first
        try:
            said, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        found.append((process.returncode, said, time.time()))
    return found[::-1]


def lost_peer() -> Iterator[Figure]:
    """Check that where a rank is killed the other's error names it in time, and that its process ends."""
    (_, said, end), (_, lost, _) = ended("killed")
    found = next((line for line in said.splitlines() if line.startswith("FOUND ")), "")
    killed = next((float(line.split()[1]) for line in lost.splitlines() if line.startswith("KILLED ")), float("nan"))
    seconds = float(found.split()[1]) if "rank 1" in found else float("nan")
    note = "" if seconds == seconds else said[-300:].replace("\n", " ")
    yield Figure(8, "an error names the rank that was killed after", seconds, "s", TIMEOUT + GRACE, note)
    yield Figure(8, "the process of the other rank has ended after", end - killed, "s", TIMEOUT + 2 * GRACE)


def one_gpu() -> Figure:
    """Check that two ranks with one GPU train, through the host's memory, and that a line says so."""
    found = ended("crowded", CUDA_VISIBLE_DEVICES="0")
    said = " ".join(text for _, text, _ in found)
    right = all(code == 0 for code, _, _ in found) and said.count("workers share one GPU") == 1
    return must(8, "two ranks share a GPU, and one line says so", right, said[-300:].replace("\n", " "))


def child(what: str) -> None:
    """Be one of two ranks: ``"killed"`` loses rank 1 in its fourth step, ``"crowded"`` has one GPU for both."""
    rank = int(os.environ["LOCAL_RANK"])
    if what == "crowded":  # of which the library finds out by itself
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        settle(rank, 2)
    bench = Bench(torch.device("cuda", torch.cuda.current_device()))
    agmerge.init("torch")
    job = resnet(bench)
    optimizer = wrapped(job, timeout=TIMEOUT)
    start = time.perf_counter()
    try:
        for step in range(STEPS):
            if step == 3 and rank == 1 and what == "killed":
                print(f"KILLED {time.time()}", flush=True)
                os.kill(os.getpid(), 9)
            start = time.perf_counter()
            optimizer.zero_grad()
            job.loss().backward()
            optimizer.step()
    except agmerge.AGMergeError as error:
        print(f"FOUND {time.perf_counter() - start:.1f} {error}".replace("\n", " "), flush=True)
        raise
    finally:
        optimizer.close()  # as scripts do: it must not wait for who is lost


def main() -> int:
    """Read the command line: a comparison of transports, or a rank of one of the failures."""
    parser = argparse.ArgumentParser(description="Horovod's NCCL beside torch's, or one rank of a check of failures")
    parser.add_argument("what", nargs="?", choices=("killed", "crowded"), help=argparse.SUPPRESS)
    parser.add_argument("--backend", choices=("horovod",), help="which is compared with torch.distributed")
    parser.add_argument("--workers", type=int, help="default: as many as there are GPUs, at least two")
    parser.add_argument("--cpu", action="store_true", help="over Gloo, few parameters: tries the comparison itself")
    arguments = parser.parse_args()
    if arguments.what:
        child(arguments.what)
        return 0
    if arguments.backend is None:
        parser.error("what is to be compared? --backend horovod")
    count = torch.cuda.device_count()
    if not (count or arguments.cpu):
        print("no GPU is here: --cpu tries the comparison itself, over Gloo")
        return 2
    return transports.main(arguments.workers or max(2, count), not arguments.cpu)


if __name__ == "__main__":
    sys.exit(main())
