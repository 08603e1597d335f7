"""Which tensors the kernels of ``sparsifiers.gpu`` are for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from sparsifiers.gpu import choice, has_kernels, is_fused


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    choice._installed.cache_clear()
    yield
    choice._installed.cache_clear()


@pytest.mark.parametrize("setting, expected", [("off", False), ("", True)])
def test_kernels_are_for_gpus_where_triton_is_and_nobody_turns_them_off(
    setting: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGMERGE_KERNEL", setting)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert is_fused(torch.device("cuda", 0)) is expected
    assert not is_fused(torch.device("cpu"))


def test_there_are_none_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGMERGE_KERNEL", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not is_fused(torch.device("cuda", 0))


def test_vectors_are_contiguous_and_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FUSED", {"cpu"})
    assert has_kernels(torch.zeros(4)) and not has_kernels(torch.zeros(4).double())
    assert not has_kernels(torch.zeros(8)[::2]) and not has_kernels(torch.zeros(4, dtype=torch.float16))
