# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, over one that exchanges eight bytes: the work of this library, function by function.

    python benchmarks/step_profile.py                       # GPT-2, topk at 1 %, 200 Mbit/s, two workers
    python benchmarks/step_profile.py --rate 1gbit --options "compression='dgc', wire='fp16'"

One process a worker trains two copies of the model in turn, one alone with an eight-byte all-gather a step, one with
this library. Clocks around functions count what is spent in each but not in those inside it: means of both ranks'
medians. What the clocks do not see is the last row but one: backward and update with other data in the caches, and the
network's threads on the same cores; with another exchange than the sparse one, that exchange too. Needs root (network
namespaces).
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.interleaved import KEEP
from lab.network import LINKS, named

STEPS, BLOCK, WARM = 120, 4, 60


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="where a step's time goes")
    parser.add_argument("--model", default="gpt2", choices=("gpt2", "resnet50", "cnn"))
    parser.add_argument("--rate", default="200mbit", help="as tc writes it, or none")
    parser.add_argument("--link", choices=LINKS, default="duplex", help="what has the rate, see network.py")
    parser.add_argument("--options", default="compression='topk', exchange='sparse'", help="of DistributedOptimizer")
    return parser.parse_args()


class Clocks:
    """Seconds in functions, without those in watched functions that they call."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def watch(self, owner: Any, name: str, row: str) -> None:
        """Count ``owner.name`` in ``row``."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*given: Any, **more: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return call(*given, **more)
            finally:
                took = time.perf_counter() - start
                self.spent[row] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        setattr(owner, name, timed)


def watched() -> Clocks:
    """Clocks on what one step consists of."""
    from agmerge.backends.base import Handle
    from agmerge.backends.torch import TorchBackend
    from agmerge.engine.grad_hooks import BackwardPasses
    from agmerge.engine.reducer import Reducer
    from agmerge.exchanges import SparseExchange
    from agmerge.step.round import Round
    from agmerge.tensors.arena import Arena

    clocks = Clocks()
    for owner, name, row in (
        (BackwardPasses, "on_gradient", "hooks: their own work"),
        (Arena, "accumulate", "hooks: residual + gradient, and move"),
        (Arena, "move_to_update", "hooks: others move to where their updates will be"),
        (Round, "_select", "select"),
        (SparseExchange, "start", "message: gather, encode, commit, checksum"),
        (TorchBackend, "all_gather", "message: hand over"),
        (Reducer, "synchronize", "step(): its own work"),
        (Reducer, "end_step", "step(): its own work"),
        (Handle, "wait", "step(): wait for messages"),
        (SparseExchange, "wait", "step(): check messages"),
        (SparseExchange, "finish", "step(): decode, zero, add up"),
    ):
        clocks.watch(owner, name, row)
    return clocks


def worker(args: argparse.Namespace) -> None:
    """One rank: both in turn; rank 0 prints the table of both."""
    import torch
    import torch.distributed as dist
    from speed import contenders

    torch.set_num_threads(1)
    clocks, options = watched(), eval(f"dict({args.options})")  # what the user has typed, for this process

    def warm(kind: Callable[..., Any], **options: Any) -> Callable[[], None]:
        work = contenders.workload(args.model)
        inner = torch.optim.SGD(work.model.parameters(), lr=1e-3, momentum=contenders.MOMENTUM)
        _, step, _ = kind(work, inner, **options)
        for _ in range(WARM):
            step()
        return step  # type: ignore[no-any-return]

    floor, ours = warm(contenders.floor), warm(contenders.agmerge, **options)
    took: dict[Any, list[float]] = {floor: [], ours: []}
    rows: dict[str, list[float]] = defaultdict(list)
    for number in range(2 * STEPS // BLOCK):
        step = (floor, ours)[number % 2]
        dist.barrier()
        for index in range(BLOCK):
            clocks.spent.clear()
            start = time.perf_counter()
            step()
            if index:  # the first finds the caches as the other has left them
                took[step].append(time.perf_counter() - start)
            for row in clocks.spent if step is ours and index else ():
                rows[row].append(clocks.spent[row])
    told: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    medians = {"floor": took[floor], **rows, "a step": took[ours]}
    dist.all_gather_object(told, {row: 1e3 * statistics.median(seconds) for row, seconds in medians.items()})
    found = {row: statistics.fmean(one.get(row, 0.0) for one in told) for row in medians}
    if dist.get_rank() == 0:
        rest = 2 * found["a step"] - sum(found.values())
        print(f"{args.model}, {named(args.rate, args.link)}, {args.options}\n\n| | ms |\n|---|---|")
        for row, spent in found.items():
            if row == "a step":
                print(f"| everything else | {rest:.1f} |")
            print(f"| {row} | {spent:.1f} |")


def main() -> None:
    """Start two workers on a shaped link."""
    args = arguments()
    if "RANK" in os.environ:
        worker(args)
        return
    with LINKS[args.link](2, None if args.rate == "none" else args.rate) as network:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *sys.argv[1:]]
        print(network.run(command, timeout=600, **KEEP)[0], end="")


if __name__ == "__main__":
    main()
