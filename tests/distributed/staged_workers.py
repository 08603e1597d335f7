# SPDX-License-Identifier: Apache-2.0
"""Real workers whose tensors are on a pretended device, run by a launcher: ``python staged_workers.py FOLDER``.

Every rank writes what collectives gave and how a model trained on the device and on the host: they must be the same.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

TESTS = Path(__file__).parents[1]  # has folders of the library's names, so that the library comes first
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "agmerge" / "backends")]
from pretend import streams  # noqa: E402
from pretend.copies import LateCopies  # noqa: E402
from pretend.device import Device  # noqa: E402
from pretend.tensors import DeviceTensor, put  # noqa: E402
from support import batch, digest, mlp, seeded, sgd  # noqa: E402
from test_staging import every_collective  # noqa: E402

import agmerge  # noqa: E402
from agmerge.backends import staging  # noqa: E402
from agmerge.backends.horovod import HorovodBackend  # noqa: E402
from agmerge.backends.staging import Line, StagedBackend  # noqa: E402
from agmerge.runtime import workers  # noqa: E402

STEPS = 4
OPTIONS = {"compression": "topk", "density": 0.1, "exchange": "sparse", "merging": "layerwise"}


def trained(model: nn.Module, place: str) -> list[str]:
    """Train a copy of ``model`` at ``place``; its digest after each step."""
    model = copy.deepcopy(model).to(place)
    optimizer = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **OPTIONS)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (one.to(place) for one in batch(agmerge.rank(), step))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append(digest([parameter.detach().cpu() for parameter in model.parameters()]))
    optimizer.close()
    return seen


def into_own_output() -> list[int]:
    """What Horovod's all-gather writes into an output that was handed in, and nowhere else; as on a GPU."""
    import horovod.torch as hvd

    backend = HorovodBackend(hvd, None, "own output")
    out, own = torch.zeros(3 * backend.size, dtype=torch.uint8), torch.full((3,), 1 + backend.rank, dtype=torch.uint8)
    place = out.data_ptr()
    for turn in range(3):
        out.zero_()
        handle = backend.gather_into(out.detach(), own.detach(), f"gather {turn}")
        handle.wait(30)
    assert out.data_ptr() == place and out.shape == (3 * backend.size,)
    return out.tolist()


def main() -> None:
    """Find out, and write it."""
    copies, device = LateCopies(), Device()
    staging.staged = lambda backend: StagedBackend(backend, Line(backend.name, copies), range(backend.size))
    agmerge.init()
    device.use()
    model = seeded(mlp, 0)
    with copies.running(agmerge.rank()), streams.installed(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given = every_collective(workers.world(), lambda tensor: put(tensor, device))
        expected = every_collective(workers.world(), lambda tensor: tensor)
        equal = [torch.equal(getattr(one, "host", one), two) for one, two in zip(given, expected, strict=True)]
        found = {
            "backend": agmerge.backend_name(),
            "away": sum(isinstance(one, DeviceTensor) for one in given),
            "equal": equal,
            "on the device": trained(model, "pretend"),
            "on the host": trained(model, "cpu"),
            "own output": into_own_output() if agmerge.backend_name() == "horovod" else [1, 1, 1, 2, 2, 2],
            "said": [str(one.message) for one in said if "no NCCL" in str(one.message)],
        }
    Path(sys.argv[1], f"found.{agmerge.rank()}.json").write_text(json.dumps(found))
    agmerge.shutdown()


if __name__ == "__main__":
    main()
