# SPDX-License-Identifier: Apache-2.0
"""What is noted while a vector is written selects the same as a search of the vector, whatever happened to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import largest, native
from sparsifiers.largest import Candidates, TensorNotes, largest_magnitudes

MASK = 0x7FFFFFFF
DTYPES = {torch.float32: "float", torch.bfloat16: "bfloat", torch.float16: "half"}
SPECIALS = torch.tensor([0.0, -0.0, 1.4e-45, -1e-40, torch.inf, -torch.inf, torch.nan, -3.4e38])
SIZES = [6400, 1, 3000, 0, 63, 4097, 64, 2048]  # of tensors in a vector; each is padded
pytestmark = [pytest.mark.skipif(not native.available(), reason="the compiled loops were not built")]


def keys_of(vector: Tensor) -> np.ndarray:
    return vector.view(torch.int32).numpy() & MASK


def padded(size: int) -> int:
    return -(-size // 32) * 32


def brute_force(vector: Tensor, k: int) -> list[int]:
    return sorted(np.argsort(-keys_of(vector).astype(np.int64), kind="stable")[:k].tolist())


def hard(n: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    special = SPECIALS[torch.randint(len(SPECIALS), (n,), generator=source)]
    return torch.randn(n, generator=source).where(torch.rand(n, generator=source) < 0.8, special)


def learnt(length: int, k: int, smallest: float) -> Candidates:
    """Candidates whose last selection of k ended with `smallest`."""
    known = Candidates(length)
    vector = torch.zeros(length)
    vector[:k] = smallest
    known.largest(vector.view(torch.int32).numpy(), MASK, k, lambda: np.arange(k, dtype=np.int32))
    return known


@dataclass
class Loop:
    """One of the loops that note, on tensors of `n` elements that begin `shift` after an aligned address."""

    run: Callable[[Tensor, Tensor, Tensor, TensorNotes | None], bool | None]
    dtype: torch.dtype = torch.float32


LOOPS = {
    **{
        f"add {name}": Loop(lambda work, rest, gradient, notes: native.add(work, rest, gradient, noting=notes), dtype)
        for dtype, name in DTYPES.items()
    },
    "add and move": Loop(
        lambda work, rest, gradient, notes: native.add(
            work, rest, gradient, 0.95, torch.empty_like(gradient), noting=notes
        )
    ),
    "subtract": Loop(native.difference),
    "momentum": Loop(
        lambda work, rest, gradient, notes: native.momentum(
            work, rest, gradient, rest.clone(), torch.empty_like(rest), 0.9, False, noting=notes
        )
    ),
    "momentum, Nesterov, and move": Loop(
        lambda work, rest, gradient, notes: native.momentum(
            work, rest, gradient, rest.clone(), torch.empty_like(rest), 0.9, True, torch.empty_like(rest), notes
        )
    ),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.usefixtures("any_size")
def test_loops_note_exactly_what_exceeds_the_floor(
    level: int, name: str, same_bits: Callable[[Tensor, Tensor], bool]
) -> None:
    loop = LOOPS[name]
    for n in (*range(1, 20), 63, 64, 65, 127, 200, 1024, 5000):
        for shift, smallest in ((0, 1.5), (1, 0.01), (3, 1e-44)):
            rest, gradient = hard(n + shift, n)[shift:], hard(n, n + 1).to(loop.dtype)
            work, plain = (torch.full((n + shift + 1,), 7.0)[shift:-1] for _ in range(2))
            split = n // 3
            one, other = learnt(40 * n + 400, n + 9, smallest), learnt(20 * n + 300, n // 2 + 9, smallest)
            parts = [(one, 100, split), (other, 17, n - split)]
            finite = loop.run(work, rest, gradient, TensorNotes(parts))
            assert finite is loop.run(plain, rest, gradient, None) is bool(work.isfinite().all())
            assert same_bits(work.nan_to_num(nan=1.0), plain.nan_to_num(nan=1.0))
            keys = keys_of(work)
            halves = zip(parts, (keys[:split], keys[split:]), (work[:split], work[split:]), strict=True)
            for (known, start, elements), mine, part in halves:
                expected = np.flatnonzero(mine > known._floor)
                (stretch,) = known._stretches.values()
                assert stretch[:2] == (start, start + elements) and stretch.end - stretch.first == len(expected)
                positions, noted = known._list[:, stretch.first : stretch.end]
                assert (positions & MASK == expected + start).all() and (noted == mine[expected]).all()
                assert (positions < 0).tolist() == part[expected].signbit().tolist()


@dataclass
class Training:
    """Steps of error feedback over a vector of several tensors, and how often it was searched."""

    known: Candidates = field(default_factory=lambda: Candidates(sum(map(padded, SIZES))))
    searched: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.starts = np.cumsum([0, *map(padded, SIZES)])[:-1].tolist()
        self.notes = [TensorNotes([(self.known, start, size)]) for start, size in zip(self.starts, SIZES, strict=True)]
        self.work, self.rest = torch.zeros(self.known.length), torch.zeros(self.known.length)
        self.random = np.random.default_rng(0)

    def write(self, number: int, gradient: Tensor | None) -> None:
        part = slice(self.starts[number], self.starts[number] + SIZES[number])
        if gradient is None:
            self.notes[number].forget()
            self.work[part] = self.rest[part]
        else:
            assert native.add(self.work[part], self.rest[part], gradient, noting=self.notes[number]) is not None

    def step(self, k: int, gradient_of: Callable[[int], Tensor | None]) -> None:
        for number in self.random.permutation(len(SIZES)):
            self.write(number, gradient_of(SIZES[number]))
        self.select(k)

    def select(self, k: int) -> None:
        bits, searched = self.work.view(torch.int32).numpy(), []

        def search() -> np.ndarray:
            searched.append(True)
            return largest_magnitudes(bits, MASK, k)

        found, values = self.known.largest(bits, MASK, k, search)
        assert values is None or (values == bits[found]).all()
        assert (values is None) is bool(searched)
        assert found.dtype == np.int32 and found.tolist() == brute_force(self.work, k)
        self.searched.append(bool(searched))
        self.work[torch.from_numpy(found).long()] = 0.0
        self.work, self.rest = self.rest, self.work


def normal(scale: float) -> Callable[[int], Tensor]:
    return lambda size: scale * torch.randn(size)


@pytest.fixture
def training(any_size: None) -> Training:
    torch.manual_seed(0)
    return Training()


@pytest.mark.usefixtures("level")
def test_a_steady_scale_is_seldom_searched(training: Training) -> None:
    for _ in range(40):
        training.step(150, normal(1.0))
    assert training.searched[0] and sum(training.searched[10:]) <= 10


@pytest.mark.parametrize("kept", [0, 400])
def test_lists_that_are_too_long_for_the_scratch_that_a_thread_keeps(
    kept: int, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a million candidates, as 5 % of seven million elements are: they were read from other scratch."""
    monkeypatch.setattr(native, "KEPT", kept)
    for _ in range(20):
        training.step(150, normal(1.0))
    assert not all(training.searched)


def test_a_scale_that_drifts_jumps_and_drops(training: Training) -> None:
    for number, scale in enumerate([*(1.03**i for i in range(12)), 100.0, 100.0, 1.0, 1.0, 1e-30, 1e-30, 1e30, 0.0]):
        training.step(150, normal(scale) if number % 5 else normal(0.97 * scale))
    assert any(training.searched[1:]) and not all(training.searched)


def test_k_that_changes(training: Training) -> None:
    for k in (100, 100, 100, 400, 400, 50, 50, 1, 1, 7, training.known.length, training.known.length - 1, 100, 100):
        training.step(k, normal(1.0))
    assert training.searched[3] and not all(training.searched)


def test_ties_zeros_infinities_and_nan(training: Training) -> None:
    kinds: list[Callable[[int], Tensor]] = [
        lambda size: torch.randint(-3, 4, (size,)).float(),
        lambda size: torch.zeros(size),
        lambda size: torch.full((size,), -2.0),
        lambda size: hard(size, size),
        lambda size: torch.randn(size) * (torch.rand(size) < 0.01),
    ]
    for number in range(40):
        if number == 30:  # what is infinite stays so
            training.rest.zero_()
        training.step((60, 300)[number % 3 == 0], kinds[number % 3 if number < 15 or number > 30 else number % 5])
    assert not all(training.searched)


def test_tensors_without_a_gradient_and_those_that_are_written_again(training: Training) -> None:
    for number in range(30):
        if number % 3 == 2:
            for attempted in (2, 7):  # large, but it comes to nothing
                training.write(attempted, 1.5 * torch.randn(SIZES[attempted]))
        training.step(150, lambda size: None if size in (63, 3000) else torch.randn(size))
    assert not all(training.searched[3::3]) and not all(training.searched[5::3])
    training.step(150, lambda size: None)
    assert training.searched[-1]  # nothing was noted: what another loop has written is not read for candidates


def test_what_was_noted_is_forgotten_where_another_loop_writes(training: Training) -> None:
    for _ in range(4):
        training.step(150, normal(1.0))
    for number, size in enumerate(SIZES):
        training.write(number, torch.randn(size))
    training.write(7, 9.0 * (torch.arange(SIZES[7]) % 200 == 0))
    stretch = training.known._stretches[training.starts[7]]
    assert stretch.end > stretch.first  # so that to keep it would be seen
    training.write(7, None)
    training.select(150)
    assert not training.searched[-1]


def test_a_vector_that_was_written_by_others_is_searched_and_nothing_is_kept_of_another_step(
    training: Training,
) -> None:
    for _ in range(4):
        training.step(150, normal(1.0))
    assert not training.searched[-1]
    training.select(150)  # once more, of what is left
    assert training.searched[-1]


def test_a_list_that_is_full_is_not_used(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest, "ROOM", 1)
    for _ in range(6):
        training.step(150, normal(1.0))
    assert sum(training.searched) >= 5


def test_where_much_is_selected_nothing_is_noted(training: Training) -> None:
    k = training.known.length // largest.RARE + 1
    for _ in range(3):
        training.step(k, normal(1.0))
    assert all(training.searched) and training.notes[0].begin() == (0, 0)


@pytest.mark.parametrize("name", ["topk", "dgc"])
def test_sparsifiers_select_the_same_with_candidates(name: str, training: Training) -> None:
    sparsifier = sparsifiers.get(name)
    assert sparsifier.takes_candidates
    known: list[bool] = []
    for step in range(12):
        for number, size in enumerate(SIZES):
            training.write(number, torch.randn(size))
        plain = sparsifier.select(training.work, k=150, step=step)
        noted = sparsifier.select(training.work, k=150, step=step, scratch=training.known)
        assert torch.equal(plain.indices, noted.indices) and plain.count == noted.count
        known.append(noted.values is not None)
        assert not known[-1] or torch.equal(noted.values, training.work[noted.trimmed()])
        training.work[noted.trimmed()] = 0.0
        training.work, training.rest = training.rest, training.work
    assert any(known) and not known[0]


def test_a_sparsifier_that_selects_otherwise_takes_none() -> None:
    assert not sparsifiers.get("adtopk").takes_candidates
    assert not sparsifiers.get("dgc", mode="paper").takes_candidates
    with pytest.raises(ValueError, match="the scratch has 8 elements, but the vector has 9"):
        sparsifiers.get("topk").select(torch.zeros(9), scratch=Candidates(8))
