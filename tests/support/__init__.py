# SPDX-License-Identifier: Apache-2.0
"""What many tests share: awkward models, batches that only rank and step decide, and comparisons to the bit.

``from support import ...`` works in every test (``conftest.py`` is why) and in scripts that put this folder on
``sys.path``.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import reprlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge
import merging
from agmerge import testing
from agmerge.step.flat_buffers import SentValues
from agmerge.tensors.arena import Write
from agmerge.tensors.layout import Segment

torch.set_num_threads(1)  # ranks are threads or processes already

T = TypeVar("T")
WIDTH = 32  # features; a Linear(WIDTH, WIDTH) has 1024 elements, which is just enough for the sparse tensor class
CLASSES = 10
_SEEDING = threading.RLock()


def seeded(build: Callable[[], T], seed: int = 0) -> T:
    """Return what ``build`` makes after ``torch.manual_seed``; one rank at a time, for the seed is the process's."""
    with _SEEDING:
        torch.manual_seed(seed)
        return build()


def mlp() -> nn.Sequential:
    """Three layers; the weights of the first two are sparse, everything else is dense."""
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def batch(rank: int, step: int, n: int = 8) -> tuple[Tensor, Tensor]:
    """The inputs and classes that ``rank`` sees in ``step``."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(n, WIDTH, generator=source), torch.randint(0, CLASSES, (n,), generator=source)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of ``model`` on the batch of ``rank`` and ``step``."""
    x, y = batch(rank, step)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def backward(model: nn.Module, rank: int, step: int) -> None:
    """The gradients of a rank's batch."""
    loss_of(model, rank, step).backward()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int],
    backward: Callable[[Any, int, int], None] = backward,
) -> list[str]:
    """Plain steps; the model's digest after each."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
        seen.append(digest(model))
    return seen


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0) -> torch.optim.SGD:
    """The optimizer of most tests."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)


def wrap(model: nn.Module, inner: torch.optim.Optimizer | None = None, **options: Any) -> agmerge.DistributedOptimizer:
    """``inner`` (SGD with momentum if None) wrapped, with the names of ``model``.

    The plan goes by sizes and selections are sent unless the test says otherwise: what goes by times changes bits
    after ten steps. Most tests are about a residual beside an SGD that applies its own momentum; the default compressor
    would apply that before selection.
    """
    options = {"exchange": "sparse", "compression": "adtopk", **options}
    if not {"groups", "num_groups"} & set(options):
        options = {"merging": "threshold", **options}
    return agmerge.DistributedOptimizer(inner or sgd(model), model.named_parameters(), **options)


def on_ranks(n: int, model: nn.Module, body: Callable[[int, Any], T], **options: Any) -> list[T]:
    """``body(rank, its own copy of model)`` on every rank of an in-memory group."""
    copies = [copy.deepcopy(model) for _ in range(n)]
    return testing.run(n, lambda rank: body(rank, copies[rank]), **options)


@contextmanager
def strict_warnings() -> Iterator[None]:
    """Make warnings errors, but for what a compressor that is named costs.

    Enter it around :func:`on_ranks`, never on a rank: filters are of the process, and threads would leave each other's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "AGM705")
        yield


def random_plan(seed: int, tensors: int) -> merging.Plan:
    source, counts = random.Random(seed), []
    while sum(counts) < tensors:
        counts.append(source.randint(1, tensors - sum(counts)))
    return merging.Plan(tuple(counts))


# -- bits -------------------------------------------------------------------------------------------------------


def digest(tensors: nn.Module | Iterable[Tensor]) -> str:
    """The bits of all parameters of a model, or of tensors, in order."""
    whole = hashlib.sha256()
    for tensor in tensors.parameters() if isinstance(tensors, nn.Module) else tensors:
        whole.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        whole.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, the sign of zero included."""
    return digest([a]) == digest([b])


def assert_near(found: Tensor, exact: Tensor, magnitude: Tensor, roundings: int = 16) -> None:
    """``found`` is ``exact`` but for some roundings of float32. ``magnitude``: the sum of the absolute values of all
    that was added up, elementwise: relative to what is left when they cancel, an error can be of any size."""
    bound = roundings * torch.finfo(torch.float32).eps * magnitude.double()
    over = (found.double() - exact.double()).abs() - bound
    assert found.shape == exact.shape and (over <= 0).all(), float(over.max())


def agreed(results: list[T]) -> T:
    """What every rank found, after asserting that all found the same: else the first rank and place that differ."""
    for rank, result in enumerate(results):
        assert result == results[0], (
            f"rank {rank} is the first that differs from rank 0: {difference(result, results[0])}"
        )
    return results[0]


def difference(result: Any, expected: Any) -> str:
    """The first place in lists, tuples and dicts where two results differ, step by step where they are by step."""
    if type(result) is type(expected) and isinstance(result, dict) and result.keys() == expected.keys():
        places: Iterable[Any] = result
    elif type(result) is type(expected) and isinstance(result, (list, tuple)) and len(result) == len(expected):
        places = range(len(result))
    else:
        return f": {reprlib.repr(result)} instead of {reprlib.repr(expected)}"
    first = next((place for place in places if not result[place] == expected[place]), None)
    return "" if first is None else f"[{first!r}]{difference(result[first], expected[first])}"


def trained(
    size: int,
    model: nn.Module,
    steps: int,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    inject: Callable[[testing.Call], None] | None = None,
    **options: Any,
) -> list[str]:
    """The digests after each of ``steps`` steps of :func:`wrap` with ``options``, the same on all ranks."""

    def body(rank: int, model: nn.Module) -> list[str]:
        return train(model, wrap(model, inner(model), **options), rank, range(steps))

    return agreed(on_ranks(size, model, body, inject=inject))


def residuals(optimizer: agmerge.DistributedOptimizer) -> dict[str, Tensor]:
    """This rank's residuals by name, as a checkpoint would hold them."""
    return dict(optimizer.state_dict()["agmerge"]["residuals"])


class Sent:
    """What every rank commits as sent: ``of[rank][name]``, the latest since somebody cleared it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, dict[str, Tensor]] = {}
        subtract, write = SentValues.subtract_sent, SentValues.write_and_subtract

        def note(segment: Segment, indices: Tensor | None, sent: Tensor | None) -> None:
            assert sent is not None  # segments that are summed where they lie are larger than any here
            full = torch.zeros(segment.length, dtype=segment.tensor_class.storage)
            if indices is None:
                full += sent
            else:
                full.index_add_(0, indices, sent.to(full.dtype))
            mine = self.of.setdefault(agmerge.rank(), {})
            for slot in segment.slots:
                start, stop = segment.inside(slot)  # perhaps not all of the tensor: another message has the rest
                whole = mine.setdefault(slot.name, torch.zeros(slot.shape, dtype=full.dtype))
                at = slot.offset - segment.start
                whole.view(-1)[start:stop] = full[at + start : at + stop]

        def subtracted(store: SentValues, segment: Segment, indices: Tensor | None, sent: Tensor | None) -> None:
            note(segment, indices, sent)
            subtract(store, segment, indices, sent)

        def written(store: SentValues, segment: Segment, writes: Write) -> bool:
            work = store._flat.operands(segment).work
            before = work.clone()
            done = write(store, segment, writes)
            if done:
                note(segment, None, before - work)
            return done

        monkeypatch.setattr(SentValues, "subtract_sent", subtracted)
        monkeypatch.setattr(SentValues, "write_and_subtract", written)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def through_a_file(state: Any) -> Any:
    """What a restart sees: nothing but tensors and plain values may be in it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


# -- a model with everything that is awkward --------------------------------------------------------------------


class AwkwardModel(nn.Module):
    """Tied, unused, rank-dependent, alternating, frozen and late-unfrozen layers; mixed dtypes, ranks and formats.

    ``loss`` uses ``only_rank_1`` on rank 1 alone, and ``alternating`` where step + rank is even. ``half``: the
    dtype of the sixteen-bit layer, for comparisons that its rounding would blur.
    """

    def __init__(self, half: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.half_dtype = half
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.only_rank_1 = nn.Linear(WIDTH, WIDTH)
        self.alternating = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.late = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.conv = nn.Conv2d(8, 16, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.in_half = nn.Linear(WIDTH, WIDTH, dtype=half)
        self.in_fp64 = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH + 16, CLASSES)

    def unfreeze(self) -> None:
        """Let ``late`` learn from now on."""
        self.late.requires_grad_(True)

    def loss(self, batch: tuple[Tensor, Tensor], rank: int, step: int) -> Tensor:
        """The loss of a batch, which depends on parameters that rank and step decide."""
        x, y = batch
        images = x.view(-1, 8, 2, 2).contiguous(memory_format=torch.channels_last)
        seen = self.conv(images).mean(dim=(2, 3))
        x = x + self.tied(torch.tanh(self.first(x)))
        x = x + torch.tanh(self.late(torch.tanh(self.frozen(x))))
        if rank == 1:
            x = x + torch.tanh(self.only_rank_1(x))
        if (step + rank) % 2 == 0:
            x = x + torch.tanh(self.alternating(x))
        x = torch.tanh(x * self.scale)
        x = x + self.in_half(x.to(self.half_dtype)).float() + self.in_fp64(x.double()).float()
        logits = self.head(torch.cat([x, seen, self.nothing.sum().expand(len(x), 0)], dim=1))
        return F.cross_entropy(logits * self.temperature, y)


def awkward_batch(rank: int, step: int, n: int = 8) -> tuple[Tensor, Tensor]:
    """The batch of ``rank`` in ``step``."""
    return batch(rank, step, n)


def awkward_groups(model: AwkwardModel) -> list[dict[str, Any]]:
    """Three param groups with their own learning rates and weight decays; together all parameters."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    other = [p for p in model.parameters() if p.dim() >= 2 and p.dtype != torch.float32]
    rest = [p for p in model.parameters() if p.dim() >= 2 and p.dtype == torch.float32]
    return [
        {"params": rest, "weight_decay": 1e-2},
        {"params": flat, "lr": 0.02},
        {"params": other, "lr": 0.03, "weight_decay": 1e-3},
    ]


def assert_conserved(
    step: int,
    before: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    sent: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
) -> None:
    """What one rank has kept and sent in a step is what it had and its gradients: to the bit, by name."""
    for name, kept in after.items():
        whole = before.get(name, torch.zeros_like(kept))
        if name in gradients:
            whole = whole + gradients[name].to(kept.dtype)
        assert torch.equal(kept + sent[name], whole), f"step {step}, {name}"


def conserving(
    model: nn.Module, optimizer: agmerge.DistributedOptimizer, loss: Callable[[int], Tensor], steps: int, sent: Sent
) -> tuple[list[str], list[merging.Plan]]:
    """Train; after every step residual + sent is exactly what was there. Digests and plans, step by step."""
    rank, seen, plans = agmerge.rank(), [], []
    old: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss(step).backward()
        gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.synchronize()
        gone = sent.of[rank]  # before a probe comes by
        sent.of[rank] = {}
        with optimizer.skip_synchronize():
            optimizer.step()
        new = residuals(optimizer)
        assert_conserved(step, old, gradient, gone, new)
        assert any(kept.any() for kept in new.values())
        old = new
        seen.append(digest(model))
        plans.append(optimizer.plan)
    return seen, plans


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)
