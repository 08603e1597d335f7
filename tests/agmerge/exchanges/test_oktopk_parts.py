# SPDX-License-Identifier: Apache-2.0
"""The mathematics of a sparse all-reduce: regions, the histogram, and pairs of indices and values."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agmerge.errors import MessageError
from agmerge.exchanges import multi_round
from agmerge.exchanges.message import bits, candidates, smallest
from agmerge.exchanges.multi_round import IndexValuePairs, PairFormat
from agmerge.exchanges.oktopk import exchange, regions

INF, NAN = torch.inf, torch.nan
LIGHT = settings(deadline=None)
COUNTS = st.lists(st.integers(0, 400), min_size=1, max_size=9)


# -- regions ----------------------------------------------------------------------------------------------------


def drawn(counts: list[int], length: int, power: float, seed: int) -> list[torch.Tensor]:
    """Ascending unique indices of every rank; the larger ``power``, the closer to 0 they lie."""
    source = np.random.default_rng(seed)
    chances = np.arange(1, length + 1, dtype=np.float64) ** -power
    chances /= chances.sum()
    return [
        torch.from_numpy(np.sort(source.choice(length, count, replace=False, p=chances)).astype(np.int32))
        for count in counts
    ]


@LIGHT
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=9),
    st.integers(300, 5000),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.integers(1, 64),
    st.integers(0, 100),
)
def test_regions_are_balanced_whatever_the_distribution(
    counts: list[int], length: int, power: float, number: int, seed: int
) -> None:
    workers, offers = len(counts), drawn(counts, length, power, seed)
    points = torch.stack([regions.sample(one, len(one), number) for one in offers]).numpy()
    cuts = regions.bounds(points, counts, length)
    assert len(cuts) == workers + 1 and cuts[0] == 0 and cuts[-1] == length and cuts == sorted(cuts)
    table = [regions.split(one, cuts) for one in offers]
    assert [sum(row) for row in table] == counts
    for rank, one in enumerate(offers):
        for region, count in enumerate(table[rank]):
            assert count == int(((one >= cuts[region]) & (one < cuts[region + 1])).sum())
    chunks = [-(-count // number) for count in counts]
    for region in range(workers):
        load = sum(row[region] for row in table)
        assert load <= Fraction(sum(counts), workers) + 1 + max(chunks) + sum(chunks)


def test_points_of_a_count_on_a_device_are_the_same() -> None:
    indices = torch.cat([torch.arange(0, 300, 3), torch.full((28,), 1000)]).to(torch.int32)
    count = torch.tensor(100, dtype=torch.int32)
    points = regions.sample(indices, count, 7)
    assert points.tolist() == regions.sample(indices[:100], 100, 7).tolist() == [39, 81, 123, 168, 210, 252, 297]
    assert regions.sample(indices[:0], 0, 3).tolist() == [0, 0, 0]
    assert regions.sample(indices[:2], 2, 4).dtype == torch.int32


@LIGHT
@given(st.integers(0, 1000), st.integers(1, 20))
def test_shares_are_equal_but_for_the_end(total: int, workers: int) -> None:
    parts = regions.shares(total, workers)
    assert sum(parts) == total and len(parts) == workers and parts == sorted(parts, reverse=True)
    assert parts[0] == -(-total // workers)


@LIGHT
@given(COUNTS)
def test_moves_keep_the_order(held: list[int]) -> None:
    wanted = regions.shares(sum(held), len(held))
    table = regions.moves(held, wanted)
    assert [sum(row) for row in table] == held
    assert [sum(column) for column in zip(*table, strict=True)] == wanted
    whole = torch.arange(sum(held))
    pieces = [part.split(row) for part, row in zip(whole.split(held), table, strict=True)]
    moved = [torch.cat([row[rank] for row in pieces]) for rank in range(len(held))]
    assert torch.equal(torch.cat(moved), whole)


# -- the histogram ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bins_are_in_the_order_of_magnitudes(dtype: torch.dtype) -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    values = [0.0, tiny / 2**20, tiny / 2, tiny, 1e-30, 1.0, 1.124, 1.125, 1.9, 2.0, 3e38, INF, NAN]
    found = exchange.bin_of(torch.tensor(values, dtype=dtype)).tolist()
    assert found == sorted(found) and found == exchange.bin_of(-torch.tensor(values, dtype=dtype)).tolist()
    assert found[0] == 0 < found[1] and found[5] == found[6] < found[7] < found[8] < found[9]
    assert found[9] == found[5] + 8 and found[-1] == exchange.BINS - 4 < exchange.BINS
    assert found[-3] < found[-2] < found[-1]


def test_what_float32_does_not_hold_has_a_bin_all_the_same() -> None:
    values = torch.tensor([1e-300, -1e300, 0.0], dtype=torch.float64)
    assert exchange.bin_of(values).tolist() == [1, exchange.bin_of(torch.tensor([INF])).item(), 0]


SOME_BINS = st.lists(st.sampled_from([0, 1, 2, 3, 900, 901, exchange.BINS - 1]), max_size=30)


@LIGHT
@given(st.lists(SOME_BINS, min_size=1, max_size=5), st.integers(0, 60))
def test_ranks_keep_the_k_largest_together(rows: list[list[int]], k: int) -> None:
    ranks = [torch.tensor(row, dtype=torch.int32) for row in rows]
    counts = sum(exchange.bin_counts(row) for row in ranks)
    assert isinstance(counts, torch.Tensor) and counts.dtype == torch.int32
    edge, room = exchange.crossing(counts, k)
    takes = exchange.allotted([int((row == edge).sum()) for row in ranks], room)
    masks = [exchange.kept_in_bins(row, edge, take) for row, take in zip(ranks, takes, strict=True)]
    whole = torch.cat(ranks).tolist()
    expected = sorted(range(len(whole)), key=lambda i: (-whole[i], i))[:k]
    assert torch.cat(masks).nonzero().view(-1).tolist() == sorted(expected)


# -- pairs --------------------------------------------------------------------------------------------------------


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def drawn_parcel(where: range, count: int, dtype: torch.dtype, seed: int) -> IndexValuePairs:
    source = torch.Generator().manual_seed(seed)
    indices = torch.randperm(len(where), generator=source)[:count].sort().values + where.start
    return IndexValuePairs(indices.to(torch.int32), torch.randn(count, generator=source).to(dtype))


def written(forms: list[PairFormat], pieces: list[IndexValuePairs], sound: bool = True) -> list[torch.Tensor]:
    sizes = [form.size for form in forms]
    message = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)  # what happened to lie there
    multi_round.write(forms, pieces, message, sound)
    return list(torch.split(message, sizes))


@LIGHT
@given(
    st.lists(st.tuples(st.integers(0, 300), st.floats(0, 1)), min_size=1, max_size=6),
    st.sampled_from([0, 5, 2**31 - 2000]),
    st.sampled_from(DTYPES),
    st.integers(0, 100),
)
def test_parcels_lie_side_by_side(parts: list[tuple[int, float]], start: int, dtype: torch.dtype, seed: int) -> None:
    forms, pieces = [], []
    for length, density in parts:
        where = range(start, start + length)
        forms.append(PairFormat(where, round(density * length), dtype))
        pieces.append(drawn_parcel(where, forms[-1].count, dtype, seed))
    back, good = multi_round.read(forms, written(forms, pieces))
    assert all(good) and len(back) == len(pieces)
    for one, two in zip(back, pieces, strict=True):
        assert torch.equal(one.indices, two.indices) and one.indices.dtype == torch.int32
        assert torch.equal(one.values, two.values) and one.values.dtype == dtype
    assert all(form.size == 0 for form in forms if form.count == 0)


@LIGHT
@given(st.integers(0, 31), st.floats(0, 1), st.floats(0, 1), st.sampled_from([1, 4, 8, 16]))
def test_the_smallest_codec_is_the_smallest(octave: int, part: float, density: float, grain: int) -> None:
    length = min(int((1 + part) * 2**octave), 2**31 - 1)
    for count in {round(density * length), round(density * min(length, 40)), round(length**density) % (length + 1)}:
        best = min(-(-codec.size // grain) for codec in candidates(length, count))
        assert -(-smallest(length, count, grain).size // grain) == best
        form = PairFormat(range(length), count, torch.float32)
        assert form.size <= (4 + 8 * count if count else 0)  # and so never more than plain, the checksum apart


@pytest.mark.parametrize("where", [range(10, 50), range(10, 10**6)], ids=str)
def test_what_does_not_fit_its_form_is_found_where_it_is_read(where: range) -> None:
    wrong = [[9], [where.stop], [-1], [2**31 - 1], [12, 11], [20, 20], [11, 12, where.stop], [9, *range(11, 40)]]
    for indices in wrong:
        forms = [PairFormat(where, 2, torch.float32), PairFormat(where, len(indices), torch.float32)]
        pieces = [
            drawn_parcel(where, 2, torch.float32, 0),
            IndexValuePairs(torch.tensor(indices), torch.ones(len(indices))),
        ]
        assert multi_round.read(forms, written(forms, pieces))[1] == [True, False], indices
    for length, count in ((40, 40), (40, 1), (40, 20), (1, 1), (10**6, 1), (10**6, 999)):  # every codec
        forms = [PairFormat(range(length), count, torch.float32)]
        pieces = [drawn_parcel(range(length), count, torch.float32, 0)]
        assert multi_round.read(forms, written(forms, pieces, sound=False))[1] == [False], (length, count)


def test_a_table_that_says_more_than_there_is_room_for_is_found() -> None:
    for length, count in ((0, 3), (2, 5), (8, 9)):
        forms = [PairFormat(range(length), count, torch.float32)]
        pieces = [IndexValuePairs(torch.arange(count, dtype=torch.int32), torch.ones(count))]
        assert multi_round.read(forms, written(forms, pieces))[1] == [False]


@settings(deadline=None)
@given(
    st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1), st.integers(1, 255), st.sampled_from(DTYPES), st.booleans()
)
def test_a_damaged_parcel_is_never_taken_for_another(
    length: int, density: float, place: float, flips: int, dtype: torch.dtype, resealed: bool
) -> None:
    where = range(70, 70 + length)
    form = PairFormat(where, max(1, round(density * length)), dtype)
    (data,) = written([form], [drawn_parcel(where, form.count, dtype, 0)])
    data[round(place * (form.size - 1))] ^= flips
    if resealed:
        bits.write_crc(data)
    (found,), (good,) = multi_round.read([form], [data])
    if not resealed:
        assert not good
    elif good:  # under a checksum that fits, at least what comes of it is in range
        assert found.indices.tolist() == sorted(set(found.indices.tolist()) & set(where))


def test_within() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    assert exchange.within(ints(1, 4, 9), ints(0, 4, 8)).tolist() == [False, True, False]
    assert exchange.within(ints(1, 4), ints()).tolist() == [False, False]
    assert exchange.within(ints(), ints(1)).tolist() == []


def test_added_goes_rank_by_rank() -> None:
    """(1e8 + 1) - 1e8 is 0 in float32, (1e8 - 1e8) + 1 is not."""
    pieces = [
        IndexValuePairs(torch.tensor([2, 5], dtype=torch.int32), torch.tensor([1e8, 7.0])),
        IndexValuePairs(torch.tensor([], dtype=torch.int32), torch.tensor([])),
        IndexValuePairs(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([3.0, 1.0])),
        IndexValuePairs(torch.tensor([2], dtype=torch.int32), torch.tensor([-1e8])),
    ]
    total = exchange.added(pieces, torch.float32, 1.0)
    assert total.indices.tolist() == [0, 2, 5] and total.values.tolist() == [3.0, 0.0, 7.0]
    scaled = exchange.added(pieces[:1], torch.float64, 0.5)
    assert scaled.values.tolist() == [5e7, 3.5] and scaled.values.dtype == torch.float64


@LIGHT
@given(COUNTS, st.integers(0, 50))
def test_where_elements_lie_after_they_have_changed_hands(held: list[int], seed: int) -> None:
    source, start, parts, pieces = np.random.default_rng(seed), 0, [], []
    for count in held:
        parts.append(range(start, start + count + int(source.integers(0, 40))))
        pieces.append(drawn_parcel(parts[-1], count, torch.float32, seed).indices)
        start = parts[-1].stop
    wanted = regions.shares(sum(held), len(held))
    covered = regions.covered(regions.moves(held, wanted), parts)
    for mine, where in zip(torch.cat(pieces).split(wanted), covered, strict=True):
        assert set(mine.tolist()) <= set(where) and (len(mine) or len(where) == 0)


@LIGHT
@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 10))
def test_room_is_allotted_to_the_first(at_edge: list[int], room: int) -> None:
    takes = exchange.allotted(at_edge, room)
    assert sum(takes) == min(room, sum(at_edge))
    short = [i for i, (take, mine) in enumerate(zip(takes, at_edge, strict=True)) if take < mine]
    assert all(takes[i] == 0 for i in range(short[0] + 1, len(takes))) if short else True


@pytest.mark.parametrize(
    "damaged, fault, named", [([[0, 3], [2]], 0, 1), ([[], [3], [], [1]], 0, 3), ([[0], [4]], 2, 1)]
)
def test_a_result_must_ascend(damaged: list[list[int]], fault: int, named: int) -> None:
    def parcels_of(rows: list[list[int]]) -> list[IndexValuePairs]:
        return [IndexValuePairs(torch.tensor(row, dtype=torch.int32), torch.zeros(len(row))) for row in rows]

    exchange.check_kept("buffer 3", parcels_of([[0, 3], [], [4, 8]]), 0)
    with pytest.raises(MessageError, match=f"buffer 3: the result of rank {named} is damaged"):
        exchange.check_kept("buffer 3", parcels_of(damaged), fault)


def test_a_merge_buffer_that_int32_cannot_index_is_refused() -> None:
    with pytest.raises(ValueError, match="a merge buffer of 2147483648 elements"):
        exchange.offered([], [], [0, 2**31], torch.float32)
