# SPDX-License-Identifier: Apache-2.0
"""``fragments=``: merge buffers take turns, also where there are fewer of them than fragments."""

from __future__ import annotations

from typing import Any

import pytest
from support import agreed, backward, digest, mlp, on_ranks, seeded, sgd, train
from torch import nn

import agmerge


def run(model: nn.Module, **options: Any) -> list[tuple[str, int, int]]:
    """Return, from each rank after eight steps, the digest of the shared parameters, merge buffers, and exchanges."""

    def body(rank: int, model: nn.Module) -> tuple[str, int, int]:
        selection: dict[str, Any] = {"exchange": "sparse", "wire": "int4"}  # with quantizers all buffers have all turns
        optimizer = agmerge.LocalOptimizer(sgd(model), model.named_parameters(), every=4, **selection, **options)
        train(model, optimizer, rank, range(8), backward)
        stats = optimizer.stats()
        with optimizer.shared():
            return digest(model), stats["buffers"], stats["exchanges"]

    return on_ranks(2, model, body)


@pytest.mark.parametrize("fragments", [2, 3, 4])
def test_fragments_have_merge_buffers_to_take_turns(fragments: int) -> None:
    _, buffers, exchanges = agreed(run(seeded(mlp), fragments=fragments))
    assert 2 <= buffers <= fragments and exchanges == 2 * buffers


def test_fragments_without_a_merge_buffer_exchange_nothing() -> None:
    _, buffers, exchanges = agreed(run(seeded(mlp), fragments=4, merging="single"))
    assert (buffers, exchanges) == (1, 2)
