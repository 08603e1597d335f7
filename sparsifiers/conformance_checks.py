# SPDX-License-Identifier: Apache-2.0
"""Helpers that the checks of the contract have in common."""

from __future__ import annotations

import random

import numpy as np
import torch


def require(holds: bool, what: str, where: str) -> None:
    """Raise AssertionError, with what was wrong and on which input, unless something holds."""
    if not holds:
        raise AssertionError(f"{what}: {where}")


def generators() -> tuple[object, ...]:
    """Return the states of the process's generators: torch's, Python's and numpy's."""
    name, words, *position = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(words).tobytes(), position
