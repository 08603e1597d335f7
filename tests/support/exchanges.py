# SPDX-License-Identifier: Apache-2.0
"""One exchange on every rank of an in-memory group, and what each rank saw of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from agmerge import testing
from agmerge.exchanges import DenseExchange, Exchange, ExchangeContext, Ranks, SegmentBuffers, SparseExchange, Store
from agmerge.exchanges.masked import MaskedExchange
from agmerge.exchanges.message.format import RoundHeader, Section
from agmerge.exchanges.oktopk.exchange import OkTopkExchange
from agmerge.ops import Average, ReduceOp, Sum
from agmerge.runtime import workers
from agmerge.tensors.arena import subtract
from agmerge.tensors.layout import Layout, Segment, TensorClass
from sparsifiers import Kind, Selection

WAIT = 30.0
CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Make = Callable[[Store], Exchange]


def put(message: torch.Tensor, section: Section, offer: Selection, values: torch.Tensor) -> torch.Tensor:
    """Write a sparse section; what receivers will read of ``values``, (capacity,), 0 at and after the count."""
    assert section.index is not None and section.value is not None
    section.index.encode(offer.indices, offer.count, message[section.indices])
    return section.value.encode(values, message[section.values], offer.count)


def get(
    message: torch.Tensor, section: Section, count: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse section, and whether the indices can be right."""
    assert section.index is not None and section.value is not None
    indices, good = section.index.decode(message[section.indices], count)
    return indices, section.value.decode(message[section.values], count, dtype), good


Pair = tuple["torch.Tensor | None", torch.Tensor]


@dataclass
class Seen:
    """What one rank saw of one exchange, segment by segment. ``sent`` is None where nothing was committed."""

    before: list[torch.Tensor]
    rest: list[torch.Tensor]
    update: list[torch.Tensor]
    sent: list[Pair | None]
    kept: list[list[Pair]]  # of sums, each time that something was
    control: RoundHeader


class Books(Store):
    """What an exchange tells of each segment, and what is left of it."""

    def __init__(self, segments: Sequence[Segment], works: list[torch.Tensor]) -> None:
        self.segments, self.works = segments, works
        self.sent: list[Pair | None] = [None] * len(segments)
        self.kept: list[list[Pair]] = [[] for _ in segments]

    def subtract_sent(self, segment: Segment, indices: torch.Tensor | None, sent: Any) -> None:
        index = self.segments.index(segment)
        assert self.sent[index] is None  # once a step
        self.sent[index] = (None if indices is None else indices.clone(), sent.clone())
        subtract(self.works[index], indices, sent)

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None:
        index = self.segments.index(segment)
        self.kept[index].append((indices.clone(), values.clone()))
        self.works[index].index_add_(0, indices, values.to(self.works[index].dtype))


class Quiet(Store):
    """A store that keeps nothing."""

    def subtract_sent(self, segment: Segment, indices: torch.Tensor | None, sent: Any) -> None: ...

    def add_unsent(self, segment: Segment, indices: torch.Tensor, values: torch.Tensor) -> None: ...


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def segments_of(tensors: Sequence[tuple[int, TensorClass]]) -> list[Segment]:
    layout = Layout([(f"t{i}", (numel,), tensor_class) for i, (numel, tensor_class) in enumerate(tensors)])
    return layout.segments(0, len(tensors))


def draw_work(segment: Segment, seed: int, magnitude: float) -> torch.Tensor:
    """Zero in the padding; what lies in a dense tensor class without a cast is a gradient, so it fits its dtype."""
    generator = torch.Generator().manual_seed(seed)
    work = torch.zeros(segment.length, dtype=segment.tensor_class.storage)
    for slot in segment.slots:
        values = torch.randn(slot.numel, generator=generator, dtype=torch.float64) * magnitude
        values[torch.rand(slot.numel, generator=generator) < 0.1] = -0.0
        start = slot.offset - segment.start
        fitting = segment.tensor_class.storage if segment.tensor_class.sparse else segment.tensor_class.dtype
        work[start : start + slot.numel] = values.to(fitting).to(work.dtype)
    return work


def control_of(rank: int, segments: Sequence[Segment], step: int = 7) -> RoundHeader:
    tensors = sum(len(segment.slots) for segment in segments)
    return RoundHeader(step, 2**31 - 1, 3, 2 << (rank % 7), tuple(i % 4 == rank for i in range(tensors)))


def exchange(
    size: int,
    make: Make,
    segments: Sequence[Segment],
    work: Callable[[int, int], torch.Tensor],
    offer: Callable[[int, int], Selection | None] = lambda rank, index: None,
) -> list[Seen]:
    """One message on every rank of a group; ``work`` and ``offer`` get the rank and the segment's number."""

    def body(rank: int) -> Seen:
        works = [work(rank, index) for index in range(len(segments))]
        before = [one.clone() for one in works]
        books = Books(segments, works)
        updates = [torch.full((s.length,), torch.nan, dtype=s.tensor_class.dtype) for s in segments]
        loads = [SegmentBuffers(s, w, u) for s, w, u in zip(segments, works, updates, strict=True)]
        control = control_of(rank, segments)
        here = make(books)
        pending = here.start("buffer 3", loads, [offer(rank, i) for i in range(len(segments))], control)
        arrived = here.wait(pending)
        assert all(update.isnan().all() for update in updates)  # wait() writes nothing
        here.finish(pending)
        assert pending.bytes == sum(size for _, _, size in testing.calls())
        return Seen(before, works, updates, books.sent, books.kept, arrived)

    seen = testing.run(size, body)
    controls = [control_of(rank, segments) for rank in range(size)]
    for one in seen:
        assert all(same(a, b) for a, b in zip(one.update, seen[0].update, strict=True))  # replicas
        assert one.control == controls[0].merged(controls)
    return seen


def context(store: Store, op: ReduceOp = Average, *, gradients: int | None = None, **options: Any) -> ExchangeContext:
    """Return what an exchange of this rank is made from, in the group that the test runs in."""
    return ExchangeContext(Ranks(workers.world(), WAIT, gradients=gradients), op, store, **options)


def dense(op: ReduceOp, cast: torch.dtype | None = None, predivide: float = 1.0, ordered: bool = False) -> Make:
    keeps = cast is not None
    return lambda store: DenseExchange(
        context(store, op, feedback=keeps, cast=cast, predivide=predivide, ordered=ordered)
    )


def sparse(op: ReduceOp) -> Make:
    return lambda store: SparseExchange(context(store, op))


def draw_offer(length: int, capacity: int, seed: int, on_device: bool) -> Selection:
    """Up to ``capacity`` unique ascending indices; the slots behind them hold any index, also a chosen one."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(0, capacity + 1, (), generator=generator))
    if seed % 3 == 0:
        count = capacity
    chosen = torch.randperm(length, generator=generator)[:count].sort().values
    behind = torch.randint(0, length, (capacity - count,), generator=generator)
    indices = torch.cat([chosen, behind]).to(torch.int32)
    return Selection(indices, torch.tensor(count, dtype=torch.int32) if on_device else count)


Offers = Callable[[int, int], Selection]


Works = Callable[[int, int], torch.Tensor]


def oktopk(op: ReduceOp = Average, wire: str = "auto") -> Make:
    return lambda store: OkTopkExchange(context(store, op, wire=wire))


def draws(
    segments: Sequence[Segment], density: float, seed: int, device: bool, magnitude: float
) -> tuple[Works, Offers]:
    def work(rank: int, index: int) -> torch.Tensor:
        return draw_work(segments[index], 100 * seed + 10 * index + rank, magnitude)

    def offer(rank: int, index: int) -> Selection:
        length = segments[index].length
        return draw_offer(length, round(density * length), 100 * seed + 10 * index + rank, device)

    return work, offer


def apart(segments: Sequence[Segment]) -> list[Segment]:
    """Return the same segments, with tensors of different names: the harness tells them apart by equality."""
    return [
        Segment(part.tensor_class, tuple(replace(slot, name=f"{slot.name} of {number}") for slot in part.slots))
        for number, part in enumerate(segments)
    ]


def masked(op: ReduceOp = Average, *, drawn: bool = False, ordered: bool = False, wire: str = "auto") -> Make:
    return lambda store: MaskedExchange(context(store, op, same_on_all_ranks=drawn, ordered=ordered, wire=wire))


@dataclass(frozen=True)
class SumInput:
    """Hold what ranks hand to a sparse sum: tensors of ``numels`` elements and one dtype, each a segment, as ahead."""

    size: int
    op: ReduceOp
    numels: list[int]
    dtype: torch.dtype
    density: float
    seed: int
    on_device: bool

    def segments(self) -> list[Segment]:
        tensor_class = TensorClass(CPU, self.dtype, Kind.SPARSE)
        return apart([part for numel in self.numels for part in segments_of([(numel, tensor_class)])])

    def draws(self, segments: Sequence[Segment], magnitude: float = 1.0) -> tuple[Works, Offers]:
        return draws(segments, self.density, self.seed, self.on_device, magnitude)


SUM_INPUTS = st.builds(
    SumInput,
    size=st.integers(1, 5),
    op=st.sampled_from([Average, Sum]),
    numels=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1000),
    on_device=st.booleans(),
)
