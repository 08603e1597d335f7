# SPDX-License-Identifier: Apache-2.0
"""Does it pay to send a merge buffer in parts? Two workers on a shaped link, and a tied embedding that is ready last.

    python benchmarks/parts.py
    python benchmarks/parts.py --rate 1gbit --density 0.05 --rows 65536

The embedding is a merge buffer of its own, nothing hides its exchange, and it travels in 1, 2 and 4 messages:
the same plan otherwise, trained with in interleaved blocks of steps. A ratio is that of the median steps of two
blocks side by side. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.worker_results import received_results, send_result

PARTS, BLOCK, WIDTH, BATCH = (1, 2, 4), 6, 256, 32


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="one merge buffer in several messages")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rows", type=int, default=32768, help="of the embedding, 256 elements each")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(args: argparse.Namespace) -> None:
    """One rank: train with every number of parts in turn, and print the median step of each block."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import agmerge
    import merging

    agmerge.init()
    torch.set_num_threads(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(args.rows, WIDTH)
            self.body = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

        def forward(self, words: Any) -> Any:
            return self.body(self.table(words)) @ self.table.weight.T

    def started(parts: int) -> Any:
        torch.manual_seed(0)
        model = Model()
        count = len(list(model.parameters()))
        return model, agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.001),
            model.named_parameters(),
            density=args.density,
            exchange="sparse",
            merging=merging.Plan((count - 1, 1), parts=(1, parts)),
        )

    def steps(model: nn.Module, optimizer: Any) -> float:
        took = []
        for _ in range(BLOCK):
            begin = time.perf_counter()
            words = torch.randint(args.rows, (BATCH,))
            optimizer.zero_grad()
            F.cross_entropy(model(words), words).backward()
            optimizer.step()
            took.append(time.perf_counter() - begin)
        return statistics.median(took)

    runs = {parts: started(parts) for parts in PARTS}
    for run in runs.values():
        steps(*run)  # not counted
    took: dict[int, list[float]] = {parts: [] for parts in PARTS}
    for _ in range(args.blocks):
        for parts, run in runs.items():
            took[parts].append(steps(*run))
    if agmerge.rank() == 0:
        send_result(took)
    agmerge.shutdown()


def main() -> None:
    """Launch the workers, report."""
    args = arguments()
    if args.worker:
        worker(args)
        return
    from lab.network import Network, named

    with Network(2, args.rate) as network:
        command = [sys.executable, "-W", "ignore", __file__, "--worker", "--rows", str(args.rows)]
        command += ["--density", str(args.density), "--blocks", str(args.blocks)]
        output = network.run(command, timeout=600)[0]
    found = received_results(output)[0]
    print(f"{args.rows * WIDTH / 1e6:.1f} million elements, density {args.density}, {named(args.rate, 'duplex')}")
    for parts, took in found.items():
        ratios = sorted(a / b for a, b in zip(took, found["1"], strict=True))
        ratio = f"median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"  {parts} parts: {1e3 * statistics.median(took):7.1f} ms a step; of what 1 part takes: {ratio}")


if __name__ == "__main__":
    main()
