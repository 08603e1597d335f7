# SPDX-License-Identifier: Apache-2.0
"""Messages that hide under the next steps: invariant 10, and what happens to a script while they are under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Parts, agreed, digest, mlp, on_ranks, seeded, sgd, train
from support.updates import assert_common, assert_kept, base_of, exact, reducer_of, updating, watched
from torch import nn

import agmerge
from agmerge import testing
from agmerge.planning.replanner import Replanner
from agmerge.step.agreed_state import Decision

MODEL = seeded(mlp)
WHEN: list[dict[str, Any]] = [
    {"overlap": 1},
    {"overlap": 3, "every": 3},
    {"overlap": 2, "every": 5},
    {"overlap": 1, "every": 4, "fragments": 3, "merging": "layerwise"},
    {"overlap": 1, "exchange": "oktopk"},
    {"overlap": 1, "exchange": "oktopk", "wire": "int4"},
    {"overlap": 1, "exchange": "masked"},
    {"overlap": 1, "compression": "none"},
    {"overlap": 1, "outer": agmerge.Nesterov(lr=1.0, momentum=0.5)},
]
BITS: dict[str, Any] = {"overlap": 1, "compression": "eden-2", "every": 2, "fragments": 2, "exchange": "sparse"}


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [*WHEN, BITS], ids=described)
def test_it_is_repeatable_to_the_bit_and_loses_nothing(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Whoever comes late: ranks arrive in random order in the second run."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, **options)
        seen = watched(rank, model, optimizer, range(8))
        optimizer.flush()
        bits = [one.parameters for one in seen] + [digest(base_of(optimizer).values())]
        # What is sent dense has no residual: 16 bits round it when it arrives beside a step that was made meanwhile.
        exchange = reducer_of(optimizer).exchange
        rounded = {name for name, _ in model.named_parameters() if exchange.agreed.residual_of(name) is None}
        assert_common(optimizer)
        return seen, bits, dict.fromkeys(rounded, torch.finfo(dtype).eps), digest(model)

    start = seeded(mlp).to(dtype)
    first = on_ranks(2, start, body)
    second = on_ranks(2, start, body, inject=testing.jitter(5))
    assert [bits for _, bits, *_ in first] == [bits for _, bits, *_ in second]
    agreed([whole for *_, whole in first])
    if "outer" not in options:
        assert_kept([seen for seen, *_ in first], roundings=4.0, rounded=first[0][2])


@pytest.mark.parametrize("overlap, every", [(1, 1), (1, 4), (3, 4), (4, 4)])
def test_the_common_parameters_move_when_messages_are_taken_in(overlap: int, every: int) -> None:
    """And a worker's own part of them is in its parameters all the time: x moves by its own steps alone."""

    def body(rank: int, model: nn.Module) -> list[bool]:
        optimizer, moved = updating(model, every=every, overlap=overlap), []
        for step in range(1, 10):
            before = {name: base.clone() for name, base in base_of(optimizer).items()}
            watched(rank, model, optimizer, [step])
            moved.append(any(not torch.equal(base, before.get(n, base)) for n, base in base_of(optimizer).items()))
        return moved

    expected = [step > overlap and (step - overlap) % every == 0 and step - overlap > 0 for step in range(1, 10)]
    assert agreed(on_ranks(2, MODEL, body)) == expected


def test_what_is_lossless_is_the_mean_of_what_was_sent_then() -> None:
    """Without compression: ``base`` after step t + 1 is the mean of all parameters after step t.

    But for the first, which leaves when ranks have agreed: in step 2.
    """

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, sgd(model), compression="none", overlap=1)
        x, base = [], []
        for step in range(5):
            watched(rank, model, optimizer, [step])
            x.append({name: exact(parameter) for name, parameter in model.named_parameters()})
            base.append({name: exact(tensor) for name, tensor in base_of(optimizer).items()})
        return x, base

    results = on_ranks(3, MODEL, body)
    for step in range(1, 4):
        for name, base in results[0][1][step + 1].items():
            mean = sum(x[step][name] for x, _ in results) / 3
            torch.testing.assert_close(base, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", WHEN[:4], ids=described)
def test_flush_takes_in_what_is_under_way(options: dict[str, Any]) -> None:
    """It may come at any step; a second one does nothing, and neither does one before the first step."""

    def body(rank: int, model: nn.Module) -> Any:
        optimizer, seen = updating(model, **options), []
        optimizer.flush()
        for step in range(8):
            seen += watched(rank, model, optimizer, [step])
            before = {name: exact(parameter) for name, parameter in model.named_parameters()}
            optimizer.flush()
            calls = len(testing.calls())
            optimizer.flush()
            assert len(testing.calls()) == calls
            assert not reducer_of(optimizer).exchange.under_way
            seen.append((before, {name: exact(parameter) for name, parameter in model.named_parameters()}))
        return seen[1::2], digest(base_of(optimizer).values())

    results = on_ranks(2, MODEL, body)
    agreed([bits for _, bits in results])
    for (before0, after0), (before1, after1) in zip(results[0][0], results[1][0], strict=True):
        for name in before0:
            torch.testing.assert_close(after0[name] + after1[name], before0[name] + before1[name], rtol=0, atol=2e-6)


# -- while a message is under way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["frozen", "unfrozen", "set_compressor", "group", "saved", "loaded on rank 1"])
def test_anything_may_change_meanwhile(what: str) -> None:
    def body(rank: int, model: Parts) -> Any:
        model.a.requires_grad_(what != "unfrozen")
        late = list(model.b.parameters())
        first = [p for p in model.parameters() if what != "group" or all(p is not q for q in late)]
        optimizer = updating(model, torch.optim.AdamW(first, lr=0.01), overlap=2, every=3, density=0.05)

        def learn(model: Parts, rank: int, step: int) -> None:
            model.loss(rank, step, "a").backward()

        seen = watched(rank, model, optimizer, range(4), learn)  # step 2 has sent; it is taken in after step 4
        if what in ("frozen", "unfrozen"):
            model.a.requires_grad_(what == "unfrozen")
        elif what == "set_compressor":
            optimizer.set_compressor("randomk", density=0.1)
        elif what == "group":
            optimizer.add_param_group({"params": late})
        elif what == "saved":
            optimizer.state_dict()
        elif rank == 1:
            optimizer.flush()
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            optimizer.flush()
        seen += watched(rank, model, optimizer, range(4, 11), learn)
        assert_common(optimizer)
        return seen, digest(model)

    seen, digests = zip(*on_ranks(2, seeded(Parts), body), strict=True)
    agreed(list(digests))
    assert_kept(seen, roundings=4.0)
    assert len({one.base for one in seen[0]}) >= 3


def test_a_plan_may_go_dense_and_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``exchange="auto"`` does: planned anew once messages of the plan before have been taken in."""

    def after_step(self: Replanner, step: int) -> Iterator[Decision]:
        if step in (3, 6):
            plan = self.buffers.plan
            yield Decision(plan=replace(plan, dense=(step == 3,) * len(plan.counts)))

    def body(rank: int, model: nn.Module) -> Any:
        optimizer = updating(model, exchange="auto", merging="agmerge", overlap=1)
        seen, bits = [], []
        for step in range(10):
            seen += watched(rank, model, optimizer, [step])
            bits.append(any(optimizer.plan.dense) if step else False)
        assert_common(optimizer)
        return seen, bits, digest(model)

    monkeypatch.setattr(Replanner, "after_step", after_step)
    seen, dense, digests = zip(*on_ranks(2, MODEL, body), strict=True)
    agreed(list(digests))
    assert_kept(seen)
    assert agreed(list(dense)) == [False] * 3 + [True] * 3 + [False] * 4


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_while_messages_are_under_way_is_named() -> None:
    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.kind == "all_gather" and call.name.startswith("buffer"):
            sent.append(call.index)
            if len(sent) == 4:
                raise RuntimeError("the cable is out")

    def body(rank: int, model: nn.Module) -> None:
        optimizer = updating(model, overlap=1, exchange="sparse")
        try:
            train(model, optimizer, rank, range(8))
        except Exception as error:
            for call in (optimizer.step, optimizer.consolidate):
                with pytest.raises(agmerge.AGMergeError, match="AGM124"):
                    call()
            optimizer.flush()  # nothing is left to take in, and that is no error
            with optimizer.shared():
                assert all(parameter.isfinite().all() for parameter in model.parameters())
            raise error

    sent: list[int] = []
    failed, lost = reversed(on_ranks(2, MODEL, body, inject=inject, return_errors=True))
    assert isinstance(failed, RuntimeError) and "the cable is out" in str(failed)
    assert isinstance(lost, agmerge.PeerLost) and "rank 1" in str(lost) and "the cable is out" in str(lost)


def test_a_message_that_is_damaged_on_its_way_is_an_error_on_all_ranks() -> None:
    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.kind == "all_gather" and call.name.startswith("buffer"):
            sent.append(call.index)
            if len(sent) == 4:
                call.tensor.view(-1).view(torch.uint8)[100:140] ^= 255

    def body(rank: int, model: nn.Module) -> tuple[str, int]:
        optimizer, steps = updating(model, overlap=1, exchange="sparse"), 0
        with pytest.raises(agmerge.MessageError, match=r"ranks \[1\]") as raised:
            while True:
                base = digest(base_of(optimizer).values())
                train(model, optimizer, rank, [steps])
                steps += 1
        assert digest(base_of(optimizer).values()) == base
        with pytest.raises(agmerge.AGMergeError, match="AGM124"):
            optimizer.step()
        return str(raised.value), steps

    sent: list[int] = []
    _, steps = agreed(on_ranks(2, MODEL, body, inject=inject))
    assert steps > 2


def test_a_rank_that_is_slow_holds_up_nobodys_own_step() -> None:
    """The others step on, as far as their messages may be behind; then they wait."""

    def inject(call: testing.Call) -> None:
        if call.rank == 1 and call.kind == "all_gather" and call.name.startswith("buffer"):
            time.sleep(0.05)

    def body(rank: int, model: nn.Module) -> list[str]:
        optimizer = updating(model, overlap=1, exchange="sparse")
        train(model, optimizer, rank, range(5))
        return [digest(base_of(optimizer).values())]

    assert on_ranks(2, MODEL, body, inject=inject) == on_ranks(2, MODEL, body)
