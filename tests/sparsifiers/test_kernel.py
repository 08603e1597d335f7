# SPDX-License-Identifier: Apache-2.0
"""The compiled loops give the bits that numpy and torch give, with every instruction set that this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import sparsifiers
from agmerge.tensors.arena import subtract
from sparsifiers import largest, native, rows_search
from sparsifiers.largest import COMPILED_SAMPLES, bit_view, compiled_sample, magnitude_mask, places, sampled_floor

MASK = magnitude_mask(torch.float32)
SIZES = [*range(71), 127, 128, 129, 1023, 1024, 1025, 5000]
SPECIALS = [0.0, -0.0, 1.4e-45, -1.4e-45, 1e-40, float("inf"), float("-inf"), float("nan"), 3.4e38]

Draw = Callable[..., Tensor]
SameBits = Callable[[Tensor, Tensor], bool]
pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")


def values(n: int, kind: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + n)
    vector = torch.randn(n, generator=generator)
    if kind == "zeros":
        vector *= torch.rand(n, generator=generator) < 0.005
    elif kind == "ties":
        vector = vector.round()
    elif kind == "specials":
        some = torch.randint(len(SPECIALS), (n,), generator=generator)
        vector = vector.where(torch.rand(n, generator=generator) < 0.5, torch.tensor(SPECIALS)[some])
    return vector


KINDS = ["normal", "zeros", "ties", "specials"]


def by_numpy(bits: NDArray[np.int32], k: int, floor: int = -1) -> list[int]:
    keys = (bits & MASK).astype(np.int64)
    order = np.argsort(-keys, kind="stable")[:k]
    return np.sort(order[keys[order] > floor]).tolist()


# -- scan, cut, sample ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_scan_appends_what_exceeds_the_floor(level: int, kind: str) -> None:
    for n in SIZES:
        for shift in (0, 1, 3):
            bits = bit_view(values(n + shift, kind)).numpy()[shift:]
            for floor in (-1, 0, 0x3F800000, MASK):
                positions, keys = (np.full(n + 2, -7, dtype=np.int32) for _ in range(2))
                stop, held = native.scan(bits, 0, MASK, floor, positions[:-1], keys[:-1], 1)
                expected = np.flatnonzero((bits & MASK) > floor)
                assert (stop, held) == (n, 1 + len(expected))
                assert np.array_equal(positions[1:held], expected)
                assert np.array_equal(keys[1:held], bits[expected] & MASK)
                assert positions[0] == positions[-1] == keys[-1] == -7


def test_scan_stops_where_a_block_might_not_fit_and_goes_on(level: int) -> None:
    bits = bit_view(values(10_000, "normal")).numpy()
    expected = np.flatnonzero((bits & MASK) > 0x3F800000)
    positions, keys = (np.zeros(native.BLOCK + 100, dtype=np.int32) for _ in range(2))
    found: list[int] = []
    stop = 0
    while stop < len(bits):
        before = stop
        stop, held = native.scan(bits, stop, MASK, 0x3F800000, positions, keys, 0)
        assert stop > before and held <= len(positions)
        found += positions[:held].tolist()
    assert found == expected.tolist()
    assert native.scan(bits, 0, MASK, -1, positions[:10], keys[:10], 0) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_keeps_the_largest_and_the_first_of_equals(level: int, kind: str) -> None:
    rng = np.random.default_rng(0)
    for n in SIZES[1:]:
        keys = bit_view(values(n, kind)).numpy() & MASK
        for k in {1, n // 3 or 1, n - 1 or 1, n, int(rng.integers(1, n + 1))}:
            positions, kept = np.arange(n, dtype=np.int32) * 3, keys.copy()
            smallest = native.cut(positions, kept, n, k, np.empty(n, dtype=np.int32))
            expected = np.array(by_numpy(keys, k))
            assert np.array_equal(positions[:k], expected * 3)
            assert np.array_equal(kept[:k], keys[expected])
            assert smallest == kept[:k].min() == np.sort(keys)[n - k] == native.nth_largest(keys, k)


def test_cut_of_many_equals_and_of_two_far_apart(level: int) -> None:
    for keys in ([5] * 100_000, [0, MASK] * 50_000, [0] * 99_999 + [MASK], [MASK] + [1] * 99_999, list(range(100_000))):
        array = np.array(keys, dtype=np.int32)
        for k in (1, 2, 30_000, 99_999):
            positions = np.arange(len(array), dtype=np.int32)
            native.cut(positions, array.copy(), len(array), k, np.empty_like(array))
            assert positions[:k].tolist() == by_numpy(array, k)


def test_the_sample_is_numpys(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = values(1_000_003, "normal")
    bits = bit_view(vector).numpy()
    for m in (1, 63, 64, 65, 5000, 100_000):
        assert np.array_equal(native.sample(bits, MASK, m), bits[places(len(bits), m)] & MASK)
    compiled = native.sampled_floor(bits, MASK, *compiled_sample(len(bits), 300_000))
    monkeypatch.setattr("sparsifiers.largest.SAMPLES", COMPILED_SAMPLES)
    monkeypatch.setattr(native, "library", None)
    assert sampled_floor(bits, MASK, 300_000) == compiled


def test_the_places_of_a_sample_lie_in_their_stretches() -> None:
    for n, m in ((8, 1), (100, 7), (1_000_003, 5000)):
        starts = np.arange(m + 1) * n // m
        assert ((places(n, m) >= starts[:-1]) & (places(n, m) < starts[1:])).all()
    spread = (places(10_000_000, 10_000) % 1000) / 1000
    assert abs(spread.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(spread[1:], spread[:-1])[0, 1]) < 0.05


def test_topk_is_the_same_with_every_level(distribution: str, draw: Draw, all_levels: list[int]) -> None:
    topk = sparsifiers.get("topk")
    for n in (1, 70, 4096, 4097, 70_001, 300_000):
        vector = draw(distribution, n)
        for k in {1, n // 100 or 1, n // 3 or 1, n}:
            expected = torch.tensor(by_numpy(bit_view(vector).numpy(), k), dtype=torch.int32)
            for wanted in all_levels:
                native.set_level(wanted)
                assert torch.equal(topk.select(vector, k=k).indices, expected)


def test_a_floor_of_any_height(level: int) -> None:
    for kind in KINDS:
        bits = bit_view(values(50_000, kind)).numpy()
        for floor in (-1, 0, 0x3F000000, 0x40000000, MASK):
            for k in (1, 700, 20_000):
                assert largest.scan(bits, MASK, k, floor).tolist() == by_numpy(bits, k, floor)


def test_what_the_loops_do_not_read() -> None:
    bits = np.zeros(100, dtype=np.int32)
    raw = np.zeros(404, dtype=np.uint8)
    assert all(map(native.reads, (bits, bits[:0], bits[1:], bits.reshape(10, 10), raw[:400].view("i4"))))
    for other in (bits[::2], bits[::-1], bits.astype(np.int64), bits.astype(">i4"), raw[1:401].view("i4")):
        assert not native.reads(other)
        assert largest.scan(other, int(np.iinfo(other.dtype).max), 3, -1).tolist() == [0, 1, 2]


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns(level: int, kind: str) -> None:
    rng = np.random.default_rng(0)
    declined = 0
    for trial in range(150):
        rows, length = int(rng.integers(1, 50)), int(rng.integers(1, 400))
        table = bit_view(values(rows * length, kind, seed=trial)).numpy().reshape(rows, length)
        high = length if trial % 4 == 0 else max(1, length // 8)
        quotas = np.minimum(rng.integers(0, high + 1) + rng.integers(0, 2, rows), length)
        expected = [r * length + p for r in range(rows) for p in by_numpy(table[r], int(quotas[r]))]
        found = rows_search.rows_top_compiled(table, MASK, quotas)
        assert found is not None and found.dtype == np.int32 and found.tolist() == expected
        turned = rows_search.rows_top_compiled(np.ascontiguousarray(table.T), MASK, quotas, transposed=True)
        declined += turned is None
        if turned is not None:
            assert turned.tolist() == sorted(p % length * rows + p // length for p in expected)
    assert declined < 15


def test_wide_and_tall_tables(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_search, "ROOM", 1 << 15)  # several panels
    for length, columns in ((3000, 150), (70, 3000), (5000, 5)):
        table = bit_view(values(length * columns, "ties")).numpy().reshape(length, columns)
        for quota in (1, length // 100 or 1, length // 4):
            quotas = np.full(columns, quota)
            expected = sorted(p * columns + c for c in range(columns) for p in by_numpy(table[:, c], quota))
            found = rows_search.rows_top_compiled(table, MASK, quotas, transposed=True)
            assert found is not None and found.tolist() == expected


def test_columns_whose_largest_stand_close_together(level: int) -> None:
    quotas = np.full(64, 100)
    for filled, fits in ((150, True), (1250, False)):  # rows: of 400 groups of 25 rows, too few hold anything
        table = np.zeros((10_000, 64), dtype=np.int32)
        table[:filled] = np.arange(1, filled * 64 + 1, dtype=np.int32).reshape(filled, 64)
        found = rows_search.rows_top_compiled(table, MASK, quotas, transposed=True)
        assert (found is not None) is fits
        if found is not None:
            assert np.array_equal(found, np.arange((filled - 100) * 64, filled * 64))
    shapes = [(10_000, 64)]
    vector = torch.from_numpy(table.reshape(-1)).view(torch.float32)
    chosen = sparsifiers.get("adtopk-row", 0.01).select(vector, shapes=shapes).trimmed()
    assert chosen.tolist() == list(range(1150 * 64, 1250 * 64))


def test_few_long_rows_are_declined_and_wrong_quotas_are_errors() -> None:
    table = np.zeros((2, 100_000), dtype=np.int32)
    assert rows_search.rows_top_compiled(table, MASK, np.array([1, 1])) is None
    for quotas in ([1], [1, -1], [1, 100_001], [[1, 1]]):
        for transposed, shaped in ((False, table), (True, table.T.copy())):
            with pytest.raises(ValueError, match="quotas of shape"):
                rows_search.rows_top_compiled(shaped, MASK, np.array(quotas), transposed)
    for shape in ((0, 5), (5, 0), (0, 0)):
        empty = rows_search.rows_top_compiled(np.zeros(shape, dtype=np.int32), MASK, np.zeros(shape[0], dtype=np.int64))
        assert empty is not None and empty.shape == (0,)
        empty = rows_search.rows_top_compiled(
            np.zeros(shape, dtype=np.int32), MASK, np.zeros(shape[1], dtype=np.int64), True
        )
        assert empty is not None and empty.shape == (0,)


# -- the memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("any_size")
def test_add_is_torchs(level: int, dtype: torch.dtype, same_bits: SameBits) -> None:
    for n in SIZES:
        for shift in (0, 1, 5):
            residual = values(n + shift, "specials", seed=1)[shift:]
            gradient = values(n, "specials", seed=2).to(dtype)
            work = torch.full((n + shift + 1,), 7.0)
            part = work[shift:-1]
            finite = native.add(part, residual, gradient)
            expected = torch.add(residual, gradient)
            assert finite is bool(expected.isfinite().all())
            assert torch.equal(part.isnan(), expected.isnan())  # which NaN it is is nobody's concern
            assert same_bits(part.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))
            assert (work[:shift] == 7.0).all() and work[-1] == 7.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("any_size")
def test_add_says_whether_all_of_it_is_finite(level: int, dtype: torch.dtype) -> None:
    n = 70  # some before, some in, some after what is written sixteen at a time
    work, residual, gradient = torch.zeros(n + 1)[1:], torch.full((n,), 3e38), torch.ones(n).to(dtype)
    assert native.add(work, residual, gradient) is True  # largest sums, but finite ones
    for value in (torch.nan, torch.inf, -torch.inf):
        for place in range(n):
            broken = gradient.index_fill(0, torch.tensor([place]), value)
            assert native.add(work, residual, broken) is False
    if dtype != torch.float16:
        assert native.add(work, residual, residual.to(dtype)) is False  # an overflow


@pytest.mark.usefixtures("any_size")
def test_add_in_two_dimensions_and_what_is_left_to_torch() -> None:
    work, residual, gradient = torch.zeros(6, 8), torch.randn(6, 8), torch.randn(6, 8)
    assert native.add(work, residual, gradient)
    assert torch.equal(work, residual + gradient)
    for other in (gradient.double(), gradient.t().contiguous().t(), torch._neg_view(gradient), gradient.to("meta")):
        assert native.add(work, residual, other) is None
    assert native.add(work.double(), residual.double(), gradient.double()) is None
    sparsifiers.memory("residual").compensate(work, residual, torch._neg_view(gradient))
    assert torch.equal(work, residual - gradient)


@pytest.mark.usefixtures("any_size")
def test_commit_is_index_add(level: int, same_bits: SameBits) -> None:
    generator = torch.Generator().manual_seed(0)
    for count in SIZES:
        work = values(3 * count + 1, "specials")[1:]
        indices = torch.randperm(3 * count, generator=generator)[:count].to(torch.int32)
        sent = work[indices].bfloat16().float()
        if count > 3:
            indices[count // 2 :], sent[count // 2 :] = indices[0], 0.0  # padding
        expected = work.clone()
        expected.index_add_(0, indices, sent, alpha=-1)
        assert native.subtract(work, indices, sent)
        assert torch.equal(work.isnan(), expected.isnan())
        assert same_bits(work.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.usefixtures("any_size")
def test_an_index_out_of_range_changes_nothing(level: int) -> None:
    work = torch.ones(100)
    for wrong in (-1, 100, -(2**31), 2**31 - 1):
        indices = torch.tensor([*range(60), wrong], dtype=torch.int32)
        with pytest.raises(IndexError, match=r"outside \[0, 100\)"):
            subtract(work, indices, torch.ones(61))
    assert (work == 1).all()
    with pytest.raises(IndexError):
        native.subtract(torch.empty(0), torch.zeros(1, dtype=torch.int32), torch.zeros(1))


@pytest.mark.usefixtures("any_size")
def test_commits_that_are_left_to_torch() -> None:
    work, indices, sent = torch.ones(10), torch.tensor([1, 2], dtype=torch.int32), torch.ones(2)
    for wrong in ((work.double(), indices, sent.double()), (work, indices.long(), sent), (work[::2], indices, sent)):
        assert not native.subtract(*wrong)
    for unlike in ((work, indices, sent[:1]), (work.view(2, 5), indices, sent), (work, indices, sent.expand(2))):
        assert not native.subtract(*unlike) or unlike[2] is not sent[:1]


# -- with and without -------------------------------------------------------------------------------------------------


def test_the_environment_names_the_best_level_or_turns_it_off(all_levels: list[int]) -> None:
    folder, best = Path(native.__file__).parent, all_levels[-1]
    for setting, expected in {"": best, "baseline": 0, "avx2": min(1, best), "avx512": best}.items():
        assert native.chosen(setting, folder) is not None  # the same library, loaded once more
        assert native.level() == expected
    assert native.chosen("off", folder) is None
    command = [sys.executable, "-c", "from sparsifiers import native; print(native.available(), native.level())"]
    environment = {**os.environ, "AGMERGE_KERNEL": "off"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "False 0\n"), done.stderr


@pytest.mark.parametrize("unknown", ["1", "AVX2", "none"])
def test_an_unknown_level_is_refused(unknown: str) -> None:
    with pytest.raises(
        ValueError, match=f"AGMERGE_KERNEL='{unknown}': expected one of off, baseline, avx2, avx512, or"
    ):
        native.chosen(unknown, Path(native.__file__).parent)


@pytest.mark.usefixtures("all_levels")
def test_a_library_that_is_not_ours_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.load(tmp_path) is None
    suffix = native.EXTENSION_SUFFIXES[0]
    (tmp_path / f"_kernel{suffix}").write_bytes(b"no library")
    assert native.load(tmp_path) is None
    version = native.INTERFACE
    monkeypatch.setattr(native, "INTERFACE", -1)
    assert native.load(Path(native.__file__).parent) is None
    monkeypatch.setattr(native.Loop, "table", [])
    native.Loop("of_the_future")
    monkeypatch.setattr(native, "INTERFACE", version)
    assert native.load(Path(native.__file__).parent) is None


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
def test_parts_are_added_up_as_torch_does(level: int, scale: float, same_bits: SameBits) -> None:
    for n in (1, 5, 100, 5000):
        indices = torch.randperm(n, generator=torch.Generator().manual_seed(n))[: max(1, n // 3)].to(torch.int32)
        total, sent = values(n, "specials"), values(n, "normal", 1)[: len(indices)]
        expected = total.clone().index_add_(0, indices, sent * scale)
        assert native.scatter(total, indices, sent, scale)
        assert same_bits(total, expected)


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_nothing_is_added_outside(bad: int) -> None:
    total = torch.zeros(8)
    with pytest.raises(IndexError, match=r"outside \[0, 8\)"):
        native.scatter(total, torch.tensor([0, bad], dtype=torch.int32), torch.ones(2), 1.0)
    assert not total.any()


def test_what_the_loops_cannot_add_is_left_to_torch() -> None:
    total, indices = torch.zeros(8), torch.arange(2, dtype=torch.int32)
    assert not native.scatter(total.double(), indices, torch.ones(2), 1.0)
    assert not native.scatter(total, indices.long(), torch.ones(2), 1.0)
    assert not native.scatter(total[::2], indices, torch.ones(2), 1.0)
    assert not total.any()
