# SPDX-License-Identifier: Apache-2.0
"""A selection that is made when somebody wants it, and where."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sparsifiers import gpu
from sparsifiers.deferred import Deferred

CPU = torch.device("cpu")
N, K = 5000, 40


def deferred(work: torch.Tensor) -> Deferred:
    return Deferred(K, CPU, partial(gpu.select_largest, work, K, gpu.Scratch(N, CPU), exact=True))


def place() -> tuple[gpu.Slots, gpu.IndexSection]:
    layout = gpu.IndexLayout(N, K, 6)
    return gpu.Slots.of(K, CPU), gpu.IndexSection(layout, torch.zeros(layout.words, dtype=torch.int32))


def test_who_looks_at_it_has_it_made_and_the_vector_stays() -> None:
    work = torch.randn(N)
    before, offer = work.clone(), deferred(work)
    assert (offer.capacity, offer.count) == (K, K)
    wanted = before.abs().topk(K).indices.sort().values
    assert torch.equal(offer.trimmed(), wanted) and torch.equal(offer.values, before[wanted])
    assert offer.indices is offer.indices and torch.equal(work, before)
    slots, section = place()
    offer.write(slots, section, commit=True, momentum=None)  # it may still be sent
    assert torch.equal(slots.indices, offer.indices) and torch.equal(slots.values, offer.values)
    assert not work[wanted].any() and int((work != before).sum()) == K


def test_what_was_taken_off_cannot_be_looked_at() -> None:
    offer = deferred(torch.randn(N))
    offer.write(*place(), commit=True, momentum=None)
    with pytest.raises(RuntimeError, match="the selection is already written to a message"):
        print(offer.indices)
