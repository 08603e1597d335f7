# SPDX-License-Identifier: Apache-2.0
"""Broadcast helpers (guarantee G10): every bit of the root's, and nothing else moves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import agmerge
from agmerge import testing
from agmerge.errors import RankMismatchError

ROOT = 1
Optimizer = torch.optim.Optimizer
Build = Callable[[list[torch.Tensor]], Optimizer]


def bits(value: Any) -> Any:
    """``value`` with every tensor replaced by what can be compared with ``==``, to the bit."""
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.is_sparse else value
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return "tensor", str(value.dtype), tuple(value.shape), value.stride(), content
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(bits(one) for one in value)
    return type(value).__name__, repr(value)


# -- parameters ---------------------------------------------------------------------------------------------


def awkward(rank: int) -> dict[str, torch.Tensor]:
    whole = torch.arange(24.0).reshape(2, 3, 4) + 100 * rank
    return {
        "plain": whole.clone(),
        "transposed": whole.clone().transpose(0, 2),
        "strided": torch.arange(20.0)[::3] + rank,
        "channels_last": torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank)).to(
            memory_format=torch.channels_last
        ),
        "bf16": torch.full((3,), 1.5 + rank, dtype=torch.bfloat16),
        "fp64": torch.full((3,), 1e-300 * (rank + 1), dtype=torch.float64),
        "int": torch.tensor([2**62 + rank]),
        "bool": torch.tensor([rank == ROOT, True]),
        "complex": torch.tensor([complex(rank, -rank)]),
        "0-dim": torch.tensor(float(rank)),
        "empty": torch.empty(0, 3),
        "special": torch.tensor([float("nan"), float("inf"), -0.0 if rank == ROOT else 0.0]),
        "leaf": torch.full((2, 2), float(rank), requires_grad=True),
    }


WAYS: dict[str, Callable[[dict[str, torch.Tensor]], Iterable[Any]]] = {
    "dict": lambda tensors: tensors,
    "generator": lambda tensors: (pair for pair in tensors.items()),
    "pairs": lambda tensors: list(tensors.items()),
    "tensors": lambda tensors: list(tensors.values()),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_become_the_roots_in_place(way: str) -> None:
    def body(rank: int) -> dict[str, torch.Tensor]:
        tensors = awkward(rank)
        kept = {name: (id(t), t.data_ptr(), t.stride(), t.requires_grad) for name, t in tensors.items()}
        agmerge.broadcast_parameters(WAYS[way](tensors), root_rank=ROOT)
        assert kept == {name: (id(t), t.data_ptr(), t.stride(), t.requires_grad) for name, t in tensors.items()}
        return tensors

    expected = bits(awkward(ROOT))
    for result in testing.run(3, body):
        assert bits(result) == expected


def test_a_module_with_buffers_and_tied_weights() -> None:
    def body(rank: int) -> list[Any]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        for i, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(10 * rank + i)
        agmerge.broadcast_parameters(model.state_dict(), root_rank=ROOT)
        first = bits(model.state_dict())
        agmerge.broadcast_parameters(model.named_parameters(), root_rank=ROOT)
        assert bits(model.state_dict()) == first
        return [first]

    results = testing.run(3, body)
    assert results[0] == results[1] == results[2]


def test_a_large_model_goes_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agmerge.runtime.tensor_stream.MESSAGE", 100)

    def body(rank: int) -> tuple[list[list[float]], list[int]]:
        sizes = [5, 20, 0, 26, 1, 60, 0, 2]  # float32: 20, 80, 0, 104, 4, 240, 0, 8 bytes
        tensors = [torch.full((size,), float(10 * i + rank)) for i, size in enumerate(sizes)]
        agmerge.broadcast_parameters(tensors, root_rank=0)
        sent = [size for kind, _, size in testing.calls() if kind == "broadcast"]
        return [tensor.tolist() for tensor in tensors], sent

    for values, sent in testing.run(2, body):
        assert values == [[10.0 * i] * len(one) for i, one in enumerate(values)]
        # Places of 16 bytes, so six of them; what is larger goes in pieces of 24 elements.
        assert sent == [32, 80, 96, 32, 96, 96, 64]


@pytest.mark.parametrize("chunk", [16, 40, 64, 1000])
def test_pieces_of_any_size_are_the_roots_to_the_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides may differ between ranks, and no message is larger than a chunk, however large a tensor is."""
    monkeypatch.setattr("agmerge.runtime.tensor_stream.MESSAGE", chunk)

    def body(rank: int) -> tuple[dict[str, torch.Tensor], int]:
        tensors = awkward(rank)
        if rank == 0:
            tensors["plain"] = tensors["plain"].transpose(0, 2).contiguous().transpose(0, 2)
        agmerge.broadcast_parameters(tensors, root_rank=ROOT)
        return tensors, max(size for kind, _, size in testing.calls() if kind == "broadcast")

    expected = awkward(ROOT)
    for found, largest in testing.run(3, body):
        assert largest <= chunk
        for name, tensor in found.items():
            assert bits(tensor.contiguous()) == bits(expected[name].contiguous()), name


def test_a_tensor_of_sparse_layout_is_refused_by_name() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="'rows' has layout torch.sparse_coo, .* Make it dense first"):
            agmerge.broadcast_parameters({"rows": torch.eye(2).to_sparse()})

    testing.run(1, body)


@pytest.mark.slow
def test_state_of_the_same_form_is_overwritten_where_it_lies() -> None:
    """So the state of a large model is never there twice; tensors that share memory are replaced instead."""

    def body(rank: int) -> tuple[bool, list[float], list[float]]:
        p = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        mine = torch.full((3,), float(rank))
        shared = mine if rank else torch.full((3,), 5.0)
        optimizer.state[p] = {"momentum_buffer": mine}
        agmerge.broadcast_optimizer_state(optimizer)
        kept = optimizer.state[p]["momentum_buffer"] is mine
        optimizer.state[p] = {"momentum_buffer": mine, "other": shared}
        agmerge.broadcast_optimizer_state(optimizer)
        state = optimizer.state[p]
        return kept, state["momentum_buffer"].tolist(), state["other"].tolist()

    assert testing.run(2, body) == [(True, [0.0] * 3, [5.0] * 3)] * 2


def test_the_order_of_a_dict_does_not_matter() -> None:
    def body(rank: int) -> dict[str, float]:
        names = ["a", "b", "c"] if rank == 0 else ["c", "a", "b"]
        tensors = {name: torch.tensor(float(10 * rank + ord(name))) for name in names}
        agmerge.broadcast_parameters(tensors)
        return {name: tensor.item() for name, tensor in tensors.items()}

    assert testing.run(2, body) == [{"a": 97.0, "b": 98.0, "c": 99.0}] * 2


MISMATCHES: dict[str, tuple[Callable[[int], Any], str]] = {
    "names": (lambda rank: {"ab"[rank]: torch.ones(1)}, r"entry 1: a torch.float32 \[1\] on rank 0; b torch"),
    "shapes": (lambda rank: [torch.ones(2 + rank)], r"tensor 0: torch.float32 \[2\] on rank 0; .*\[3\] on rank 1"),
    "dtypes": (lambda rank: [torch.ones(1).to([torch.half, torch.float][rank])], "float16.*float32"),
    "lengths": (lambda rank: [torch.ones(1)] * (rank + 1), r"tensor 1: nothing on rank 0; .* on rank 1"),
    "nothing": (lambda rank: [torch.ones(1)] * rank, "nothing on rank 0"),
}


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_other_names_shapes_or_dtypes_are_the_same_error_on_every_rank(mismatch: str) -> None:
    make, text = MISMATCHES[mismatch]
    errors = testing.run(2, lambda rank: agmerge.broadcast_parameters(make(rank)), return_errors=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(RankMismatchError, match=text):
        raise errors[0]


def test_what_is_no_tensor_is_refused() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="'epoch' is a int, not a tensor. Use broadcast_object"):
            agmerge.broadcast_parameters({"weight": torch.ones(1), "epoch": 3})
        with pytest.raises(ValueError, match=r"invalid params of type: str \(entry 0\)"):
            agmerge.broadcast_parameters(["weight"])

    testing.run(1, body)


# -- optimizer state ----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Build] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "Adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, weight_decay=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1, weight_decay=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], lr=0.1, weight_decay=0.1),
}


def test_the_list_of_optimizers_is_complete() -> None:
    known = {name.split()[0] for name in OPTIMIZERS}
    here = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    assert here <= known


def build(name: str) -> tuple[list[torch.Tensor], Optimizer]:
    """A model's parameters, equal on every rank, and a fresh optimizer of two groups where that is possible."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(33, 17), (17, 33), (4, 3, 3, 3), (5,), ()]
    parameters = [torch.randn(shape, generator=generator) for shape in shapes]
    if name not in ("LBFGS", "SparseAdam"):  # these two want C order
        parameters[1] = parameters[1].t().clone()
        parameters[2] = parameters[2].to(memory_format=torch.channels_last)
    for parameter in parameters:
        parameter.requires_grad_()
    optimizer = OPTIMIZERS[name](parameters)
    if name not in ("LBFGS", "Adagrad"):  # that has no state of what is added later, before torch 2.13
        extra = torch.full((3, 3), 0.5, requires_grad=True)
        parameters.append(extra)
        optimizer.add_param_group({"params": [extra], "lr": optimizer.param_groups[0]["lr"] * 0.5})
    return parameters, optimizer


def advance(parameters: list[torch.Tensor], optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Steps with gradients that depend on the number of the step only."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))
            sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = gradient.to_sparse() if sparse else gradient
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(lambda: sum((p**2).sum() for p in parameters))
        else:
            optimizer.step()


def options(optimizer: Optimizer) -> list[Any]:
    return [bits({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def state(parameters: list[torch.Tensor], optimizer: Optimizer) -> list[Any]:
    return [bits(optimizer.state[p]) if p in optimizer.state else None for p in parameters]


@pytest.mark.parametrize("first", ["parameters", "state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_from_the_root(name: str, first: str) -> None:
    """Finding 1: with weight decay, Horovod's documented order leaves the ranks different."""
    advance(*build(name), range(1))  # torch imports some modules late, which threads must not do together

    def body(rank: int) -> tuple[list[Any], ...]:
        parameters, optimizer = build(name)
        if rank == ROOT:
            advance(parameters, optimizer, range(3))
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
        elif rank == 2:  # what it has is not the root's
            advance(parameters, optimizer, range(10, 17))
            optimizer.param_groups[0]["left over"] = 1
        parameters[0].grad = torch.full_like(parameters[0], float(rank))
        parameters[1].grad = None
        gradients = [p.grad for p in parameters]
        before = bits(gradients), [id(group) for group in optimizer.param_groups], bits(parameters)

        if first == "parameters":
            agmerge.broadcast_parameters(parameters, ROOT)
            moved = bits(parameters)
        agmerge.broadcast_optimizer_state(optimizer, ROOT)
        if first == "parameters":
            assert bits(parameters) == moved
        else:
            assert bits(parameters) == before[2]  # not a bit has moved
            agmerge.broadcast_parameters(parameters, ROOT)

        assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
        assert bits(gradients) == before[0]
        assert [id(group) for group in optimizer.param_groups] == before[1]
        resumed = bits(parameters), state(parameters, optimizer), options(optimizer)
        advance(parameters, optimizer, range(20, 25))
        return *resumed, bits(parameters), state(parameters, optimizer), options(optimizer)

    fresh, root, stale = testing.run(3, body)
    for mine, theirs, again in zip(root, fresh, stale, strict=True):
        assert mine == theirs == again

    parameters, optimizer = build(name)  # and the root went on as if nothing had happened
    advance(parameters, optimizer, range(3))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    assert root[:3] == (bits(parameters), state(parameters, optimizer), options(optimizer))
    assert any(one is not None for one in root[1])


def test_a_fresh_root_takes_the_state_of_the_others_away() -> None:
    def body(rank: int) -> None:
        parameters, optimizer = build("Adam")
        if rank == 1:
            advance(parameters, optimizer, range(2))
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        assert len(optimizer.state) == 0

    testing.run(2, body)


def test_a_scheduler_goes_on_after_the_broadcast() -> None:
    def body(rank: int) -> list[float]:
        parameters, optimizer = build("SGD")
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        if rank == 0:
            for step in range(2):
                advance(parameters, optimizer, [step])
                scheduler.step()
        agmerge.broadcast_optimizer_state(optimizer, root_rank=0)
        advance(parameters, optimizer, [2])
        scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    assert testing.run(2, body) == [[0.0125, 0.00625]] * 2


@pytest.mark.parametrize("other", ["kind", "groups", "shape"])
def test_other_optimizers_are_the_same_error_on_every_rank(other: str) -> None:
    def body(rank: int) -> None:
        tensors = [torch.ones(2), torch.ones(3 + (rank if other == "shape" else 0))]
        kind = torch.optim.Adam if rank and other == "kind" else torch.optim.SGD
        groups: Any = [{"params": [one]} for one in tensors] if rank and other == "groups" else tensors
        agmerge.broadcast_optimizer_state(kind(groups, lr=0.1))

    errors = testing.run(2, body, return_errors=True)
    assert [type(error) for error in errors] == [RankMismatchError] * 2
    assert str(errors[0]) == str(errors[1])
    name = {"kind": "optimizer: SGD on rank 0; Adam", "groups": "param_groups: [2]", "shape": "parameter 1: "}
    assert name[other] in str(errors[0])


def test_through_the_wrapper_the_residuals_stay_where_they_are() -> None:
    model = nn.Linear(40, 40)

    def body(rank: int) -> tuple[Any, list[Any], dict[str, torch.Tensor]]:
        replica = copy.deepcopy(model)
        plain = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
        optimizer = agmerge.DistributedOptimizer(plain, replica.named_parameters(), density=0.1)
        for step in range(3):
            replica(torch.full((1, 40), 1.0 + rank + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = optimizer.state_dict()["agmerge"]
        agmerge.broadcast_optimizer_state(optimizer, root_rank=ROOT)
        assert bits(optimizer.state_dict()["agmerge"]) == bits(before)
        return bits(list(replica.parameters())), state(list(replica.parameters()), plain), before["residuals"]

    results = testing.run(2, body)
    assert results[0][:2] == results[1][:2]
    assert all(residuals["weight"].any() for *_, residuals in results)
    assert bits(results[0][2]) != bits(results[1][2])
