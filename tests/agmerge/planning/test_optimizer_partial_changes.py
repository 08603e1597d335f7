# SPDX-License-Identifier: Apache-2.0
"""dense="partial" over changes of membership and compressor, and over restarts: the cut only falls."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from support import agreed, on_ranks
from support.partial_models import MODEL, choosing, cut, sparse, train, wrapped
from torch import nn

import agmerge
from agmerge.planning.replanner import FIRST


def test_membership_and_compressor_may_change_and_the_cut_only_falls() -> None:
    """A tensor that has a residual never leaves the sparse tensor class, so nothing is stranded."""

    def body(rank: int, model: nn.Module) -> list[Any]:
        optimizer, found, classes = wrapped(model), [], set()

        def go(steps: range) -> None:
            train(model, optimizer, rank, steps)
            found.append(cut(optimizer)[0])
            now = sparse(optimizer)
            active = {name for name, p in model.named_parameters() if p.requires_grad}
            assert classes & active <= now
            classes.update(now)
            assert not active & {name for _, name in optimizer._reducer.exchange.agreed.carried.tensors}

        go(range(2))
        model[4].weight.requires_grad_(False)  # most of all elements: the budget shrinks
        go(range(2, 4))
        model[4].weight.requires_grad_(True)
        go(range(4, 6))
        optimizer.set_compressor("topk", density=0.5)
        go(range(6, 8))
        return found

    # Without the large one: 24576 elements, of whose budget half is 1228.
    assert agreed(on_ranks(2, MODEL, body)) == [1536, 1024, 1024, 1024]


def test_a_lower_density_has_a_smaller_cut() -> None:
    def body(rank: int, model: nn.Module) -> list[Any]:
        optimizer = wrapped(model)
        train(model, optimizer, rank, range(2))
        found = [cut(optimizer)]
        optimizer.set_compressor("adtopk", density=0.03)
        train(model, optimizer, rank, range(2, 4))
        return [*found, cut(optimizer), optimizer._reducer.exchange.agreed.carried.tensors]

    assert agreed(on_ranks(2, MODEL, body)) == [(1536, False), (1024, False), {}]


def test_ranks_that_differ_are_told() -> None:
    def body(rank: int, model: nn.Module) -> str:
        said = "dense='partial': by rule on rank 0; None on rank 1"
        with pytest.raises(agmerge.RankMismatchError, match=said) as told:
            wrapped(model, dense="partial" if rank == 0 else None)
        return str(told.value)

    agreed(on_ranks(2, MODEL, body))


# -- checkpoints ----------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_resumed_run_starts_with_the_settled_cut_and_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = choosing(1024, monkeypatch)
    half = FIRST + 3

    def body(rank: int, model: nn.Module) -> tuple[list[str], list[str], Any]:
        optimizer = wrapped(model, merging="agmerge", sparsify="ahead", dense_sum="ordered")
        train(model, optimizer, rank, range(half))
        twin, saved = copy.deepcopy(model), through_a_file(optimizer.state_dict())
        whole = train(model, optimizer, rank, range(half, half + 5))
        resumed = wrapped(twin, merging="agmerge", sparsify="ahead", dense_sum="ordered")
        resumed.load_state_dict(saved)
        assert cut(resumed) == (1024, True)
        again = train(twin, resumed, rank, range(half, half + FIRST))  # and measures, and plans; it does not choose
        return whole, again[:5], (cut(resumed), sorted(sparse(resumed)) == sorted(sparse(optimizer)))

    whole, again, found = agreed(on_ranks(2, MODEL, body))
    assert whole == again and found == ((1024, True), True) and asked == [1536]


@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_of_a_run_without_a_cut_may_have_residuals_anywhere(steps: int) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrapped(model, dense=None)
        train(model, optimizer, rank, range(steps))
        saved = through_a_file(optimizer.state_dict())
        assert saved["agmerge"]["partial"] is None
        optimizer.close()
        resumed = wrapped(model)
        resumed.load_state_dict(saved)
        train(model, resumed, rank, range(steps, steps + 2))
        assert resumed._reducer.exchange.agreed.carried.tensors == {}
        return cut(resumed)

    assert agreed(on_ranks(2, MODEL, body)) == ((1536, False) if steps == 0 else (0, True))


def test_a_checkpoint_of_other_options_says_nothing_of_cuts() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = wrapped(model, dense=None)
        train(model, optimizer, rank, range(2))
        saved = optimizer.state_dict()
        optimizer.close()
        for dense in (None, "partial"):
            resumed = wrapped(model, dense=dense)
            resumed.load_state_dict(saved)
            train(model, resumed, rank, range(2, 4))
            resumed.close()
        return cut(resumed)

    assert agreed(on_ranks(2, MODEL, body)) == (0, True)
