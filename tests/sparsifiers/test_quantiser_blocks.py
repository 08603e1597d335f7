# SPDX-License-Identifier: Apache-2.0
"""Tensors are cut into blocks by their shapes alone, and no block spans two rows where rows are long enough."""

from __future__ import annotations

import pytest

from sparsifiers.quantising.base import LARGEST, LEAST, block_size, blocks_in


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((256,), 256),
        ((1024, 1024), 256),
        ((50257, 768), 256),
        ((10, 128), 128),
        ((10, 384), 128),
        ((3, 64), 64),
        ((7, 192), 64),
        ((64, 3, 8, 8), 64),  # a row of 192
        ((512, 512, 3, 3), 256),  # a row of 4608
        ((10, 96), 256),  # 32 is too small: across rows
        ((10, 100), 256),
        ((64, 1), 256),
        ((64,), 64),  # one row
        ((320,), 64),
        ((100,), 256),
        ((1,), 256),
        ((), 256),
        ((5, 0), 256),
        ((0,), 256),
    ],
)
def test_a_block_is_the_largest_that_divides_a_row(shape: tuple[int, ...], size: int) -> None:
    assert block_size(shape) == size


def test_no_block_spans_two_rows_that_are_long_enough() -> None:
    for row in range(1, 2000):
        size = block_size((3, row))
        assert size in (64, 128, 256)
        assert size == block_size((1000, row)) == block_size((3, row, 1)) == block_size((row,))
        if row % LEAST == 0:
            assert row % size == 0 and (row % (2 * size) or size == LARGEST)
        else:
            assert size == LARGEST


def test_the_last_block_may_be_short() -> None:
    assert [blocks_in(numel, 64) for numel in (0, 1, 63, 64, 65, 128, 129)] == [0, 1, 1, 1, 2, 2, 3]
