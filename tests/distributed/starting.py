# SPDX-License-Identifier: Apache-2.0
"""One worker's ``init()``, and what became of it: a line of JSON, the last that it prints.

With the argument ``children``: two workers, as children of multiprocessing, of which one raises; the other says so.
With ``stays``: a worker that has joined others ends once its standard input does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time

import torch

import agmerge


def worker(fails: bool = False) -> bool:
    """Join the others, add up, say so; return whether that went well."""
    begun = time.monotonic()
    try:
        agmerge.init()
        if fails:
            raise FileNotFoundError("data/train.bin: no such file")
        total = agmerge.allreduce(torch.tensor([1.0 + agmerge.rank()]), op=agmerge.Sum)
        place = [agmerge.rank(), agmerge.size(), agmerge.local_rank(), agmerge.local_size()]
        said = {"place": place, "backend": agmerge.backend_name(), "sum": total.item()}
    except agmerge.AGMergeError as error:
        said = {"error": type(error).__name__, "text": str(error), "missing": getattr(error, "missing", ())}
    print(json.dumps({**said, "took": time.monotonic() - begun}), flush=True)
    return "error" not in said


def child(rank: int) -> None:
    """One of two workers on this machine."""
    os.environ["RANK"] = str(rank)
    worker(fails=rank == 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["children"]:
        children = [multiprocessing.get_context("fork").Process(target=child, args=(rank,)) for rank in (0, 1)]
        for one in children:
            one.start()
        for one in children:
            one.join()
    else:
        has_joined = worker()
        if has_joined and sys.argv[1:] == ["stays"]:
            sys.stdin.read()
