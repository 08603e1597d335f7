# SPDX-License-Identifier: Apache-2.0
"""The kit passes every registered sparsifier and catches each one that breaks a single clause."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Request, Selection, conformance
from sparsifiers.largest import TopK

pytestmark = pytest.mark.usefixtures("one_thread")


# Of all others test_sparsifier_contract.py asks the same, in fewer sizes.
FULL = ("topk", "dgc", "gaussiank", "adtopk-row")
NAMES = [pytest.param(name, marks=() if name in FULL else pytest.mark.long) for name in sparsifiers.names()]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_registered_sparsifier_conforms(name: str) -> None:
    conformance.check(name)


@pytest.mark.slow
def test_options_reach_the_sparsifier() -> None:
    conformance.check("adtopk", reuse=False)
    conformance.check("randomk", seed=7)
    with pytest.raises(TypeError, match="no option 'sed'"):
        conformance.check("randomk", sed=7)


def largest_of(vector: Tensor, indices: Tensor, count: int) -> Tensor:
    """Return the ``count`` of ``indices`` with the largest magnitudes, ascending."""
    order = vector[indices.long()].abs().argsort(descending=True, stable=True)
    return indices[order[:count].sort().values]


class Good(TopK):
    """topk that sends a little less to a key it knows, and less still if it sent smaller values before: legal."""

    name = "good"

    def __init__(self, density: float = 0.01, spare: int = 1) -> None:
        super().__init__(density)
        self.spare = spare
        self.sums: dict[str, tuple[int, float]] = {}

    def options(self) -> dict[str, object]:
        return {"spare": self.spare}

    def _select(self, vector: Tensor, request: Request) -> Selection:
        indices = super()._select(vector, request).indices
        length, last = self.sums.get(request.key, (0, 0.0))
        now = float(vector[indices.long()].double().abs().sum())
        self.sums[request.key] = (len(vector), now)
        less = self.spare + (now > last) if request.k > 30 and length == len(vector) else 0
        kept = largest_of(vector, indices, request.k - less)
        return Selection(kept, len(kept))

    def state_dict(self) -> dict[str, object]:
        return {"sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        if set(state) != {"sums"}:
            raise ValueError(f"unknown state {sorted(state)}")
        self.sums = dict(state["sums"])  # type: ignore[call-overload]

    def retain(self, keys: Iterable[str]) -> None:
        self.sums = {key: self.sums[key] for key in set(keys) & set(self.sums)}


def test_a_good_one_conforms() -> None:
    conformance.check(lambda density, **options: Good(density, **options), spare=2)


Change = Callable[[Any, Tensor, Request, Tensor], Any]
BROKEN: dict[str, tuple[type[Good] | Callable[..., Any], str]] = {}


def changed(message: str) -> Callable[[Change], Change]:
    """Register a Good whose indices go through `change(self, vector, request, indices)` before they return."""

    def wrap(change: Change) -> Change:
        class Broken(Good):
            def _select(self, vector: Tensor, request: Request) -> Selection:
                super()._select(vector, request)  # remembers its sum
                result = change(self, vector, request, TopK._select(self, vector, request).indices)
                return result if not isinstance(result, Tensor) else Selection(result, len(result))

        BROKEN[change.__name__] = (Broken, message)
        return change

    return wrap


def broken(message: str) -> Callable[[type[Good]], type[Good]]:
    def keep(kind: type[Good]) -> type[Good]:
        BROKEN[kind.__name__] = (kind, message)
        return kind

    return keep


@changed("were sent, less than 0.8 k")
def fewer_slots(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return indices[: 1 if request.k > 20 else None]


@changed("were sent, less than 0.8 k")
def too_few(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Selection:
    kept = largest_of(vector, indices, request.k * 3 // 4 + 1)
    return Selection(kept, len(kept))


@changed("slots, but capacity says")
def too_many(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return torch.cat([indices, indices[-1:]])


@changed("coordinates were never sent in 600 steps, the first is 100: what is large, or old, has to be sent some day")
def the_first_ones(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return torch.arange(request.k, dtype=torch.int32)


@changed("1 of 1000 coordinates were never sent in 600 steps, the first is 999")
def all_but_the_last(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return indices if request.k in (1, len(vector)) else TopK()._select(vector[:-1], request).indices


@changed("not ascending and unique")
def doubled(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return torch.cat([indices[:1], indices[:-1]])


@changed("not ascending and unique")
def by_magnitude(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return indices[vector[indices.long()].abs().argsort(descending=True, stable=True)]


@changed("an index lies outside")
def padded_with_minus_one(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Selection:
    padded = indices.clone()
    padded[-1] = -1
    return Selection(padded, len(padded) - (len(padded) > 5))


@changed("no Selection")
def bare_indices(self: Good, vector: Tensor, request: Request, indices: Tensor) -> list[int]:
    return indices.tolist()


@changed("the vector was changed")
def clearing(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    vector[indices.long()] = 0.0
    return indices


@changed("a generator of the process was used")
def torch_random(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    torch.rand(1)
    return indices


@changed("a generator of the process was used")
def numpy_random(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    np.random.rand()
    return indices


@changed("two equal runs differ")
def unseeded(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    drawn = np.random.default_rng().choice(len(vector), request.k, replace=False)
    return torch.from_numpy(np.sort(drawn)).int()


@changed("vectors times -1.0 change it")
def without_abs(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return vector.nan_to_num().topk(request.k).indices.sort().values.int()


@changed("vectors times 0.125 change it")
def absolute_threshold(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return indices if float(vector.abs().max()) > 2.0 else torch.arange(request.k, dtype=torch.int32)


@changed("a stride changes the selection")
def storage_order(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    return indices if vector.is_contiguous() else torch.arange(request.k, dtype=torch.int32)


@changed("select has not returned after 0.5 s: input '(mostly zero|zeros)'")
def endless(self: Good, vector: Tensor, request: Request, indices: Tensor) -> Tensor:
    if not vector.any():
        threading.Event().wait(60)
    return indices


@broken("capacity is .*, more than k")
class WideCapacity(Good):
    def _capacity(self, numel: int, request: Request) -> int:
        return request.k + 1

    def _select(self, vector: Tensor, request: Request) -> Selection:
        indices = super()._select(vector, request).indices
        return Selection(torch.cat([indices, indices[:1]]), request.k)


@broken("capacity changed with a call")
class ImpureCapacity(Good):
    def _capacity(self, numel: int, request: Request) -> int:
        return request.k - len(self.sums) * (request.k > 30)


@broken("made again from its options")
class ForgetfulOptions(Good):
    def __init__(self, density: float = 0.01, spare: int = 1) -> None:
        super().__init__(density, spare + 1)


@broken("does not tell two densities apart")
class SilentRepr(Good):
    def __repr__(self) -> str:
        return self.name


@broken("repr holds an address")
class AddressRepr(Good):
    def __repr__(self) -> str:
        return f"good({self.density}, at 0x7f)"


@broken("an unknown option is accepted")
class SwallowedOptions(Good):
    def __init__(self, density: float = 0.01, **unused: object) -> None:
        super().__init__(density)

    def options(self) -> dict[str, object]:
        return {}


@broken("two equal runs differ")
class SharedState(Good):
    everywhere: dict[str, tuple[int, float]] = {}

    def __init__(self, density: float = 0.01, spare: int = 1) -> None:
        super().__init__(density, spare)
        self.sums = self.everywhere


@broken("another key in between changes it")
class OneStateForAllKeys(Good):
    def _select(self, vector: Tensor, request: Request) -> Selection:
        return super()._select(vector, Request(request.k, "", request.step, request.shapes))


@broken("after load_state_dict key 'a' does not go on")
class LostState(Good):
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        self.sums = {}


@broken("after retain.* key 'a' does not go on")
class ForgetsAll(Good):
    def retain(self, keys: Iterable[str]) -> None:
        self.sums = {}


@broken("key 'c' is still remembered")
class ForgetsNothing(Good):
    def retain(self, keys: Iterable[str]) -> None:
        return


@broken("key 'a' is still remembered")
class RetainsTheLast(Good):
    def retain(self, keys: Iterable[str]) -> None:
        super().retain(list(keys) or ["a"])


@broken("does not start cold with another length")
class AnyLength(Good):
    def _select(self, vector: Tensor, request: Request) -> Selection:
        if request.key in self.sums:
            self.sums[request.key] = (len(vector), self.sums[request.key][1])
        return super()._select(vector, request)


@broken("the state of something else is accepted")
class AcceptsAnyState(Good):
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.sums = dict(state.get("sums", {}))  # type: ignore[call-overload]


@broken("name is 7, no text")
class Nameless(Good):
    name = 7  # type: ignore[assignment]


@broken("kind is <Kind.DENSE: 'dense'>, not Kind.SPARSE")
class Dense(Good):
    kind = sparsifiers.Kind.DENSE


@broken("no memory can be made by the name in `memory`: unknown memory 'elephant'")
class UnknownMemory(Good):
    memory = "elephant"


@broken("same_on_all_ranks is None, neither True nor False")
class NoClaim(Good):
    same_on_all_ranks = None  # type: ignore[assignment]


@broken("same_on_all_ranks is True, but another vector changes it")
class FalseClaim(Good):
    same_on_all_ranks = True


@broken("options.. holds what is no plain value: .*'spare' is")
class ObjectAsOption(Good):
    def options(self) -> dict[str, object]:
        return {"spare": [self.spare]}

    def __repr__(self) -> str:
        return f"good({self.density})"


@broken("after load_state_dict of a snapshot.. key 'a' does not go on")
class SnapshotThatGoesAlong(Good):
    def snapshot(self) -> Mapping[str, object]:
        return {"sums": self.sums}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "SECONDS", 0.5 if name == "endless" else 60.0)
    factory, message = BROKEN[name]
    with pytest.raises(AssertionError, match=message):
        conformance.check(factory)


def test_only_a_factory_of_sparsifiers_will_do() -> None:
    with pytest.raises(AssertionError, match="the factory made no Sparsifier: 0.125"):
        conformance.check(lambda density, **options: density)  # type: ignore[arg-type, return-value]


def test_the_lower_bound_can_be_waived() -> None:
    factory, _ = BROKEN["too_few"]
    conformance.check(factory, at_least=0.7)
    factory, _ = BROKEN["absolute_threshold"]
    conformance.check(factory, at_least=0.0)


def test_errors_of_the_sparsifier_pass_through() -> None:
    class Raises(Good):
        def _select(self, vector: Tensor, request: Request) -> Selection:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        conformance.check(Raises)
