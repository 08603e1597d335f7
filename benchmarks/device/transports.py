# SPDX-License-Identifier: Apache-2.0
"""One training by two transports: the mission's five sparsifiers by name through Horovod, beside torch.distributed.

``gpu_world.py --backend horovod`` asks for it. Every worker trains the same layers with each sparsifier, dense, and, in
torch.distributed, with DistributedDataParallel. Replicas have to be equal to the bit after every step, both
transports have to have the same bits, and to send as many bytes; seconds are only told.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where a worker is started by this file
import checkout  # noqa: E402, F401 - it says where this checkout's packages are

# isort: split

import torch  # noqa: E402
from lab.worker_results import received_results, send_result  # noqa: E402
from torch import nn  # noqa: E402

import agmerge  # noqa: E402
from device.gpu_bench import bits_of  # noqa: E402

MISSION = ("dgc", "gaussiank", "redsync", "sidco", "adtopk")
DENSE, DDP = "none", "DDP"
WARM, STEPS = 3, 20  # steps of each contender
MORE_BYTES = 1.01  # times torch's, at most: headers may differ, messages may not
LONGEST = 900.0  # seconds of a launch
Found = dict[str, dict[str, Any]]  # by contender: digests of every rank, bytes, milliseconds


def layers(is_gpu: bool) -> nn.Sequential:
    """The same layers on every rank: 17 million parameters on a GPU, few on the CPU."""
    torch.manual_seed(0)
    width, depth = (1024, 16) if is_gpu else (64, 4)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def contender(name: str, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer that train: wrapped as ``name`` says."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == DDP:
        return nn.parallel.DistributedDataParallel(model), inner
    options: dict[str, Any] = {} if name == DENSE else {"density": 0.01, "exchange": "sparse"}
    named = model.named_parameters()
    return model, agmerge.DistributedOptimizer(
        inner, named, compression=name, merging="threshold", dense_sum="ordered", check_every=1, **options
    )


def trained(name: str, device: torch.device) -> dict[str, Any]:
    """Collective. Train, and return what this rank saw."""
    model, optimizer = contender(name, layers(device.type == "cuda").to(device))
    first: Any = next(model.parameters())
    source = torch.Generator().manual_seed(agmerge.rank())
    seen, took = [], []
    for _ in range(WARM + STEPS):
        x = torch.randn(32, first.shape[1], generator=source).to(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        seen.append(bits_of(model))
    sent = 0 if name == DDP else optimizer.stats()["bytes_sent"]  # type: ignore[attr-defined]
    return {"seen": seen, "bytes": sent, "ms": 1e3 * statistics.median(took[WARM:])}


def worker(backend: str, is_gpu: bool) -> None:
    """Be one rank of a launch; rank 0 tells what all saw."""
    warnings.simplefilter("ignore")
    agmerge.init(backend)
    device = torch.device("cpu")
    if is_gpu:
        device = torch.device("cuda", agmerge.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    names = (DENSE, *MISSION, *([DDP] if backend == "torch" else []))
    found = {name: agmerge.allgather_object(trained(name, device)) for name in names}
    if agmerge.rank() == 0:
        send_result({name: told(ranks) for name, ranks in found.items()})
    agmerge.shutdown()


def told(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks saw of one contender."""
    equal = all(one["seen"] == ranks[0]["seen"] for one in ranks)
    return {**ranks[0], "equal": equal, "ms": max(one["ms"] for one in ranks)}


def launched(backend: str, workers: int, is_gpu: bool) -> Found:
    """What the workers of one launch found. ``RuntimeError`` with their output where they found nothing."""
    programs = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}"]
    if backend == "horovod":
        program = shutil.which("horovodrun", path=programs)
        if program is None:
            raise RuntimeError("Horovod is not installed here: python -m agmerge build-horovod --nccl")
        start = [program, "-np", str(workers), "--gloo", sys.executable]
    command = [*start, str(Path(__file__).resolve()), backend, "cuda" if is_gpu else "cpu"]
    env = {**os.environ, "PATH": programs, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LONGEST, check=False
    )
    lines = (line.partition("<stdout>:")[2] or line for line in ended.stdout.splitlines())  # horovodrun's prefix
    found: Found = received_results("\n".join(lines))[0]
    return found


def compared(ours: Found, torchs: Found, say: Callable[[str], object] = print) -> bool:
    """Print a line for each contender; return whether all that is judged is right."""
    right = True
    say(f"{'':10}{'replicas':>10}{'bits':>10}{'bytes':>8}{'ms, Horovod':>13}{'torch':>9}{'DDP':>9}")
    for name in (DENSE, *MISSION):
        one, other = ours[name], torchs[name]
        equal, bits = one["equal"] and other["equal"], one["seen"] == other["seen"]
        ratio = one["bytes"] / other["bytes"]
        good = equal and bits and ratio <= MORE_BYTES
        right &= good
        words = f"{'equal' if equal else 'DIFFER':>10}{'the same' if bits else 'OTHERS':>10}{ratio:8.3f}"
        times = f"{one['ms']:13.2f}{other['ms']:9.2f}{torchs[DDP]['ms']:9.2f}"
        say(f"{name:10}{words}{times}" + ("" if good else "  FAILED"))
    return right


def main(workers: int, is_gpu: bool) -> int:
    """Launch both, compare, and return the exit code: 2 where Horovod is not there."""
    try:
        ours = launched("horovod", workers, is_gpu)
    except RuntimeError as error:
        print(error)
        return 2
    return 0 if compared(ours, launched("torch", workers, is_gpu)) else 1


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2] == "cuda")
