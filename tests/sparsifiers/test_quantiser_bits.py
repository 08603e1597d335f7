# SPDX-License-Identifier: Apache-2.0
"""The same vectors give the same bytes, and these are read alike, whatever a machine has to compute them with."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pretend.device import Device
from pretend.tensors import put
from torch import Tensor

import sparsifiers
from sparsifiers.conformance_reading import DRAWS, decoded, encoded

pytestmark = pytest.mark.usefixtures("one_thread")

SCALED = ("int8", "int4", "fp8", "qsgd", "terngrad", "onebit")  # those with a scale of sparsifiers.quantising.draws


def everything(size: int) -> Iterator[Tensor]:
    """Vectors by numpy: torch's own normal numbers depend on the instructions of the processor."""
    generator = np.random.default_rng(size)

    def normal(numel: int) -> Tensor:
        return torch.from_numpy(generator.standard_normal(numel)).to(torch.float32)

    yield normal(20 * size)
    yield normal(20 * size) * torch.from_numpy(2.0 ** generator.integers(-20, 20, 20 * size)).to(torch.float32)
    yield normal(4 * size) * (torch.arange(4 * size) % size < 3)
    for exponent in (-130, -120, -110, -104, 100, 126):
        yield normal(2 * size) * 2.0**exponent
    bad = normal(3 * size)
    bad[5], bad[size + 5] = torch.nan, torch.inf
    yield bad
    yield normal(size + 13)


def fingerprint() -> str:
    """A hash of the bytes of all quantisers, and of what is read of them."""
    whole = hashlib.sha256()
    for name in sparsifiers.quantisers():
        for size in (64, 256):
            for values in everything(size):
                records = encoded(sparsifiers.quantiser(name), values, size)
                got = decoded(sparsifiers.quantiser(name), records, size)
                finite = got.isfinite().all(dim=1)  # what else is written beside a scale of NaN has no meaning
                whole.update(records[finite].numpy().tobytes() + got.nan_to_num_(nan=7.0).numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize("capability", ["default", pytest.param("avx2", marks=pytest.mark.long)])
def test_bits_do_not_depend_on_the_instructions_of_the_processor(capability: str) -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_quantiser_bits as t; print(t.fingerprint())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == fingerprint()


@pytest.mark.parametrize("name", SCALED)
def test_what_is_read_is_the_same_where_subnormals_are_zeros(name: str) -> None:
    for values in everything(64):
        records = encoded(sparsifiers.quantiser(name), values, 64)
        got = decoded(sparsifiers.quantiser(name), records, 64, scale=1 / 256)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor has no such mode")
        try:
            again = decoded(sparsifiers.quantiser(name), records, 64, scale=1 / 256)
            written = encoded(sparsifiers.quantiser(name), values, 64)
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(again.view(torch.int32), got.view(torch.int32)) and torch.equal(written, records)


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("name", SCALED)
def test_a_device_writes_and_reads_the_same_and_nobody_waits_for_it(device: Device, name: str, size: int) -> None:
    quantiser = sparsifiers.quantiser(name)
    for values in everything(size):
        records = encoded(quantiser, values, size)
        expected = torch.empty(values.numel())
        quantiser.decode_sum([records.view(-1)] * 3, [DRAWS] * 3, size, 0.5, expected)
        squares = torch.zeros(1, dtype=torch.float64, device="pretend:0")
        written = torch.zeros(records.numel(), dtype=torch.uint8, device="pretend:0")
        again, read = torch.zeros_like(written), torch.zeros(values.numel(), device="pretend:0")
        quantiser.encode(put(values.clone(), device), size, DRAWS, written, squares)
        quantiser.decode_sum([written] * 3, [DRAWS] * 3, size, 0.5, read)
        quantiser.encode_sum([written], [DRAWS], size, 1.0, quantiser, DRAWS, again)
        assert not device.books.waits
        assert torch.equal(written.host, records.view(-1))
        assert torch.equal(read.host.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
