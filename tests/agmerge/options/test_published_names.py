# SPDX-License-Identifier: Apache-2.0
"""The names of papers and other projects: they work, or the same right hint comes wherever they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import mlp, on_ranks, seeded, train, wrap
from torch import nn

import agmerge
import merging
from agmerge.cli import plan as plan_command
from agmerge.options import published
from agmerge.options.compressors import cast_name

MODEL = seeded(mlp)


def refused(**options: Any) -> str:
    """Return the error of an optimizer with these options."""

    def body(rank: int, model: nn.Module) -> str:
        with pytest.raises(ValueError) as raised:
            wrap(model, **options)
        return str(raised.value)

    return on_ranks(1, MODEL, body)[0]


@pytest.mark.parametrize("name", ["SSGD", "S-SGD", "ssgd", "s_sgd"])
def test_synchronous_sgd_sends_everything(name: str) -> None:
    def body(rank: int, model: nn.Module) -> str:
        return wrap(model, compression=name)._reducer.exchange.agreed.config.compression.compressor.name

    assert on_ranks(1, MODEL, body) == ["none"]
    assert cast_name(name) == "none"
    assert agmerge.from_params({"compressor": name}) == {"compression": name}
    assert "'none'" in published.hint("merging", name) and "'none'" in published.hint("exchange", name)


# By name: what its hint must say, as compression=, and where a dictionary has it.
MEANT = {
    "Ok-Topk": "write compression='topk', exchange='oktopk'",
    "OkTopk": "write compression='topk', exchange='oktopk'",
    "gTopK-SGD": "write compression='topk', exchange='oktopk'",
    "LAGS-SGD": "write compression='topk', merging='layerwise', sparsify='ahead'",
    "SNA-MGS-SGD": "write merging='agtf'",
    "OMGS-SGD": "write merging='omgs'",
    "MG-WFBP": "write merging='mgwfbp'",
    "AGM-Inter": "write merging=merging.get('agmerge', intra=False, check_every=0)",
    "AGM-(Inter+Intra)": "write merging='agmerge'",
    "OneBitAdam": "sync='updates'",
    "DiLoCo": "agmerge.LocalOptimizer",
    "fp32": "did you mean 'none'?",
    "bfloat16": "did you mean 'bf16'?",
}
NEAREST = {"natural": "int8", "inceptionn": "int8", "sketch": "int4", "qsgd_cuda": "qsgd", "u8": "int8"}


@pytest.mark.parametrize("name", MEANT)
def test_a_published_name_says_what_to_write_wherever_a_compressor_is_named(name: str) -> None:
    text = refused(compression=name)
    assert f"compression={name!r} is unknown. Choose from: topk, " in text and MEANT[name] in text
    assert text.endswith(published.hint("compression", name))
    with pytest.raises(ValueError) as of_a_dictionary:
        agmerge.from_params({"compressor": name})
    assert str(of_a_dictionary.value).endswith(published.hint("compression", name))

    def swapped(rank: int, model: nn.Module) -> str:
        with pytest.raises(ValueError) as raised:
            wrap(model).set_compressor(name)
        return str(raised.value)

    assert on_ranks(1, MODEL, swapped)[0] == text


@pytest.mark.parametrize("name", NEAREST)
def test_what_comes_nearest_to_a_quantiser_is_named(name: str) -> None:
    assert refused(compression=name).endswith(f"; did you mean {NEAREST[name]!r}?")
    with pytest.raises(ValueError, match=f"pass compression='{NEAREST[name]}', without a memory"):
        agmerge.from_params({"compressor": name})


@pytest.mark.parametrize(
    "name, advice",
    [
        ("topk", "write compression='topk'"),
        ("Ok-Topk", "write compression='topk', exchange='oktopk'"),
        ("eden", "write compression='eden-2'"),
        ("S-SGD", "write compression='none'"),
        ("treshold", "did you mean 'threshold'?"),
        ("ByteScheduler", "did you mean 'dear'?"),
    ],
)
def test_what_is_no_planner_says_what_it_is(name: str, advice: str) -> None:
    text = refused(merging=name)
    assert text.startswith(f"merging={name!r} is unknown. Choose from: layerwise, ") and text.endswith(f"; {advice}")
    assert published.hint("merging", name) == f"; {advice}"
    with pytest.raises(ValueError) as raised:
        published.planner(name)
    assert str(raised.value) == text


@pytest.mark.parametrize(
    "name, advice",
    [
        ("Ok-Topk", "did you mean 'oktopk'?"),
        ("allgather_fast", "did you mean 'sparse'?"),
        ("hierarchical", "did you mean 'two-level'?"),
        ("topk", "write compression='topk'"),
        ("dense", "compression='none'"),
        ("spares", "did you mean 'sparse'?"),
    ],
)
def test_what_is_no_exchange_says_what_it_is(name: str, advice: str) -> None:
    text = refused(exchange=name, compression="topk")
    assert f"exchange={name!r} is unknown. Choose from: 'auto', " in text and advice in text


def test_planners_by_published_names_are_taken() -> None:
    def body(rank: int, model: nn.Module) -> list[Any]:
        both = (wrap(model, merging=name) for name in ("SNA-MGS-SGD", "AGM-Inter"))
        return [each._reducer.exchange.agreed.config.merging.planner for each in both]

    assert on_ranks(1, MODEL, body) == [[merging.get("agtf"), merging.get("agmerge", intra=False, check_every=0)]]


def test_nonsense_gets_the_names_and_no_hint() -> None:
    for name in ("xyzzy", "Local-AdaAlter-SGD", ""):
        assert "did you mean" not in refused(compression=name) and "write" not in refused(compression=name)


def test_the_plan_command_gives_the_same_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrap(model)
        train(model, optimizer, rank, range(2))
        optimizer.measure().save(tmp_path / "measured.json")

    on_ranks(1, MODEL, body)
    assert plan_command.main(str(tmp_path / "measured.json"), None, str(tmp_path / "plan.json"), "topk") == 1
    assert "write compression='topk'" in capsys.readouterr().err
    assert plan_command.main(str(tmp_path / "measured.json"), None, str(tmp_path / "plan.json"), "SNA-MGS-SGD") == 0
    assert (tmp_path / "plan.json").exists()
