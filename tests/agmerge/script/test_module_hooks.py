# SPDX-License-Identifier: Apache-2.0
"""DeAR and models that read their parameters in odd ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import WIDTH, batch, digest, loss_of, on_ranks, seeded
from support.dear import MODEL, adamw, dear, same, train
from torch import nn
from torch.nn import functional as F

import agmerge
from agmerge.script.module_hooks import readers


class Odd(nn.Module):
    """Tied weights, a parameter list, a weight that a hook computes, attention, and a layer in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.scales = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])
        self.normed = nn.Linear(WIDTH, WIDTH)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.ModuleDict({"out": nn.Linear(WIDTH, 10)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.first(x))) * self.scales[0] + self.scales[1]
        x = torch.tanh(self.normed(x)) + torch.tanh(self.parametrized(x))
        x = x.unsqueeze(0)
        x = self.layer(x + self.attention(x, x, x)[0]).squeeze(0)
        return self.head["out"](x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_that_read_parameters_in_odd_ways() -> None:
    def body(rank: int, model: Odd, wrap: Any) -> list[str]:
        nn.utils.weight_norm(model.normed)  # a pre-hook of its own, and then not to be copied any more
        optimizer, seen = wrap(model, adamw(model)), []
        for step in range(13):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step % 4 == 0:
                model.eval()
                with torch.no_grad():
                    seen.append(digest([model(batch(0, step)[0])]))
                model.train()
        optimizer.flush()
        return [*seen, digest(model)]

    assert len(set(same(2, seeded(Odd), body))) == 5


def test_every_parameter_has_all_its_readers() -> None:
    model = seeded(Odd)
    found = {module: set(parameters) for module, parameters in readers(model).items()}
    assert set().union(*found.values()) == set(model.parameters())
    assert {module for module in found if model.first.weight in found[module]} == {model.first, model.tied}
    assert found[model] == set(model.scales) and model.scales not in found and model.head not in found
    assert model.attention.out_proj.weight in found[model.attention]


class Functional(nn.Module):
    """Its head is used as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

        self.other = nn.Linear(WIDTH, WIDTH)
        self.used = False

    def forward_trunk(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return F.linear(x, self.other.weight, self.other.bias) if self.used else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.forward_trunk(x), self.head.weight, self.head.bias)


def test_a_parameter_used_as_a_tensor_is_found_by_name() -> None:
    def body(rank: int, model: Functional) -> None:
        optimizer = dear(model)
        train(model, optimizer, rank, range(1))
        with pytest.raises(agmerge.AGMergeError, match=r"AGM116: .*'head.(weight|bias)' .*optimizer.flush\(\)"):
            loss_of(model, rank, 1).backward()
        with pytest.raises(agmerge.AGMergeError, match="AGM124"):
            optimizer.step()

    on_ranks(2, seeded(Functional), body)


def test_a_flush_makes_such_a_model_right() -> None:
    def body(rank: int, model: Functional, wrap: Any) -> str:
        optimizer = wrap(model)
        for step in range(12):
            optimizer.flush()
            train(model, optimizer, rank, [step])
        optimizer.flush()
        return digest(model)

    same(2, seeded(Functional), body)


def test_a_tensor_that_never_had_an_update_may_be_used_at_once() -> None:
    def body(rank: int, model: Functional, wrap: Any) -> str:
        model.forward = lambda x: model.head(model.forward_trunk(x))
        optimizer = wrap(model)
        for step in range(15):
            model.used = step == 14  # its merge buffer, which is its own by then, may still be on its way
            train(model, optimizer, rank, [step])
        optimizer.flush()
        return digest(model)

    same(2, seeded(Functional), body)


def test_a_module_recast_before_its_update_is_an_error() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = dear(model)
        train(model, optimizer, rank, range(1))
        model[2].double()
        with pytest.raises(
            agmerge.AGMergeError, match=r"AGM116: .*'2.weight' .*torch.float32.*float64.*optimizer.flush\(\)"
        ):
            optimizer.flush()

    on_ranks(2, MODEL, body)
