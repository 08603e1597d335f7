# SPDX-License-Identifier: Apache-2.0
"""Random words are splitmix64's, whatever they are drawn with, and blocks draw the same ones wherever they stand."""

from __future__ import annotations

import pytest
import torch

from sparsifiers.quantising.draws import FACTORS, GOLDEN, MASK, SHIFTS, STREAM, WORDS, Draws, key_of, mixed

CPU = torch.device("cpu")
SEED = 1234567  # with the first words that its authors' program, and others, give for it
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64(seed: int, count: int) -> list[int]:
    """The first words of the generator, as its authors write it: the counter is moved before each word."""
    words = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        word = seed
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        words.append(word ^ (word >> 31))
    return words


def unsigned(words: torch.Tensor) -> list[int]:
    return [word % 2**64 for word in words.flatten().tolist()]


def test_the_reference_is_the_published_generator() -> None:
    assert splitmix64(SEED, 5) == PUBLISHED
    assert (GOLDEN, FACTORS, SHIFTS) == (0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31))
    assert MASK == 2**64 - 1


def test_words_are_those_of_splitmix64() -> None:
    """The first word of a key is the mixed key itself: the generator's counter one step on from its seed."""
    assert unsigned(Draws((SEED + GOLDEN) % 2**64).words(2, 0, CPU))[:5] == PUBLISHED
    assert mixed((SEED + GOLDEN) % 2**64) == PUBLISHED[0]


@pytest.mark.parametrize("key", [0, 1, SEED, 2**63, 2**64 - 1])
@pytest.mark.parametrize("first", [0, 7, 10**9, 2**40])
@pytest.mark.parametrize("stream", [0, 1, 15])
def test_words_of_any_key_block_and_stream(key: int, first: int, stream: int) -> None:
    words = Draws(key, first).words(3, stream, CPU)
    assert words.shape == (3, WORDS) and words.dtype == torch.int64
    seed = key + stream * STREAM + (WORDS * first - 1) * GOLDEN
    assert unsigned(words) == splitmix64(seed % 2**64, 3 * WORDS)


def test_blocks_draw_the_same_wherever_they_stand() -> None:
    whole = Draws(SEED, 3)
    for blocks in (1, 5):
        assert torch.equal(whole.after(blocks).words(2, 1, CPU), whole.words(8, 1, CPU)[blocks : blocks + 2])
        assert torch.equal(whole.after(blocks).signs(2, 128, 0, CPU), whole.signs(8, 128, 0, CPU)[blocks : blocks + 2])
        assert torch.equal(whole.after(blocks).uniform(2, 256, CPU), whole.uniform(8, 256, CPU)[blocks : blocks + 2])
    assert whole.after(2).after(3) == whole.after(5) == Draws(SEED, 8)


def test_signs_are_the_bits_of_words() -> None:
    draws = Draws(SEED, 2)
    words = [unsigned(row) for row in draws.words(3, 1, CPU)]
    for size in (64, 128, 256):
        signs = draws.signs(3, size, 1, CPU)
        assert signs.dtype == torch.float32 and signs.shape == (3, size)
        expected = [[1.0 - 2.0 * (row[i // 64] >> i % 64 & 1) for i in range(size)] for row in words]
        assert signs.tolist() == expected


def test_uniform_numbers_are_quarters_of_words() -> None:
    draws = Draws(SEED, 2)
    for size in (64, 128, 256):
        words = [word for stream in range(size // 16) for word in unsigned(draws.words(1, stream, CPU))]
        expected = [(words[i // 4] >> 16 * (i % 4) & 0xFFFF) / 2**16 for i in range(size)]
        uniform = draws.uniform(1, size, CPU)
        assert uniform.dtype == torch.float32 and uniform.tolist() == [expected]


def test_signs_are_balanced_and_of_one_another_independent() -> None:
    signs = Draws(key_of(1)).signs(4096, 256, 0, CPU)
    other = Draws(key_of(1)).signs(4096, 256, 1, CPU)
    deviation = 4096**-0.5
    assert float(signs.mean().abs()) < 5 * deviation / 16
    assert float(signs.mean(dim=0).abs().max()) < 5 * deviation  # of each coordinate
    products = signs.T @ signs / 4096
    products.fill_diagonal_(0.0)
    assert float(products.abs().max()) < 6 * deviation  # of any two coordinates
    assert float((signs[1:] * signs[:-1]).mean(dim=0).abs().max()) < 5 * deviation  # of neighbouring blocks
    assert float((signs * other).mean(dim=0).abs().max()) < 5 * deviation  # of two streams


def test_uniform_numbers_are_uniform_and_independent() -> None:
    uniform = Draws(key_of(2)).uniform(4096, 256, CPU)
    assert 0.0 <= float(uniform.min()) and float(uniform.max()) < 1.0
    counts = torch.histc(uniform, bins=256, min=0.0, max=1.0)
    expected = uniform.numel() / 256
    assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 5 * (2 * 255) ** 0.5  # chi-squared
    centred = (uniform - (0.5 - 2.0**-17)) * 12**0.5
    assert float(centred.mean().abs()) < 5 / 1024
    products = centred.T @ centred / 4096
    products.fill_diagonal_(0.0)
    assert float(products.abs().max()) < 6 / 64  # of any two coordinates, also of different streams


def test_streams_do_not_meet() -> None:
    """The counters of two streams are so far apart that no tensor has blocks enough to go from one to the other."""
    steps = STREAM * pow(GOLDEN, -1, 2**64) % 2**64  # of the counter, from one stream to the next
    for streams in range(1, 16):
        apart = streams * steps % 2**64
        assert min(apart, 2**64 - apart) > 2**50


def test_keys() -> None:
    facts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (2**64 - 1,), (1, 2, 3), (3, 2, 1), (2, 1, 3)]
    keys = [key_of(*each) for each in facts]
    assert len(set(keys)) == len(facts) and all(0 <= key < 2**64 for key in keys)
    assert keys == [key_of(*each) for each in facts]
    flipped = [bin(key_of(5, 77) ^ key_of(5, 77 ^ 1 << bit)).count("1") for bit in range(64)]
    assert 16 < min(flipped) and max(flipped) < 48  # one bit of a fact changes about half of the key's
