# SPDX-License-Identifier: Apache-2.0
"""Selections measured in training."""

from __future__ import annotations

import pytest
import torch
from support import agreed, mlp, on_ranks, seeded, train, wrap
from torch import nn

MODEL = seeded(mlp)


@pytest.mark.parametrize("compression", ["topk", "adtopk-row"])
def test_selections_are_measured_on_request(compression: str) -> None:
    def body(rank: int, model: nn.Module) -> dict[str, float]:
        optimizer = wrap(model, compression=compression, density=0.05)
        train(model, optimizer, rank, range(2))
        assert "selection" not in optimizer.stats()
        optimizer.measure_selection()
        train(model, optimizer, rank, range(2, 8))
        found = optimizer.stats()["selection"]
        optimizer.measure_selection(False)
        train(model, optimizer, rank, range(8, 9))
        assert "selection" not in optimizer.stats()
        return dict(found)

    for found in on_ranks(2, MODEL, body):
        assert found["observations"] == 6
        assert found["rows"] == 32 + 32  # the shorter axes of 48 x 32 and 32 x 48
        if compression == "topk":
            assert 0 < found["contraction_mean"] <= found["contraction_max"] <= 1 - 0.05
        else:
            assert found["row_coverage"] == found["rows_reached"] == 1.0 and found["longest_wait"] == 0


def test_measuring_changes_nothing() -> None:
    def run(measured: bool) -> list[str]:
        def body(rank: int, model: nn.Module) -> list[str]:
            optimizer = wrap(model)
            optimizer.measure_selection(measured)
            return train(model, optimizer, rank, range(5))

        return agreed(on_ranks(2, MODEL, body))

    assert run(True) == run(False)
    assert torch.is_grad_enabled()
