# SPDX-License-Identifier: Apache-2.0
"""Which tensors the kernels of ``sparsifiers.gpu`` are for, and what happens where kernels do not work."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from sparsifiers.gpu import choice, has_kernels, is_fused, runs_triton

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
