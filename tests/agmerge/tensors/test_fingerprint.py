# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: the same wherever they are computed, and another one for every bit, and every two."""

from __future__ import annotations

import itertools

import pytest
import torch

from agmerge.tensors import parameters
from agmerge.tensors.parameters import fingerprints
from sparsifiers import native

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (257,)])
def test_are_of_the_bits_and_not_of_where_they_lie(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape)).to(dtype)
    wide = torch.zeros(tensor.numel() + 1, 2, dtype=dtype)
    wide[1:, 1] = tensor.reshape(-1)
    strided, moved = wide[1:, 1], torch.cat([tensor.reshape(-1)[:1], tensor.reshape(-1)])[min(tensor.numel(), 1) :]
    found = fingerprints([tensor, strided, moved])
    assert found.shape == (3, 2) and found.dtype == torch.int64
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(found[0], fingerprints([torch.nn.Parameter(tensor.clone(), requires_grad=False)])[0])


@pytest.mark.parametrize("length", [0, 1, 4, 7, 8, 9, 63, 64, 65, 1001])
def test_devices_compute_what_the_host_does(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "CHUNK", 8)  # words: most lengths take several
    octets = torch.randint(0, 256, (length + 3,), dtype=torch.uint8)
    for part in (octets[:length], octets[3:]):
        assert int(parameters._checksum_by_torch(part)) % 2**64 == native.checksum(part)


@pytest.mark.long
def test_a_bit_that_differs_and_any_two_that_do_are_seen() -> None:
    """Sign bits too: those of every other element are the highest bits of words, where a plain checksum loses pairs."""
    tensor = torch.randn(8)
    known = tuple(fingerprints([tensor])[0].tolist())
    bits = list(range(32 * len(tensor)))
    changes = [(bit,) for bit in bits] + list(itertools.combinations(bits, 2))
    changed = tensor.view(torch.int32).repeat(len(changes), 1)
    for row, change in enumerate(changes):
        for bit in change:
            changed[row, bit // 32] ^= torch.tensor(1 << bit % 32, dtype=torch.int64).to(torch.int32)
    assert known not in set(map(tuple, fingerprints(changed).tolist()))


def test_of_nothing_are_none() -> None:
    assert fingerprints([]).shape == (0, 2)
