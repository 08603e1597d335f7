# SPDX-License-Identifier: Apache-2.0
"""Hold the compiled loops to the codecs of a few bits: they write and read the same, to the bit, at every level."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from agmerge.exchanges.message.scaled import SCALED, Scaled
from sparsifiers import native

SIZES = (1, 2, 3, 7, 8, 9, 255, 256, 257, 1000, 4096, 70_001)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")


def broken(vector: Tensor, source: torch.Generator) -> Tensor:
    """One block in three has something that is not finite."""
    places = torch.randint(vector.numel(), (1 + vector.numel() // 768,), generator=source)
    vector[places] = torch.tensor(NOT_FINITE)[torch.arange(len(places)) % 3]
    return vector


MAKERS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "normal": lambda x, source: x,
    "denormal": lambda x, source: x * 1e-40,
    "largest": lambda x, source: x * 1e38,
    "ties": lambda x, source: x.round(),
    "sparse": lambda x, source: x * (torch.rand(x.numel(), generator=source) < 0.01),
    "not finite": broken,
}


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use the loops of one instruction set."""
    if request.param not in native.names():
        pytest.skip(f"this machine has no {request.param}")
    before = native.level()
    native.set_level(native.LEVELS.index(request.param))
    yield request.param
    native.set_level(before)


def message(codec: Scaled, vector: Tensor, count: int | None) -> list[Tensor]:
    """Return what is written, what is said to be read, and what is."""
    out = torch.full((codec.size(vector.numel()),), 77, dtype=torch.uint8)
    sent = codec.encode(vector, out, count)
    few = vector.numel() // 3
    return [out, *(codec.decode(out, m, torch.float32).nan_to_num(nan=1.5) for m in (vector.numel(), few)),
            sent.nan_to_num(nan=1.5)]  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("codec", SCALED, ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", MAKERS)
def test_messages_are_those_of_torch(level: str, codec: Scaled, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(1)
    for n in SIZES:
        vector = MAKERS[kind](torch.randn(n, generator=source), source)
        for count in (None, n, n // 2, 0):
            used = vector if count is None else torch.cat([vector[:count], torch.zeros(n - count)])
            made = message(codec, used, count)
            with monkeypatch.context() as patch:
                patch.setattr(native, "library", None)
                expected = message(codec, used, count)
            scales = codec.split(made[0])[0]
            assert torch.equal(scales.isnan(), codec.split(expected[0])[0].isnan())
            for one, other in zip(made, expected, strict=True):
                if one.dtype == torch.uint8 and scales.isnan().any():  # which NaN it is is nobody's concern
                    one, other = (codec.split(data)[1] for data in (one, other))
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (n, count)


def test_what_the_loops_do_not_write() -> None:
    values, read = torch.randn(300), torch.zeros(512)
    scales, codes = torch.zeros(2), torch.zeros(300, dtype=torch.uint8)
    assert native.values_encode(values, 300, 8, scales, codes, read)
    assert native.values_decode(scales, codes, 300, 8, read)
    for refused in (
        (values.double(), 300, 8, scales, codes, read),
        (values[::2], 150, 8, scales, codes[:150], read),
        (values, 300, 8, scales[:1], codes, read),
        (values, 300, 8, scales, codes[:299], read),
        (values, 300, 8, scales, codes, read[:299]),
    ):
        assert not native.values_encode(*refused)
    assert not native.values_decode(scales, codes, 301, 8, read)
    assert not native.values_decode(scales, codes, 300, 8, read.half())
