# SPDX-License-Identifier: Apache-2.0
"""Two workers under Horovod; rank 1 ends while rank 0 is busy. ``python ending.py starting|stuck``.

``starting``: rank 0 starts one call after the other, and must be told. ``stuck``: it is in code that lets no other
thread of Python run, Horovod's waits for it to free a tensor, and rank 1, which fails, must not wait for both.
"""

from __future__ import annotations

import ctypes
import sys
import time

import horovod.torch as hvd
import torch

import agmerge
from agmerge.runtime import workers

LEAVES = 1.0  # seconds: by then thousands of calls are under way
STUCK = 300  # seconds: longer than any launch may last

agmerge.init()
if agmerge.rank() == 1:
    time.sleep(LEAVES)
    if sys.argv[1] == "stuck":
        raise FloatingPointError("of its own")
    sys.exit(0)
if sys.argv[1] == "stuck":
    hvd.allgather_async(torch.ones(4), name="its own")
    ctypes.PyDLL(None).sleep(STUCK)  # with Python's lock
handles = []
while True:
    number = len(handles)
    handles.append(workers.world().all_gather(torch.empty(8), torch.ones(4), f"call {number}"))
    handles.append(workers.world().all_reduce(torch.ones(4), f"sum {number}"))
