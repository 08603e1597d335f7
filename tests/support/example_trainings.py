# SPDX-License-Identifier: Apache-2.0
"""Trainings of ``examples/train.py`` among ranks in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import train
from jobs.base import Job, Settings, Task
from training import assemble
from training import options as train_options
from training.stopping import Stopping

from agmerge.testing import run

LOCK, SEED = threading.Lock(), torch.manual_seed


class Locked(Job):
    """Make networks of the same weights in every run, though ranks are threads and share torch's generator."""

    def make(self, settings: Settings) -> Task:
        with LOCK:
            SEED(settings.seed)
            return super().make(settings)


@pytest.fixture(autouse=True)
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = jobs.get
    monkeypatch.setattr(assemble.jobs, "get", lambda name: Locked(**vars(real(name))))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)  # in the middle of what another rank draws
    torch.set_num_threads(1)
    yield


def results(line: str, folder: Path, workers: int = 2) -> list[dict[str, Any]]:
    """What every worker returns of ``train.py line``; logs lie in ``folder/log``."""
    args = train_options.arguments(
        [*line.split(), "--log-dir", str(folder), "--run-name", "log", "--merging", "threshold"]
    )
    return run(workers, lambda rank: train.train(args, Stopping()))


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log" / "log.jsonl").read_text().splitlines()]


SAME = ("accuracy", "loss", "perplexity", "bytes_sent", "residual_norm", "step", "epoch", "best")


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """What is the same to the bit where a run is."""
    return {name: found[name] for name in SAME if name in found}
