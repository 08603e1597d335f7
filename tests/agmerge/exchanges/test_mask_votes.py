# SPDX-License-Identifier: Apache-2.0
"""Votes of the masked exchange: who may name what, the bytes that bring it, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exchanges import CPU, Quiet, control_of, draw_offer, masked, same, segments_of

from agmerge import testing
from agmerge.backends.local import Call
from agmerge.errors import MessageError
from agmerge.exchanges import mask_votes
from agmerge.exchanges.base import SegmentBuffers
from agmerge.exchanges.message import bits
from agmerge.tensors.layout import TensorClass
from sparsifiers import Kind, Selection

LIGHT = settings(deadline=None)
FP32 = TensorClass(CPU, torch.float32, Kind.SPARSE)


@given(k=st.integers(0, 200), extra=st.integers(0, 200), workers=st.integers(1, 9), step=st.integers(0, 20))
def test_shares_cover_everything_once_and_quotas_make_k(k: int, extra: int, workers: int, step: int) -> None:
    length, shares = k + extra, [mask_votes.share_of(rank, workers, step) for rank in range(workers)]
    assert sorted(shares) == list(range(workers))
    quotas = [mask_votes.quota(k, workers, share) for share in shares]
    assert sum(quotas) == k and max(quotas) <= mask_votes.slots(k, workers)
    assert all(quota <= len(range(share, length, workers)) for quota, share in zip(quotas, shares, strict=True))


@LIGHT
@given(
    length=st.integers(1, 300),
    workers=st.integers(1, 6),
    density=st.floats(0.01, 1.0),
    offered=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_a_vote_is_of_its_share_and_0_8_full(
    length: int, workers: int, density: float, offered: float, seed: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    work = torch.randn(length, generator=source)
    chosen = torch.randperm(length, generator=source)[: round(offered * length)]
    k, before = max(1, round(density * length)), work.clone()
    for share in range(workers):
        most = mask_votes.quota(k, workers, share)
        named = mask_votes.vote(work, chosen, share, workers, most)
        assert len(named.unique()) == len(named) <= most and (named % workers == share).all()
        assert 5 * len(named) >= 4 * most and bool((named >= 0).all() and (named < length).all())
        first = [i for i in chosen.tolist() if i % workers == share]
        inside, size_of = set(named.tolist()), work.abs()
        if len(first) > most:
            assert inside == set(sorted(first, key=lambda i: -float(size_of[i]))[:most])
        else:
            assert inside >= set(first)
            others = [i for i in range(share, length, workers) if i not in first]
            filled = sorted(inside - set(first), key=lambda i: -float(size_of[i]))
            assert filled == sorted(others, key=lambda i: -float(size_of[i]))[: len(filled)]
            assert not filled or 5 * len(first) < 4 * most
    assert same(work, before)


def test_every_rank_judges_every_coordinate_by_turns() -> None:
    for workers in range(1, 7):
        for rank in range(workers):
            assert {mask_votes.share_of(rank, workers, step) for step in range(workers)} == set(range(workers))


def told(odd: int, damage: Callable[[torch.Tensor], None] | None = None, offer: Selection | None = None) -> str:
    """The one error that all of three ranks raise if what rank ``odd`` votes is damaged, or ``offer``."""
    (segment,) = segments_of([(640, FP32)])

    def inject(call: Call) -> None:
        if damage is not None and call.rank == odd and call.kind == "all_gather":
            damage(call.tensor[-votes_of(640, 90).size :])

    def body(rank: int) -> None:
        load = SegmentBuffers(segment, torch.ones(1000)[: segment.length], torch.zeros(segment.length))
        here = masked()(Quiet())
        mine = draw_offer(640, 90, 0, False) if offer is None or rank != odd else offer
        here.wait(here.start("b", [load], [mine], control_of(0, [segment])))

    errors = testing.run(3, body, return_errors=True, inject=inject)
    assert [type(error) for error in errors] == [MessageError] * 3
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


def votes_of(length: int, k: int, workers: int = 3) -> mask_votes.VoteFormat:
    return mask_votes.VoteFormat([length], [mask_votes.slots(k, workers)], workers)


@LIGHT
@given(odd=st.sampled_from([0, 2]), place=st.floats(0, 1), flips=st.integers(1, 255))
def test_a_vote_that_has_changed_on_its_way_names_the_rank(odd: int, place: float, flips: int) -> None:
    def damage(votes: torch.Tensor) -> None:
        votes[round(place * (len(votes) - 1))] ^= flips

    assert f"selection of rank {odd} was damaged" in told(odd, damage)


@pytest.mark.parametrize("indices", [[7, 8, 9] * 30, [*range(87), 1999, 2000, 2001]], ids=["twice", "outside"])
@pytest.mark.parametrize("odd", [0, 2])
def test_a_selection_that_may_not_be_names_the_rank(odd: int, indices: list[int]) -> None:
    offer = Selection(torch.tensor(indices, dtype=torch.int32), 90)
    assert f"selection of rank {odd} was damaged" in told(odd, offer=offer)


@LIGHT
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    workers=st.integers(1, 6),
    density=st.floats(0, 1),
    seed=st.integers(0, 100),
)
def test_votes_bring_what_was_named(lengths: list[int], workers: int, density: float, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    slots = [mask_votes.slots(round(density * length), workers) for length in lengths]
    votes, seen = mask_votes.VoteFormat(lengths, slots, workers), []
    assert votes.size <= 4 + sum(4 + 4 * count for count in slots)  # an index takes four bytes at most
    for share in range(workers):
        named = []
        for length, most in zip(lengths, slots, strict=True):
            mine = torch.tensor(range(share, length, workers), dtype=torch.int64)
            named.append(mine[torch.randperm(len(mine), generator=source)[: max(0, most - seed % 2)]])
        data = torch.randint(0, 256, (votes.size,), dtype=torch.uint8)  # what happened to lie there
        votes.write(named, share, data)
        found = votes.read(data, share)
        assert found is not None
        assert all(torch.equal(one, two.sort().values) for one, two in zip(found, named, strict=True))
        seen.append(found)
        if votes.size > 4:  # whatever arrives under a right checksum, nothing is named that is not there, or another's
            data[int(torch.randint(4, votes.size, ()))] ^= 1 + seed
            assert votes.read(data, share) is None
            bits.write_crc(data)
            for one, length in zip(votes.read(data, share) or [], lengths, strict=False):
                assert set(one.tolist()) <= set(range(share, length, workers)) and len(one.unique()) == len(one)
    for of_all in zip(*seen, strict=True):
        mask = mask_votes.merge_votes(of_all)
        assert torch.equal(mask, mask.unique()) and len(mask) == sum(map(len, of_all))
