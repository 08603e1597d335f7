# SPDX-License-Identifier: Apache-2.0
"""Decide which segments of a merge buffer share a message, and its exchange: pure, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from agmerge.exchanges import Exchange
from agmerge.exchanges.all_reduce import LARGE
from agmerge.tensors.layout import Layout, Segment, Slot, TensorClass
from sparsifiers import Kind

# Bytes that dense segments in a sparse message may add to those a rank receives, in place of an all-reduce of their
# own, which goes round twice: 2 (W-1) hops, each of which waits for a thread of another process. With four ranks on two
# cores, which share 200 Mbit/s, 184 KB more were worth it: steps of 418 ms, and of 437 ms with an all-reduce.
RIDE = 1 << 18


@dataclass(frozen=True)
class Message:
    """Segments of one merge buffer that share a message, and the exchange that takes them."""

    name: str  # of its collectives
    buffer: int  # number of the merge buffer
    exchange: Exchange
    segments: tuple[Segment, ...]

    @cached_property
    def selected(self) -> tuple[bool, ...]:
        """Return of each segment whether a sparsifier selects from it; else all of it is sent."""
        return tuple(self.exchange.sparse and segment.tensor_class.sparse for segment in self.segments)

    @cached_property
    def slots(self) -> list[Slot]:
        """Return the tensors of the message, in the order of its used bits."""
        return [slot for segment in self.segments for slot in segment.slots]


def segments(layout: Layout, start: int, stop: int, ahead: bool) -> list[Segment]:
    """Return the segments of a merge buffer of tensors ``start`` to ``stop``; ahead, each sparse tensor by itself."""
    merged = layout.segments(start, stop)
    if not ahead:
        return merged
    return [
        part
        for segment in merged
        for part in (
            [Segment(segment.tensor_class, (slot,)) for slot in segment.slots]
            if segment.tensor_class.sparse
            else [segment]
        )
    ]


def group_into_messages(
    segments: Sequence[Segment],
    size: int,
    ride: Collection[Kind] = (Kind.SPARSE,),
    bytes_of: Callable[[Segment], int] | None = None,
) -> list[list[Segment]]:
    """Decide which segments of a merge buffer share a message, between ``size`` ranks.

    Per device, sparse segments share one, and so do quantised ones. A low-rank segment has its own. Dense ones share
    a message with a kind of ``ride``: with factors, which are all-reduced like them, if they have its dtype and are not
    so large that they would better be summed where they lie; with quantised ones, or alone in that format, see
    :func:`goes_quantised`; else with sparse ones while an all-gather is not much dearer than an all-reduce: it receives
    ``(W-1) m`` bytes instead of ``2 (W-1)/W m``. Every other segment has a message of its own.

    ``bytes_of``: the bytes of a dense segment in a message with sparse ones; None: as it is.
    """
    messages: list[list[Segment]] = []
    for device in dict.fromkeys(segment.tensor_class.device for segment in segments):
        on_device = [segment for segment in segments if segment.tensor_class.device == device]
        sparse = [segment for segment in on_device if segment.tensor_class.sparse]
        dense = [segment for segment in on_device if segment.tensor_class.kind is Kind.DENSE]
        for segment in on_device:
            if segment.tensor_class.kind is Kind.LOW_RANK:
                along = []
                if Kind.LOW_RANK in ride:
                    along = [
                        d for d in dense if d.tensor_class.dtype == segment.tensor_class.dtype and d.length < LARGE
                    ]
                messages.append([segment, *along])
                dense = [other for other in dense if other not in along]
        quantised = [segment for segment in on_device if segment.tensor_class.kind is Kind.QUANTISED]
        along = [segment for segment in dense if goes_quantised(segment, ride)] if quantised or not sparse else []
        if quantised or along:
            messages.append([*quantised, *along])
            dense = [other for other in dense if other not in along]
        alone = sum(segment.nbytes for segment in dense)
        riding = alone if bytes_of is None else sum(map(bytes_of, dense))
        if Kind.SPARSE in ride and sparse and (size - 1) * (riding - 2 * alone / size) <= RIDE:
            messages.append(sparse + dense)
        else:
            messages += [sparse] if sparse else []
            messages += [[segment] for segment in dense]
    return messages


def goes_quantised(segment: Segment, ride: Collection[Kind]) -> bool:
    """Return whether a segment travels in a quantised message: quantised ones, and dense ones of no large tensor.

    Whether there are quantised ones in its merge buffer does not matter, nor how many tensors it has: from three ranks
    on a sum in rank order has other bits than an all-reduce, and no plan shall change any.
    """
    if segment.tensor_class.kind is Kind.DENSE:
        return Kind.QUANTISED in ride and max(slot.numel for slot in segment.slots) < LARGE
    return segment.tensor_class.kind is Kind.QUANTISED


def group_by(segments: Sequence[Segment], key: Callable[[TensorClass], Hashable]) -> list[list[Segment]]:
    """Make one message of the segments of which the tensor classes have the same key."""
    messages: dict[Hashable, list[Segment]] = {}
    for segment in segments:
        messages.setdefault(key(segment.tensor_class), []).append(segment)
    return list(messages.values())


def group_by_dtype(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Make one message of the dense segments of one device and dtype."""
    return group_by(segments, lambda tensor_class: (tensor_class.device, tensor_class.dtype))


def message_name(buffer: int, number: int) -> str:
    """Return the name of a message's collectives; ``number``: of the message in its merge buffer."""
    return f"buffer {buffer}" if number == 0 else f"buffer {buffer}.{number}"
