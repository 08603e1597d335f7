# SPDX-License-Identifier: Apache-2.0
"""Value codecs in training: replicas, figures, and what changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
from support import agreed, mlp, on_ranks, residuals, seeded, train, wrap
from torch import nn

from agmerge.exchanges.message import VALUES

MODEL = seeded(mlp)


def run(size: int, **options: Any) -> tuple[list[str], dict[str, Any]]:
    """Digests after every step, the same on all ranks; rank 0's figures."""
    figures: list[dict[str, Any]] = [{}] * size

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = wrap(model, compression="topk", density=0.05, exchange="sparse", **options)
        seen = train(model, optimizer, rank, range(5))
        figures[rank] = optimizer.stats()
        assert all(residual.isfinite().all() for residual in residuals(optimizer).values())
        return seen

    return agreed(on_ranks(size, MODEL, body)), figures[0]


@pytest.mark.parametrize("sparsify", ["ahead", "behind"])
@pytest.mark.parametrize("wire", ["auto", *VALUES])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_replicas_are_equal_and_every_byte_is_accounted_for(size: int, wire: str, sparsify: str) -> None:
    _, found = run(size, wire=wire, sparsify=sparsify, merging="layerwise")
    assert sum(found["wire"].values()) == found["bytes_sent"]
    (coded,) = (name for name in found["wire"] if "/" in name)
    assert coded.endswith("/fp32" if wire == "auto" else f"/{wire}")
    assert set(found["wire"]) <= {coded, "header", "plain"}


def test_smaller_values_are_smaller_messages_and_other_bits() -> None:
    runs = {wire: run(2, wire=wire) for wire in ("auto", "fp32", "bf16", "int8", "int4", "2bit", "sign")}
    assert runs["auto"][0] == runs["fp32"][0]
    sizes = [figures["bytes_sent"] for wire, (_, figures) in runs.items() if wire != "auto"]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 6
    assert len({tuple(seen) for seen, _ in runs.values()}) == 6
