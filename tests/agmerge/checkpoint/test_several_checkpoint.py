# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several optimizers: a section for each, and whatever ranks keep beside them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support import agreed, digest, on_ranks, residuals, seeded, sgd, through_a_file, train, wrap
from support.several_optimizers import MODEL, MUON, both, halves, moments, pair
from torch import nn

import agmerge

CASES: dict[str, dict[str, Any]] = {
    "topk": {},
    "none": {"compression": "none", "density": None},
    "powersgd": {"compression": "powersgd", "density": None},
    "updates": {"sync": "updates"},
    "updates, held": {"sync": "updates", "carry": "hold", "every": 2},
}


@pytest.mark.parametrize("way", ["own", "gathered"])
@pytest.mark.parametrize("case", CASES)
def test_four_steps_and_four_are_eight(case: str, way: str) -> None:
    def whole(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, **CASES[case])
        train(model, optimizer, rank, range(4))
        state: Any = optimizer.state_dict()
        assert set(state) == {"optimizers", "agmerge"}
        assert [set(section) for section in state["optimizers"]] == [{"state", "param_groups"}] * 2
        if way == "gathered":
            state = agmerge.broadcast_object(agmerge.gather_state(optimizer))
        kept = through_a_file((model.state_dict(), state))
        return kept, train(model, optimizer, rank, range(4, 8)), moments(optimizer.optimizers)

    first = on_ranks(2, MODEL, whole)

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, **CASES[case])
        parameters, state = first[rank][0]
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
        return train(model, optimizer, rank, range(4, 8)), moments(optimizer.optimizers)

    assert on_ranks(2, MODEL, second) == [(seen, kept) for _, seen, kept in first]


@pytest.mark.parametrize("case", ["topk", "updates"])
def test_another_number_of_workers_takes_over_all_that_was_not_sent(case: str) -> None:
    def whole(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, **CASES[case])
        train(model, optimizer, rank, range(4))
        unsent = {name: tensor.double() for name, tensor in optimizer._reducer.replica.unsent().items()}
        return through_a_file(agmerge.gather_state(optimizer)), model.state_dict(), unsent

    saved = on_ranks(2, MODEL, whole)

    def second(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, **CASES[case])
        model.load_state_dict(saved[0][1])
        optimizer.load_state_dict(
            copy.deepcopy(saved[0][0])
        )  # torch's takes tensors as they are, and ranks share these
        unsent = {name: tensor.double() for name, tensor in optimizer._reducer.replica.unsent().items()}
        train(model, optimizer, rank, range(4, 6))
        optimizer.consolidate()
        return digest(model), unsent

    found = on_ranks(3, MODEL, second)
    agreed([bits for bits, _ in found])
    for name in saved[0][2]:
        before = sum(unsent[name] for *_, unsent in saved) / 2
        after = sum(unsent[name] for _, unsent in found if name in unsent) / 3  # of a new rank there may be none
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


def test_states_that_a_script_saved_separately_are_loaded_from_a_list() -> None:
    def body(rank: int, model: nn.Module) -> None:
        plain = pair(model)
        train(model, plain[0], 0, range(2))
        train(model, plain[1], 0, range(2))
        states, kept = through_a_file([each.state_dict() for each in plain]), moments(plain)
        optimizer = both(model)
        optimizer.load_state_dict(copy.deepcopy(states))
        assert moments(optimizer.optimizers) == kept
        train(model, optimizer, rank, range(2))
        optimizer.load_state_dict({"optimizers": states})
        assert moments(optimizer.optimizers) == kept and not residuals(optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, MODEL, body)
    assert sum("AGM401" in str(one.message) for one in caught) == 2 * 2


def test_states_of_another_number_of_optimizers_are_refused() -> None:
    """Before anything is loaded; and one that is of others, by its place."""

    def body(rank: int, model: nn.Module) -> None:
        optimizer, single = both(model), wrap(seeded(lambda: copy.deepcopy(MODEL)))
        train(model, optimizer, rank, range(2))
        state, kept = copy.deepcopy(optimizer.state_dict()), moments(optimizer.optimizers)
        for given in (single.state_dict(), sgd(model).state_dict(), [sgd(model).state_dict()]):
            with pytest.raises(ValueError, match=rf"of 2 optimizers \({MUON.__name__} and AdamW\), got one state\."):
                optimizer.load_state_dict(given)
        with pytest.raises(ValueError, match="expected the state of one optimizer \\(SGD\\), got 2 states"):
            single.load_state_dict(state)
        with pytest.raises(ValueError, match="expected states of 2 optimizers .*, got 3 states"):
            optimizer.load_state_dict({**state, "optimizers": [*state["optimizers"], state["optimizers"][0]]})
        assert moments(optimizer.optimizers) == kept and residuals(optimizer)
        state["optimizers"][1]["param_groups"][0]["params"].pop()
        with pytest.raises(
            ValueError, match=r"optimizers\[1\] \(AdamW\) has 2 parameters in group 0, but the optimizer has 3"
        ):
            optimizer.load_state_dict(state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(1, MODEL, body)


@pytest.mark.parametrize("given", ["wrapper", "inner"])
def test_one_rank_loads_and_a_broadcast_does_the_rest(given: str) -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, compression="none")
        if rank == 0:
            plain = copy.deepcopy((model, optimizer.optimizers))
            for each in plain[1]:
                train(plain[0], each, 5, range(2))
                each.param_groups[0]["lr"] *= 0.5
            optimizer.load_state_dict([each.state_dict() for each in plain[1]])
        for each in [optimizer] if given == "wrapper" else optimizer.optimizers:
            agmerge.broadcast_optimizer_state(each, root_rank=0)
        kept = moments(optimizer.optimizers)
        return kept, train(model, optimizer, rank, range(3)), [group["lr"] for group in optimizer.param_groups]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept, _, rates = agreed(on_ranks(2, MODEL, body))
    assert rates == [0.01, 0.005] and kept != moments(pair(MODEL))


def test_ranks_with_other_optimizers_are_told_so() -> None:
    def body(rank: int, model: nn.Module) -> None:
        inner: Any = [torch.optim.SGD(halves(model)[0], lr=0.1), pair(model)[1]] if rank else pair(model)
        optimizer = wrap(model, inner, compression="none")
        with pytest.raises(agmerge.RankMismatchError, match="optimizer: .* and AdamW on rank 0; SGD and AdamW"):
            agmerge.broadcast_optimizer_state(optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(2, MODEL, body)


def test_replicas_that_differ_after_join_are_levelled_with_the_state_of_all() -> None:
    def body(rank: int, model: nn.Module) -> Any:
        optimizer = both(model, compression="none")
        for step in range(4 if rank == 0 else 2):
            train(model, optimizer, rank, range(step, step + 1))
            if rank == 0 and step == 3:
                optimizer.param_groups[1]["lr"] = 0.5  # on one rank alone
        last = optimizer.join()
        return last, digest(model), moments(optimizer.optimizers), [group["lr"] for group in optimizer.param_groups]

    last, *_, rates = agreed(on_ranks(2, MODEL, body))
    assert last == 0 and rates == [0.02, 0.5]
