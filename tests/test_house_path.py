# SPDX-License-Identifier: Apache-2.0
"""A gradient's way through the house: how many files it visits, from its hook to its message.

A newcomer who follows one gradient opens these files. A change that lowers a figure lowers its limit, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_path import PACKAGES, Way

import agmerge
from agmerge import testing
from tests.support import seeded

ROOT = Path(agmerge.__file__).parents[1]
FOLDERS = tuple(f"{ROOT / package}/" for package in PACKAGES)
TENSORS, STEPS = 2, 3
# For each compressor, the most files and changes of file in the hook of the last tensor, whose message leaves. The rank
# that arrives last at a collective of the in-memory group does its work, so the other rank's way counts.
LIMITS = {"topk": (20, 43), "eden-2": (15, 34), "none": (13, 26)}


def model() -> torch.nn.Sequential:
    """Return two layers of one weight each, which are merge buffers of their own."""
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(TENSORS)))


def way_of_a_gradient(compression: str, options: dict[str, Any]) -> Way:
    """Return what a rank calls in the last hook of the third step, in which a message leaves."""
    copies = [seeded(model) for _ in range(2)]

    def body(rank: int) -> Way:
        layers = copies[rank]
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), lr=0.1),
            layers.named_parameters(),
            compression=compression,
            merging="layerwise",
            **options,
        )
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = layers(torch.ones(8, 256)).square().mean()
            with Way(FOLDERS, hook=TENSORS) as way:
                loss.backward()
            optimizer.step()
        return way

    return min(testing.run(2, body), key=lambda way: (way.files, way.changes))


@pytest.mark.parametrize("compression", LIMITS)
def test_a_gradient_meets_few_files_on_its_way_to_the_message(compression: str) -> None:
    way = way_of_a_gradient(compression, {"density": 0.01, "exchange": "sparse"} if compression == "topk" else {})
    assert way.calls, "the hook calls nothing of the library: the test watches the wrong frame"
    most_files, most_changes = LIMITS[compression]
    files = sorted({Path(file).relative_to(ROOT).as_posix() for file, _ in way.calls})
    seen = (
        f"{way.files} files (at most {most_files}) and {way.changes} changes of file (at most {most_changes}): "
        + ", ".join(files)
    )
    assert way.files <= most_files and way.changes <= most_changes, seen
