# SPDX-License-Identifier: Apache-2.0
"""Print a digest of the weights that short trainings end with, to compare two versions of the library bit by bit.

    PYTHONPATH=. python tests/support/training_digests.py > after.txt      # and before.txt in a checkout of before
    diff before.txt after.txt                                              # nothing: no bit of any weight has changed

One line for each compressor and number of ranks. Ranks are threads of one process, and arrive in random order. Plans do
not depend on times. Digests differ between processors, so compare on one machine.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from typing import Any

import torch
from torch import nn

import agmerge
from agmerge import testing

STEPS, WIDTH = 8, 64
RANKS = (2, 3)
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"compression": "none"},
    "fp16": {"compression": "fp16"},
    "topk": {"compression": "topk", "density": 0.05, "exchange": "sparse"},
    "dgc": {"compression": "dgc", "density": 0.05, "exchange": "sparse"},
    "eden-2": {"compression": "eden-2"},
    "int8": {"compression": "int8"},
    "powersgd": {"compression": "powersgd", "rank": 2, "exchange": "sparse"},
    "oktopk": {"compression": "topk", "density": 0.05, "exchange": "oktopk"},
    "updates": {"compression": "topk", "density": 0.05, "exchange": "sparse", "sync": "updates"},
}


def model() -> nn.Sequential:
    """Return three layers with matrices, which are compressed, and biases, which are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Tanh(), nn.Linear(96, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))


def digest(options: dict[str, Any], ranks: int) -> str:
    """Return a digest of all weights of all ranks after some steps, 16 hexadecimal digits."""
    copies = [model() for _ in range(ranks)]

    def body(rank: int) -> bytes:
        layers = copies[rank]
        inner = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
        optimizer = agmerge.DistributedOptimizer(inner, layers.named_parameters(), merging="threshold", **options)
        source = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            x = torch.randn(16, WIDTH, generator=source)
            y = torch.randint(10, (16,), generator=source)
            optimizer.zero_grad()
            nn.functional.cross_entropy(layers(x), y).backward()
            optimizer.step()
        return b"".join(parameter.detach().numpy().tobytes() for parameter in layers.parameters())

    found = testing.run(ranks, body, inject=testing.jitter(ranks))
    return hashlib.sha256(b"".join(found)).hexdigest()[:16]


def main() -> None:
    """Print all digests."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, options in SETTINGS.items():
        for ranks in RANKS:
            sys.stdout.write(f"{name} {ranks} {digest(options, ranks)}\n")


if __name__ == "__main__":
    main()
