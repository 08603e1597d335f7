# SPDX-License-Identifier: Apache-2.0
"""A compressor that the library does not know is used like its own: nothing asks for a class of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded, sgd, through_a_file, train, wrap
from support.gradient_exchange import Table, Tensors, config_of, connected, drawn, stepped, with_compressor
from torch import nn

import agmerge
from agmerge import testing
from agmerge.options.compressors import Cast
from agmerge.step.config import assign_classes
from agmerge.step.gradient_exchange import GradientExchange
from sparsifiers import Compressor, Kind

SHAPES = {"a": (48, 32), "b": (7,)}


class Counting(Compressor):
    """Send every element as it is, and count the agreements that it was told of."""

    name = "counting"
    kind = Kind.DENSE

    def __init__(self, unit: int = 1) -> None:
        self.unit, self.agreements = unit, 0

    def options(self) -> dict[str, object]:
        return {"unit": self.unit}

    def state_dict(self) -> dict[str, object]:
        return {"agreements": self.agreements}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.agreements = int(state["agreements"])  # type: ignore[call-overload]

    def retain(self, keys: Iterable[str]) -> None:
        assert all(isinstance(key, str) for key in keys)
        self.agreements += self.unit


class Halved(Cast):
    """A cast to 16 bits, under another name."""

    def __init__(self) -> None:
        super().__init__("bf16")
        self.name = "halved"


def table() -> Table:
    return Table({name: torch.zeros(shape) for name, shape in SHAPES.items()})


def test_an_unknown_dense_compressor_sends_all_as_none_does() -> None:
    def body(rank: int) -> tuple[list[str], list[str]]:
        ours = connected(table())
        theirs = connected(table(), with_compressor(config_of(), Counting(), "none"))
        steps = [drawn(rank, step, SHAPES) for step in range(3)]
        return tuple([digest(stepped(either, tensors).values()) for tensors in steps] for either in (ours, theirs))

    none, counting = agreed(testing.run(3, body))
    assert none == counting


def stepped_to_bits(exchange: GradientExchange, tensors: Tensors) -> str:
    """Return a digest of the updates of one step and of the residuals after it."""
    return digest(stepped(exchange, tensors).values()) + digest(exchange.agreed.current.residuals().values())


def test_an_unknown_cast_keeps_what_bf16_does() -> None:
    def body(rank: int) -> list[list[str]]:
        ours = connected(table(), compression="bf16")
        theirs = connected(table(), with_compressor(config_of(compression="bf16"), Halved(), "residual"))
        steps = [drawn(rank, step, SHAPES) for step in range(3)]
        return [[stepped_to_bits(either, tensors) for tensors in steps] for either in (ours, theirs)]

    bf16, halved = testing.run(2, body)[0]
    assert bf16 == halved


def test_what_a_config_says_of_it_is_what_the_compressor_says() -> None:
    config = with_compressor(config_of(), Counting(3), "none")
    facts = dict(config.facts())
    assert (facts["compression"], facts["options"]) == ("counting", "counting(unit=3)")
    assert config.modes == ("dense",) and config.compression.compressor.dtype is None
    assert {member.kind for member in assign_classes(config, table().active())} == {Kind.DENSE}


def test_ranks_with_other_options_of_it_do_not_begin() -> None:
    def body(rank: int) -> None:
        connected(table(), with_compressor(config_of(), Counting(1 + rank), "none"))

    errors = testing.run(2, body, return_errors=True)
    assert all(isinstance(error, agmerge.RankMismatchError) for error in errors)
    assert "counting(unit=2)" in agreed([str(error) for error in errors])


def test_an_optimizer_trains_with_it_and_its_state_survives_a_restart() -> None:
    """Handed over as an object, as a sparsifier of one's own is."""

    def body(
        rank: int, model: nn.Module, compression: Callable[[], object]
    ) -> tuple[list[str], dict[str, object], dict[str, object]]:
        optimizer = wrap(model, compression=compression())
        digests = train(model, optimizer, rank, range(3))
        saved = through_a_file(optimizer.state_dict())
        optimizer.close()
        resumed = wrap(model, sgd(model), compression=compression())
        resumed.load_state_dict(saved)
        resumed.zero_grad()
        backward(model, rank, 3)
        resumed.step()
        return [*digests, digest(model)], saved["agmerge"]["compressor"], resumed.state_dict()["agmerge"]["compressor"]

    model = seeded(mlp)
    expected, *_ = agreed(on_ranks(2, model, lambda rank, net: body(rank, net, lambda: "none")))
    digests, before, after = agreed(on_ranks(2, model, lambda rank, net: body(rank, net, Counting)))
    assert digests == expected
    assert before == ("counting(unit=1)", {"agreements": 1}) and after == ("counting(unit=1)", {"agreements": 2})


@pytest.mark.parametrize("options", [{"wire": "fp16"}, {"density": {".*": 0.1}}, {"exchange": "masked"}], ids=str)
def test_what_is_about_selection_is_refused_with_it(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"^{name}=.*counting\(unit=1\), which sends every element.*Remove {name}="):
        wrap(seeded(mlp), compression=Counting(), **options)
