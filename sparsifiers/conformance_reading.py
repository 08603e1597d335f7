# SPDX-License-Identifier: Apache-2.0
"""Checks of the values read of a quantiser's records: zeros, extremes, errors, means, and sums of several messages.

Helpers that other checks of the contract need stand first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsifiers.catalogue import quantiser
from sparsifiers.largest import bit_view
from sparsifiers.quantising.base import Quantiser, blocks_in
from sparsifiers.quantising.draws import Draws, key_of

# Make the inputs that a sparsifier is checked on: small, deterministic, and each a special case.

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """Input of a selection, with its name in errors."""

    name: str  # of the special case
    vector: Tensor  # floats [n]
    shapes: Shapes | None = None  # of the tensors that it concatenates
    finite: bool = True  # the lower bound on the count applies to it

    def __str__(self) -> str:
        return f"input {self.name!r} ({self.vector.dtype}, n={self.vector.numel()}, shapes={self.shapes})"


def gaussian(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers from a generator of their own, [n]."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cases() -> Iterator[Case]:
    """Make distributions of several lengths, the longest beyond the block in which long vectors are read."""
    for n in (2, 31, 1000, 70_001):
        uniform = gaussian(n, 1).erf()
        yield Case("gaussian", gaussian(n))
        yield Case("mostly zero", gaussian(n) * (uniform > 0.98))
        yield Case("blocks of unlike scale", gaussian(n) * gaussian(n // 97 + 1, 2).exp().repeat_interleave(97)[:n])
    for n in (2, 31, 1000):
        uniform = gaussian(n, 1).erf()
        yield Case("heavy tails", uniform.sign() / (1.001 - uniform.abs()).sqrt())
        yield Case("three values", uniform.mul(1.5).round())
        yield Case("constant", torch.full((n,), -0.75))
        yield Case("zeros", torch.zeros(n))
        yield Case("ascending", gaussian(n).abs().sort().values)
        yield Case("descending", -gaussian(n).abs().sort(descending=True).values)
        yield Case("spikes at a period", 1e-3 * gaussian(n) + 5.0 * (torch.arange(n) % 97 == 0))


def structured() -> Iterator[Case]:
    """Make vectors that concatenate tensors of several shapes, padding included."""
    for shapes in (
        ((40, 25),),
        ((25, 40), (24,)),
        ((300, 7), (20, 5, 3, 3), (28,), (10,), (1, 9), (9, 1), (13,)),
        ((3, 0), (4, 4), (), (15,)),
    ):
        n = sum(math.prod(shape) for shape in shapes)
        yield Case("gaussian", gaussian(n), shapes)
        yield Case("padding of zeros", gaussian(n) * (torch.arange(n) % 32 < 20), shapes)
        yield Case("constant", torch.ones(n), shapes)


def degenerate() -> Iterator[Case]:
    """Make values at which rules divide by zero or search for ever."""
    yield Case("n=1", torch.tensor([-2.0]))
    yield Case("n=1, zero", torch.zeros(1))
    for n in (7, 3000):
        alone = torch.zeros(n)
        alone[n // 2] = -1e-30
        yield Case("one non-zero", alone)
        yield Case("subnormal", 1e-42 * torch.arange(1, n + 1, dtype=torch.float64).float())
        yield Case("near the largest float", gaussian(n).sign() * 3e38)
        yield Case("two magnitudes far apart", torch.where(torch.arange(n) % 50 == 0, 1e30, 1e-30))
        for name, value in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
            some = gaussian(n)
            some[:: 3 if n == 7 else 500] = value
            yield Case(f"some {name}", some, finite=False)
            yield Case(f"all {name}", torch.full((n,), value), finite=False)
    yield Case("overflowing in fp16", torch.full((2000,), 6e4, dtype=torch.float16))


def drifting(step: int, factor: float = 1.0) -> Case:
    """Make the vector of a key at one step: new values in each step, of a slowly changing scale times `factor`."""
    scale = factor * (1.0 + 0.2 * math.sin(step))
    return Case("drifting", gaussian(4000, 100 + step) * scale, ((40, 100),))


# Helpers of all checks.


def require(holds: bool, what: str, where: str) -> None:
    """Raise AssertionError, with what was wrong and on which input, unless something holds."""
    if not holds:
        raise AssertionError(f"{what}: {where}")


def generators() -> tuple[object, ...]:
    """Return the states of the process's generators: torch's, Python's and numpy's."""
    name, words, *position = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, np.asarray(words).tobytes(), position


# Records, written and read as the checks do, and the vectors that are checked.

DRAWS = Draws(key_of(2024), first=5)


def encoded(made: Quantiser, values: Tensor, size: int, draws: Draws = DRAWS, fill: int = 0x5A) -> Tensor:
    """Return the records of ``values``, written where all bytes were ``fill``: uint8[blocks, bytes]."""
    out = torch.full((blocks_in(values.numel(), size), made.record_bytes(size)), fill, dtype=torch.uint8)
    made.encode(values, size, draws, out.view(-1))
    return out


def decoded(made: Quantiser, records: Tensor, size: int, draws: Draws = DRAWS, scale: float = 1.0) -> Tensor:
    """Return ``scale`` times the values read of ``records``, uint8[blocks, bytes]: float32[blocks, size]."""
    out = torch.full((len(records) * size,), math.nan)
    made.decode_sum([records.reshape(-1)], [draws], size, scale, out)
    return out.view(-1, size)


def inputs(size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of vectors of a few blocks: float32."""
    normal, uniform = gaussian(4 * size), gaussian(4 * size, 1).erf()
    yield "normal", normal
    yield "heavy tails", uniform.sign() / (1.001 - uniform.abs()).sqrt()
    yield "mostly zero", normal * (uniform > 0.9)
    yield "constant", torch.full((2 * size,), -0.75)
    yield "one coordinate a block", normal * (torch.arange(4 * size) % size == 3)
    yield "one large coordinate a block", normal + 100.0 * (torch.arange(4 * size) % size == 3)
    yield "blocks of unlike scale", normal * torch.tensor([1e-12, 1.0, 1e12, 0.0]).repeat_interleave(size)


def where_of(made: Quantiser, size: int, name: str = "any input") -> str:
    return f"{made!r} on blocks of {size}, input {name!r}"


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether all bits are the same, but that 0 and -0 are equal."""
    return torch.equal(bit_view(left + 0.0), bit_view(right + 0.0))


# The checks.

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of values
BIASED = 0.03  # share of a vector, and of its coordinates beside the largest, that its mean over draws may lack
NOISE = 0.15  # share by which the noise may be another one than announced
SHARES = (0.1, 0.5, 0.9)  # of a block that is not zero
COPIES = 2048  # draws of which the mean is taken
FACTORS = (2.0**-99, 2.0**-20, 8.0, 2.0**20, 2.0**99)  # from 1e-30 to 1e30
EXTREMES = (3e38, 1e36, 1e-28, 1e-31, 1e-33, 1e-36, 1e-38, 1e-41)
SENDERS = 256  # at most: their values must have a finite sum
LARGEST = 2.0**128 * (1 - 2.0**-16)  # of a sum, with room for rounding up while adding
NORMAL = 2.0**-126  # the least float32 that is not subnormal


def check_reading(made: Quantiser, size: int) -> None:
    """Raise AssertionError, with what was wrong and on which input, unless blocks of ``size`` are read as they must."""
    _zeros(made, size)
    _mixed(made, size)
    _not_finite(made, size)
    _factors(made, size)
    if made.unbiased:
        _mean(made, size)
    else:
        for name, values in inputs(size):
            _error(made, size, name, values)
    _extremes(made, size)
    _tails(made, size)
    _dtypes(made, size)
    _sums(made, size)


def check_noise(made: Quantiser) -> None:
    """Raise AssertionError unless normally distributed blocks are read with the error that is announced."""
    values = gaussian(1024 * 256)
    read = decoded(made, encoded(made, values, 256), 256).view(-1).double()
    noise = float((read - values.double()).square().sum() / values.double().square().sum())
    right = abs(noise - made.noise) <= NOISE * made.noise if made.noise else noise < 1e-4
    require(right, f"noise is {noise:.3g}, not {made.noise:.3g}", where_of(made, 256, "normal"))


def _zeros(made: Quantiser, size: int) -> None:
    """Check that zeros are read as zeros, also beside other blocks."""
    values = gaussian(4 * size)
    values[: 2 * size] = 0.0
    values[size : size + 7] = -0.0
    read = decoded(made, encoded(made, values, size), size)
    require(bool((read[:2] == 0.0).all()), "a block of zeros is not read as zeros", where_of(made, size, "zeros"))
    read = decoded(made, torch.zeros(2, made.record_bytes(size), dtype=torch.uint8), size)
    require(bool((read == 0.0).all()), "bytes of 0, for no gradient, are not read as zeros", where_of(made, size))


def _mixed(made: Quantiser, size: int) -> None:
    """Check that zeros beside other values are read as zeros: of one message, of sums, and of sums that are sent again.

    Else elements without a gradient on any rank, such as padding or pruned weights, would move.
    """
    draws = [Draws(key_of(8, sender), DRAWS.first) for sender in range(2)]
    for share in SHARES:
        where = where_of(made, size, f"normal, {share:.0%} of all elements, the others zero")
        empty = gaussian(8 * size, 3).erf() > 2 * share - 1
        empty[::size] = False
        # Somewhere only one of two senders has a value, and the last block is not full.
        vectors = [gaussian(7 * size + 13, 4 + sender) * 100.0**sender for sender in range(2)]
        for sender, vector in enumerate(vectors):
            vector[empty[: len(vector)]] = 0.0
            vector[5 * size :: 2 + sender] = 0.0
        messages = [encoded(made, one, size, draw).view(-1) for one, draw in zip(vectors, draws, strict=True)]
        none = (vectors[0] == 0) & (vectors[1] == 0)
        read = torch.full((8 * size,), math.nan)[: len(vectors[0])]
        again = torch.empty_like(messages[0])
        made.encode_sum(messages, draws, size, 0.5, made, DRAWS, again)
        for what, sent, by in (("", messages, draws), (" of a sum that is sent again", [again], [DRAWS])):
            made.decode_sum(sent, by, size, 0.5, read)
            require(not bool(read[none].any()), f"zeros{what} beside other values are not read as zeros", where)


def _not_finite(made: Quantiser, size: int) -> None:
    """Check that a value that is not finite makes its block NaN, and no other."""
    values = gaussian(4 * size)
    records = encoded(made, values, size)
    for name, value in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
        where = where_of(made, size, f"one {name}")
        bad = values.clone()
        bad[size + 9] = value
        written, squares = encoded(made, bad, size), torch.zeros(1, dtype=torch.float64)
        read = decoded(made, written, size)
        require(bool(read[1].isnan().all()), "a block that is not finite is not read as NaN", where)
        same = torch.equal(written[[0, 2, 3]], records[[0, 2, 3]]) and bool(read[[0, 2, 3]].isfinite().all())
        require(same, "a block that is not finite changes another one", where)
        made.encode(bad, size, DRAWS, written.view(-1), squares)
        require(not bool(squares.isfinite().any()), "squares are finite, and a value is not", where)


def _factors(made: Quantiser, size: int) -> None:
    """Check that a power of two times a vector is read as so many times the values read of it, to the bit."""
    values = gaussian(4 * size).clamp(-3.9, 3.9)
    read = decoded(made, encoded(made, values, size), size)
    for factor in FACTORS:
        times = decoded(made, encoded(made, values * factor, size), size)
        where = where_of(made, size, f"normal times {factor:.2g}")
        require(same_bits(times, read * factor), "a factor changes more than the scale of what is read", where)


def _extremes(made: Quantiser, size: int) -> None:
    """Check that values read are never infinite, not even when added up, and never subnormal, when divided."""
    for magnitude in EXTREMES:
        where = where_of(made, size, f"magnitudes of {magnitude:.0e}")
        signs, uniform = gaussian(2 * size).sign(), gaussian(2 * size, 1).erf()
        alike = decoded(made, encoded(made, signs * magnitude, size), size)
        spread = decoded(made, encoded(made, uniform * magnitude, size), size)
        for read in (alike, spread):
            total = SENDERS * float(read.double().abs().max())
            require(total < LARGEST, f"what {SENDERS} senders say has no finite sum", where)
            quotient = read / SENDERS
            normal = (quotient == 0.0) | (quotient.abs() >= NORMAL)
            require(bool(normal.all()), f"what is read, divided by {SENDERS} senders, is subnormal", where)
        require(magnitude < 1.0 or bool(alike.any()), "large values are read as zeros", where)


def _error(made: Quantiser, size: int, name: str, values: Tensor) -> None:
    """Check that values read are no farther from a block than zeros are: else error feedback would have no end."""
    read = decoded(made, encoded(made, values, size), size).double()
    blocks = values.view(-1, size).double()
    errors, squares = (read - blocks).square().sum(dim=1), blocks.square().sum(dim=1)
    nearer = bool((errors <= 1.001 * squares).all())
    require(nearer, "it is biased, and the error of a block is larger than the block", where_of(made, size, name))


def _fixed_blocks(size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of blocks of which the mean over draws is taken."""
    for share, kept in ((0.0, 1.0), (0.5, 1.0), (0.9, 1.0), (0.99, 1.0), (0.0, 0.5), (0.5, 0.5)):
        block = gaussian(size)
        block[gaussian(size, 5).erf() > 2 * kept - 1] = 0.0
        block[3] = 0.0
        block[3] = block.norm() * math.sqrt(share / (1 - share))
        yield f"normal, {kept:.0%} of it not zero, one coordinate with {share:.0%} of the energy", block
    yield "magnitudes from 1 to 1.1", torch.linspace(1.0, 1.1, size) * gaussian(size).sign()


def _mean(made: Quantiser, size: int) -> None:
    """Check that the mean over draws is the vector: all of it, its largest coordinate, and the others together."""
    for name, block in _fixed_blocks(size):
        where = where_of(made, size, name)
        read = decoded(made, encoded(made, block.repeat(COPIES), size), size).double()
        exact = block.double()
        largest = exact.abs() == exact.abs().max()
        for which, what in ((largest, "the largest coordinate is"), (~largest, "all but the largest coordinate are")):
            gains = read[:, which] @ exact[which] / exact[which].square().sum()
            gain, deviation = float(gains.mean()), float(gains.std()) / math.sqrt(COPIES)
            right = abs(gain - 1.0) <= BIASED + 5.0 * deviation
            require(right, f"it says that it is unbiased, but on average {what} read {gain:.3f} times", where)
        mean = read.mean(dim=0)
        chance = float((read - mean).square().sum(dim=1).mean()) / COPIES
        error, energy = float((mean - exact).square().sum()), float(exact.square().sum())
        right = error <= BIASED**2 * energy + 3.0 * chance
        require(right, f"it says that it is unbiased, but the mean is off by {math.sqrt(error / energy):.3f}", where)


def _tails(made: Quantiser, size: int) -> None:
    """Check vectors that do not fill their last block."""
    for tail in (1, size // 2 + 3, size - 1):
        where = where_of(made, size, f"normal, {tail} values behind two blocks")
        values = gaussian(2 * size + tail)
        records = encoded(made, values, size)
        same = torch.equal(encoded(made, values[: 2 * size], size), records[:2])
        same = same and torch.equal(encoded(made, values[2 * size :], size, DRAWS.after(2)), records[2:])
        require(same, "a block that is not full changes another one, or is changed by it", where)
        read = torch.full((3 * size,), 7.0)
        made.decode_sum([records.view(-1)], [DRAWS], size, 1.0, read[: values.numel()])
        require(bool((read[values.numel() :] == 7.0).all()), "something is written behind the vector", where)
        read = read[: values.numel()]
        require(bool(read.isfinite().all()), "finite values are not read as finite ones", where)
        blocks = decoded(made, records, size).view(-1)
        require(same_bits(read, blocks[: len(read)]), "its length changes what is read", where)
        last, error = values[2 * size :], (read - values)[2 * size :]
        nearer = made.unbiased or float(error.norm()) <= 1.001 * float(last.norm())
        require(nearer, "it is biased, and the error of a block that is not full is larger than the block", where)


def _dtypes(made: Quantiser, size: int) -> None:
    """Check that values of each dtype are quantised as the float32 they are equal to, and results rounded once."""
    for dtype in DTYPES:
        where = f"{where_of(made, size, 'normal')}, {dtype}"
        values = gaussian(3 * size).to(dtype)
        records = encoded(made, values, size)
        require(torch.equal(records, encoded(made, values.float(), size)), "float32 has other bytes", where)
        out = torch.empty(3 * size, dtype=dtype)
        made.decode_sum([records.view(-1)], [DRAWS], size, 0.3, out)
        expected = decoded(made, records, size, scale=0.3).view(-1).to(dtype)
        require(same_bits(out, expected), "what is read is not that of float32, rounded", where)


def _sums(made: Quantiser, size: int) -> None:
    """Check that messages are added in their order, in float32, and that a sum is quantised as any other vector."""
    where = where_of(made, size, "three normal vectors of unlike scale")
    draws = [Draws(key_of(7, sender), DRAWS.first) for sender in range(3)]
    vectors = [gaussian(5 * size, sender) * 1000.0**sender for sender in (1, 0, 2)]
    records = [encoded(made, vector, size, each) for vector, each in zip(vectors, draws, strict=True)]
    first, *others = [decoded(made, data, size, each) for data, each in zip(records, draws, strict=True)]
    for read in others:
        first = first + read
    expected = (first * 0.3).view(-1)
    messages = [data.view(-1) for data in records]
    for dtype in DTYPES:
        total = torch.empty(5 * size, dtype=dtype)
        made.decode_sum(messages, draws, size, 0.3, total)
        same = same_bits(total, expected.to(dtype))
        require(same, f"the sum is not that of its terms in their order, rounded to {dtype}", where)
    full = (first != 0).all(dim=1)  # one that is 0 by chance may be written as any other value
    for second in (made, quantiser("int8")):
        wanted = encoded(second, expected, size)
        written = torch.full_like(wanted, 0xA5)
        made.encode_sum(messages, draws, size, 0.3, second, DRAWS, written.view(-1))
        same = torch.equal(written[full], wanted[full])
        require(same, f"encode_sum writes other bytes than {second!r} does of the sum", where)
