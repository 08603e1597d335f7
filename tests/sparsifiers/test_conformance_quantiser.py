# SPDX-License-Identifier: Apache-2.0
"""The kit passes the quantisers and catches each one that breaks a single clause, of itself or of its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsifiers
from sparsifiers import Quantiser, conformance
from sparsifiers.conformance_quantiser import check_quantiser
from sparsifiers.quantising.draws import Draws
from sparsifiers.quantising.eden import Eden
from sparsifiers.quantising.linear import Int4, Int8
from sparsifiers.quantising.stochastic import QSGD

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [*sparsifiers.quantisers(), "EDEN_3", "u8bit"])
def test_every_quantiser_conforms(name: str) -> None:
    conformance.check(name)


def test_classes_and_factories_of_quantisers_conform() -> None:
    conformance.check(Int4)
    conformance.check(Eden)
    conformance.check(lambda: Eden(1))


def test_options_reach_the_quantiser() -> None:
    conformance.check("qsgd", bits=8, norm="l2")
    conformance.check(QSGD, bits=2)
    conformance.check(lambda bits, norm="l2": QSGD(bits, norm), bits=4)
    with pytest.raises(TypeError, match="quantizer 'qsgd' has no option 'bit'. Its options: bits, norm"):
        conformance.check("qsgd", bit=7)
    with pytest.raises(ValueError, match=": expected 2, 4 or 8 bits, and"):
        conformance.check("qsgd", bits=7)


class Dense(Int8):
    kind = sparsifiers.Kind.DENSE


class Unnamed(Int8):
    name = ""


class Selecting(Int8):
    @property
    def selects(self) -> bool:
        return True


class Thin(Int8):
    density = 0.5


class Undecided(Int8):
    unbiased = None  # type: ignore[assignment]


class Negative(Int8):
    noise = -1.0


class Absent(Int8):
    memory = "no such memory"


class Needy(Int8):
    @property
    def needs_feedback(self) -> bool:
        return True


class Listing(Int8):
    def options(self) -> dict[str, object]:
        return {"levels": [1, 2]}


class Addressed(Int8):
    __repr__ = object.__repr__


class Renamed(QSGD):
    def options(self) -> dict[str, object]:
        return {"bits": 8}


class Hiding(Int8):
    """Int8 with an option that neither its options nor its text mention."""

    def __init__(self, levels: int = 127) -> None:
        super().__init__()
        self.levels = levels


class Generous(Int8):
    def __init__(self, **_: object) -> None:
        super().__init__()


class Remembering(Int8):
    def state_dict(self) -> dict[str, object]:
        return {"steps": 0}


class Credulous(Int8):
    def load_state_dict(self, state: Any) -> None:
        pass


class Bottomless(Int8):
    def record_bytes(self, size: int) -> int:
        return 0


class Cramped(Int4):
    bits = 17

    def __init__(self) -> None:
        super().__init__()
        self.bits = 17


class Growing(Int8):
    calls = 0

    def record_bytes(self, size: int) -> int:
        return super().record_bytes(size) + (self.calls > 0)

    def encode(self, values: Tensor, size: int, *more: Any, **named: Any) -> None:
        super().encode(values, size, *more, **named)
        self.calls += 1


class Touching(Int8):
    def encode(self, values: Tensor, *more: Any, **named: Any) -> None:
        super().encode(values.mul_(1.0), *more, **named)


class Moody(Int8):
    """Int8 that writes another scale every other time."""

    calls = 0

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        self.calls += 1
        super()._encode(blocks * (1.0 + self.calls % 2), draws, out)


class Sparing(Int8):
    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        before = out[:, -1].clone()
        super()._encode(blocks, draws, out)
        if blocks.shape[1] == 128:
            out[:, -1] = before


class Smudging(Int8):
    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        read = super()._decode(data, draws, size)
        data[:, -1] = 0
        return read


class Forgetful(Int8):
    """Int8 that reads a little more each time."""

    calls = 0

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        self.calls += 1
        return super()._decode(data, draws, size) * (1.0 + 0.01 * self.calls)


class Rolling(Int8):
    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        torch.rand(1)
        super()._encode(blocks, draws, out)


class Exploding(Int8):
    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return super()._decode(data, draws, size) * 1e38


class Careless(Int8):
    def encode(self, values: Tensor, size: int, draws: Draws, out: Tensor, squares: Tensor | None = None) -> None:
        super().encode(values, size, draws, out)
        if squares is not None:
            squares.copy_(values.double().square().sum())  # instead of being added


class Fixed(Int8):
    unbiased = True


class Global(Int8):
    """Int8 with one scale for all blocks that are quantised at once."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        super()._encode(blocks, draws, out)
        whole = blocks.view(1, -1)
        row = torch.zeros(1, 2 + whole.numel(), dtype=torch.uint8)
        super()._encode(whole, draws, row)
        out[:, :2] = row[:, :2]


class Lost(QSGD):
    """QSGD whose blocks are numbered from 0 in each call."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        super()._encode(blocks, Draws(draws.key), out)


class Counting(Int8):
    """Int8 that reads long messages otherwise."""

    def _decode(self, data: Tensor, draws: Draws, size: int) -> Tensor:
        return super()._decode(data, draws, size) * (1.0 if len(data) < 100 else 1.01)


class Frightened(Int8):
    """Int8 that writes all blocks otherwise if there is one with very large values."""

    def _encode(self, blocks: Tensor, draws: Draws, out: Tensor) -> None:
        super()._encode(blocks * (0.9 if bool((blocks > 1e5).any()) else 1.0), draws, out)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Dense, "its kind is"),
        (Unnamed, "its name is ''"),
        (Selecting, "select nothing"),
        (Thin, "its density is 0.5"),
        (Undecided, "unbiased is None"),
        (Negative, "noise is -1.0"),
        (Absent, "no memory can be made"),
        (Needy, "needs_feedback is True, with memory 'none'"),
        (Listing, r"options\(\) holds what is no plain value"),
        (Addressed, "repr holds an address"),
        (Renamed, r"options\(\) makes"),
        (Generous, "an unknown option is accepted"),
        (Remembering, "keeps state"),
        (Credulous, "state of something else"),
        (Bottomless, "record_bytes is 0"),
        (Cramped, "34 bytes do not hold 17 bits a coordinate"),
        (Growing, "record_bytes changed with a call"),
        (Touching, "values were changed: .* blocks of 64, input 'normal'"),
        (Moody, "the same draws give other bytes"),
        (Sparing, "bytes of a record are not written.* blocks of 128, input 'normal'"),
        (Smudging, "reading changes the bytes"),
        (Forgetful, "the same bytes are read differently the"),
        (Rolling, "a generator of the process was used"),
        (Exploding, "finite values are not read as finite ones"),
        (Careless, "squares are"),
        (Fixed, "unbiased, but other draws give the same bytes"),
        (Global, "blocks 1 and 2 have other bytes by themselves"),
        (Lost, "unbiased, but other draws give the same bytes"),
        (Counting, "blocks 1 and 2 are read otherwise by themselves"),
        (Frightened, "changes the bytes of its neighbours"),
    ],
)
def test_a_broken_clause_is_named(broken: type[Quantiser], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        conformance.check(broken)


def test_what_is_no_quantiser_and_what_copies_lose() -> None:
    with pytest.raises(AssertionError, match="no sparsifiers.Quantizer: str"):
        check_quantiser(lambda: "text")  # type: ignore[arg-type, return-value]
    with pytest.raises(AssertionError, match=r"options\(\) makes one that writes other bytes"):
        conformance.check(Hiding, levels=126)


def test_one_that_makes_a_sparsifier_is_checked_as_such() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta'"):
        conformance.check(lambda density=0.01: sparsifiers.get("topk", density), beta=1)
