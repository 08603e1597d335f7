# SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder share: scenarios that run one after the other in one launch of two workers.

``python trainer_scenarios.py FOLDER [SCENARIO ...]`` under torchrun: every rank writes what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TESTS = Path(__file__).parents[2]  # which has folders of the library's names
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS.parent / "examples")]
from support import CLASSES, WIDTH, digest  # noqa: E402

import agmerge  # noqa: E402
from agmerge.planning import cost_probe  # noqa: E402

Scenario = Callable[[Path], Any]

SMALL = {"merging": "threshold", "check_every": 1}  # nothing is measured, so plans are alike in every run
TOPK: dict[str, Any] = {"compression": "topk", "density": 0.05, "exchange": "sparse", **SMALL}
DENSE: dict[str, Any] = {"compression": "none", "dense_sum": "native", **SMALL}
UPDATES: dict[str, Any] = {"sync": "updates", "density": 0.05, "exchange": "sparse", **SMALL}


def two(model: nn.Module, several: bool = True) -> Any:
    """AdamW for the matrices and another one for what is none; or, in place of both, one with the groups of both."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    groups = [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.1},
        {"params": [parameter for parameter in model.parameters() if parameter.dim() != 2], "lr": 0.01},
    ]
    return [torch.optim.AdamW([group]) for group in groups] if several else torch.optim.AdamW(groups)


def lose(file: Path) -> None:
    """Remove a file when all ranks are through with it, and before any of them goes on."""
    agmerge.barrier()
    if agmerge.rank() == 0:
        file.unlink()
    agmerge.barrier()


class Scenarios:
    """Collect functions by name, and run them on every rank, each with a folder of its own that all ranks share."""

    def __init__(self) -> None:
        self._known: dict[str, Scenario] = {}
        self._asked_for: set[str] = set()  # that run only where they are named

    def __call__(self, fn: Scenario) -> Scenario:
        """Run ``fn`` under its name."""
        self._known[fn.__name__] = fn
        return fn

    def if_named(self, fn: Scenario) -> Scenario:
        """Run ``fn`` under its name, if it is named."""
        self._asked_for.add(fn.__name__)
        return self(fn)

    def main(self, folder: Path, *names: str) -> None:
        """Run those of these names, all but those that are to be named if there are none; write what they return."""
        torch.set_num_threads(1)
        cost_probe.SECONDS, cost_probe.VISITS = 0.1, 1  # plans need not be good ones
        rank = os.environ["RANK"]
        for name in names or [name for name in self._known if name not in self._asked_for]:
            own = folder / f"{name}.out"
            own.mkdir(exist_ok=True)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                found = self._known[name](own)
            texts = [
                str(one.message) for one in said if "agmerge" in str(one.filename) or "agmerge" in str(one.message)
            ]
            (folder / f"{name}.{rank}.json").write_text(json.dumps({"found": found, "warnings": texts}))
            agmerge.barrier()


def bytes_on_the_wire() -> int | None:
    """Bytes that have left this network namespace's loopback device; None unless the namespace is this launch's own."""
    if os.environ.get("AGMERGE_TEST_OWN_NETWORK") != "1":
        return None
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def waiting(compressed: Any) -> dict[str, list[float]]:
    """Of what is still to come, as the mean over ranks, by parameter: the sum and the norm."""
    members, unsent, found = compressed._reducer.members, compressed._reducer.replica.unsent(), {}
    for parameter in members.name_all():  # a rank that is new may have none
        name = members.name_of(parameter)
        mean = agmerge.allreduce(unsent.get(name, torch.zeros_like(parameter)).detach().double())
        found[name] = [float(mean.sum()), float(mean.norm())]
    return found


def refused(call: Callable[[], Any]) -> str:
    """What the error says that ``call`` raises; empty if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def layers() -> nn.Sequential:
    """Three layers, of which most is in the sparse tensor class."""
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, CLASSES))


def bits(model: nn.Module | Iterable[Tensor]) -> str:
    """A digest of parameters."""
    return digest(model)
