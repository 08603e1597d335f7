# SPDX-License-Identifier: Apache-2.0
"""A brute-force twin of exact top-k, and the inputs that every sparsifier is tried on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsifiers import native

Maker = Callable[[int, np.random.Generator], np.ndarray]


def _spikes(n: int, rng: np.random.Generator) -> np.ndarray:
    vector = 1e-3 * rng.standard_normal(n)
    vector[:: max(1, n // 1310)] += 5.0  # about one a stretch of the sample that topk takes at n = 1M, 1 %
    return vector


def _block_scaled(n: int, rng: np.random.Generator) -> np.ndarray:
    scales = np.exp(2.0 * rng.standard_normal(n // 768 + 1))
    return rng.standard_normal(n) * np.repeat(scales, 768)[:n]


def _mostly_zero(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(n) * (rng.random(n) < 1e-3)


MAKERS: dict[str, Maker] = {
    "gaussian": lambda n, rng: rng.standard_normal(n),
    "student2": lambda n, rng: rng.standard_t(2, n),
    "zeros999": _mostly_zero,
    "zero": lambda n, rng: np.zeros(n),
    "constant": lambda n, rng: np.full(n, -0.75),
    "ternary": lambda n, rng: rng.integers(-1, 2, n).astype(np.float64),
    "spikes": _spikes,
    "block-scaled": _block_scaled,
    "ascending": lambda n, rng: np.sort(np.abs(rng.standard_normal(n))),
    "descending": lambda n, rng: -np.sort(-np.abs(rng.standard_normal(n))),
}


@pytest.fixture(scope="session", params=list(MAKERS))
def distribution(request: pytest.FixtureRequest) -> str:
    """The name of one input distribution."""
    return str(request.param)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for a busy core cost more than they bring to operations of a few microseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def draw() -> Callable[..., Tensor]:
    """draw(distribution, n, dtype): the same vector for the same arguments."""

    def make(distribution: str, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(MAKERS[distribution](n, np.random.default_rng(n))).to(dtype)

    return make


@pytest.fixture(scope="session")
def ranked() -> Callable[[Tensor], np.ndarray]:
    """ranked(vector): indices by (-magnitude, index), NaN before inf, from a stable sort of the values."""

    def order(vector: Tensor) -> np.ndarray:
        magnitudes = vector.detach().double().abs().numpy()
        ascending = np.argsort(-magnitudes, kind="stable")  # numpy puts NaN last, in index order
        return np.roll(ascending, int(np.isnan(magnitudes).sum()))

    return order


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Tensor, Tensor], bool]:
    """same_bits(a, b): equal shapes, dtypes and bits, NaN payloads and signs of zero included."""

    def compare(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        return torch.equal(a.detach().view(integer), b.detach().view(integer))

    return compare


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which loops are used: numpy's alone, or the compiled ones where they apply."""
    if request.param == "compiled" and not native.available():
        pytest.skip("the compiled loops were not built")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(native, "library", None)
        yield str(request.param)


@pytest.fixture
def all_levels() -> Iterator[list[int]]:
    """Those that this machine has; afterwards the one in use before is used again."""
    before = native.level()
    yield list(range(len(native.names())))
    native.set_level(before)


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest, all_levels: list[int]) -> int:
    """The loops of one instruction set."""
    wanted = native.LEVELS.index(request.param)
    if wanted not in all_levels:
        pytest.skip(f"this machine has no {request.param}")
    return native.set_level(wanted)


@pytest.fixture
def any_size(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the loops for the memory, whatever the size, and one thread."""
    monkeypatch.setattr(native, "STREAMED", 0)
    monkeypatch.setattr(native, "SCATTERED", 0)
