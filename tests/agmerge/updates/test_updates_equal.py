# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"`` beside what it must equal, alone or where nothing is compressed: invariants 4 to 6.

One worker alone is the plain optimizer. SGD, which is linear in gradients, is the exchange of gradients. After local
steps parameters are the mean of what the workers have come to.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded, sgd, train, wrap
from support.updates import base_of, exact, reducer_of, updating
from torch import nn

import agmerge
from agmerge import testing

MODEL = seeded(mlp)
LOSSLESS: list[dict[str, Any]] = [
    {"compression": "none"},
    {"compression": "none", "dense_sum": "ordered"},
    {"compression": "topk", "density": 1.0, "wire": "fp32"},
    {"compression": "topk", "density": 1.0, "wire": "fp32", "sparsify": "ahead", "merging": "single"},
    {"compression": "adtopk", "density": 1.0, "exchange": "oktopk"},
]
CARRIES = ["apply", "hold"]


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


# -- alone ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"carry": "hold", "decay": 0.9, "every": 3},
        {"overlap": 1},
        {"every": 4, "fragments": 2, "outer": agmerge.Nesterov()},
        {"compression": "none"},
    ],
    ids=described,
)
def test_alone_it_is_the_plain_optimizer(options: dict[str, Any]) -> None:
    """To the bit; nothing is sent, and nothing is kept of parameters."""

    def body(rank: int, model: nn.Module) -> list[str]:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = updating(model, inner, **options)
        begun = len(testing.calls())
        seen = train(model, optimizer, rank, range(7))
        with optimizer.shared():
            assert digest(model) == seen[-1]
        optimizer.flush()
        optimizer.consolidate()
        assert digest(model) == seen[-1] and len(testing.calls()) == begun
        assert not base_of(optimizer) and reducer_of(optimizer).exchange.agreed.buffers is None
        assert optimizer.stats()["steps"] == 7 and optimizer.stats()["bytes_sent"] == 0
        assert optimizer.join() == 0
        return seen

    plain = copy.deepcopy(MODEL)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1), 0, range(7))
    assert on_ranks(1, MODEL, body) == [expected]


# -- every step, nothing compressed ---------------------------------------------------------------------------------


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [exact(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("momentum, decay", [(0.0, 0.0), (0.9, 0.01)], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("options", LOSSLESS, ids=described)
@pytest.mark.parametrize("carry", CARRIES)
def test_sgd_is_the_exchange_of_gradients(carry: str, options: dict[str, Any], momentum: float, decay: float) -> None:
    """After fifty steps, to 1e-6; in float64 to nearly all digits, unless the wire has fewer: all of it is linear."""

    def body(rank: int, model: nn.Module, **options: Any) -> list[torch.Tensor]:
        optimizer = wrap(model, sgd(model, lr=0.05, momentum=momentum, weight_decay=decay), **options)
        train(model, optimizer, rank, range(50))
        return parameters(model)

    model, updates = copy.deepcopy(MODEL).double(), {**options, "sync": "updates", "carry": carry}
    ours, theirs = (
        on_ranks(2, model, lambda rank, m, given=given: body(rank, m, **given))[0]
        for given in (updates, {"compression": "none"})
    )
    tolerance = 1e-6 if options.get("wire") == "fp32" else 1e-11
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# Units in the last place of the largest number that an exchange among three may be off, whatever the processor: a way
# is at most twice that number, and rounded when it is computed, at 1/3, at its product with that, and at two sums (of
# up to 2/3 and all of it), half a unit each time; what it is taken off is rounded once: (2 * (3 + 5/3) + 1) / 2 = 5.2.
ROUNDINGS = 6


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", LOSSLESS, ids=described)
def test_adamw_with_the_same_batch_everywhere_is_adamw(options: dict[str, Any], size: int) -> None:
    """Each step from where the one before has led, to the roundings of one exchange."""

    def body(rank: int, model: nn.Module) -> str:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = updating(model, inner, **options)
        for step in range(10):
            optimizer.zero_grad()
            backward(model, 0, step)
            twin, plain = copy.deepcopy((model, inner))
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                theirs.grad = ours.grad.clone()
            assert plain.param_groups[0]["params"][0] is next(twin.parameters())
            plain.step()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.step()
            for was, ours, theirs in zip(before, model.parameters(), twin.parameters(), strict=True):
                magnitude = torch.maximum(was.abs(), theirs.detach().abs()).double()
                unit = torch.finfo(torch.float32).eps * magnitude
                assert ((exact(ours) - exact(theirs)).abs() <= ROUNDINGS * unit.reshape(-1)).all(), step
        return digest(model)

    agreed(on_ranks(size, MODEL, body))


# -- local steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("options", LOSSLESS, ids=described)
@pytest.mark.parametrize("carry", CARRIES)
def test_after_local_steps_parameters_are_the_mean(carry: str, options: dict[str, Any], every: int) -> None:
    def body(rank: int, model: nn.Module) -> list[Any]:
        inner, seen = torch.optim.AdamW(model.parameters(), lr=0.01), []
        optimizer = updating(model, inner, every=every, carry=carry, **options)
        local: list[torch.Tensor] = []
        base = parameters(model)
        inner.register_step_post_hook(lambda *_: local.__setitem__(slice(None), parameters(model)))
        for step in range(2 * every):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            if (step + 1) % every:
                assert all(torch.equal(a, b) for a, b in zip(local, parameters(model), strict=True))
            else:
                seen.append((list(local), parameters(model), base))
                base = parameters(model)
        return seen

    results = on_ranks(3, MODEL, body)
    for exchange in range(2):
        for place in range(6):
            locals_ = [seen[exchange][0][place] for seen in results]
            largest = torch.stack([*locals_, results[0][exchange][2][place]]).abs().amax(0)
            unit = torch.finfo(torch.float32).eps * largest
            for seen in results:
                mean = sum(local.double() for local in locals_) / 3
                assert ((seen[exchange][1][place].double() - mean).abs() <= ROUNDINGS * unit).all()


# -- other names of the same thing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, torchft",
    [
        ({"every": 3}, {"sync_every": 3}),
        ({"every": 5}, {"sync_every": 5}),
        (
            {"every": 4, "fragments": 2, "overlap": 1, "compression": "none"},
            {"sync_every": 4, "fragment_sync_delay": 1},
        ),
        ({"every": 2, "carry": "hold", "outer": torch.optim.SGD}, {"sync_every": 2}),
    ],
    ids=["eden-2", "int4", "fragments", "outer"],
)
def test_a_context_around_a_plain_optimizer_comes_to_the_same_bits(
    options: dict[str, Any], torchft: dict[str, Any]
) -> None:
    def outer_of(model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def wrapped(rank: int, model: nn.Module) -> list[str]:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = {**options}
        if "outer" in given:
            given["outer"] = lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)
        return train(model, agmerge.LocalOptimizer(inner, model.named_parameters(), **given), rank, range(9))

    def around(rank: int, model: nn.Module) -> list[str]:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = {k: v for k, v in options.items() if k not in ("every", "overlap", "outer")} | torchft
        if "outer" in options:
            given["outer_optimizer"] = outer_of(model)
        with agmerge.LocalSync(model, inner, **given) as sync:
            seen = train(model, inner, rank, range(9))
            assert sync.stats()["steps"] == 9
            return seen

    assert on_ranks(2, MODEL, around) == on_ranks(2, MODEL, wrapped)
