# SPDX-License-Identifier: Apache-2.0
"""What a step asks of a GPU, without one: kernels, bytes and host waits, counted on a pretended device.

    python benchmarks/launches.py --tensors 161 --messages 17 --workers 8 --compression topk --json

Ranks are threads, and their tensors say that they lie on a device while the host computes (``tests/pretend``). The
figures are of rank 0 in one step after the first ones (races: in all of them), and say nothing of time. What the
script's own model and optimizer ask for is not counted.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch
from torch import Tensor, nn

# isort: split

from pretend import fused
from pretend.books import COLLECTIVE, ELSEWHERE, HOOK, SYNCHRONIZE, Books
from pretend.clocks import Race
from pretend.device import Device
from pretend.training import needs_own_thread, on_devices

import agmerge
import merging

WIDTH = 64  # of every layer: its matrix is selected from, and its two vectors are sent whole
WARM = 2  # steps that are not counted, at least: ranks agree, compare replicas and allocate


class Layers(nn.Module):
    """``tensors`` parameters: matrices, and after each but the last a factor and a summand, as normalisations have."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        kinds = [(WIDTH, WIDTH), (WIDTH,), (WIDTH,)]
        self.weights = nn.ParameterList(torch.randn(kinds[i % 3]) / WIDTH**0.5 for i in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight if weight.dim() == 2 else x * (1 + weight)
        return x


def even(tensors: int, messages: int) -> merging.Plan:
    """So many merge buffers of as many tensors each as can be."""
    bounds = [tensors * i // messages for i in range(messages + 1)]
    return merging.Plan(tuple(stop - start for start, stop in zip(bounds, bounds[1:], strict=False)))


def count(arguments: argparse.Namespace) -> tuple[Books, int]:
    """Rank 0's books of one step, and the elements of the model."""
    torch.manual_seed(0)
    model, inputs = Layers(arguments.tensors), torch.randn(arguments.workers, 4, WIDTH)

    def body(rank: int, device: Device) -> Books:
        own = Layers(arguments.tensors)
        own.load_state_dict(model.state_dict())
        own = own.to("pretend")
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(own.parameters(), lr=0.01),
            own.named_parameters(),
            compression=arguments.compression,
            exchange=arguments.exchange,
            density=arguments.density,
            merging=even(arguments.tensors, arguments.messages),
        )
        races: list[Race] = []
        for _ in range(arguments.step + 1):
            races += device.books.taken().races
            optimizer.zero_grad()
            own(inputs[rank].to("pretend")).square().mean().backward()
            optimizer.step()
        device.books.races[:0] = races  # of all steps
        return device.books

    own_thread = needs_own_thread(arguments.exchange, arguments.compression)
    with nullcontext() if arguments.torch else fused.installed():
        books = on_devices(arguments.workers, body, own_thread=own_thread, watched={0})[0]
    return books, sum(weight.numel() for weight in model.parameters())


def figures(books: Books, elements: int) -> dict[str, float]:
    """The line that is printed."""
    messages = sum(launch.operation == COLLECTIVE for launch in books.launches)
    return {
        "host_waits_in_hooks": len(books.waits_in(HOOK)),
        "host_waits_in_synchronize": len(books.waits_in(SYNCHRONIZE)),
        "host_waits_elsewhere": len(books.waits_in(ELSEWHERE)),
        "messages": messages,
        "launches": books.count(),
        "launches_in_hooks": books.count(HOOK),
        "launches_per_message": round(books.count() / max(messages, 1), 1),
        "bytes_per_element": round(books.bytes() / elements, 1),
        "races": len(books.races),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Parse the command line (``given``: in its place), count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=161, help="parameters of the model (161: as ResNet-50)")
    parser.add_argument("--messages", type=int, default=17, help="merge buffers")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--compression", default="topk")
    parser.add_argument("--exchange", default="sparse")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--step", type=int, default=WARM, help="which is counted, from 0 on: adtopk's differ by turns")
    parser.add_argument("--torch", action="store_true", help="count torch's operations, as where Triton is missing")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, not which lines ask for what")
    arguments = parser.parse_args(given)
    if arguments.step < WARM:
        parser.error(f"--step is {arguments.step}; the first {WARM} are not as others are")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        books, elements = count(arguments)
    line = figures(books, elements)
    if arguments.json:
        print(json.dumps(line))
        return
    for name, value in line.items():
        print(f"{name:30}{value:>12}")
    launches: Counter[str] = Counter()
    for launch in books.launches:
        launches[f"{launch.place.phase:12} {launch.place.line}"] += launch.kernels if launch.place.line else 0
    for title, counter in (
        ("host waits", Counter(f"{wait.place.phase:12} {wait.place.line} ({wait.what})" for wait in books.waits_in())),
        ("launches", launches),
    ):
        print(f"\n{title}, by phase and line of the library")
        for place, number in counter.most_common(40):
            print(f"{number:8}  {place}")


if __name__ == "__main__":
    main()
