# SPDX-License-Identifier: Apache-2.0
"""The language model of the job ``gpt-stdlib``; tests/test_example_train.py trains it."""

from __future__ import annotations

import gpt
import numpy as np
import pytest
import torch


def test_a_model_that_guesses_and_one_that_counts_have_their_losses() -> None:
    train, held_out = gpt.corpus()
    assert len(train) + len(held_out) == 3_000_000 and int(train.max()) < gpt.VOCABULARY
    assert 2.5 < gpt.unigram_loss(train, held_out) < 3.5
    torch.manual_seed(0)
    model = gpt.GPT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 817_920
    x, y = gpt.windows(train, torch.tensor([0, 100]), 64)
    assert torch.equal(x[0, 1:], y[0, :-1]) and model(x).shape == (2, 64, gpt.VOCABULARY)
    assert model.loss(x, y).item() == pytest.approx(np.log(gpt.VOCABULARY), abs=0.1)
    later = x.clone()
    later[:, 40:] = 0
    assert torch.allclose(model(x)[:, :40], model(later)[:, :40], atol=1e-5)  # it sees nothing of what comes
