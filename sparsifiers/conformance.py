# SPDX-License-Identifier: Apache-2.0
"""Check in one call that a sparsifier, a low-rank compressor or a quantiser keeps the contract, in tests of your own.

    def test_mine() -> None:
        sparsifiers.conformance.check(Mine, beta=0.5)

after `import sparsifiers.conformance`. The first clause that is broken raises an AssertionError that says what
was wrong and on which input. It runs on the CPU in a few seconds, and does not see what happens on a device.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from sparsifiers.base import DTYPES, Kind, Selection, Sparsifier, budget, canonical
from sparsifiers.catalogue import get, is_low_rank, is_quantiser, memory
from sparsifiers.conformance_low_rank import check_low_rank
from sparsifiers.conformance_quantiser import check_quantiser
from sparsifiers.conformance_reading import Case, cases, degenerate, drifting, gaussian, generators, require, structured
from sparsifiers.largest import bit_view
from sparsifiers.low_rank import LowRank
from sparsifiers.quantising.base import Quantiser

SECONDS = 60.0  # on one input; a selection that takes longer counts as endless
STEPS = 600  # in which all of a residual has to be sent that grows alike everywhere, a tenth of it a step
Maker = Callable[..., Sparsifier]  # called as make(density, **options)


def check(sparsifier: str | Callable[..., Any], *, at_least: float = 0.8, **options: object) -> None:
    """Check that your own compressor keeps the contract. Call it in your tests.

    Args:
        sparsifier (str or callable): A registered name, or what you pass to ``register``. For sparsifiers that is
            ``factory(density, **options)``. For low-rank compressors and quantizers it is the name or the class.
            Quantizers can also be a factory without density.
        at_least (float): Fraction of k that must be selected if the vector has k non-zeros. Use 0 for a threshold that
            the user sets, because it selects as many values as it finds. Default: 0.8.
        **options: Options of the compressor.

    Raises:
        AssertionError: If the contract is broken. The text says what is wrong, and for which input.
    """

    if isinstance(sparsifier, str) and is_low_rank(sparsifier) or _makes_low_rank(sparsifier):
        check_low_rank(sparsifier, **options)
        return
    if isinstance(sparsifier, str) and is_quantiser(sparsifier) or _makes_quantiser(sparsifier, options):
        check_quantiser(sparsifier, **options)
        return

    def make(density: float = 0.01, **more: object) -> Sparsifier:
        chosen = {**options, **more}
        if isinstance(sparsifier, str):
            return get(sparsifier, density, **chosen)
        made: Sparsifier = sparsifier(density, **chosen)
        return made

    _construction(make)
    _protocol(make(0.125))
    _symmetries(make, at_least)
    if make(0.125).same_on_all_ranks:
        _equal_on_all_ranks(make, at_least)
    _state(make, at_least)
    _selections(make, at_least)
    _dtypes_and_strides(make, at_least)
    if at_least:
        _everything_leaves(make, at_least)


def _makes_low_rank(factory: object) -> bool:
    return isinstance(factory, type) and issubclass(factory, LowRank)


def _makes_quantiser(factory: object, options: Mapping[str, object]) -> bool:
    """Return whether a factory makes a quantiser of these options alone: a sparsifier's needs a density."""
    if isinstance(factory, str | type) or not callable(factory):
        return isinstance(factory, type) and issubclass(factory, Quantiser)
    try:
        inspect.signature(factory).bind(**options)
    except (TypeError, ValueError):
        return False
    return isinstance(factory(**options), Quantiser)


def selected(sparsifier: Sparsifier, case: Case, at_least: float, **request: Any) -> Tensor:
    """Select once, check everything that a single call promises, and return the indices, int64[count]."""
    vector, n = case.vector, case.vector.numel()
    request = {"shapes": case.shapes, **request}
    where = f"{sparsifier!r} on {case}, {request}"
    k = request.get("k") or budget(sparsifier.density, n)
    slots = {name: value for name, value in request.items() if name != "key"}
    capacity = sparsifier.capacity(n, **slots)
    before, version, drawn = vector.clone(), vector._version, generators()
    selection = sparsifier.select(vector, **request)
    require(generators() == drawn, "a generator of the process was used", where)
    same = vector._version == version and torch.equal(bit_view(vector), bit_view(before))
    require(same, "the vector was changed", where)
    require(isinstance(selection, Selection), f"select returned no Selection but {type(selection).__name__}", where)
    indices, count = selection.indices, int(selection.count)
    require(indices.dtype == torch.int32, f"indices are {indices.dtype}, not int32", where)
    require(indices.device == vector.device, f"indices are on {indices.device}", where)
    require(sparsifier.capacity(n, **slots) == capacity, "capacity changed with a call", where)
    require(len(indices) == capacity, f"{len(indices)} slots, but capacity says {capacity}", where)
    require(capacity <= k, f"capacity is {capacity}, more than k = {k}", where)
    require(0 <= count <= capacity, f"count is {count}, outside [0, {capacity}]", where)
    require(bool(((indices >= 0) & (indices < n)).all()), f"an index lies outside [0, {n})", where)
    chosen = selection.trimmed()
    require(bool((chosen[1:] > chosen[:-1]).all()), "indices are not ascending and unique", where)
    if case.finite and int(vector.count_nonzero()) >= k:
        require(count >= at_least * k, f"only {count} of k = {k} were sent, less than {at_least} k", where)
    return chosen


def _construction(make: Maker) -> None:
    """Check that name, density and options make a sparsifier again, and that its text tells settings apart."""
    made = make(0.125)
    require(isinstance(made, Sparsifier), "the factory made no Sparsifier", repr(made))
    require(made.density == 0.125, f"density is {made.density}, not the 0.125 it was made with", repr(made))
    again = make(made.density, **made.options())
    require(repr(again) == repr(made), f"made again from its options it is {again!r}", repr(made))
    require(repr(make(0.25)) != repr(made), "repr does not tell two densities apart", repr(made))
    require(" at 0x" not in repr(made), "repr holds an address, so it differs between ranks", repr(made))
    try:
        make(0.125, no_such_option=1)
    except TypeError:
        return
    raise AssertionError(f"an unknown option is accepted, which must be a TypeError: {made!r}")


def _protocol(made: Sparsifier) -> None:
    """Check the attributes of a compressor."""
    where = repr(made)
    require(isinstance(made.name, str) and bool(made.name), f"name is {made.name!r}, no text", where)
    require(made.kind is Kind.SPARSE, f"kind is {made.kind!r}, not Kind.SPARSE", where)
    claim = made.same_on_all_ranks
    require(isinstance(claim, bool), f"same_on_all_ranks is {claim!r}, neither True nor False", where)
    try:
        memory(made.memory)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"no memory can be made by the name in `memory`: {error}: {where}") from error
    try:
        canonical(made.name, made.options())
    except TypeError as error:
        raise AssertionError(f"options() holds what is no plain value: {error}: {where}") from error


def _equal_on_all_ranks(make: Maker, at_least: float) -> None:
    """Check that two ranks choose alike that have nothing in common but seed, key and step."""
    expected = _run(make(0.02), at_least, stop=4)
    other = make(0.02)
    for step in range(4):
        for case in (Case("zeros", torch.zeros(4000), ((40, 100),)), drifting(step + 50, 1e3)):
            chosen = selected(other, case, at_least, key="a", step=step)
            _same([chosen], [expected[step]], "same_on_all_ranks is True, but another vector changes it", make)


def _selections(make: Maker, at_least: float) -> None:
    """Check single selections on all inputs, from k = 1 to all, and of nothing."""

    def all_of(case: Case) -> None:
        n = case.vector.numel()
        for k in sorted({1, budget(0.01, n), budget(0.3, n), n}):
            sparsifier = make(0.01)
            for step in range(4):
                selected(sparsifier, case, at_least, k=k, key="a", step=step)
        selected(make(0.05), case, at_least, step=7)

    for case in chain(cases(), structured(), degenerate()):
        _in_time(lambda case=case: all_of(case), case)  # type: ignore[misc]
    empty = Case("nothing", torch.empty(0))
    require(len(selected(make(0.01), empty, at_least)) == 0, "something was selected", str(empty))


def _everything_leaves(make: Maker, at_least: float) -> None:
    """Check that no coordinate stays in the residual for ever, where it grows, while others are sent."""
    sparsifier, n = make(0.1), 1000
    gradient = gaussian(n).sign() * (1.0 + 0.5 * gaussian(n, 1).erf())
    residual, waits = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    for step in range(STEPS):
        residual = residual + gradient
        case = Case("a residual that grows", residual, ((40, 25),))
        chosen = selected(sparsifier, case, at_least, key="a", step=step)
        residual[chosen] = 0.0
        waits[chosen] = False
        if not waits.any():
            return
    first = int(waits.int().argmax())
    what = f"{int(waits.sum())} of {n} coordinates were never sent in {STEPS} steps, the first is {first}"
    require(False, f"{what}: what is large, or old, has to be sent some day", repr(sparsifier))


def _dtypes_and_strides(make: Maker, at_least: float) -> None:
    """Check that each dtype is selected from, and that strides and autograd make no difference."""
    for dtype in DTYPES:
        for n in (1000, 70_001):
            plain = Case("gaussian", gaussian(n, dtype=dtype))
            strided = Case("gaussian of stride 3", plain.vector.repeat_interleave(3)[::3])
            for step in range(2):
                expected, chosen = (selected(make(0.02), case, at_least, step=step) for case in (plain, strided))
                require(torch.equal(chosen, expected), "a stride changes the selection", str(strided))
    indices = make(0.02).select(gaussian(1000).requires_grad_()).indices
    require(not indices.requires_grad, "indices require grad", repr(make(0.02)))


def _symmetries(make: Maker, at_least: float) -> None:
    """Check that equal runs select alike, and so do vectors times -1 and powers of two."""
    expected = _run(make(0.02), at_least)
    _same(_run(make(0.02), at_least), expected, "two equal runs differ", make)
    for factor in (-1.0, 0.125, 1024.0) if at_least else (-1.0,):
        _same(_run(make(0.02), at_least, factor=factor), expected, f"vectors times {factor} change it", make)


def _state(make: Maker, at_least: float) -> None:
    """Check that state belongs to a key, survives every form of saving, and is forgotten where it must be."""
    straight = _run(make(0.02), at_least, stop=12)
    both = make(0.02)
    turns = [selected(both, drifting(t), at_least, key=key, step=t) for t in range(12) for key in "ba"]
    _same(turns[1::2], straight, "another key in between changes it", make)
    half, restored = make(0.02), make(0.02)
    for key in "ac":
        _run(half, at_least, key=key)
    _run(restored, at_least, stop=3, factor=4.0)
    restored.load_state_dict(pickle.loads(pickle.dumps(half.state_dict())))
    copied, shortened = copy.deepcopy(half), copy.deepcopy(half)
    rewound = copy.deepcopy(half)
    snapshot = rewound.snapshot()
    _run(rewound, at_least, start=3, stop=5, factor=4.0)
    rewound.load_state_dict(snapshot)
    half.retain(["a"])
    continued = {
        "retain(['a'])": half,
        "load_state_dict": restored,
        "copy.deepcopy": copied,
        "load_state_dict of a snapshot()": rewound,
    }
    for what, sparsifier in continued.items():
        going_on = _run(sparsifier, at_least, start=6, stop=12)
        _same(going_on, straight[6:], f"after {what} key 'a' does not go on as it was", make)

    for kept, key in ((["a"], "c"), ([], "a")):
        half.retain(kept)
        cold = _run(make(0.02), at_least, start=6, stop=12, key=key)
        going_on = _run(half, at_least, start=6, stop=12, key=key)
        _same(going_on, cold, f"after retain({kept}) key {key!r} is still remembered", make)
    other = Case("gaussian of another length", gaussian(3000))
    fresh, known = (selected(made, other, at_least, key="a", step=7) for made in (make(0.02), shortened))
    _same([known], [fresh], "key 'a' does not start cold with another length", make)
    try:
        make(0.02).load_state_dict({"no such state": 1})
    except ValueError:
        return
    raise AssertionError(f"the state of something else is accepted, which must be a ValueError: {make(0.02)!r}")


def _run(
    sparsifier: Sparsifier, at_least: float, *, start: int = 0, stop: int = 6, factor: float = 1.0, key: str = "a"
) -> list[Tensor]:
    """Return the indices of each step from `start` to `stop`, on vectors of a slowly changing scale times `factor`."""
    return [selected(sparsifier, drifting(t, factor), at_least, key=key, step=t) for t in range(start, stop)]


def _same(chosen: list[Tensor], expected: list[Tensor], what: str, make: Maker) -> None:
    for place, (indices, wanted) in enumerate(zip(chosen, expected, strict=True)):
        where = f"{make(0.02)!r} on {drifting(0)}, selection {place} of {len(chosen)}"
        require(torch.equal(indices, wanted), f"the selection is not the same: {what}", where)


def _in_time(call: Callable[[], None], case: Case) -> None:
    """Call in a thread, so that one that never returns can be told; its exception passes through."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    require(bool(ended), f"select has not returned after {SECONDS} s", str(case))
    if ended[0] is not None:
        raise ended[0]
