# SPDX-License-Identifier: Apache-2.0
"""List the exchanges by name, and make all of them from one context."""

from __future__ import annotations

import pytest
import torch
from support import agreed, mlp, on_ranks, seeded, train, wrap
from support.exchanges import Quiet, context

import sparsifiers
from agmerge import testing
from agmerge.exchanges.table import DENSE, EXCHANGES
from agmerge.ops import Average, Sum
from sparsifiers import Selection
from sparsifiers.base import Request

SMALL = seeded(mlp, 3)


class Head(sparsifiers.Sparsifier):
    """Select the first k coordinates, on every rank alike."""

    name = "head"
    same_on_all_ranks = True

    def _select(self, vector: torch.Tensor, request: Request) -> Selection:
        return Selection(torch.arange(request.k, dtype=torch.int32), request.k)


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_is_made_from_a_context_and_trains_by_its_name(name: str) -> None:
    made = testing.run(2, lambda rank: EXCHANGES[name](context(Quiet())))
    assert all(one.sparse and type(one) is EXCHANGES[name] for one in made)
    agreed(
        on_ranks(2, SMALL, lambda rank, model: train(model, wrap(model, exchange=name, density=0.1), rank, range(2)))
    )


def test_a_sum_counts_the_workers_whose_gradients_it_has() -> None:
    def scales(rank: int) -> list[float]:
        some = [{"op": Average}, {"op": Average, "gradients": 6}, {"op": Sum, "gradients": 6}]
        return [DENSE(context(Quiet(), **options)).scale for options in some]

    assert testing.run(2, scales) == [[1 / 2, 1 / 6, 1.0]] * 2


@pytest.mark.parametrize("compression, votes", [(Head(0.1), False), (sparsifiers.get("topk", 0.1), True)], ids=str)
def test_any_sparsifier_that_says_so_is_not_voted_on(compression: sparsifiers.Sparsifier, votes: bool) -> None:
    def body(rank: int, model: torch.nn.Module) -> set[str]:
        train(model, wrap(model, compression=compression, exchange="masked"), rank, range(2))
        return {kind for kind, name, _ in testing.calls() if name == "buffer 0"}

    assert agreed(on_ranks(2, SMALL, body)) == ({"all_gather"} if votes else {"all_reduce"})
