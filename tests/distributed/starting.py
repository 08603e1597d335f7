"""One worker's ``init()``, and what became of it: a line of JSON, the last that it prints."""

from __future__ import annotations

import json
import time

import torch

import agmerge

begun = time.monotonic()
try:
    agmerge.init()
    total = agmerge.allreduce(torch.tensor([1.0 + agmerge.rank()]), op=agmerge.Sum)
    place = [agmerge.rank(), agmerge.size(), agmerge.local_rank(), agmerge.local_size()]
    said = {"place": place, "backend": agmerge.backend_name(), "sum": total.item()}
except agmerge.NoAnswer as error:
    said = {"error": type(error).__name__, "text": str(error), "missing": error.missing}
print(json.dumps({**said, "took": time.monotonic() - begun}), flush=True)
