# SPDX-License-Identifier: Apache-2.0
"""``sync="updates"``: nothing is lost, and what is common to all is equal to the bit, whatever the options.

Invariants 1 to 3: an exchange leaves the sum over ranks of x as it is, where x is the parameters and, with
``carry="hold"``, what they would be with the residual; ``base`` is the same on all ranks; after ``consolidate()``
every parameter is ``base``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded
from support.updates import assert_common, assert_kept, base_of, exact, reducer_of, updating, watched
from torch import nn

import agmerge
import sparsifiers
from agmerge.backends import topology
from agmerge.options.meaning import check_meaning
from agmerge.options.resolve import resolve
from agmerge.options.typed import Options
from agmerge.step.gradient_exchange import Combined
from agmerge.updates.shared_parameters import pieces_by_name

MODEL = seeded(mlp)
STEPS = 7

AXES: dict[str, list[dict[str, Any]]] = {
    "exchange": [{"exchange": name} for name in ("sparse", "auto", "oktopk", "masked", "two-level")],
    "wire": [{"wire": name} for name in ("auto", "fp32", "fp16", "bf16", "int8", "int4", "2bit", "sign")],
    "carry": [{"carry": "apply"}, {"carry": "hold"}],
    "compression": [{"compression": name} for name in (*sparsifiers.names(), "none")],
    "sparsify": [{"sparsify": name} for name in ("ahead", "behind")],
    "merging": [{"merging": name} for name in ("layerwise", "single", "threshold", "agmerge")],
    "when": [
        {},
        {"every": 3},
        {"every": 2, "fragments": 2},
        {"overlap": 1},
        {"every": 3, "overlap": 2},
        {"every": 4, "fragments": 3, "overlap": 1},
    ],
    "dense": [{}, {"dense": []}, {"dense": [r"0\..*"]}, {"dense": "partial"}],
    "density": [
        {"density": 0.03},
        {"density": 1.0},
        {"density": {r"0\.weight": 0.2, r"2\..*": 0.01}},
        {"density": "importance"},
        {"density": 0.05, "warmup": 4},
        {"density": 0.02, "warmup": "dgc"},
    ],
}


def meaningful(options: dict[str, Any]) -> bool:
    """Tell whether the library takes these arguments together."""
    try:
        check_meaning(options["compression"], options)
        resolve(Options(sync="updates", **options))
    except (ValueError, TypeError):
        return False
    return True


def drawn(pairs: Collection[tuple[str, str]], seed: int, tries: int) -> list[dict[str, Any]]:
    """Return cases of which each has a value, or values of two axes that are among ``pairs``, that none before has."""
    source, axes, held, cases = random.Random(seed), list(AXES), set(), []
    for _ in range(tries):
        places = {axis: source.randrange(len(AXES[axis])) for axis in axes}
        new = {(axis, places[axis]) for axis in axes} | {(a, b, places[a], places[b]) for a, b in pairs}
        options = {key: value for axis in axes for key, value in AXES[axis][places[axis]].items()}
        if options["compression"] == "none":  # it has no densities, and no codecs
            options = {k: v for k, v in options.items() if k not in ("density", "warmup", "wire", "dense", "sparsify")}
        if new - held and meaningful(options):
            held |= new
            cases.append(options)
    return cases


def of(two_level: bool) -> list[Any]:
    """Return cases for every test run, and more of them that are marked ``long``."""
    quick = drawn([("exchange", "when"), ("carry", "when")], seed=18, tries=600)
    more = drawn(list(itertools.combinations(AXES, 2)), seed=19, tries=600)
    marked = [*(pytest.param(one) for one in quick), *(pytest.param(one, marks=pytest.mark.long) for one in more)]
    return [one for one in marked if (one.values[0]["exchange"] == "two-level") is two_level]


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.fixture(autouse=True)
def _nodes_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(topology.VARIABLE, "2")


def kept_by(model: nn.Module, steps: int = STEPS, size: int = 3, roundings: float = 4.0, **options: Any) -> None:
    """Assert that ``size`` ranks keep what is to be kept, while they train and when they consolidate."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, **options)
        seen = watched(rank, model, optimizer, range(steps))
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(size, model, body), strict=True)
    agreed(list(digests))
    assert_kept(seen, equal=options.get("carry") == "hold" and options.get("every", 1) == 1, roundings=roundings)
    assert seen[0][-1].base != seen[0][0].base  # something has been exchanged


@pytest.mark.parametrize("options", of(two_level=False), ids=described)
def test_nothing_is_lost_and_base_is_equal_to_the_bit(options: dict[str, Any]) -> None:
    kept_by(MODEL, **options)


def test_signs_of_everything_lose_nothing_where_elements_are_zero() -> None:
    """What is zero has no sign and is left out, so that others stand at its place in the message."""
    for merging in ("layerwise", "single"):
        kept_by(MODEL, compression="topk", density=1.0, wire="sign", dense=[], merging=merging, exchange="sparse")


# -- what is carried, and what is not -----------------------------------------------------------------------------


@pytest.mark.parametrize("merging", ["layerwise", "single"])
@pytest.mark.parametrize("compression", ["topk", "adtopk", "randomk"])
def test_where_nothing_is_carried_parameters_are_the_common_ones_to_the_bit(compression: str, merging: str) -> None:
    """These are the coordinates that were sent without rounding, and tensors that are sent whole."""

    def body(rank: int, model: nn.Module) -> int:
        optimizer = updating(model, compression=compression, wire="fp32", merging=merging, density=0.2)
        checked, sent, shared = 0, {}, None
        for seen in range(4):
            watched(rank, model, optimizer, [seen])
            buffers = reducer_of(optimizer).exchange.agreed.buffers
            assert buffers is not None
            if shared is None:  # the first step has taken the parameters in
                shared = reducer_of(optimizer).replica.shared
                apply = shared.apply

                def remembered(combined: Combined, follow: Any = None, apply: Any = apply) -> None:
                    sent.update(pieces_by_name(combined.buffers.store.sent))
                    apply(combined, follow)

                shared.apply = remembered
                continue
            for name, parameter in model.named_parameters():
                flat, base = parameter.detach().view(-1), base_of(optimizer)[name].view(-1)
                if buffers.goes_dense(buffers.slot_of[name]):
                    assert digest([flat]) == digest([base])
                    continue
                for piece in sent[name]:
                    places = piece.indices - piece.first + piece.start
                    assert digest([flat[places]]) == digest([base[places]])
                    checked += places.numel()
        return checked

    assert min(on_ranks(2, MODEL, body)) > 3 * 0.19 * (32 * 48 * 2)


def test_held_parameters_are_the_common_ones_after_each_exchange() -> None:
    def body(rank: int, model: nn.Module) -> list[bool]:
        optimizer, equal = updating(model, carry="hold", every=3), []
        for step in range(6):
            watched(rank, model, optimizer, [step])
            equal.append(all(torch.equal(p.detach(), base_of(optimizer)[n]) for n, p in model.named_parameters()))
        return equal

    assert agreed(on_ranks(2, MODEL, body)) == [False, False, True, False, False, True]


def test_nothing_is_lost_between_exchanges_either() -> None:
    """``consolidate()`` brings everything: the common parameters are then the mean of all x, before and after."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, density=0.01)
        watched(rank, model, optimizer, range(5))
        before = {name: exact(p) for name, p in model.named_parameters()}
        optimizer.consolidate()
        return before, {name: exact(p) for name, p in model.named_parameters()}

    results = on_ranks(3, MODEL, body)
    for name, after in results[0][1].items():
        torch.testing.assert_close(after, sum(before[name] for before, _ in results) / 3, rtol=1e-6, atol=1e-8)


def test_a_part_of_the_merge_buffers_leaves_the_others_alone() -> None:
    """Check that what all have in common of those that are not due does not move, and each has its turn."""

    def body(rank: int, model: nn.Module) -> list[list[str]]:
        optimizer, moved = updating(model, every=3, fragments=3, merging="layerwise"), []
        for step in range(9):
            before = {name: base.clone() for name, base in base_of(optimizer).items()}
            watched(rank, model, optimizer, [step])
            after = base_of(optimizer)
            moved.append(sorted(name for name in before if not torch.equal(before[name], after[name])))
        return moved

    moved = agreed(on_ranks(2, MODEL, body))
    assert moved[3:6] == moved[6:]
    assert sorted(itertools.chain(*moved[6:])) == sorted(name for name, _ in MODEL.named_parameters())
    assert all(moved[6:])


@pytest.mark.parametrize("outer", [None, agmerge.Nesterov()], ids=["none", "Nesterov"])
def test_with_fewer_merge_buffers_than_fragments_some_turns_are_nobodys(outer: Any) -> None:
    """The step of the first agreement may be such a turn; and in ``join()`` it is no word of anybody's."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, every=4, fragments=4, merging="single", outer=outer, carry="hold")
        seen = watched(rank, model, optimizer, range(9))
        for step in range(9, 11 if rank else 9):
            watched(rank, model, optimizer, [step])
        last = optimizer.join()
        return seen, last, digest(model), optimizer.stats()["exchanges"]

    seen, *rest = zip(*on_ranks(2, MODEL, body), strict=True)
    assert [agreed(list(one)) for one in rest][0] == 1
    if outer is None:
        assert_kept(seen)


def test_what_is_not_finite_in_a_turn_of_nobodys_is_raised_at_the_next() -> None:
    def body(rank: int, model: nn.Module) -> str:
        optimizer = updating(model, every=4, fragments=4, merging="single")
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rank, step)
            if (rank, step) == (1, 0):
                next(model.parameters()).grad.fill_(torch.nan)
            optimizer.step()
        optimizer.zero_grad()
        backward(model, rank, 3)
        with pytest.raises(agmerge.NonFiniteError, match=r"rank 1: .*0\.weight") as raised:
            optimizer.step()
        return str(raised.value)

    agreed(on_ranks(2, MODEL, body))


# -- nodes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", of(two_level=True), ids=described)
def test_two_levels_keep_a_nodes_rest_in_shards(options: dict[str, Any]) -> None:
    """Two nodes of two: parameters are equal after an exchange, and their sum less all shards is as it was."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, seen = updating(model, **options), []
        reducer = reducer_of(optimizer)

        def look() -> Any:
            displaced = {name: exact(reducer.replica.shared.displacement(name)) for name in base_of(optimizer)}
            rests = {name: exact(rest) for name, rest in reducer.exchange.agreed.current.residuals().items()}
            return {name: exact(base) for name, base in base_of(optimizer).items()}, displaced, rests

        optimizer.register_step_post_hook(lambda *_: seen.append([look()]))
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
            seen[-1].append(look())
        return seen, digest(base_of(optimizer).values())

    results = on_ranks(4, MODEL, body)
    agreed([bits for _, bits in results])
    for step in range(STEPS):
        for name in base_of_names(results):
            before, after = (total(results, step, moment, name) for moment in (0, 1))
            torch.testing.assert_close(after, before, rtol=0, atol=2e-6)


def base_of_names(results: list[Any]) -> list[str]:
    return list(results[0][0][0][0][0])


def total(results: list[Any], step: int, moment: int, name: str) -> torch.Tensor:
    """Return the sum over four ranks of base less displacements and less the nodes' residuals."""
    looks = [seen[step][moment] for seen, _ in results]
    whole = sum(base[name] - displaced[name] for base, displaced, _ in looks)
    for node in (looks[:2], looks[2:]):
        if all(name in rests for *_, rests in node):
            whole = whole - torch.cat([rests[name] for *_, rests in node])[: whole.numel()]
    return whole


@pytest.mark.parametrize("steps", [9, 99])
def test_consolidate_is_no_step_to_plan_from(steps: int) -> None:
    """It is the exchange after which ranks measure and plan anew, and all of it goes dense."""

    def body(rank: int, model: nn.Module) -> str:
        optimizer = updating(model, exchange="sparse")
        for step in range(steps):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        optimizer.consolidate()
        backward(model, rank, steps)
        optimizer.step()
        optimizer.close()
        return digest(model)

    agreed(on_ranks(2, MODEL, body))
