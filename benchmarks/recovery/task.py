# SPDX-License-Identifier: Apache-2.0
"""What all workers train, and what they write down of it. Needs torch and transformers alone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch


def network(kind: str) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """Return a model with random weights, and a function that makes a batch and returns the model's loss on it.

    ``kind``: "gpt2", of 13.8 million parameters, or "mlp", of 0.3.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind == "mlp":
        layers = torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 256)
        return torch.nn.Sequential(*layers), lambda model: model(torch.randn(16, 256)).square().mean()
    from transformers import GPT2Config, GPT2LMHeadModel

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        ids = torch.randint(0, 256, (1, 64))
        loss: torch.Tensor = model(ids, labels=ids).loss
        return loss

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=384, n_layer=8, n_head=6)
    return GPT2LMHeadModel(config), loss_of


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all contenders."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


class Record:
    """Lines of a worker's file, one for each step that it has finished: seconds, step, workers, steps begun by it."""

    def __init__(self, folder: str) -> None:
        self._file = open(Path(folder, f"{os.getpid()}.lines"), "a", encoding="utf-8")  # noqa: SIM115
        self._begun = 0

    def begin(self) -> None:
        """Count a step that begins."""
        self._begun += 1

    def end(self, step: int, workers: int) -> None:
        """Write that the training has reached ``step``, with so many workers."""
        print(json.dumps([time.monotonic(), step, workers, self._begun]), file=self._file, flush=True)
