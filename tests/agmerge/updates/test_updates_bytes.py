# SPDX-License-Identifier: Apache-2.0
"""What ``sync="updates"`` sends, and what it leaves behind in the long run: invariants 12 to 14; ``shared()``."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest
import torch
from support import agreed, backward, digest, mlp, on_ranks, seeded, train
from support.updates import base_of, reducer_of, updating
from torch import nn

from sparsifiers import Kind

MODEL = seeded(mlp)
SIDE = 1 << 9
ELEMENTS = SIDE * SIDE
# Bytes of a value, and of its index at a density: the tables of docs/dev/wire.md.
VALUE = {"fp32": 4.0, "bf16": 2.0, "int8": 1.016, "int4": 0.516, "2bit": 0.281, "sign": 0.141}
INDEX = {1.0: 0.125, 0.1: 0.69, 0.05: 0.785, 0.01: 1.07}


class Matrix(nn.Module):
    """Hold one matrix."""

    def __init__(self, side: int = SIDE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(side, side))


@pytest.mark.parametrize("every", [1, 4, 15])
@pytest.mark.parametrize(
    "wire, density",
    [("sign", 0.05), ("sign", 0.1), ("2bit", 0.01), ("2bit", 1.0), ("int4", 1.0), ("int4", 0.05), ("fp32", 0.01)],
)
def test_bytes_are_those_of_the_codecs(wire: str, density: float, every: int) -> None:
    def body(rank: int, model: nn.Module) -> list[float]:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = updating(model, inner, wire=wire, density=density, every=every)
        source = torch.Generator().manual_seed(rank)
        model.weight.grad = torch.randn(SIDE, SIDE, generator=source)
        for _ in range(2 * every):
            optimizer.step()
        stats = optimizer.stats()
        assert (stats["steps"], stats["exchanges"]) == (2 * every, 2)
        assert stats["bytes_dense"] == 2 * every * 4 * ELEMENTS
        return [stats["bytes_sent"] / 2]

    (sent,) = agreed(on_ranks(2, Matrix(), body))
    index = 0.0 if density == 1.0 and wire not in ("sign", "2bit") else INDEX[density]
    assert sent == pytest.approx(density * ELEMENTS * (VALUE[wire] + index), rel=0.03)


# -- what is left behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", ["apply", "hold"])
@pytest.mark.parametrize("wire", ["sign", "2bit", "int4", "fp32"])
def test_what_is_left_is_what_there_was_less_what_receivers_read(wire: str, carry: str) -> None:
    """And the sum of its magnitudes does not grow by an exchange, also where values tie, are zero, or few."""

    def body(rank: int, model: Matrix) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = updating(model, inner, wire=wire, density=0.3, carry=carry)
        before: list[torch.Tensor] = []
        inner.register_step_post_hook(
            lambda *_: before.append(reducer_of(optimizer).replica.unsent()["weight"].clone().double())
        )
        for step in range(6):
            source = torch.Generator().manual_seed(10 * step + rank)
            gradient = torch.randn(33, 33, generator=source)
            if step == 2:
                gradient = gradient.sign()  # ties
            if step > 2:
                gradient[1:] = 0.0  # fewer than may be sent are new
            model.weight.grad = gradient
            optimizer.step()
            after = reducer_of(optimizer).replica.unsent()["weight"].double()
            assert after.abs().sum() <= before[-1].abs().sum() * (1 + 1e-6)
            sent = before[-1] - after
            changed = sent[sent.abs() > 1e-5 * before[-1].abs().max()].abs()
            if wire in ("sign", "2bit"):  # few magnitudes, for each block of 256
                blocks = -(-int(0.3 * 33 * 33 + 1) // 256) * (2 if wire == "2bit" else 1)
                assert len(torch.unique((changed * 2**12).round())) <= 2 * blocks
            assert len(changed) <= 0.3 * 33 * 33 + 1

    on_ranks(2, Matrix(33), body)


@pytest.mark.long
def test_noise_that_is_hardly_ever_sent_stays_bounded_and_does_not_drift() -> None:
    """An element in 512 is sent in each of 2000 steps: what is carried comes to an end, as error feedback has it.

    The mean of all workers' parameters is that of their own steps, to rounding: after 2000 of them too.
    """
    side, steps = 32, 2000

    def body(rank: int, model: Matrix) -> Any:
        optimizer = updating(
            model, torch.optim.SGD(model.parameters(), lr=1.0), density=1e-3, wire="fp32", merging="single"
        )
        source, own, norms = torch.Generator().manual_seed(rank), torch.zeros(side, side, dtype=torch.float64), []
        for step in range(steps):
            model.weight.grad = torch.randn(side, side, generator=source)
            own -= model.weight.grad
            optimizer.step()
            if step % 250 == 249:
                norms.append(float((base_of(optimizer)["weight"] - model.weight.detach()).norm()))
        return own, model.weight.detach().double(), norms, digest(base_of(optimizer).values())

    results = on_ranks(2, Matrix(side), body)
    agreed([bits for *_, bits in results])
    for _, _, norms, _ in results:
        assert max(norms) < 32 * (2 * 512) ** 0.5  # some hundreds of steps of one element each
        assert max(norms[4:]) < 1.15 * max(norms[2:4])  # without an exchange it would be 1.41 times as much
    drift = sum(x - own for own, x, *_ in results) / 2
    assert drift.abs().max() < 2000 * torch.finfo(torch.float32).eps * max(float(x.abs().max()) for _, x, *_ in results)


# -- looking at what is common --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.float32, {}),
        (torch.float32, {"carry": "hold", "every": 3}),
        (torch.float32, {"overlap": 1}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"overlap": 1}),
        (torch.bfloat16, {"carry": "hold", "every": 3}),
    ],
    ids=str,
)
def test_shared_shows_what_is_common_and_gives_back_every_bit(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """In the same storage; also after an error inside, and whatever is written inside is lost."""

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = updating(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        with optimizer.shared():  # before the first step: as they are
            assert digest(model) == digest(start)
        train(model, optimizer, rank, range(5))
        own, places, seen = digest(model), [p.data_ptr() for p in model.parameters()], []
        with optimizer.shared():
            assert digest(model) == digest(t.to(dtype) for t in base_of(optimizer).values())
            assert [p.data_ptr() for p in model.parameters()] == places
            seen.append(digest(model))
        assert digest(model) == own
        with pytest.raises(KeyError), optimizer.shared():
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
            raise KeyError("in an evaluation")
        assert digest(model) == own and [p.data_ptr() for p in model.parameters()] == places
        optimizer.zero_grad()
        with optimizer.shared():  # a backward pass inside leaves its gradients, and the next step takes them
            backward(model, rank, 9)
        optimizer.step()
        with optimizer.shared():
            seen.append(digest(model))
        return seen

    start = seeded(mlp).to(dtype)
    first, second = agreed(on_ranks(2, start, body))
    assert (first != second) or "every" in options


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux alone")
def test_consolidate_keeps_no_memory() -> None:
    """Everything is sent dense, from flat memory that later steps do not need: pages that were given back are zeros."""

    def body(rank: int, model: Matrix) -> list[int]:
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = updating(model, inner, compression="eden-2", every=2, fragments=2)
        model.weight.grad = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(rank))
        optimizer.step()
        optimizer.consolidate()
        arenas = reducer_of(optimizer).exchange.agreed.buffers.flat.arenas.values()
        held = [arena.update.count_nonzero().item() for arena in arenas if arena.tensor_class.kind is Kind.QUANTIZED]
        optimizer.step()  # it is used again
        optimizer.consolidate()
        return held

    in_a_page = mmap.PAGESIZE // 4  # elements; the first and the last page may have other things
    for (held,) in on_ranks(2, Matrix(), body):
        assert held <= 2 * in_a_page < ELEMENTS // 8
