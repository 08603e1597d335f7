# SPDX-License-Identifier: Apache-2.0
"""Run the checks of ``benchmarks/gpu.py`` on a GPU with its clock, or, to try the checks themselves, the CPU."""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import agmerge

FLUSH = 2  # times the size of the cache is written between two runs
HOST = torch.device("cpu")
SPIN, LONGEST_SPIN = 1 << 20, 1 << 26  # cycles that the device counts while the host queues what is timed
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "GROUP_", "ROLE_", "NCCL_HOSTID")  # beginnings


@dataclass(frozen=True)
class Bench:
    """Hold where the checks run, and how much of everything."""

    device: torch.device
    sizes: tuple[int, ...] = (1_000_000, 16_000_000, 100_000_000)  # elements
    runs: int = 50  # that are timed, after `warm` others
    warm: int = 10
    tiny: bool = False  # models of some layers

    @property
    def is_gpu(self) -> bool:
        """Tell whether there is something to measure."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has nothing to do."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def micros(self, call: Callable[[], object]) -> float:
        """Measure the microseconds of the device for what ``call`` queues, with cold caches: the median.

        The device spins until all is queued, so the host's time is not in it, unless ``call`` waits for the device.
        """
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.is_gpu else 1 << 16
        flush = torch.empty(FLUSH * cache, dtype=torch.uint8, device=self.device)
        took, cycles = list[float](), SPIN
        for run in range(self.warm + self.runs):
            flush.zero_()
            seconds, is_hidden = self._timed(call, cycles)
            cycles = cycles if is_hidden else min(2 * cycles, LONGEST_SPIN)
            if run >= self.warm:
                took.append(1e6 * seconds)
        return statistics.median(took)

    def _timed(self, call: Callable[[], object], cycles: int) -> tuple[float, bool]:
        """Return the seconds of ``call``, and whether all was queued before the device had counted so many cycles."""
        if not self.is_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start, True
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(cycles)
        events[0].record()
        call()
        events[1].record()
        is_hidden = not events[0].query()
        events[1].synchronize()
        return events[0].elapsed_time(events[1]) / 1e3, is_hidden

    def launch_seconds(self) -> float:
        """Measure the host's seconds for one small kernel of torch's: the median."""
        small, took = torch.zeros(64, device=self.device), []
        for _ in range(self.warm + self.runs):
            self.synchronize()
            start = time.perf_counter()
            small.add_(1.0)
            took.append(time.perf_counter() - start)
        return statistics.median(took[self.warm :])

    def launches(self, call: Callable[[], object]) -> int:
        """Count the kernels that ``call`` queues; 0 on the CPU."""
        if not self.is_gpu:
            call()
            return 0
        from torch.profiler import ProfilerActivity, profile

        call()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            self.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events())

    def normal(self, n: int, seed: int = 0) -> Tensor:
        """Draw normal numbers, the same on any device."""
        return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def laplace(self, n: int, seed: int = 0) -> Tensor:
        """Draw numbers of Laplace's distribution, the same on any device."""
        uniform = torch.rand(n, generator=torch.Generator().manual_seed(seed)).sub_(0.5).to(self.device)
        return uniform.sign() * torch.log1p(-2 * uniform.abs()).clamp_(min=-30)

    def trained(self, n: int, seed: int = 0) -> Tensor:
        """Draw numbers like a trained model's: normal, each thousand with a scale of its own, log-normal."""
        scales = torch.randn(-(-n // 1024), generator=torch.Generator().manual_seed(seed + 1)).exp_().to(self.device)
        return self.normal(n, seed) * scales.repeat_interleave(1024)[:n]

    def data(self) -> Mapping[str, Callable[[int], Tensor]]:
        """Return what selections are tried on, by name."""
        return {"normal": self.normal, "Laplace": self.laplace, "trained": self.trained}


@dataclass(frozen=True)
class Job:
    """Hold a model and how a backward of it is begun."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        """Count the elements of all parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def tensors(self) -> int:
        """Count the parameters."""
        return sum(1 for _ in self.model.parameters())


def resnet(bench: Bench) -> Job:
    """Build ResNet-50 with a batch so small that launches are what takes time."""
    from networks.resnet import bottlenecks

    torch.manual_seed(0)
    model = bottlenecks(50, small=bench.tiny, tiny=bench.tiny).to(bench.device)
    x = torch.randn(2, 3, 64, 64, device=bench.device)
    return Job("ResNet-50", model, lambda: model(x).square().mean())


def transformer(bench: Bench) -> Job:
    """Build a model of the sizes of GPT-2 small, without its mask and its dropout."""
    width, layers, tokens = (32, 2, 100) if bench.tiny else (768, 12, 50_257)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, width // 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(tokens, width), blocks, nn.Linear(width, tokens)).to(bench.device)
    x = torch.randint(tokens, (1, 32), device=bench.device)
    return Job("GPT-2 small", model, lambda: model(x).square().mean())


def alone() -> None:
    """Collective. Join a world of one rank, by NCCL on a GPU; nothing happens where there is a world already."""
    if agmerge.is_initialized():
        return
    for name, value in place(0, 1, free_port()).items():
        os.environ.setdefault(name, value)
    agmerge.init("torch")


def join(bench: Bench) -> None:
    """Collective. Join the launcher's world as a script with DDP does; nothing happens where there is a world already.

    By NCCL on a GPU, else by Gloo.
    """
    import torch.distributed as dist

    if not agmerge.is_initialized():
        dist.init_process_group("nccl" if bench.is_gpu else "gloo")
        agmerge.init("torch")


def bits_of(model: nn.Module) -> str:
    """Return what identifies the bits of a model's parameters."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    return bits.hexdigest()


def free_port() -> int:
    """Return the number of a port that nobody serves now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def place(rank: int, size: int, port: int) -> dict[str, str]:
    """Return a launcher's variables for one rank of a world on this machine, which meets at ``port``."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}


def settle(rank: int, workers: int) -> int:
    """Choose a GPU for this process, one of ``workers`` on this machine, and return its number.

    Where there are fewer GPUs, NCCL is told that every rank is on a host of its own: else it refuses to share one.
    Messages take the network of this machine then, and kernels take turns: right or wrong can be seen, not speed.
    """
    count = torch.cuda.device_count()
    if workers > count:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % count)
    return rank % count


def child_env(**more: str) -> dict[str, str]:
    """Return the environment of a child process that belongs to no world, not to this one's: its port is served."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    return {**env, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def wrapped(job: Job, lr: float = 1e-3, **options: object) -> agmerge.DistributedOptimizer:
    """Collective. Wrap SGD for a job, with every message compressed unless ``options`` say otherwise."""
    alone()
    given = {"compression": "topk", "density": 0.01, "exchange": "sparse", "merging": "threshold", **options}
    return agmerge.DistributedOptimizer(
        torch.optim.SGD(job.model.parameters(), lr=lr), job.model.named_parameters(), **given
    )
