# SPDX-License-Identifier: Apache-2.0
"""The classes that docs/extend.md shows, which keep the contract as they stand there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import agmerge
import sparsifiers
from agmerge import testing
from sparsifiers import Request, Selection, catalogue, conformance

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"
BLOCKS = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "conformance" in block]


@pytest.mark.parametrize(("number", "name"), [(0, "test_plain_topk"), (1, "test_coarse")])
def test_a_class_of_your_own_keeps_the_contract_as_it_is_shown(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"shown_{number}.py").write_text(BLOCKS[number])
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (catalogue._sparsifiers, catalogue._quantisers):  # what is registered goes with the test
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    getattr(importlib.import_module(f"shown_{number}"), name)()


def test_no_other_class_is_shown() -> None:
    assert len(BLOCKS) == 2


class Blocks(sparsifiers.Sparsifier):
    """Whole blocks of 8 with the largest norms: at most k coordinates, mostly fewer."""

    name = "blocks"
    gives_values = False

    def _select(self, vector: Tensor, request: Request) -> Selection:
        if request.k < 40 or vector.numel() % 8:
            indices = vector.abs().topk(request.k).indices.sort().values.int()
        else:
            best = vector.view(-1, 8).square().sum(1).topk(request.k // 8).indices.sort().values
            indices = (best[:, None] * 8 + torch.arange(8)).flatten().int()
        return Selection(indices, len(indices), vector[indices.long()] if self.gives_values else None)


def test_one_may_send_fewer_than_k() -> None:
    """As the page says: the rest of the message is padding."""
    conformance.check(Blocks)
    given = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    chosen = Blocks(0.1).select(given, k=45)
    assert (len(chosen.indices), chosen.count, len(chosen.trimmed())) == (45, 40, 40)
    with_values = type("WithValues", (Blocks,), {"gives_values": True})(0.1).select(given, k=45)
    assert with_values.values is not None
    assert torch.equal(with_values.values[:40], given[with_values.trimmed()])
    assert not with_values.values[40:].any()


def test_training_with_fewer_than_k_loses_nothing() -> None:
    def body(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.nn.Parameter(torch.zeros(40, 40))
        inner = torch.optim.SGD([weight], lr=1.0)
        optimizer = agmerge.DistributedOptimizer(inner, [("w", weight)], compression=Blocks(0.03), exchange="sparse")
        given = torch.randn(40, 40, generator=torch.Generator().manual_seed(rank))
        (weight * given).sum().backward()
        optimizer.step()
        return given, -weight.detach(), testing.inspect(optimizer).residuals["w"].view(40, 40)

    given, updates, left = (torch.stack(part) for part in zip(*testing.run(2, body), strict=True))
    assert torch.equal(updates[0], updates[1])
    assert 0 < int(updates[0].count_nonzero()) <= 2 * 48
    torch.testing.assert_close(updates[0] + left.mean(0), given.mean(0))
