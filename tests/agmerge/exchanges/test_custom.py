# SPDX-License-Identifier: Apache-2.0
"""Compressors of a script's own class: five shapes of them, beside their formulas; errors; checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import agreed, batch, mlp, on_ranks, seeded, sgd
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
from agmerge.errors import MessageError, NonFiniteError

MODEL = seeded(mlp)


class TopK:
    """The largest tenth of each tensor: values and int64 indices, which are as many on each rank."""

    average = True

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        flat = tensor.flatten()
        indices = flat.abs().topk(max(1, flat.numel() // 10)).indices
        return [flat[indices], indices], (tensor.shape, flat.numel())

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        shape, numel = ctx
        return torch.zeros(numel).scatter_(0, tensors[1], tensors[0]).view(shape)


class Threshold(TopK):
    """All elements above a threshold: as many as there are, on each rank others, perhaps none."""

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        flat = tensor.flatten()
        (indices,) = torch.where(flat.abs() > 0.02)
        return [flat[indices], indices.to(torch.int32)], (tensor.shape, flat.numel())

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return super().decompress([tensors[0], tensors[1].long()], ctx)


class Sign:
    """Signs as bytes and their scale, a tensor of one element; Python numbers in ctx; a majority of its own."""

    average = False

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        return [(tensor >= 0).to(torch.uint8), tensor.abs().mean()], {"numel": tensor.numel()}

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return (tensors[0].float() * 2 - 1) * tensors[1]

    def aggregate(self, tensors: list[Tensor]) -> Tensor:
        return sum(tensors) / len(tensors)


class Half:
    """A cast, of one tensor that is no list; to be added up."""

    average = True

    def compress(self, tensor: Tensor, name: str) -> tuple[Tensor, Any]:
        return tensor.bfloat16(), tensor.dtype

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return tensors[0].to(ctx)


class LowRank:
    """Factors of matrices from a basis that it keeps by name; vectors as they are. To be gathered."""

    def __init__(self) -> None:
        self.bases: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        if tensor.dim() < 2:
            return [tensor], None
        matrix = tensor.flatten(1)
        if name not in self.bases:
            self.bases[name] = torch.ones(matrix.shape[1], 1) / math.sqrt(matrix.shape[1])
        left = matrix @ self.bases[name]
        left = left / (left.norm() + 1e-12)
        self.bases[name] = matrix.t() @ left
        return [left, self.bases[name].clone()], tensor.shape

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return tensors[0] if ctx is None else (tensors[0] @ tensors[1].t()).view(ctx)


class Residuals:
    """Error feedback, as GRACE has it."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        return tensor + self.residuals[name] if name in self.residuals else tensor

    def update(self, tensor: Tensor, name: str, compressor: Any, tensors: list[Tensor], ctx: Any) -> None:
        self.residuals[name] = tensor - compressor.decompress(tensors, ctx)


class Momentum(Sign):
    """Signs of a momentum, which at first is the gradient that it is given, and not a copy."""

    def __init__(self) -> None:
        self.momenta: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        tensor = 0.1 * tensor + 0.9 * self.momenta[name] if name in self.momenta else tensor
        self.momenta[name] = tensor
        return super().compress(tensor, name)


class Shuffled(TopK):
    """A random tenth, the same on all ranks because they count alike; values only, to be added up."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, torch.Generator().manual_seed(3)

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        self.calls += 1
        start = torch.randperm(tensor.numel(), generator=self.generator) + self.calls
        indices = start[: max(1, tensor.numel() // 10)] % tensor.numel()
        return [tensor.flatten()[indices]], (indices, tensor.shape, tensor.numel())

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        indices, *rest = ctx
        return super().decompress([tensors[0], indices], rest)


class Bases(Residuals):
    """Error feedback that writes to what it is given, and shares a dictionary with its compressor."""

    def __init__(self, compressor: LowRank) -> None:
        super().__init__()
        self.bases = compressor.bases

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        if name in self.residuals:
            tensor += self.residuals[name]
        if name in self.bases:
            self.bases[name] = self.bases[name] / (self.bases[name].norm() + 1e-12)
        return tensor


class Keeper(Half):
    """What it decompresses is half of what has arrived, and half of what had arrived before, which it keeps."""

    def __init__(self) -> None:
        self.arrived: dict[Any, list[Tensor]] = {}

    def compress(self, tensor: Tensor, name: str) -> tuple[Tensor, Any]:
        return tensor, (name, tensor.shape)

    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        name, shape = ctx
        seen = self.arrived.setdefault(name, [])
        seen.append(tensors[0])
        return (seen[max(0, len(seen) - 7)] + tensors[0]).view(shape) / 2


def with_bases() -> Any:
    compressor = LowRank()
    return agmerge.grace(compressor, Bases(compressor))


SHAPES: dict[str, Callable[[], Any]] = {
    "top-k": lambda: agmerge.grace(TopK(), Residuals()),
    "variable length": lambda: agmerge.grace(Threshold(), Residuals()),
    "sign": lambda: agmerge.grace(Sign(), Residuals()),
    "cast, added up": lambda: agmerge.grace(Half(), sums=True),
    "low rank": lambda: agmerge.grace(LowRank(), Residuals()),
    "keeps what it is given": lambda: agmerge.grace(Momentum()),
    "keeps what arrives": lambda: agmerge.grace(Keeper()),
    "writes to what it is given": with_bases,
    "counts": lambda: agmerge.grace(Shuffled(), Residuals(), sums=True),
}


def wrapped(model: nn.Module, compression: Any, **options: Any) -> agmerge.DistributedOptimizer:
    return agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), compression=compression, **options)


def gradients(model: nn.Module, rank: int, step: int) -> dict[str, Tensor]:
    model.zero_grad()
    inputs, targets = batch(rank, step)
    F.cross_entropy(model(inputs), targets).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def by_formula(made: list[Any], each: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What GRACE does: compensate, compress, gather (or add up), decompress, aggregate, divide."""
    found = {}
    for name in each[0]:
        rows = [own.encode(gradients[name], name) for own, gradients in zip(made, each, strict=True)]
        shape = each[0][name].shape
        if made[0].sums:
            summed = [sum(parts) / len(rows) for parts in zip(*(tensors for tensors, _ in rows), strict=True)]
            found[name] = made[0].decode(summed, rows[0][1], name, shape)
        else:
            total = made[0].aggregate([made[0].decode(tensors, ctx, name, shape) for tensors, ctx in rows])
            found[name] = total / len(rows) if made[0].averages else total
    return found


IN_ANY_ORDER = [shape for shape in SHAPES if shape != "counts"]  # whatever the order in which tensors are compressed


@pytest.mark.whole
@pytest.mark.parametrize("merging", ["layerwise", "single"])
@pytest.mark.parametrize("shape", IN_ANY_ORDER)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_class_gives_the_update_of_its_formula(shape: str, workers: int, merging: str) -> None:
    models = [copy.deepcopy(MODEL) for _ in range(workers)]
    made, optimizers = [SHAPES[shape]() for _ in range(workers)], [sgd(model) for model in models]

    def body(rank: int, model: nn.Module) -> list[dict[str, Tensor]]:
        optimizer = wrapped(model, SHAPES[shape](), merging=merging)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        return seen

    seen = on_ranks(workers, MODEL, body)
    for step, parameters in enumerate(seen[0]):
        for other in seen[1:]:
            assert all(torch.equal(other[step][name], parameters[name]) for name in parameters)
        updates = by_formula(made, [gradients(model, rank, step) for rank, model in enumerate(models)])
        for model, optimizer in zip(models, optimizers, strict=True):
            for name, parameter in model.named_parameters():
                parameter.grad = updates[name]
            optimizer.step()
        for name, parameter in models[0].named_parameters():
            torch.testing.assert_close(parameters[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sums", [True, False])
def test_what_a_class_writes_to_after_compressing_is_not_sent(sums: bool) -> None:
    class Scratch(Half):
        def compress(self, tensor: Tensor, name: str) -> tuple[Tensor, Any]:
            self.sent = [*getattr(self, "sent", []), tensor.clone()]
            for before in self.sent[:-1]:
                before.zero_()
            return self.sent[-1], tensor.dtype

    def body(rank: int, model: nn.Module) -> list[Tensor]:
        found = []
        for compression in (agmerge.grace(Scratch(), sums=sums), "none"):
            own = copy.deepcopy(model)
            optimizer = wrapped(own, compression, merging="layerwise")
            for step in range(2):
                optimizer.zero_grad()
                inputs, targets = batch(rank, step)
                F.cross_entropy(own(inputs), targets).backward()
                optimizer.step()
            found.append(torch.cat([parameter.detach().flatten() for parameter in own.parameters()]))
            optimizer.close()
        return found

    for found, expected in on_ranks(2, MODEL, body):
        assert torch.equal(found, expected)


def test_an_object_is_taken_as_it_is_and_a_holder_brings_its_memory() -> None:
    class Allreduce:
        def __init__(self) -> None:
            self.compressor, self.memory = Half(), Residuals()

    def body(rank: int, model: nn.Module) -> tuple[str, str]:
        own, held = wrapped(model, TopK()), None
        first = repr(own._reducer.exchange.agreed.config.compression.compressor)
        own.close()
        held = agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), grace=Allreduce())
        return first, repr(held._reducer.exchange.agreed.config.compression.compressor)

    first, held = agreed(on_ranks(2, MODEL, body))
    assert first == "TopK(memory='none', sums=False)" and held == "Half(memory='Residuals', sums=True)"


class Wrong(TopK):
    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return super().decompress(tensors, ctx).flatten()


class Raises(TopK):
    def compress(self, tensor: Tensor, name: str) -> tuple[list[Tensor], Any]:
        if agmerge.rank() == 1:
            raise ArithmeticError("mine")
        return super().compress(tensor, name)


class Nothing(TopK):
    def compress(self, tensor: Tensor, name: str) -> Any:
        return None


class Infinite(TopK):
    def decompress(self, tensors: list[Tensor], ctx: Any) -> Tensor:
        return super().decompress(tensors, ctx) / 0


@pytest.mark.parametrize(
    "made, errors",
    [
        (Wrong, [(ValueError, r"Wrong.decompress\(\): expected shape \[")] * 2),
        (Raises, [(MessageError, "AGM508: .*Raises raised an error on rank 1"), (ArithmeticError, "mine")]),
        (Nothing, [(TypeError, r"Nothing.compress\(\): expected \(tensors, ctx\) for ")] * 2),
        (Infinite, [(MessageError, "AGM510: Infinite made infinities or NaN")] * 2),
    ],
)
def test_a_wrong_class_is_told_on_every_rank(made: type, errors: list[tuple[type[Exception], str]]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrapped(model, made())
        inputs, targets = batch(rank, 0)
        kind, text = errors[rank]
        with pytest.raises(kind, match=text):
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    on_ranks(2, MODEL, body)


def test_tensors_of_other_shapes_are_not_added_up() -> None:
    def body(rank: int, model: nn.Module) -> None:
        optimizer = wrapped(model, agmerge.grace(Threshold(), sums=True))
        inputs, targets = batch(rank, 0)
        with pytest.raises(MessageError, match="AGM509: .*Threshold made other tensors on rank 1 than on rank 0"):
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    on_ranks(2, MODEL, body)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"sync": "updates"}, "sync='updates' is not supported with compression=TopK"),
        ({"exchange": "two-level"}, "two-level"),
        ({"merging": "mgwfbp"}, "To time messages, it would compress made-up gradients"),
        ({"memory": "residual"}, "Pass its memory with it"),
        ({"memory": Residuals()}, "Pass its memory with it"),
        ({"wire": "fp16"}, "wire='fp16' has no effect"),
        ({"warmup": "dgc"}, "warmup='dgc' has no effect"),
    ],
)
def test_options_that_do_not_go_with_a_class_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        wrapped(copy.deepcopy(MODEL), TopK(), **options)


def test_what_is_no_memory_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a memory with compensate"):
        agmerge.grace(TopK(), TopK())
    with pytest.raises(TypeError, match="expected an object with compress"):
        agmerge.grace(Residuals())


@pytest.mark.values
@pytest.mark.parametrize("shape", ["counts", "writes to what it is given", "keeps what it is given", "low rank"])
def test_a_resumed_run_goes_on_to_the_bit(shape: str) -> None:
    def step_of(rank: int, model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def body(rank: int, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        optimizer = wrapped(model, SHAPES[shape]())
        for step in range(2):
            step_of(rank, model, optimizer, step)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for step in range(2, 4):
            step_of(rank, model, optimizer, step)
        ended = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.close()
        optimizer = wrapped(model, SHAPES[shape]())
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in range(2, 4):
            step_of(rank, model, optimizer, step)
        return ended, [parameter.detach().clone() for parameter in model.parameters()]

    for ended, resumed in on_ranks(2, MODEL, body):
        assert all(torch.equal(one, other) for one, other in zip(ended, resumed, strict=True))


def test_a_compressor_is_swapped_for_a_class_and_back() -> None:
    """Residuals of topk are sent by the class, and nothing is lost: the mean of parameters moves by all gradients."""

    def body(rank: int, model: nn.Module) -> list[Tensor]:
        optimizer = wrapped(model, "topk", density=0.1)
        for step, compression in enumerate(["topk", agmerge.grace(TopK(), Residuals()), Half(), "none"]):
            optimizer.set_compressor(compression)
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, second = on_ranks(2, MODEL, body)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.values
@pytest.mark.parametrize("shape", ["counts", "writes to what it is given", "variable length"])
def test_a_step_that_comes_to_nothing_leaves_no_trace(shape: str) -> None:
    def body(rank: int, model: nn.Module, bad: int | None) -> list[Tensor]:
        optimizer = wrapped(model, SHAPES[shape]())
        for step in range(6):
            for factor in [math.nan, 1.0] if step == bad else [1.0]:
                optimizer.zero_grad()
                inputs, targets = batch(rank, step)
                (F.cross_entropy(model(inputs), targets) * (factor if rank == 1 else 1.0)).backward()
                if math.isnan(factor):
                    with pytest.raises(NonFiniteError):
                        optimizer.step()
                else:
                    optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = on_ranks(2, MODEL, lambda rank, model: body(rank, model, None))
    for bad in (0, 1, 4):
        for found, expected in zip(on_ranks(2, MODEL, lambda rank, model: body(rank, model, bad)), plain, strict=True):  # noqa: B023
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
