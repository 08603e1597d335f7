# SPDX-License-Identifier: Apache-2.0
"""What may stand beside a quantiser, which names lead to one, and which of them ``auto`` takes for whom."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support import agreed, mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
from agmerge import testing
from agmerge.options.defaults import TO_4_BITS, TO_8_BITS, candidates_for, resolve_auto
from agmerge.options.typed import Options
from agmerge.step.config import TWO_LEVEL

MODEL = seeded(mlp)


def made(**options: Any) -> str:
    """The compressor of an optimizer, alone."""

    def body(rank: int, model: nn.Module) -> str:
        return str(wrap(model, **options)._reducer.exchange.agreed.config.compression.compressor)

    return on_ranks(1, MODEL, body)[0]


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("8bit", "int8()"),
        ("u8bit", "int8()"),
        ("QSGD", "qsgd(bits=4, norm='max')"),
        ("onebit", "onebit()"),
        ("SignSGD", "onebit()"),
        ("EFSignSGD", "onebit()"),
        ("signum", "onebit()"),
        ("eden", "eden-2()"),
        ("terngrad", "terngrad()"),
    ],
)
def test_names_that_others_use_lead_here(given: str, name: str) -> None:
    assert made(compression=given) == name


@pytest.mark.parametrize(
    ("given", "meant"),
    [("u8", "int8"), ("uint8", "int8"), ("natural", "int8"), ("fp8_e4m3", "fp8"), ("edne", "eden-2")],
)
def test_names_that_are_nearly_right_are_answered_with_those_that_are(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant[:4]}"):
        made(compression=given)


@pytest.mark.parametrize("given", ["OneBitAdam", "1-bit Adam", "onebit_lamb", "ZeroOneAdam", "0/1 Adam", "QAdam"])
def test_optimizers_that_compress_are_answered_with_what_compresses_here(given: str) -> None:
    with pytest.raises(ValueError, match="name of an optimizer.* sync='updates'.* compression='eden-1'"):
        made(compression=given)


# -- what has a meaning beside it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["eden", "int8", ["none", "int8"], ["eden-4", "eden-2"]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "oktopk"},
        {"exchange": "masked"},
        {"exchange": "fastest"},
        {"wire": "int8"},
        {"sparsify": "ahead"},
        {"warmup": 5},
        {"density": {".*": 0.1}},
        {"density": "importance"},
    ],
    ids=str,
)
def test_what_is_about_selection_is_refused_beside_a_quantiser(compression: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"Remove {name}=, or set compression= to a sparsifier's name") as raised:
        made(compression=compression, **options)
    assert f"{name}={options[name]!r}" in str(raised.value) and f"compression={compression!r}" in str(raised.value)


@pytest.mark.parametrize("compression", ["eden", ["none", "int8"], "none"], ids=str)
def test_partly_dense_is_about_selection_too(compression: Any) -> None:
    with pytest.raises(ValueError, match="dense='partial' has no effect .*: every element is sent"):
        made(compression=compression, dense="partial")


@pytest.mark.parametrize("compression", ["eden", ["none", "int8"]], ids=str)
@pytest.mark.parametrize("exchange", ["auto", "sparse", TWO_LEVEL])
def test_a_density_waits_for_the_next_swap_by_name(compression: Any, exchange: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[Any, ...]:
        optimizer = wrap(model, compression=compression, density=0.07, exchange=exchange)
        train(model, optimizer, rank, range(2))
        sent = optimizer.stats()["density"]
        optimizer.set_compressor("topk")
        return sent, optimizer._reducer.exchange.agreed.config.compression.compressor.density

    assert agreed(on_ranks(2, MODEL, body)) == (1.0, 0.07)


def test_always_compressed_is_accepted_with_every_quantiser() -> None:
    for name in ("eden", "int8"):
        assert made(compression=name, exchange="sparse").startswith(name)


def test_two_levels_leave_what_goes_dense_out_of_the_default() -> None:
    assert "none" not in made(compression="auto", exchange=TWO_LEVEL)
    assert "none" in made(compression="auto", exchange="auto")


# -- who gets what -------------------------------------------------------------------------------------------------


def optimizer_named(name: str, base: type[torch.optim.Optimizer] = torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One of a class of this name, as a script's own or another library's."""

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        del self, closure

    return type(name, (base,), {"step": step})([nn.Parameter(torch.ones(2))], {"lr": 0.1})


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "DistributedMuon", "Shampoo", "SOAP", "Dion", "GaLoreAdamW"])
def test_optimizers_that_mix_elements_have_dense_and_8_bits(name: str) -> None:
    assert candidates_for(optimizer_named(name)) == TO_8_BITS == ("none", "int8")


def test_lbfgs_mixes_elements_too() -> None:
    assert candidates_for(torch.optim.LBFGS([nn.Parameter(torch.ones(2))])) == TO_8_BITS


@pytest.mark.parametrize("name", ["LAMB", "LARS", "Prodigy", "DAdaptAdam", "SophiaG", "MyOwn", "AdamW", "SGD"])
def test_optimizers_that_nobody_has_measured_have_4_bits_at_the_least(name: str) -> None:
    """Also one of a known name that is not torch's."""
    assert candidates_for(optimizer_named(name)) == TO_4_BITS == ("none", "int8", "eden-4")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam])
def test_optimizers_that_were_measured_have_2_bits(kind: Any) -> None:
    assert candidates_for(kind([nn.Parameter(torch.ones(2))], lr=0.1))[-1] == "eden-2"


@pytest.mark.parametrize("kind", ["NAdam", "Adafactor", "RMSprop", "Adagrad"])
def test_a_wrapped_step_counts_as_one_that_nobody_has_measured(kind: str) -> None:
    """Of each optimizer of torch's all candidates are of the longest row, in its order, from dense on."""
    known = candidates_for(getattr(torch.optim, kind)([nn.Parameter(torch.ones(2, 2))], lr=0.1))
    assert ("none", "int8", "eden-4", "eden-2")[: len(known)] == known and len(known) > 1


def test_where_nobody_hands_an_optimizer_over_it_is_dense_or_8_bits_and_one_line_says_so() -> None:
    def body(rank: int) -> tuple[str, ...]:
        return tuple(resolve_auto(Options(), None).candidates)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert agreed(testing.run(2, body)) == TO_8_BITS
    (line,) = [str(one.message) for one in heard]
    assert "optimizer=" in line and "8 bits" in line


def settled(model: nn.Module, **options: Any) -> tuple[str, int, bool]:
    """Return the compressor of local steps, how late their messages are, and whether moments follow the mean."""
    inner = torch.optim.AdamW(model.parameters())
    optimizer = agmerge.LocalOptimizer(inner, model.named_parameters(), **options)
    config = optimizer._reducer.exchange.agreed.config
    optimizer.close()
    updates = config.sync.updates
    return config.compression.compressor.name, updates.overlap, updates.mean_moments


def test_updates_are_in_few_bits() -> None:
    def body(rank: int, model: nn.Module) -> str:
        inner = torch.optim.AdamW(model.parameters())
        return agmerge.DistributedOptimizer(inner, model.named_parameters(), sync="updates").stats()["compressor"]

    assert agreed(on_ranks(2, MODEL, body)) == "auto"


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, ("eden-2", 1, True)),
        ({"every": 4, "compression": "AUTO", "exchange": "sparse"}, ("eden-2", 1, True)),
        ({"every": 8, "fragments": 2}, ("eden-2", 1, True)),
        ({"every": 8}, ("topk", 0, False)),
        ({"density": 0.1}, ("topk", 0, False)),
        ({"wire": "int4"}, ("topk", 0, False)),
        ({"outer": agmerge.Nesterov()}, ("topk", 0, False)),
        ({"carry": "hold"}, ("topk", 0, False)),
        ({"every": 8, "compression": "eden-4"}, ("eden-4", 0, False)),
        ({"every": 8, "compression": "eden-4", "moments": "mean", "overlap": 1}, ("eden-4", 1, True)),
        ({"every": 4, "compression": "int8", "moments": "own"}, ("int8", 1, False)),
        ({"every": 4, "compression": "int8", "overlap": 0}, ("int8", 0, True)),
    ],
)
def test_local_steps_are_in_few_bits_and_late_if_exchanges_are_near_enough(
    options: dict[str, Any], expected: tuple[str, int, bool]
) -> None:
    assert agreed(on_ranks(2, MODEL, lambda rank, model: settled(model, **options))) == expected


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_density_asks_for_selection(momentum: float) -> None:
    def body(rank: int, model: nn.Module) -> str:
        return str(resolve_auto(Options(density=0.01), sgd(model, momentum=momentum, weight_decay=1e-3)))

    assert agreed(on_ranks(2, MODEL, body)) == ("dgc" if momentum else "topk")


def test_stats_say_in_how_many_bits_and_why() -> None:
    def body(rank: int, model: nn.Module) -> list[Any]:
        found = []
        for compression in ("eden-3", "int8", "none", "topk", ["none", "int8"]):
            optimizer = wrap(model, compression=compression, exchange="auto")
            assert optimizer.stats()["quantiser"] == "none"  # ranks have not agreed so far
            train(model, optimizer, rank, range(1))
            stats = optimizer.stats()
            found.append((stats["quantiser"], stats["bits"], stats["quantiser_why"]))
            optimizer.close()
        return found

    named, open_ = "you set it", "candidates are tried until about step 70"
    wanted = [("eden-3", 3, named), ("int8", 8, named), ("none", None, "no quantizer is in use")]
    assert agreed(on_ranks(2, MODEL, body)) == [*wanted, wanted[-1], ("int8", 8, open_)]
