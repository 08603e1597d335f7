# SPDX-License-Identifier: Apache-2.0
"""A worker of ``going_on.py`` with its tensors on a pretended device: they go through the host's memory."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
from pretend import streams  # noqa: E402
from pretend.copies import LateCopies  # noqa: E402
from pretend.device import Device  # noqa: E402

from agmerge.backends import staging  # noqa: E402
from agmerge.backends.staging import Line, StagedBackend  # noqa: E402

if __name__ == "__main__":
    copies = LateCopies()
    line = Line("torch", copies)
    staging.staged = lambda backend, _=None: StagedBackend(backend, line, range(backend.size))
    Device(is_watched=False).use()
    torch.autograd.set_multithreading_enabled(False)  # hooks come on this thread, which has the device
    with copies.running(os.getpid()), streams.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(HERE / "going_on.py"), run_name="__main__")
