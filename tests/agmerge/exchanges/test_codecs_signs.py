# SPDX-License-Identifier: Apache-2.0
"""Signs and magnitudes, ``sign`` and ``2bit``: what is sent for a value, what is left, and slots behind the count."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agmerge.exchanges.message import VALUES, scaled
from agmerge.exchanges.message.scaled import BLOCK, LARGEST

NAMES = ["2bit", "sign"]
SCALED = ["int8", "int4", *NAMES]
each_name = pytest.mark.parametrize("name", NAMES)
counts = st.one_of(st.integers(0, 20), st.sampled_from([255, 256, 257, 511, 512, 513, 1000]))


def drawn(count: int, seed: int, exponent: float = 0.0, spread: float = 1.0) -> torch.Tensor:
    """Values with signs, zeros among them. ``spread``: how many powers of ten they lie apart."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=source, dtype=torch.float64)
    values *= 10.0 ** (exponent + spread * torch.randn(count, generator=source, dtype=torch.float64))
    values[torch.rand(count, generator=source) < 0.1] = 0.0
    return values


def sent(name: str, values: torch.Tensor, count: int | torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what arrives of ``values``, and the bytes."""
    out = torch.full((VALUES[name].size(len(values)),), 0xA5, dtype=torch.uint8)
    return VALUES[name].encode(values, out, count).clone(), out


def magnitudes(name: str, block: np.ndarray) -> np.ndarray:
    """Return what the definition says of one block, float64: the magnitude that is sent for each value."""
    size = np.minimum(np.abs(block), LARGEST / BLOCK)
    if name == "sign":
        return np.full_like(size, size.mean())
    above = size > size.mean()
    low, high = size[~above].mean(), size[above].mean() if above.any() else 0.0
    return np.where(above, high, low)


@given(st.sampled_from(NAMES), counts, st.integers(0, 1000), st.floats(-30, 37))
def test_a_value_arrives_as_its_sign_and_a_mean(name: str, count: int, seed: int, exponent: float) -> None:
    values = drawn(count, seed, exponent).clamp(-LARGEST, LARGEST).float()
    got, _ = sent(name, values)
    for start in range(0, count, BLOCK):
        block, back = (x[start : start + BLOCK].double().numpy() for x in (values, got))
        expected = np.where(block < 0, -1, 1) * magnitudes(name, block)
        # 16 significant bits; what is that small is cut off.
        np.testing.assert_allclose(back, expected, rtol=2.0**-14, atol=2.0**-140)


@given(st.sampled_from(SCALED), counts, st.integers(0, 1000), st.floats(-44, 37), st.floats(0, 4), st.booleans())
def test_the_rest_is_exactly_what_was_not_sent(
    name: str, count: int, seed: int, exponent: float, spread: float, double: bool
) -> None:
    """From half of what is sent on, to the bit; a smaller value is rounded once, which the residual's dtype decides."""
    limit = LARGEST / BLOCK
    values = drawn(count, seed, exponent, spread).clamp(-limit, limit).to(torch.float64 if double else torch.float32)
    got, _ = sent(name, values)
    rest = values - got
    exact = values.abs() >= got.abs() / 2
    assert torch.equal((rest + got)[exact], values[exact])
    if name in ("int8", "int4"):
        assert exact.all()
    ulp = torch.finfo(values.dtype).eps * torch.maximum(got.abs(), values.abs())
    assert ((rest + got) - values).abs().le(ulp).all()
    # The mean is what takes most energy away.
    assert rest.double().square().sum() <= values.double().square().sum() * (1 + 1e-6)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("slots, count", [(0, 0), (1, 0), (300, 0), (300, 1), (300, 256), (700, 257), (600, 511)])
def test_slots_behind_the_count_send_nothing_and_change_nothing(name: str, slots: int, count: int) -> None:
    values = drawn(slots, count).float()
    values[count:] = 0.0
    alone, _ = sent(name, values[:count])
    got, data = sent(name, values, count)
    assert torch.equal(got[:count], alone)
    assert (got[count:].view(torch.int32) == 0).all()  # +0: -0 neither
    on_device, same_data = sent(name, values, torch.tensor(count, dtype=torch.int32))
    assert torch.equal(got, on_device) and torch.equal(data, same_data)
    assert torch.equal(VALUES[name].decode(data, count, torch.float32), alone)


@each_name
def test_equal_values_are_exact(name: str) -> None:
    values = torch.full((600,), 0.8125) * torch.where(torch.arange(600) % 3 == 0, -1.0, 1.0)
    assert torch.equal(sent(name, values)[0], values)


@each_name
def test_nothing_but_zeros_sends_zeros(name: str) -> None:
    got, data = sent(name, torch.tensor([0.0, -0.0] * 300))
    assert not got.any() and not data.any()


@each_name
def test_a_zero_among_others_is_sent_as_plus(name: str) -> None:
    """One bit has no third sign. It stays in the residual, exactly."""
    values = torch.tensor([4.0, 0.0, -4.0, -0.0])
    got, _ = sent(name, values)
    low = {"sign": 2.0, "2bit": 0.0}[name]
    high = {"sign": 2.0, "2bit": 4.0}[name]
    assert got.tolist() == [high, low, -high, low]


def test_two_magnitudes_are_the_means_above_and_below_the_mean() -> None:
    values = torch.tensor([1.0, -2.0, 3.0, -10.0, 14.0])  # 6 on average
    assert sent("2bit", values)[0].tolist() == [2.0, -2.0, 2.0, -12.0, 12.0]
    assert sent("sign", values)[0].tolist() == [6.0, -6.0, 6.0, -6.0, 6.0]


@each_name
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_dtype_of_values(name: str, dtype: torch.dtype) -> None:
    values = drawn(700, 3, spread=0.2).to(dtype)
    got, data = sent(name, values)
    assert got.dtype == dtype
    wide, wide_data = sent(name, values.to(torch.float64))
    assert torch.equal(data, wide_data) and torch.equal(got, wide.to(dtype))


@pytest.mark.parametrize("name", SCALED)
def test_any_bytes_are_read_as_something(name: str) -> None:
    """Read a damaged message that nobody notices, on a device: other values, no error, no place beyond the table."""
    source = np.random.default_rng(0)
    for slots in (1, 255, 256, 257, 1000):
        for _ in range(20):
            data = torch.from_numpy(source.integers(0, 256, VALUES[name].size(slots), dtype=np.uint8))
            for count in (0, 1, slots // 2, slots):
                assert VALUES[name].decode(data, count, torch.float32).shape == (count,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_name
def test_behind_the_count_nothing_is_sent_whatever_the_block_is(name: str, bad: float) -> None:
    values = torch.tensor([1.0, bad, 0.0, 0.0])
    got, _ = sent(name, values, 2)
    assert not got[1].isfinite() and not got[2:].any()


@pytest.mark.parametrize("count", [1_000_000, 300])
def test_a_block_is_added_up_by_halves(count: int) -> None:
    """To the bit, in numpy's float32: no library's own order of a sum, which is not promised anywhere."""
    values = drawn(count, 0).float()
    _, data = sent("sign", values)
    rows = np.zeros((-(-count // BLOCK), BLOCK), dtype=np.float32)
    rows.reshape(-1)[:count] = values.abs().numpy()
    half = BLOCK // 2
    while half:
        rows = rows[:, :half] + rows[:, half:]
        half //= 2
    used = np.minimum(count - BLOCK * np.arange(len(rows)), BLOCK).astype(np.float32)
    expected = (rows[:, 0] / used).view(np.int32) & -256
    assert np.array_equal(data[: 4 * len(rows)].view(torch.int32).numpy(), expected)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 511, 512, 513, 1300])
def test_in_how_many_parts_values_are_written_changes_no_bit(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, found = drawn(1300, count).float(), []
    values[count:] = 0.0
    for part in (1, 2, 3, scaled.PART):
        monkeypatch.setattr(scaled, "PART", part)
        for used in (count, torch.tensor(count, dtype=torch.int32)):
            got, data = sent(name, values, used)
            found.append((got, data, VALUES[name].decode(data, count, torch.float32)))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def fingerprint() -> str:
    """Return the bytes and the values of all codecs with scales, of values of all kinds."""
    whole = hashlib.sha256()
    for name in SCALED:
        for number, count in enumerate((1, 7, 256, 300, 1023, 5000, 70_001)):
            for dtype in (torch.float32, torch.float64):
                got, data = sent(name, drawn(count, number, spread=number / 2).to(dtype), count - count // 9)
                whole.update(got.numpy().tobytes() + data.numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.long
@pytest.mark.parametrize(
    "capability", ["default", *(pytest.param(one, marks=pytest.mark.long) for one in ("avx2", "avx512"))]
)
def test_bits_do_not_depend_on_the_instructions_of_the_processor(capability: str) -> None:
    """torch takes the best that there is of those that it is told."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_codecs_signs as t; print(t.fingerprint())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == fingerprint()
