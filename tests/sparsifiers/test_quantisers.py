# SPDX-License-Identifier: Apache-2.0
"""What each quantiser writes and reads: small examples by hand, and the properties that it is there for."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Quantiser
from sparsifiers.conformance_reading import DRAWS, decoded, encoded, gaussian, inputs
from sparsifiers.quantising.draws import LEAST, MOST, SCALE, Draws, as_scale, bounded, key_of, read_scale, write_scale
from sparsifiers.quantising.linear import packed, unpacked
from sparsifiers.quantising.stochastic import NOISE

pytestmark = pytest.mark.usefixtures("one_thread")

INTEGERS = ("int8", "int4", "qsgd", "terngrad")
SCALED = (*INTEGERS, "fp8", "onebit")  # those with a scale of sparsifiers.quantising.draws
OPTIONS = [{"bits": bits, "norm": norm} for norm, bits in NOISE]


def made(name: str, **options: object) -> Quantiser:
    return sparsifiers.quantiser(name, **options)


def read(name: str, values: Tensor, size: int = 64, draws: Draws = DRAWS, **options: object) -> Tensor:
    """What is read of the bytes of `values`, as long as they are."""
    quantiser = made(name, **options)
    return decoded(quantiser, encoded(quantiser, values, size, draws), size, draws).view(-1)[: values.numel()]


def block(*values: float, size: int = 64) -> Tensor:
    """One block that begins with some values and goes on with zeros."""
    return torch.tensor([*values, *[0.0] * (size - len(values))])


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "of_64", "of_256", "unbiased", "memory"),
    [
        ("int8", 8, 66, 258, False, "none"),
        ("int4", 4, 34, 130, False, "none"),
        ("fp8", 8, 66, 258, False, "none"),
        ("qsgd", 4, 34, 130, True, "none"),
        ("terngrad", 2, 18, 66, True, "none"),
        ("onebit", 1, 10, 34, False, "residual"),
    ],
)
def test_the_table(name: str, bits: int, of_64: int, of_256: int, unbiased: bool, memory: str) -> None:
    quantiser = made(name)
    assert (quantiser.name, quantiser.bits, quantiser.unbiased, quantiser.memory) == (name, bits, unbiased, memory)
    assert (quantiser.record_bytes(64), quantiser.record_bytes(256)) == (of_64, of_256)
    assert quantiser.needs_feedback == (memory != "none")
    assert repr(quantiser) == ("qsgd(bits=4, norm='max')" if name == "qsgd" else f"{name}()")
    assert pickle.loads(pickle.dumps(quantiser)).record_bytes(128) == quantiser.record_bytes(128)


@pytest.mark.parametrize("name", sparsifiers.quantisers())
def test_noise_is_what_it_is_said_to_be(name: str) -> None:
    _noise_is_right(made(name))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_noise_of_qsgd_is_right_with_all_options(options: dict[str, object]) -> None:
    _noise_is_right(made("qsgd", **options))


def _noise_is_right(quantiser: Quantiser) -> None:
    values = gaussian(2000 * 256, seed=17)
    error = decoded(quantiser, encoded(quantiser, values, 256), 256).view(-1) - values
    noise = float(error.double().square().sum() / values.double().square().sum())
    assert noise == pytest.approx(quantiser.noise, rel=0.15)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_int8_by_hand() -> None:
    values = block(127.0, -127.0, 0.5, 1.5, 2.5, -3.5, 3.4, -0.0)
    (record,) = encoded(made("int8"), values, 64)
    assert record[:SCALE].tolist() == [0x80, 0x3F]  # 1.0 in bfloat16, the low byte first
    assert record[SCALE : SCALE + 8].view(torch.int8).tolist() == [127, -127, 0, 2, 2, -4, 3, 0]
    assert read("int8", values)[:8].tolist() == [127.0, -127.0, 0.0, 2.0, 2.0, -4.0, 3.0, 0.0]


def test_int4_by_hand() -> None:
    values = block(7.0, -7.0, 0.5, 1.5, 2.5, -3.5)
    values[32:35] = torch.tensor([1.0, 2.0, -1.0])
    (record,) = encoded(made("int4"), values, 64)
    assert record[:SCALE].tolist() == [0x80, 0x3F]
    # Two a byte, half a block apart: 7 and 1, -7 and 2, 0 and -1, 2, 2, -4.
    assert record[SCALE : SCALE + 6].tolist() == [0x17, 0x29, 0xF0, 0x02, 0x02, 0x0C]
    assert read("int4", values)[[0, 1, 2, 3, 4, 5, 32, 33, 34]].tolist() == [7, -7, 0, 2, 2, -4, 1, 2, -1]


def test_a_scale_is_rounded_and_codes_are_chosen_for_it() -> None:
    """128.2 / 127 is 1.0094, of which a bfloat16 makes 1.0078125: 127 of these, and 1 is 0.99 of one, not 0.9906."""
    step = 1.0078125
    values = block(128.2, 1.0, 0.505 * step, 0.495 * step)
    assert read("int8", values)[:4].tolist() == [127 * step, step, step, 0.0]


def e4m3() -> list[float]:
    """All numbers from 0 on that the format has, as its paper defines them."""
    subnormal = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(8 + mantissa) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for mantissa in range(8)]
    return [*subnormal, *normal[:-1]]  # the last one is NaN


def test_fp8_by_hand() -> None:
    assert max(e4m3()) == 448.0
    values = block(200.0, -255.9, 145.0, 1.0, -17.5, 0.3, 2.0**-9, 0.4 * 2.0**-9, -0.6 * 2.0**-9)
    expected = [192.0, -256.0, 144.0, 1.0, -18.0, 0.3125, 2.0**-9, 0.0, -(2.0**-9)]  # halves go to the even mantissa
    assert read("fp8", values)[:9].tolist() == expected
    assert read("fp8", values / 1024)[:9].tolist() == [value / 1024 for value in expected]


def test_fp8_is_the_nearest_of_its_numbers() -> None:
    values = gaussian(64 * 64, seed=3) * 10.0 ** gaussian(64 * 64, seed=4)
    for row, got in zip(values.view(-1, 64), read("fp8", values).view(-1, 64), strict=True):
        scale = 2.0 ** (row.abs().max().log2().floor() - 7)
        known = torch.tensor(e4m3()) * scale
        distances = (row.abs().unsqueeze(1) - known).abs()
        assert torch.equal((row - got).abs(), distances.amin(dim=1))


def test_onebit_by_hand() -> None:
    values = block(*[1.0, -3.0, 2.0, -2.0] * 16)
    (record,) = encoded(made("onebit"), values, 64)
    assert record[:SCALE].tolist() == [0x00, 0x40]  # (1 + 3 + 2 + 2) / 4
    # Eight a byte, an eighth of a block apart: 1 and 3 of each row of four are minus, so whole bytes are.
    assert record[SCALE:].tolist() == [0x00, 0xFF, 0x00, 0xFF] * 2
    assert read("onebit", values)[:4].tolist() == [2.0, -2.0, 2.0, -2.0]


def test_onebit_sends_one_sign_of_a_block_that_has_zeros_by_hand() -> None:
    values = block(*[1.0, -3.0, 0.0, -0.0] * 16)
    (record,) = encoded(made("onebit"), values, 64)
    assert record[:SCALE].tolist() == [0x41, 0xC0]  # 3, of which 1 has no bit: minus, in a block with zeros
    assert record[SCALE:].tolist() == [0x00, 0xFF, 0x00, 0x00] * 2
    assert read("onebit", values)[:4].tolist() == [0.0, -3.0, 0.0, 0.0]
    assert read("onebit", -values)[:4].tolist() == [0.0, 3.0, 0.0, 0.0]
    assert read("onebit", torch.tensor([4.0, 0.0, 2.0]), 256).tolist() == [3.0, 0.0, 3.0]


def test_the_mean_of_onebit_is_of_the_values_that_are_there() -> None:
    assert read("onebit", torch.tensor([1.0, -3.0, 2.0]), 256).tolist() == [2.0, -2.0, 2.0]
    assert read("onebit", torch.cat([torch.ones(64), torch.tensor([4.0])]), 64).tolist() == [*[1.0] * 64, 4.0]


def test_terngrad_by_hand() -> None:
    values = block(2.0, -2.0, 1.0, -1.0, 0.0).repeat(4000)
    got = read("terngrad", values).view(-1, 64)
    assert set(got.unique().tolist()) == {-2.0, 0.0, 2.0}
    assert (got[:, 0] == 2.0).all() and (got[:, 1] == -2.0).all() and (got[:, 4:] == 0.0).all()
    assert float(got[:, 2].mean()) == pytest.approx(1.0, abs=5 / 4000**0.5)
    assert float(got[:, 3].mean()) == pytest.approx(-1.0, abs=5 / 4000**0.5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_qsgd_reads_one_of_two_neighbouring_levels(options: dict[str, object]) -> None:
    values = gaussian(64 * 512, seed=5)
    quantiser = made("qsgd", **options)
    records = encoded(quantiser, values, 64)
    scale = read_scale(records)
    norm = values.view(-1, 64).norm(dim=1) if options["norm"] == "l2" else values.view(-1, 64).abs().amax(dim=1)
    levels = (1 << (int(str(options["bits"])) - 1)) - 1
    assert bool((scale.view(-1) * levels / norm >= 1.0 - 1e-6).all())  # rounded up, by 2**-7 at most
    assert bool((scale.view(-1) * levels / norm <= 1.0 + 2.0**-7).all())
    steps = values.view(-1, 64) / scale
    got = decoded(quantiser, records, 64) / scale
    assert bool(((got == steps.floor()) | (got == steps.ceil())).all())
    fraction = steps - steps.floor()
    raised = (got > steps).float()
    assert float((raised - fraction).mean()) == pytest.approx(0.0, abs=5 * 0.5 / values.numel() ** 0.5)
    for low in (0.1, 0.4, 0.7):
        some = (fraction > low) & (fraction < low + 0.2)
        expected, chance = float(fraction[some].mean()), 5 * 0.5 / float(some.sum()) ** 0.5
        assert float(raised[some].mean()) == pytest.approx(expected, abs=chance)


def test_draws_decide_what_qsgd_rounds_up() -> None:
    values = gaussian(640)
    assert torch.equal(read("qsgd", values), read("qsgd", values))
    assert not torch.equal(read("qsgd", values), read("qsgd", values, draws=Draws(key_of(1))))
    uniform = DRAWS.uniform(1, 64, torch.device("cpu"))[0] + 2.0**-17
    one = block(7.0, *[0.25] * 63)
    assert torch.equal(read("qsgd", one)[1:] == 1.0, uniform[1:] < 0.25)


# -- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
def test_what_is_read_is_code_times_scale_exactly(name: str) -> None:
    for _, values in inputs(64):
        records = encoded(made(name), values, 64)
        got, scale = decoded(made(name), records, 64).double(), read_scale(records).double()
        if name == "onebit":  # in its sign and its last bit it says which values there are
            wanted, scale = scale.abs(), got.abs().amax(dim=1, keepdim=True)
            assert torch.allclose(scale, wanted, rtol=2.0**-7, atol=0.0)
        codes = torch.where(scale > 0, got / scale, 0.0)
        assert torch.equal(codes * scale, got)
        grain = 2.0**-9 if name == "fp8" else 1.0
        assert torch.equal((codes / grain).round() * grain, codes) and float(codes.abs().max()) <= 256


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_linear_levels_are_half_a_step_off_at_most_and_read_themselves_again(name: str) -> None:
    for _, values in inputs(128):
        quantiser = made(name)
        records = encoded(quantiser, values, 128)
        got = decoded(quantiser, records, 128)
        assert bool(((got - values.view(-1, 128)).abs() <= 0.5 * read_scale(records) * (1 + 1e-6)).all())
        assert torch.equal(encoded(quantiser, got.view(-1), 128), records)


def test_scales_are_rounded_flushed_and_written() -> None:
    wanted = torch.tensor([[1.0], [1.00390625], [1.01171875], [0.0], [LEAST], [LEAST * 0.999], [1e-40], [torch.nan]])
    nearest, up = as_scale(wanted), as_scale(wanted, up=True)
    assert nearest[:-1, 0].tolist() == [1.0, 1.0, 1.015625, 0.0, LEAST, 0.0, 0.0]  # halves to the even one
    assert up[:-1, 0].tolist() == [1.0, 1.0078125, 1.015625, 0.0, LEAST, 0.0, 0.0]
    assert bool(nearest[-1].isnan()) and bool(up[-1].isnan())
    out = torch.zeros(8, 5, dtype=torch.uint8)
    write_scale(up, out)
    assert torch.equal(read_scale(out)[:-1], up[:-1]) and bool(read_scale(out)[-1].isnan()) and not out[:, 2:].any()


def test_magnitudes_are_cut_off() -> None:
    blocks = torch.tensor([[1.0, -2.0], [3e38, -1.0], [torch.inf, 1.0], [-torch.inf, 1.0], [torch.nan, 1.0]])
    largest = bounded(blocks)
    assert largest[:2, 0].tolist() == [2.0, MOST] and bool(largest[2:].isnan().all())
    assert blocks[:2].tolist() == [[1.0, -2.0], [MOST, -1.0]]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_codes_are_packed(width: int) -> None:
    codes = torch.randint(0, 1 << width, (5, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = packed(codes, width)
    assert data.shape == (5, 64 * width // 8) and data.dtype == torch.uint8
    assert torch.equal(unpacked(data, width), codes)
    apart = data.shape[1]
    for i in (0, 1, 63):
        assert torch.equal(data[:, i % apart] >> i // apart * width & (1 << width) - 1, codes[:, i])


@pytest.mark.parametrize("name", SCALED)
def test_sums_of_opposite_senders_are_not_subnormal(name: str) -> None:
    """Two that differ by the last bit of a least scale, divided by as many as there may be."""
    quantiser, top = made(name), {"int8": 127, "int4": 7, "qsgd": 7, "fp8": 128}.get(name, 1)
    messages = [
        encoded(quantiser, torch.full((64,), value * top * LEAST * 1.5), 64).view(-1)
        for value in (1.0, -1.0 - 2.0**-7, 1.0 + 2.0**-6)
    ]
    for pair in ((0, 1), (1, 2), (0, 2)):
        total = torch.empty(64)
        quantiser.decode_sum([messages[which] for which in pair], [DRAWS] * 2, 64, 1 / 256, total)
        assert bool(((total == 0) | (total.abs() >= 2.0**-126)).all())
        assert name == "fp8" or bool(total.any())


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"bits": 3}, {"bits": 1}, {"bits": "4"}, {"norm": "l1"}, {"norm": None}], ids=str)
def test_options_of_qsgd(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=": expected 2, 4 or 8 bits, and"):
        made("qsgd", **options)


def test_fp8_needs_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ValueError, match="fp8 is not supported: torch"):
        made("fp8")
