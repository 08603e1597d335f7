# SPDX-License-Identifier: Apache-2.0
"""The compiled loops about what is sent of a vector do what torch and numpy do, and refuse what they cannot read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsifiers import memory, native
from sparsifiers.memories import DGCMemory

pytestmark = pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")
SPECIALS = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -3e38)


def drawn(n: int, seed: int) -> torch.Tensor:
    """Numbers, every third of them a special one."""
    source = torch.Generator().manual_seed(seed)
    vector = torch.randn(n, generator=source)
    some = torch.tensor(SPECIALS)[torch.randint(len(SPECIALS), (n,), generator=source)]
    return torch.where(torch.rand(n, generator=source) < 0.33, some, vector)


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for which NaN it is."""
    same = torch.equal(a.nan_to_num(nan=1.0).view(torch.int32), b.nan_to_num(nan=1.0).view(torch.int32))
    return same and torch.equal(a.isnan(), b.isnan())


@pytest.mark.whole
@pytest.mark.parametrize("n", [1, 48, 49, 50, 1000])
@pytest.mark.parametrize("has_momentum", [False, True])
def test_take_gathers_commits_and_masks(level: int, n: int, has_momentum: bool) -> None:
    for shift in (0, 1):
        work, momentum = drawn(3 * n + shift, 1)[shift:], drawn(3 * n + shift, 2)[shift:]
        indices = torch.randperm(3 * n)[:n].sort().values.int()
        sent = work[indices]
        left, cleared = work.clone(), momentum.clone()
        left.index_add_(0, indices, sent, alpha=-1)
        if has_momentum:
            cleared.scatter_reduce_(0, indices.long(), (sent == 0).float(), "prod")
        values = torch.full((n,), 7.0)
        assert native.write_and_subtract(work, indices, values, momentum if has_momentum else None)
        assert alike(values, sent) and alike(work, left) and alike(momentum, cleared)


def test_mask_is_dgcs(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = memory("dgc")
    assert isinstance(rule, DGCMemory)
    momentum, sent = drawn(500, 1), drawn(100, 2)
    indices = torch.randint(500, (100,)).int()
    indices[90:], sent[90:] = indices[0], 0.0  # padding
    compiled, expected = momentum.clone(), momentum.clone()
    rule.mask(compiled, indices, sent)
    monkeypatch.setattr(native, "mask", lambda *given: False)
    rule.mask(expected, indices, sent)
    assert alike(compiled, expected) and not alike(compiled, momentum)


def test_ascends_is_numpys(level: int) -> None:
    good = np.arange(3, 300, 2, dtype=np.int32)
    assert native.ascends(good, 300) and native.ascends(good[:0], 0)
    assert not native.ascends(good, 299)
    for place in range(len(good)):
        for wrong in (-1, 2**31 - 1, good[place - 1]):
            other = good.copy()
            other[place] = wrong
            ordered = bool((other[1:] > other[:-1]).all() and other[0] >= 0 and other[-1] < 300)
            assert native.ascends(other, 300) is ordered
    assert native.ascends(good.astype(np.int64), 300) is None  # type: ignore[arg-type]


def test_what_does_not_fit_changes_nothing(level: int) -> None:
    vector, values = torch.ones(100), torch.full((3,), 7.0)
    for wrong in (-1, 100, -(2**31)):
        indices = torch.tensor([1, wrong, 2], dtype=torch.int32)
        with pytest.raises(IndexError, match=r"outside \[0, 100\)"):
            native.write_and_subtract(vector, indices, values)
        with pytest.raises(IndexError, match=r"outside \[0, 100\)"):
            native.mask(vector, indices, values)
    fine = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert not native.write_and_subtract(vector.double(), fine, values.double())
    assert not native.write_and_subtract(vector, fine.long(), values)
    assert not native.write_and_subtract(vector, fine, values[:2])
    assert not native.write_and_subtract(vector, fine, values, vector.half())
    assert not native.mask(vector.view(10, 10), fine, values)
    assert (vector == 1).all() and (values == 7).all()


def test_a_checksum_is_numpys(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8))
    lengths = (0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 1000, 4096, 4999)
    got = [native.checksum(data[shift:][:n]) for n in lengths for shift in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", None)
        expected = [native.checksum(data[shift:][:n]) for n in lengths for shift in (0, 1)]
    assert got == expected and len(set(got)) == len(got) - 1  # of nothing it is 0, wherever
    for place in range(0, 5000, 71):  # every bit counts
        other = data.clone()
        other[place] ^= 16
        assert native.checksum(other) != native.checksum(data)
