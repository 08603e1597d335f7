"""Which parameters take part: unused, tied, frozen, thawed, added and recast ones; several optimizers."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from support import WIDTH, agreed, batch, digest, loss_of, mlp, on_ranks, residuals, same_bits, seeded, sgd, train, wrap
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
from agmerge import testing

Residuals = dict[str, Tensor]
MODEL = seeded(mlp)
COMPRESSIONS = ["none", "topk"]


class Parts(nn.Module):
    """A trunk, a head, and layers ``a`` and ``b`` of which ``loss`` uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def loss(self, rank: int, step: int, use: str) -> Tensor:
        x, y = batch(rank, step)
        x = torch.tanh(self.trunk(x))
        for name in use:
            x = x + torch.tanh(getattr(self, name)(x))
        return F.cross_entropy(self.head(x), y)


PARTS = seeded(Parts)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(
    "use",
    [("a", ""), ("", "b"), ("ab", "a"), ("a", "b")],
    ids=["one unused on rank 1", "one unused on rank 0", "b on rank 0 only", "each its own"],
)
def test_unused_parameters_never_divide_replicas(use: tuple[str, str], compression: str, set_to_none: bool) -> None:
    def body(rank: int, model: Parts) -> list[str]:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compression=compression)
        seen = []
        for step in range(20):
            optimizer.zero_grad(set_to_none=set_to_none)
            model.loss(rank, step, use[(rank + step // 5) % 2]).backward()  # they change places now and then
            optimizer.step()
            seen.append(digest(model))
        return seen

    assert len(set(agreed(on_ranks(2, PARTS, body)))) == 20


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_density_one_equals_a_dense_reference_with_rank_dependent_layers(size: int, compression: str) -> None:
    """Used bits are sticky: from its first gradient on, wherever that was, a parameter takes part in every step."""
    uses = ["a", "b", "", "ab"]
    twin = copy.deepcopy(PARTS)
    single = sgd(twin, weight_decay=0.1)
    for step in range(20):
        single.zero_grad(set_to_none=False)
        (sum(twin.loss(rank, step, uses[(step + rank) % 4]) for rank in range(size)) / size).backward()
        single.step()

    def body(rank: int, model: Parts) -> Parts:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), compression=compression, density=1.0)
        for step in range(20):
            optimizer.zero_grad()
            model.loss(rank, step, uses[(step + rank) % 4]).backward()
            optimizer.step()
        return model

    found = on_ranks(size, PARTS, body)
    agreed([digest(model) for model in found])
    for a, b in zip(found[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_parameter_no_rank_ever_used_has_no_gradient_or_on_request_zeros() -> None:
    def body(rank: int, model: Parts, unused: str) -> tuple[bool, list[bool]]:
        optimizer = wrap(model, sgd(model, weight_decay=0.1), unused=unused)
        none = []
        for step in range(4):
            optimizer.zero_grad()
            model.loss(rank, step, "" if step == 0 else "a" if rank == 1 and step == 1 else "").backward()
            optimizer.step()
            none.append(model.a.weight.grad is None)
        return torch.equal(model.b.weight, PARTS.b.weight), none

    as_torch = agreed(on_ranks(2, PARTS, lambda r, m: body(r, m, "none")))
    as_horovod = agreed(on_ranks(2, PARTS, lambda r, m: body(r, m, "zero")))
    assert as_torch == (True, [True, False, False, False])
    assert as_horovod == (False, [False] * 4)  # weight decay moved it


def test_a_tensor_unused_in_a_step_still_offers_its_residual() -> None:
    def body(rank: int, model: Parts) -> list[float]:
        optimizer = wrap(model, dense=["trunk.*", "head.*", ".*bias"], merging="layerwise")
        left = []
        for step in range(60):
            optimizer.zero_grad()
            model.loss(rank, step, "a" if step == 0 else "").backward()
            optimizer.step()
            left.append(float(residuals(optimizer)["a.weight"].abs().sum()))
        return left

    for left in on_ranks(2, PARTS, body):
        assert left[0] > 0 and left[30] < 0.5 * left[0] and left[59] < left[30]


def test_frozen_parameters_are_not_moved_and_not_sent() -> None:
    def body(rank: int, model: Parts) -> int:
        optimizer = wrap(model, sgd(model, weight_decay=0.5))
        for step in range(5):
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
        assert same_bits(model.a.weight, PARTS.a.weight) and model.a.weight.grad is None
        return sum(optimizer.plan.counts)

    frozen = copy.deepcopy(PARTS)
    frozen.a.requires_grad_(False)
    assert agreed(on_ranks(2, frozen, body)) == 6


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_freezing_keeps_a_residual_for_the_time_after(size: int, compression: str) -> None:
    def body(rank: int, model: Parts) -> list[str]:
        optimizer = wrap(model, compression=compression)
        seen = []
        for step in range(12):
            if step in (4, 8):
                model.a.requires_grad_(step == 8)
                model.a.weight.grad = None
                model.a.bias.grad = None
                before, weight = residuals(optimizer), model.a.weight.clone()
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
            if 4 <= step < 8:
                assert torch.equal(model.a.weight, weight)
                assert all(same_bits(residuals(optimizer)[name], before[name]) for name in before if name[0] == "a")
            if step == 8:
                assert not torch.equal(model.a.weight, weight)
            seen.append(digest(model))
        assert "a.weight" in optimizer.plan.names
        return seen

    assert len(set(agreed(on_ranks(size, PARTS, body)))) == 12


def test_a_residual_that_was_kept_over_a_freeze_is_not_lost() -> None:
    """What froze unsent arrives after the thaw, though the layer itself is not used any more."""

    def body(rank: int, model: Parts) -> tuple[Tensor, Tensor]:
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), merging="layerwise")
        model.loss(rank, 0, "a").backward()
        optimizer.step()
        kept = residuals(optimizer)["a.weight"]
        model.a.weight.requires_grad_(False)
        optimizer.zero_grad()
        model.loss(rank, 1, "a").backward()
        optimizer.step()
        model.a.weight.requires_grad_(True)
        total = torch.zeros_like(kept)
        for step in range(2, 4):
            optimizer.zero_grad()
            model.loss(rank, step, "b").backward()
            optimizer.step()
            total += model.a.weight.grad
        return kept - residuals(optimizer)["a.weight"], total

    found = on_ranks(2, PARTS, body)
    gone = (found[0][0] + found[1][0]) / 2
    assert gone.any()
    torch.testing.assert_close(found[0][1], gone)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("how", ["wrapper", "inner", "thaw"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parameters_that_join_later_are_exchanged_from_then_on(size: int, how: str, compression: str) -> None:
    twin = copy.deepcopy(PARTS)

    def join(model: Parts, optimizer: torch.optim.Optimizer) -> None:
        if how == "thaw":
            model.a.requires_grad_(True)
        else:
            adder = optimizer.optimizer if how == "inner" and optimizer is not single else optimizer
            adder.add_param_group({"params": list(model.a.parameters()), "lr": 0.05})

    def prepare(model: Parts) -> torch.optim.SGD:
        if how == "thaw":
            model.a.requires_grad_(False)
            return sgd(model)
        return torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1, momentum=0.9)

    single = prepare(twin)
    for step in range(8):
        single.zero_grad(set_to_none=False)
        twin.a.zero_grad()
        if step == 4:
            join(twin, single)
        (sum(twin.loss(rank, step, "a") for rank in range(size)) / size).backward()
        single.step()

    def body(rank: int, model: Parts) -> Parts:
        optimizer = wrap(model, prepare(model), compression=compression, density=1.0)
        for step in range(8):
            optimizer.zero_grad()
            model.a.zero_grad()
            if step == 4:
                join(model, optimizer)
            model.loss(rank, step, "a").backward()
            optimizer.step()
        assert "a.weight" in optimizer.plan.names
        return model

    found = on_ranks(size, PARTS, body)
    agreed([digest(model) for model in found])
    for a, b in zip(found[0].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [0, 2])
def test_joining_in_the_middle_of_a_step_is_an_error_and_never_silent(step: int) -> None:
    def body(rank: int, model: Parts) -> str:
        inner = torch.optim.SGD([*model.trunk.parameters(), *model.head.parameters()], lr=0.1)
        optimizer = wrap(model, inner)
        for i in range(step):
            optimizer.zero_grad()
            model.loss(rank, i, "a").backward()
            optimizer.step()
        optimizer.zero_grad()
        model.loss(rank, step, "a").backward()
        group = {"params": list(model.a.parameters())}
        with pytest.raises(agmerge.AGMergeError, match=r"add_param_group\(\) was called between backward"):
            optimizer.add_param_group(group)
        inner.add_param_group(group)  # behind the wrapper's back; their gradients are local
        if step == 0:
            optimizer.step()  # nothing was sent yet, so they are in time
            return digest(model)
        with pytest.raises(agmerge.AGMergeError, match="'a.weight' was added or unfrozen during backward"):
            optimizer.step()
        return "refused"

    agreed(on_ranks(2, PARTS, body))


def test_thawing_between_two_backward_passes_of_a_step_is_an_error() -> None:
    def body(rank: int, model: Parts) -> None:
        optimizer = wrap(model)
        for step in range(4):
            model.a.weight.requires_grad_(step < 2)
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()
        optimizer.zero_grad()
        model.head(torch.ones(1, WIDTH)).sum().backward()
        model.a.weight.requires_grad_(True)  # its hook is there from before
        model.a(torch.ones(1, WIDTH)).sum().backward()
        with pytest.raises(agmerge.AGMergeError, match="'a.weight' was added or unfrozen during backward"):
            optimizer.step()

    on_ranks(2, PARTS, body)


def test_a_change_on_one_rank_only_is_the_same_error_on_all() -> None:
    def body(rank: int, model: Parts) -> None:
        optimizer = wrap(model)
        for step in range(4):
            if step == 2 and rank == 1:
                model.a.requires_grad_(False)
            optimizer.zero_grad()
            model.loss(rank, step, "ab").backward()
            optimizer.step()

    found = on_ranks(3, PARTS, body, return_errors=True)
    assert all(isinstance(error, agmerge.RankMismatchError) for error in found)
    text = agreed([str(error) for error in found])
    assert "8 on ranks 0, 2" in text and "6 on rank 1" in text and "on every rank at the same step" in text


@pytest.mark.parametrize("compression", ["none", "topk", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_is_recast_later_goes_on_in_sync(dtype: torch.dtype, compression: str) -> None:
    def body(rank: int, model: nn.Module) -> tuple[list[str], Residuals, Residuals, Residuals]:
        optimizer = wrap(model, compression=compression)
        seen = train(model, optimizer, rank, range(3))
        before = residuals(optimizer)
        model.to(dtype)
        for state in optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
        optimizer.zero_grad()
        optimizer.synchronize()  # no gradient: what is offered is what was kept
        with optimizer.skip_synchronize():
            optimizer.step()
        after, sent = residuals(optimizer), {name: p.grad.clone() for name, p in model.named_parameters()}
        return [*seen, *train(model, optimizer, rank, range(3, 6))], before, after, sent

    found = on_ranks(2, MODEL, body)
    assert len(set(agreed([seen for seen, *_ in found]))) == 6
    for name in found[0][1]:
        gone = sum(before[name] - after[name] for _, before, after, _ in found) / 2
        assert gone.any()
        torch.testing.assert_close(found[0][3][name], gone.to(dtype))


def test_two_optimizers_take_turns_and_share_nothing() -> None:
    """A GAN's training loop: each step of one runs backward through the other."""
    torch.manual_seed(1)
    pair = nn.ModuleDict({"g": nn.Linear(WIDTH, WIDTH), "d": nn.Linear(WIDTH, 2)})

    def body(rank: int, model: nn.ModuleDict) -> list[str]:
        g = agmerge.DistributedOptimizer(sgd(model["g"]), model["g"].named_parameters())
        d = agmerge.DistributedOptimizer(sgd(model["d"]), model["d"].named_parameters(), compression="none")
        seen = []
        for step in range(6):
            x, _ = batch(rank, step)
            d.zero_grad()
            F.cross_entropy(model["d"](torch.cat([x, model["g"](x).detach()])), torch.arange(16) // 8).backward()
            if step % 2:  # the other's whole step comes between backward and step of this one
                model["d"].requires_grad_(False)
                g.zero_grad()
                F.cross_entropy(model["d"](model["g"](x)), torch.zeros(8, dtype=torch.long)).backward()
                g.step()
                model["d"].requires_grad_(True)
            d.step()
            seen.append(digest(model))
        assert (g.stats()["steps"], d.stats()["steps"]) == (3, 6)
        return seen

    assert len(set(agreed(on_ranks(3, pair, body)))) == 6


def test_a_parameter_belongs_to_one_living_wrapper() -> None:
    def body(rank: int, model: nn.Module) -> str:
        first = wrap(model)
        with pytest.raises(ValueError, match="already exchanged by another DistributedOptimizer"):
            wrap(model, sgd(model))
        with pytest.raises(TypeError, match="is a DistributedOptimizer already"):
            wrap(model, first)
        train(model, first, rank, range(2))
        first.close()
        with pytest.raises(agmerge.AGMergeError, match="this optimizer was closed"):
            first.step()
        second = wrap(model, first.optimizer)
        train(model, second, rank, range(2, 4))
        return digest(model)

    agreed(on_ranks(2, MODEL, body))


def test_a_wrapper_that_was_dropped_hears_nothing_more() -> None:
    def body(rank: int, model: nn.Module) -> str:
        dropped = wrap(model)
        train(model, dropped, rank, range(2))
        inner = dropped.optimizer
        del dropped
        gc.collect()
        calls = len(testing.calls())
        for _ in range(2):  # twice without a step: guards are gone too
            loss_of(model, rank, 2).backward()
        assert len(testing.calls()) == calls
        inner.zero_grad()
        return train(model, wrap(model, inner), rank, range(2, 4))[-1]

    agreed(on_ranks(2, MODEL, body))
