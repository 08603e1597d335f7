# SPDX-License-Identifier: Apache-2.0
"""The compiled loops about updates: a difference, and one pass over what is shared and what is a worker's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sparsifiers import native

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="the compiled loops were not built"),
    pytest.mark.usefixtures("one_thread"),
]
SIZES = (1, 15, 2048, 2049, 9000)  # 2048 elements are gone over together


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With several threads torch's own loops are faster, and tensors of any size are left to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(native, "STREAMED", 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    before, wanted = native.level(), native.LEVELS.index(request.param)
    if native.set_level(wanted) < wanted:
        native.set_level(before)
        pytest.skip("this processor has not that instruction set")
    yield wanted
    native.set_level(before)


def chosen(n: int, first: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ascending indices of about a fifth of ``n`` elements, counted from ``first``, and a value for each."""
    indices = torch.rand(n, generator=source).lt(0.2).nonzero().view(-1)
    return (indices + first).int(), torch.randn(len(indices), generator=source)


def test_subtract_is_torchs(level: int) -> None:
    source = torch.Generator().manual_seed(0)
    for n in SIZES:
        for shift in range(3):
            end, begin = torch.randn(n, generator=source), torch.randn(n, generator=source)
            work = torch.full((n + shift + 1,), 7.0)
            assert native.difference(work[shift:-1], end, begin) is True
            assert torch.equal(work[shift:-1], end - begin)
            assert (work[:shift] == 7.0).all() and work[-1] == 7.0
            for value in (torch.nan, torch.inf, -torch.inf):
                begin[n // 2] = value
                assert native.difference(work[shift:-1], end, begin) is False
    assert native.difference(torch.zeros(4).double(), torch.zeros(4).double(), torch.zeros(4).double()) is None
    assert native.difference(torch.zeros(4), torch.zeros(4), torch.zeros(4).bfloat16()) is None


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_sum_is_written_as_torch_writes_it(level: int, ranks: int) -> None:
    source = torch.Generator().manual_seed(ranks)
    for n in SIZES:
        lists = [chosen(n, 0, source) for _ in range(ranks)]
        update = torch.zeros(n)
        for indices, values in lists:
            update.index_add_(0, indices, values * (1 / 3))
        for shift in range(3):
            total = torch.full((n + shift + 1,), 7.0)
            assert native.write_sum(total[shift:-1], lists, 1 / 3)
            assert torch.equal(total[shift:-1], update)
            assert (total[:shift] == 7.0).all() and total[-1] == 7.0


def test_a_gradient_moves_in_the_pass_that_adds_it_up(level: int) -> None:
    source = torch.Generator().manual_seed(0)
    for n in SIZES:
        for shift in range(3):
            residual, gradient = torch.randn(n, generator=source), torch.randn(n, generator=source)
            work, copied = torch.full((n + 1,), 7.0), torch.full((n + shift + 1,), 7.0)
            assert native.add(work[:-1], residual, gradient, copy=copied[shift:-1]) is True
            assert torch.equal(work[:-1], residual + gradient) and torch.equal(copied[shift:-1], gradient)
            assert work[-1] == 7.0 and (copied[:shift] == 7.0).all() and copied[-1] == 7.0
            before, after, moved = torch.randn(n, generator=source), torch.empty(n), torch.empty(n)
            for nesterov in (False, True):
                assert native.momentum(work[:-1], residual, gradient, before, after, 0.9, nesterov, copy=moved.zero_())
                alone, velocity = torch.empty(n), torch.empty(n)
                assert native.momentum(alone, residual, gradient, before, velocity, 0.9, nesterov)
                assert torch.equal(work[:-1], alone) and torch.equal(after, velocity) and torch.equal(moved, gradient)
            gradient[n // 2] = torch.inf
            assert native.add(work[:-1], residual, gradient, copy=copied[shift:-1]) is False
            assert torch.equal(copied[shift:-1], gradient)
    assert native.add(torch.zeros(4), torch.zeros(4), torch.zeros(4).bfloat16(), copy=torch.zeros(4)) is None
    assert native.add(torch.zeros(4), torch.zeros(4), torch.zeros(4), copy=torch.zeros(4).double()) is None


@pytest.mark.whole
@pytest.mark.parametrize("first", [0, 5, 4096])
@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_take_in_is_what_torch_makes_of_it_in_several_passes(level: int, first: int, ranks: int) -> None:
    source = torch.Generator().manual_seed(ranks)
    for n in SIZES:
        base = torch.randn(n, generator=source)
        parameter = base - torch.randn(n, generator=source) * 1e-2
        lists = [chosen(n, first, source) for _ in range(ranks)]
        own, sent = chosen(n, first, source)
        own_base, own_parameter = base.clone(), parameter.clone()
        assert native.take_in(own_base, own_parameter, first, lists, 1 / 3, (own, sent))

        update = torch.zeros(n)
        for indices, values in lists:
            update.index_add_(0, indices - first, values * (1 / 3))
        places = (own - first).long()
        rest = (base - parameter).index_add_(0, places, sent, alpha=-1)
        base -= update
        parameter -= update
        parameter[places] = base[places] - rest[places]
        assert torch.equal(own_base, base) and torch.equal(own_parameter, parameter)


def test_indices_that_do_not_fit_change_nothing(level: int) -> None:
    n, first = 100, 10
    good = (torch.arange(first, first + n, 3, dtype=torch.int32), torch.ones(34))
    for wrong in ([first - 1], [first + n], [20, 20], [30, 20], [-1], [2**31 - 1]):
        bad = (torch.tensor(wrong, dtype=torch.int32), torch.ones(len(wrong)))
        for lists, own in (([good, bad], good), ([good], bad)):
            base, parameter = torch.ones(n), torch.ones(n)
            assert not native.take_in(base, parameter, first, lists, 0.5, own)
            assert (base == 1).all() and (parameter == 1).all()
        total = torch.ones(n)
        assert not native.write_sum(total, [(bad[0] - first, bad[1])], 0.5)
        assert (total == 1).all()


def test_what_is_left_to_torch(level: int) -> None:
    own = (torch.tensor([0], dtype=torch.int32), torch.ones(1))
    base, parameter = torch.ones(4), torch.ones(4)
    assert native.take_in(base, parameter, 0, [], 1.0, own)
    assert not native.take_in(base.double(), parameter, 0, [], 1.0, own)
    assert not native.take_in(base, torch.ones(8)[::2], 0, [], 1.0, own)
    assert not native.take_in(base, parameter, 0, [(own[0].long(), own[1])], 1.0, own)
    assert not native.take_in(base, parameter, 0, [], 1.0, (own[0], own[1].double()))
    assert native.takes_in(torch.float32, base.device) and not native.takes_in(torch.float64, base.device)
