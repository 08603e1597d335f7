# SPDX-License-Identifier: Apache-2.0
"""One worker of a job over several hosts: joins the others, trains a small network with top-k, says what came of it.

Its last line is JSON: place, backend, host and a digest of the parameters; or the error of ``init()``, and after how
long it came.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time
import warnings

import torch

import agmerge

STEPS = 12


def train() -> str:
    """Train with the same data on every launcher; a digest of the parameters, which is every rank's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    optimizer = agmerge.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression="topk",
        density=0.05,
        exchange="sparse",
        merging="single",
    )
    agmerge.broadcast_parameters(model.state_dict())
    drawn = torch.Generator().manual_seed(agmerge.rank())
    for _ in range(STEPS):
        x, y = torch.randn(16, 64, generator=drawn), torch.randint(10, (16,), generator=drawn)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    """Say what became of this worker, in one write: the lines of several meet in one pipe."""
    begun = time.monotonic()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            agmerge.init()
        took = time.monotonic() - begun
        place = [agmerge.rank(), agmerge.size(), agmerge.local_rank(), agmerge.local_size()]
        said = {"place": place, "backend": agmerge.backend_name(), "told": [str(one.message) for one in told]}
        said |= {"took": took, "digest": train()}
    except (agmerge.AGMergeError, OSError) as error:
        said = {"error": type(error).__name__, "text": str(error), "took": time.monotonic() - begun}
    sys.stdout.write(json.dumps({**said, "host": socket.gethostname()}) + "\n")
    sys.stdout.flush()
    if "error" in said:
        sys.exit(1)


if __name__ == "__main__":
    main()
