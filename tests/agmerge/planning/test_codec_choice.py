# SPDX-License-Identifier: Apache-2.0
"""The rule by which the value codec is chosen, and what is predicted of one that was not in use: pure functions."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from pretend import streams
from pretend.device import Device
from pretend.tensors import put

import merging
from agmerge.exchanges.message.scaled import BLOCK, BLOCKS, VALUES, ValueSample, handling
from agmerge.exchanges.routing import OWN, with_send_mode
from agmerge.planning.candidates import Candidate
from agmerge.planning.codec_choice import GAIN, Codec, best, in_codec
from agmerge.planning.sparse_search import why_codec
from merging import Curve, Measurements


def test_the_least_seconds_for_what_arrives_by_brute_force() -> None:
    source = random.Random(1)
    for _ in range(2000):
        count = source.randint(1, 6)
        seconds = [source.choice([1.0, 1.005, 1.02, 1.1, 2.0]) for _ in range(count)]
        shares = [source.choice([1.0, 0.999, 0.9, 0.5, 0.0]) for _ in range(count)]
        taken = best(seconds, shares)
        score = [s / share if share else float("inf") for s, share in zip(seconds, shares, strict=True)]
        exact = [number for number in range(count) if shares[number] == 1.0]
        if exact and shares[taken] < 1.0:
            assert all(score[taken] * (1 + GAIN) < seconds[number] for number in exact)
            assert score[taken] == min(score)
        elif exact:
            assert seconds[taken] == min(seconds[number] for number in exact)
            assert all(score[lossy] * (1 + GAIN) >= seconds[taken] for lossy in range(count))
        else:
            assert score[taken] == min(score)
        assert taken == min(n for n in range(count) if (score[n], shares[n]) == (score[taken], shares[taken]))


def test_codecs_of_more_bits_win_ties() -> None:
    assert best([2.0, 1.0, 1.0], [1.0, 0.9995, 0.9995]) == 1


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


@pytest.mark.parametrize(
    ("seconds", "taken", "doubt"),
    [
        ((0.0785, 0.0683), 0, "; int8 stays, because times of single steps vary by more"),
        ((0.0683, 0.0785), 0, ""),
        ((0.0785, 0.0683), 1, ""),
        ((0.0770, 0.0785), 1, "; the gradient's own dtype stays, because times of single steps vary by more"),
        ((0.0784, 0.0785), 1, ""),  # int8 gains less than a codec that rounds has to
    ],
)
def test_the_reason_for_a_codec_explains_why_a_slower_one_stays(
    seconds: tuple[float, float], taken: int, doubt: str
) -> None:
    plan = merging.Plan((1, 1))
    rounding = Candidate(with_send_mode(plan, codec="int8"), measured(), 0.99996)
    exact = Candidate(with_send_mode(plan, codec=OWN), measured())
    text = why_codec([rounding, exact], seconds, taken)
    assert f"{1e3 * seconds[0]:.3g} ms per step in int8, {1e3 * seconds[1]:.3g} ms per step in the gradient's" in text
    assert text.partition("own dtype")[2] == doubt


def codec(wire: str, size: float, encode: float = 0.0, decode: float = 0.0) -> Codec:
    return Codec(wire, size, 1.0, encode, decode)


def test_an_exchange_takes_what_one_of_as_many_bytes_took() -> None:
    before = measured(Curve((0,), (0.5,)))
    other = in_codec(before, np.array([100, 16]), codec("auto", 5.0), codec("int8", 2.5), 2)
    elements = np.arange(10, 3000, 7)
    assert other.exchange(elements) == pytest.approx(before.exchange(elements / 2), rel=1e-12)
    assert other.message == before.message and other.profile.load.tolist() == [100, 16]
    again = in_codec(other, before.profile.load, codec("int8", 2.5), codec("auto", 5.0), 2)
    assert again == before


def test_what_a_codec_takes_itself_counts_once_to_write_and_for_each_worker_to_read() -> None:
    before, now = measured(Curve((0,), (0.5,))), codec("auto", 5.0, encode=1e-4, decode=1e-4)
    other = in_codec(before, before.profile.load, now, codec("int8", 5.0, encode=3e-4, decode=2e-4), 4)
    assert other.exchange(100) == pytest.approx(0.4 + 4 * 1e-4 * 100)
    assert other.message is not None and other.message(100) == pytest.approx(0.5 + 2e-4 * 100)
    cheaper = in_codec(before, before.profile.load, codec("auto", 5.0, decode=1.0), codec("int8", 5.0), 4)
    assert cheaper.exchange(1000) >= 0.0  # a curve does not fall, nor below nothing


def test_a_sample_has_a_part_of_everything_and_is_small() -> None:
    sample = ValueSample(40 * BLOCKS * BLOCK)
    for number in range(4):
        sample.take(torch.full((10 * BLOCKS * BLOCK,), float(number + 1)), 10 * BLOCKS * BLOCK)
    values = sample.values()
    assert values is not None and BLOCKS * BLOCK <= values.numel() <= 2 * BLOCKS * BLOCK
    counts = [int((values == number + 1).sum()) for number in range(4)]
    assert min(counts) > 0 and max(counts) - min(counts) <= BLOCK


def test_what_is_left_of_messages_comes_behind_whole_blocks() -> None:
    sample = ValueSample(BLOCK)
    sample.take(torch.full((10,), 2.0), 7)
    sample.take(torch.full((BLOCK + 3,), 3.0), BLOCK + 3)
    values = sample.values()
    assert values is not None
    assert values.tolist() == [3.0] * BLOCK + [2.0] * 7 + [0.0] * 3 + [3.0] * 3


def test_a_sample_comes_from_a_device_at_once() -> None:
    device, sample = Device(), ValueSample(BLOCK)
    device.use()
    with streams.installed():
        for number, length in enumerate((10, BLOCK + 3, 2 * BLOCK)):
            sample.take(put(torch.full((length,), float(number)), device), length)
        sample.take(torch.full((2,), 3.0), 2)  # a tensor class of another device
        assert not device.books.waits
        values = sample.values()
    assert len(device.books.waits) == 1
    assert (
        values is not None and values.tolist() == [1.0] * BLOCK + [2.0] * 2 * BLOCK + [0.0] * 10 + [1.0] * 3 + [3.0] * 2
    )


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nothing_is_learned_of_no_values_or_of_such(bad: float) -> None:
    assert ValueSample(10).values() is None
    sample = ValueSample(10)
    sample.take(torch.tensor([1.0, bad]), 2)
    assert sample.values() is None


def test_what_arrives_is_what_receivers_read() -> None:
    values = torch.linspace(1.0, 9.0, 3 * BLOCK)
    shares = []
    for name in ("fp32", "fp16", "int8", "int4"):
        found = handling(VALUES[name], values)
        out = torch.empty(VALUES[name].size(values.numel()), dtype=torch.uint8)
        read = VALUES[name].encode(values, out)
        assert found.lost == pytest.approx(float((values.double() - read.double()).square().sum()))
        assert found.energy == pytest.approx(float(values.double().square().sum()))
        assert found.encode > 0 and found.decode > 0
        shares.append(1 - found.lost / found.energy)
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True) and shares[-1] < 1.0
    assert handling(VALUES["sign"], torch.tensor([3.0, -3.0] * BLOCK)).lost == 0.0
