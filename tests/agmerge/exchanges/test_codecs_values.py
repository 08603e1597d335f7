# SPDX-License-Identifier: Apache-2.0
"""Value codecs: how much is lost, that what is said to arrive arrives, and what becomes of the extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agmerge.exchanges.message import VALUES, Cast, ValueCodec, scaled, value_codec
from agmerge.exchanges.message.scaled import Signs, Steps

STORAGE = [torch.float32, torch.float64]
ALL = {**VALUES, "fp64": value_codec("auto", torch.float64)}
EACH = pytest.mark.parametrize("codec", ALL.values(), ids=ALL)
BITS = {4: torch.int32, 8: torch.int64, 2: torch.int16}
NAN, INF = math.nan, math.inf


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, but for which NaN it is: conversions differ in that from one place of a vector to another."""
    if a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    return torch.equal(*(x.nan_to_num(nan=0.0).view(BITS[x.itemsize]) for x in (a, b)))


def through(codec: ValueCodec, values: torch.Tensor) -> torch.Tensor:
    """What receivers read; also that the sender knows it, to the bit, and that only its own bytes are written."""
    size = codec.size(values.numel())
    out, kept = torch.full((size + 16,), 0xA5, dtype=torch.uint8), values.clone()
    sent = codec.encode(values, out[:size])
    assert same(values, kept) and (out[size:] == 0xA5).all()
    got = codec.decode(out[:size], values.numel(), values.dtype)
    assert same(sent.to(values.dtype), got) and sent.shape == values.shape
    messages = out[: size // 16 * 16 + 16].repeat(2, 1)  # of two ranks, as a device reads them
    rows = codec.decode_rows(messages[:, :size], values.numel(), values.dtype)
    assert all(same(row, got) for row in rows) and len(rows) == 2
    for count in {0, 1, values.numel() // 2, values.numel() - 1} - {-1}:
        if count <= values.numel():
            assert same(codec.decode(out[:size], count, values.dtype), got[:count])
    return got


@settings(deadline=None)
@given(
    codec=st.sampled_from(list(ALL.values())),
    dtype=st.sampled_from(STORAGE),
    count=st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 257, 511, 512, 513, 1000])),
    exponent=st.floats(-50, 42),
    seed=st.integers(0, 1000),
)
def test_what_is_finite_stays_finite_and_near(
    codec: ValueCodec, dtype: torch.dtype, count: int, exponent: float, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=source, dtype=torch.float64) * 10.0**exponent
    values[torch.rand(count, generator=source) < 0.1] = 0.0
    limit = torch.finfo(dtype).max
    values = values.clamp(-limit, limit).to(dtype)
    got = through(codec, values)
    assert got.isfinite().all()
    if isinstance(codec, Signs):  # what it makes of them: test_codecs_signs.py
        return
    assert (got[values == 0] == 0).all()
    if isinstance(codec, Cast):
        info = torch.finfo(codec.dtype)
        expected = values.clamp(-info.max, info.max) if info.max < limit else values
        assert same(got, expected.to(codec.dtype).to(dtype))
        return
    assert isinstance(codec, Steps)
    levels = codec.levels
    most = torch.finfo(torch.float32).max / (levels + 1) * levels
    for start in range(0, count, 256):
        block, back = values[start : start + 256].double(), got[start : start + 256].double()
        step = min(float(block.abs().max()), most) / levels
        tiny = torch.finfo(torch.float32).tiny
        assert (back - block.clamp(-levels * step, levels * step)).abs().max() <= 0.5001 * step + levels * tiny


@EACH
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 255, 256, 299])
def test_what_is_not_finite_arrives_so(codec: ValueCodec, dtype: torch.dtype, bad: float, place: int) -> None:
    values = torch.ones(300, dtype=dtype)
    values[place] = bad
    got = through(codec, values)
    assert not got[place].isfinite()
    assert got[(torch.arange(300) // 256) != place // 256].isfinite().all()  # at most its block
    if isinstance(codec, Cast):
        assert got.isfinite().sum() == 299


@EACH
@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_the_largest_saturates(codec: ValueCodec, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest, 1.0, -0.0, 0.0], dtype=dtype)
    got = through(codec, values)
    assert got.isfinite().all() and got[0] == -got[1] > 1e4
    assert (values - got).isfinite().all()


@pytest.mark.parametrize("name", ["int8", "int4", "2bit", "sign"])
@pytest.mark.parametrize("tiny", [5e-45, 1e-45, 1e-44, 1e-43, 1e-40, 1e-38])
def test_the_smallest_do_no_harm(tiny: float, name: str) -> None:
    values = torch.tensor([tiny, -tiny, tiny / 2, 0.0])
    got = through(VALUES[name], values)
    assert got.isfinite().all() and (got.abs() <= 1.01 * tiny).all()


@pytest.mark.parametrize("name, levels", [("int8", 127), ("int4", 7)])
def test_multiples_of_a_step_are_exact(name: str, levels: int) -> None:
    values = torch.arange(-levels, levels + 1).float() / 8
    assert same(through(VALUES[name], values).abs(), values.abs())


SIZES = [  # bytes of a value of many, and of a single one
    ("fp32", 4.0, 4),
    ("fp16", 2.0, 2),
    ("bf16", 2.0, 2),
    ("int8", 1 + 4 / 256, 5),
    ("int4", 1 / 2 + 4 / 256, 5),
    ("2bit", 1 / 4 + 8 / 256, 9),
    ("sign", 1 / 8 + 4 / 256, 5),
]


@pytest.mark.parametrize("name, each, single", SIZES)
def test_sizes(name: str, each: float, single: int) -> None:
    assert VALUES[name].size(256 * 100) == 256 * 100 * each
    assert VALUES[name].size(0) == 0 and VALUES[name].size(1) == single


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_auto_is_the_gradients_own_dtype(dtype: torch.dtype) -> None:
    codec = value_codec("auto", dtype)
    assert isinstance(codec, Cast) and codec.dtype == dtype
    assert value_codec("int8", dtype).name == "int8"


def test_identities_are_what_they_have_always_been() -> None:
    expected = {"fp32": 1, "fp16": 2, "bf16": 3, "fp64": 4, "int8": 8, "int4": 9, "2bit": 10, "sign": 11}
    assert {name: codec.identity for name, codec in ALL.items()} == expected


@EACH
def test_nothing_waits_on_a_device(codec: ValueCodec) -> None:
    out = torch.empty(codec.size(300), dtype=torch.uint8, device="meta")
    count = torch.empty((), dtype=torch.int32, device="meta")
    assert codec.encode(torch.empty(300, device="meta"), out, count).shape == (300,)
    assert codec.decode(out, 299, torch.float32).shape == (299,)


@pytest.mark.parametrize("name, error", [("int8", 0.03), ("int4", 0.5), ("2bit", 4.5), ("sign", 4.5)])
@pytest.mark.parametrize("count", [66_559, 66_560, 66_561, 1_000_000])
def test_many_values(name: str, error: float, count: int) -> None:
    """Where scales end follows from the size alone."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    assert (through(VALUES[name], values) - values).abs().max() < error


@pytest.mark.parametrize("name", ["int8", "int4", "2bit", "sign"])
def test_scales_end_where_the_size_says(name: str) -> None:
    codec = VALUES[name]
    assert isinstance(codec, (Steps, Signs))
    for slots in range(2000):
        scales, codes = codec.split(torch.zeros(codec.size(slots), dtype=torch.uint8))
        assert scales.shape == (-(-slots // 256), codec.scales)
        assert len(codes) == -(-slots * codec.width // 8)


BYTES = {  # scales, then codes, the first in the lowest bits
    "int8": "87c3613d 12ee0900fb367f81",
    "int4": "0000803f f1003097",
    "2bit": "00cc0c3f 0055b540 04e9",
    "sign": "00001e40 92",
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_what_they_have_always_been(name: str) -> None:
    values = torch.tensor([1.0, -1.0, 0.5, 0.0, -0.25, 3.0, 7.0, -7.0])
    out = torch.zeros(VALUES[name].size(8), dtype=torch.uint8)
    VALUES[name].encode(values, out)
    assert out.numpy().tobytes() == bytes.fromhex(BYTES[name])


def test_a_codec_of_a_width_that_nothing_packs_is_refused() -> None:
    with pytest.raises(ValueError, match="int6: values of 6 bits are not supported. Use 8, 4, 2, 1"):
        Steps("int6", 99, 6)


class GPUsDivision(TorchDispatchMode):
    """Division by a Python number as torch has it on GPUs: a product with the reciprocal."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket is torch.ops.aten.div and not isinstance(args[1], torch.Tensor):
            return args[0] * torch.tensor(1.0, dtype=args[0].dtype).div_(torch.tensor(args[1], dtype=args[0].dtype))
        return func(*args, **(kwargs or {}))


@EACH
@pytest.mark.parametrize("dtype", STORAGE)
def test_a_gpu_writes_the_hosts_bits(codec: ValueCodec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(3), dtype=dtype)
    here, there = (torch.zeros(codec.size(len(values)), dtype=torch.uint8) for _ in range(2))
    sent = codec.encode(values, here)
    monkeypatch.setattr(scaled.native, "values_encode", lambda *_: False)
    with GPUsDivision():
        assert same(codec.encode(values, there), sent)
    assert torch.equal(here, there)
