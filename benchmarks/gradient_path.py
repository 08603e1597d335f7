# SPDX-License-Identifier: Apache-2.0
"""Count the library's calls on a gradient's way: from the hook to its message, and in ``step()``.

    torchrun --nproc_per_node=2 benchmarks/gradient_path.py [--list]

Two tensors in two merge buffers, top-k, the sparse exchange, the third step. Prints, on rank 0, how many functions of
agmerge, sparsifiers and merging are called, in how many files, and how often a call is in another file than the call
before it. ``--list`` shows each call. No times: they are in step_time.py.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import agmerge

PACKAGES = ("agmerge", "sparsifiers", "merging")
STEPS, TENSORS = 3, 2


class Way:
    """Watch what of the library is called, from now on or only inside the n-th hook.

    ``folders``: of the library's packages. ``hook``: which call that comes from outside of the library to watch, from
    1 on; None: all of them.
    """

    def __init__(self, folders: tuple[str, ...], hook: int | None = None) -> None:
        self._folders, self._hook = folders, hook
        self._outer: FrameType | None = None  # the frame by which the library was entered
        self._entered = 0  # how often
        self.calls: list[tuple[str, str]] = []  # file and function, in order

    def __enter__(self) -> Way:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def files(self) -> int:
        """Return in how many files of the library something was called."""
        return len({file for file, _ in self.calls})

    @property
    def changes(self) -> int:
        """Return how often a call is in another file than the call before it."""
        return sum(one[0] != other[0] for one, other in pairwise(self.calls))

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "return" and frame is self._outer:
            self._outer = None
        if event != "call" or not name.startswith(self._folders):
            return
        if self._outer is None:
            self._outer, self._entered = frame, self._entered + 1
        if self._hook in (None, self._entered):
            self.calls.append((name, frame.f_code.co_name))


def main() -> None:
    """Train three steps, and watch the third."""
    agmerge.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(TENSORS)))
    optimizer = agmerge.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression="topk",
        density=0.01,
        exchange="sparse",
        merging="layerwise",
    )
    root = Path(agmerge.__file__).parents[1]
    folders = tuple(f"{root / package}/" for package in PACKAGES)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 256)).square().mean()
        if step < STEPS - 1:
            loss.backward()
            optimizer.step()
            continue
        with Way(folders, hook=TENSORS) as hook:  # the round has begun with an earlier one
            loss.backward()
        with Way(folders) as in_step:
            optimizer.step()
    if agmerge.rank() == 0:
        for what, way in (("the hook of one tensor, whose message leaves", hook), ("step() for two messages", in_step)):
            print(f"{what}: {len(way.calls)} calls in {way.files} files, {way.changes} changes of file")
            if "--list" in sys.argv:
                print(*(f"    {Path(file).relative_to(root)}: {function}" for file, function in way.calls), sep="\n")


if __name__ == "__main__":
    main()
