# SPDX-License-Identifier: Apache-2.0
"""Which tensors the kernels of ``sparsifiers.gpu`` are for, what happens where kernels do not work, and how numbers
reach a GPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsifiers.gpu import choice, has_kernels, is_fused, runs_triton
from sparsifiers.gpu.tables import send

GPU = torch.device("cuda", 0)


class OnGPU:
    """What is asked of a tensor."""

    is_cuda, device = True, GPU


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("AGMERGE_KERNEL", raising=False)
    choice._works.cache_clear()
    yield
    choice._works.cache_clear()


def trial(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[torch.device]:
    """Have another trial than that of a kernel, which fails with ``error``; returns where it was made."""
    made: list[torch.device] = []

    def run(device: torch.device) -> None:
        made.append(device)
        if error is not None:
            raise error

    monkeypatch.setitem(sys.modules, "sparsifiers.gpu.kernels.launching", SimpleNamespace(launch_trial=run))
    return made


def test_kernels_are_for_gpus_where_one_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trial(monkeypatch, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_fused(GPU) and runs_triton(OnGPU())  # type: ignore[arg-type]
        assert not is_fused(torch.device("cpu")) and not runs_triton(torch.zeros(1))
    assert made == [GPU]


def test_nobody_tries_what_was_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGMERGE_KERNEL", "off")
    made = trial(monkeypatch, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_fused(GPU) and not runs_triton(OnGPU())  # type: ignore[arg-type]
    assert made == []


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'triton'"),
        RuntimeError("Failed to find C compiler."),  # and what Triton says of Python.h is a CalledProcessError
        TypeError("histogram() got an unexpected keyword argument 'mask'"),  # before Triton 3.4
    ],
)
def test_where_none_runs_torch_computes_and_one_warning_says_why(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trial(monkeypatch, error)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            assert not is_fused(GPU) and not runs_triton(OnGPU())  # type: ignore[arg-type]
    assert made == [GPU] and [str(one.message) for one in said] == [
        choice.FALLBACK.format(device=GPU, problem=f"{type(error).__name__}: {error}")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_fails_the_trial() -> None:
    with pytest.warns(UserWarning, match="torch's operations"):
        assert not is_fused(GPU)


def test_the_trial_is_a_kernel() -> None:
    pytest.importorskip("triton", reason="triton is not installed: make test-all installs it")
    from sparsifiers.gpu.kernels import launching

    assert launching.launch_trial(torch.device("cpu")).tolist() == [1, 0] * 16  # in Triton's interpreter


def test_vectors_are_contiguous_and_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FUSED", {"cpu"})
    assert has_kernels(torch.zeros(4)) and not has_kernels(torch.zeros(4).double())
    assert not has_kernels(torch.zeros(8)[::2]) and not has_kernels(torch.zeros(4, dtype=torch.float16))


class Away(Tensor):
    """A tensor of the host that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("numbers", [[1, 2, 3], [[1, 2], [3, 4]], np.arange(6), np.arange(6).reshape(2, 3)])
def test_numbers_are_pinned_before_they_are_copied_to_a_gpu(numbers: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning copies: the sender may write over an array at once. Torch refuses to make a pinned tensor of one."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.clone()) or pinned[-1])
    expected = torch.tensor(numbers)
    out = send(numbers, torch.empty(expected.shape, dtype=torch.int64).as_subclass(Away))  # type: ignore[arg-type]
    assert len(pinned) == 1 and torch.equal(out.as_subclass(Tensor), expected)
    assert torch.equal(send(numbers, torch.empty(expected.shape, dtype=torch.int64)), expected)  # type: ignore[arg-type]
    assert len(pinned) == 1
