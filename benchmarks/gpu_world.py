"""Check 8 of ``benchmarks/gpu.py``: several GPUs beside DDP, and what is said where a rank is missing."""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from device.gpu_bench import Bench, Job, resnet, wrapped
from device.gpu_figures import Figure, must, of_world
from torch import nn

import agmerge

BLOCKS, BLOCK, WARM = 20, 5, 15  # blocks in turn, steps of one, steps before
TIMEOUT, GRACE = 10.0, 5.0  # seconds that a wait may take, and that its error may take longer
SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes of messages alone


def world(bench: Bench) -> Iterator[Figure]:
    """Collective. Run check 8: steps, messages, replicas, and two failures."""
    import torch.distributed as dist

    dist.init_process_group("nccl")
    agmerge.init("torch")
    yield from steps(bench)
    yield from messages(bench)
    if agmerge.rank() == 0 and torch.cuda.device_count() > 1:
        yield lost_peer()
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
    yield from of_world({name: statistics.median(seconds) for name, seconds in took.items()})
    model = running["ours, auto"][0].model
    own = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    first = agmerge.broadcast(own, 0)
    yield must(8, "replicas are equal to the bit", torch.equal(own, first))
    yield Figure(
        8, "Horovod dense", float("nan"), note="not run: it has a launcher of its own (benchmarks/step_time.py)"
    )


def messages(bench: Bench) -> Iterator[Figure]:
    """Measure NCCL's all-gather and all-reduce of messages alone."""
    for size in SIZES:
        sent = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        summed = torch.zeros(size // 4, device=bench.device)
        yield Figure(8, f"all-gather of {size:,} bytes", bench.micros(lambda sent=sent: agmerge.allgather(sent)), "us")
        took = bench.micros(lambda summed=summed: agmerge.allreduce_(summed, op=agmerge.Sum))
        yield Figure(8, f"all-reduce of {size:,} bytes", took, "us")


def launched(what: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks of :func:`child`, by a launcher of their own."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "GROUP_", "ROLE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"AGMERGE_TIMEOUT": str(TIMEOUT), "PYTHONPATH": os.pathsep.join(sys.path), **more}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    file = str(Path(__file__).resolve())
    return subprocess.run([*command, file, what], env=env, capture_output=True, text=True, timeout=300, check=False)


def lost_peer() -> Figure:
    """Check that where a rank is killed the other's error names it in time, and is printed before the process ends."""
    said = launched("killed")
    lines = [line for line in said.stdout.splitlines() if line.startswith("FOUND ")]
    seconds = float(lines[0].split()[1]) if lines else float("nan")
    named = "rank 1" in (lines[0] if lines else "")
    return Figure(8, "an error names the rank that was killed after", seconds if named else float("nan"), "s",
                  TIMEOUT + GRACE, "" if named else said.stderr[-300:].replace("\n", " "))  # fmt: skip


def one_gpu() -> Figure:
    """Check that with two ranks on one GPU the error says so, and what to do."""
    said = launched("crowded", CUDA_VISIBLE_DEVICES="0")
    return must(8, "two ranks on one GPU: the error says set_device", "set_device" in said.stdout + said.stderr)


def child(what: str) -> None:
    """Be one of two ranks: ``"killed"`` loses rank 1 in its fourth step, ``"crowded"`` has one GPU for both."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(0 if what == "crowded" else rank)
    bench = Bench(torch.device("cuda", torch.cuda.current_device()))
    agmerge.init("torch")
    job = resnet(bench)
    optimizer = wrapped(job, timeout=TIMEOUT)
    start = time.perf_counter()
    try:
        for step in range(1000):
            if step == 3 and rank == 1 and what == "killed":
                os.kill(os.getpid(), 9)
            start = time.perf_counter()
            optimizer.zero_grad()
            job.loss().backward()
            optimizer.step()
    except agmerge.AGMergeError as error:
        print(f"FOUND {time.perf_counter() - start:.1f} {error}".replace("\n", " "), flush=True)
        raise


if __name__ == "__main__":
    child(sys.argv[1])
