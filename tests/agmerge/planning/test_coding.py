# SPDX-License-Identifier: Apache-2.0
"""What is measured of codings, and what is predicted of one that was not in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import agreed, mlp, on_ranks, seeded, train, wrap
from torch import nn

import merging
from agmerge.exchanges.message.scaled import CHOICE, VALUES
from agmerge.planning.coding import Coding, in_coding, measure_codings
from merging import Curve, Measurements


def measured(message: Curve | None = None) -> Measurements:
    nothing = Curve((0, 1), (0.0, 0.0))
    profile = merging.Profile(["a", "b"], [1000, 10], [1.0, 1.0], work=[1000, 0], load=[100, 8])
    exchange = Curve((10, 100, 1000), (0.1, 0.4, 3.1))
    return Measurements(
        profile=profile,
        sparsify=nothing,
        exchange=exchange,
        dense=None,
        modes=("behind",),
        workers=2,
        message=message,
    )


def test_an_exchange_takes_what_one_of_as_many_bytes_took() -> None:
    before = measured(Curve((0,), (0.5,)))
    other = in_coding(before, np.array([100, 16]), Coding("auto", 5.0), Coding("int8", 2.5), 2, quantises=False)
    elements = np.arange(10, 3000, 7)
    assert other.exchange(elements) == pytest.approx(before.exchange(elements / 2), rel=1e-12)
    assert other.message == before.message and other.profile.load.tolist() == [100, 16]
    again = in_coding(other, before.profile.load, Coding("int8", 2.5), Coding("auto", 5.0), 2, quantises=False)
    assert again == before


def test_what_a_codec_takes_itself_counts_once_to_write_and_for_each_worker_to_read() -> None:
    before, now = measured(Curve((0,), (0.5,))), Coding("auto", 5.0, encode=1e-4, decode=1e-4)
    slower = Coding("int8", 5.0, encode=3e-4, decode=2e-4)
    other = in_coding(before, before.profile.load, now, slower, 4, quantises=False)
    assert other.exchange(100) == pytest.approx(0.4 + 4 * 1e-4 * 100)
    assert other.message is not None and other.message(100) == pytest.approx(0.5 + 2e-4 * 100)
    assert other.sparsify == before.sparsify
    now = Coding("auto", 5.0, decode=1.0)
    cheaper = in_coding(before, before.profile.load, now, Coding("int8", 5.0), 4, quantises=False)
    assert cheaper.exchange(1000) >= 0.0  # a curve does not fall, nor below nothing


def test_a_quantiser_takes_as_long_where_others_select_and_for_a_share_of_the_mean() -> None:
    before, now = measured(Curve((0,), (0.5,))), Coding("int8", 1.0, encode=1e-4, decode=1e-4)
    slower = Coding("eden-4", 1.0, encode=3e-4, decode=2e-4)
    other = in_coding(before, before.profile.load, now, slower, 4, quantises=True)
    assert other.exchange(100) == pytest.approx(0.4 + (1e-4 + 2e-4 / 4) * 100)
    assert other.sparsify is not None and other.sparsify(100) == pytest.approx(2e-4 * 100)
    assert other.message == before.message


@pytest.mark.parametrize("compression", ["topk", "int8"])
def test_codings_are_measured_alike_on_all_ranks_and_smaller_ones_have_fewer_bytes(compression: str) -> None:
    names = ["auto", "fp16", "int8", "int4"] if compression == "topk" else ["int8", "eden-4", "eden-2"]

    def body(rank: int, model: nn.Module) -> dict[str, Coding]:
        optimizer = wrap(model, compression=compression)
        train(model, optimizer, rank, range(1))
        return measure_codings(optimizer._reducer.exchange.agreed.buffers, names, 1)

    found = agreed(on_ranks(3, seeded(mlp), body))
    assert list(found) == names and all(each.name == name for name, each in found.items())
    sizes = [each.size for each in found.values()]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert all(each.encode > 0 and each.decode > 0 for each in found.values())


def test_a_codec_that_may_be_chosen_keeps_nearly_all_of_the_energy() -> None:
    """Of selected values: the largest tenth of a gradient whose elements differ much in size."""
    torch.manual_seed(1)
    values = torch.randn(1 << 18)
    values = values[values.abs() > 1.645]
    kept = {}
    for name in (*CHOICE, "int4"):
        read = VALUES[name].encode(values, torch.empty(VALUES[name].size(values.numel()), dtype=torch.uint8))
        kept[name] = 1 - float((values - read).double().square().sum() / values.double().square().sum())
    assert min(kept[name] for name in CHOICE) > 0.9999 > kept["int4"]
