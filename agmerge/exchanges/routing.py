# SPDX-License-Identifier: Apache-2.0
"""Route of a merge buffer: how it is sent, which of its segments share a message, and by which exchange.

All functions are pure, with the same results on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import merging
import sparsifiers
from agmerge.exchanges import Exchange
from agmerge.exchanges.dense import LARGE
from agmerge.exchanges.message.scaled import VALUES
from agmerge.exchanges.oktopk.exchange import BINS
from agmerge.exchanges.oktopk.regions import POINTS
from agmerge.exchanges.quantised.exchange import SEED
from agmerge.tensors.layout import ALIGNMENT, Layout, Segment, Slot, TensorClass
from merging import Curve
from sparsifiers import Kind
from sparsifiers.quantising.base import VERSION

# Send modes: the one record of how merge buffers are sent, and its text as the label of a merge buffer in a plan.
#
# A label is words with spaces between them; without any, a buffer has the default mode, until times are measured. So
# whatever stores a plan, a checkpoint or the user's cache, stores its send modes with it.

AHEAD = "ahead"
OWN = "auto"  # the codec of a gradient's own dtype; the exchange that the options name; no quantiser chosen
MASKED, OKTOPK = SUMS = (
    "masked",
    "oktopk",
)  # exchanges that send k elements of the sum, which exchange="fastest" tries
# Versions that the bits of a quantiser depend on, in both phases: a plan with others is refused.
_VERSIONS = {"codec": str(VERSION), "seed": str(SEED)}
_THIS_VERSION = " ".join(f"{key}={value}" for key, value in _VERSIONS.items())
_STORED = {"quantizer": "quantiser"}  # plans are stored with the old spelling, and both are read
_WORDS = {"wire": "codec", "exchange": "exchange", "quantiser": "quantiser", "workers": "workers"}  # fields by word


@dataclass(frozen=True)
class SendMode:
    """Send mode of a merge buffer. All merge buffers of a plan have the same one, but for ``ahead``."""

    ahead: bool = False  # tensors are selected from one by one, before they are merged
    codec: str = OWN  # of selected values
    exchange: str = OWN  # of selections
    quantiser: str = OWN  # of quantised tensors, where there is a choice
    workers: int = 0  # among which the quantiser was chosen; 0: it was not

    @classmethod
    def parse(cls, label: str) -> SendMode:
        """Return the send mode of ``label``. Raises ``ValueError`` for an unknown word."""
        fields: dict[str, Any] = {}
        for word in label.split():
            key, _, value = word.partition("=")
            key = _STORED.get(key, key)
            if word == AHEAD:
                fields[AHEAD] = True
            elif _VERSIONS.get(key) == value:
                continue
            elif key in _VERSIONS:
                raise ValueError(
                    f"labels: {label!r} has {word!r}, but this version sends other bits, with {_THIS_VERSION}. Create "
                    "a new plan."
                )
            elif key == "workers" and value.isdigit():
                fields[key] = int(value)
            elif (
                (key == "wire" and value in VALUES)
                or (key == "exchange" and value in SUMS)
                or (key == "quantiser" and sparsifiers.is_quantiser(value))
            ):
                fields[_WORDS[key]] = value
            else:
                raise ValueError(
                    f"labels: {label!r} has the word {word!r}; there are {AHEAD!r} and, with a value codec, "
                    f"'wire=int8', with one of {', '.join(SUMS)} 'exchange={MASKED}', with a quantiser "
                    "'quantiser=eden-2' and the number of workers that it was chosen for 'workers=4'"
                )
        return cls(**fields)

    @property
    def label(self) -> str:
        """Return the label of this send mode: the words for what is not the default."""
        fields = asdict(self)
        words = [AHEAD] if self.ahead else []
        words += [f"{word}={fields[field]}" for word, field in _WORDS.items() if fields[field] not in (OWN, 0)]
        return " ".join(words + ([_THIS_VERSION] if self.quantiser != OWN else []))


def send_modes(plan: merging.Plan) -> list[SendMode]:
    """Return the send mode of each merge buffer. Raises as :meth:`SendMode.parse` does."""
    return [SendMode.parse(label) for label in plan.labels]


def send_mode(plan: merging.Plan) -> SendMode:
    """Return the send mode of the plan; it is ahead if any merge buffer is. Raises as :meth:`SendMode.parse` does."""
    modes = send_modes(plan)
    return replace(modes[0], ahead=any(mode.ahead for mode in modes))


def with_send_mode(plan: merging.Plan, **changes: Any) -> merging.Plan:
    """Return ``plan`` with other send modes; with one of ``SUMS``, each merge buffer is one message.

    ``changes``: fields of :class:`SendMode`, for all merge buffers.
    """
    parts = plan.parts if changes.get("exchange", OWN) == OWN else ()
    return replace(plan, labels=tuple(replace(mode, **changes).label for mode in send_modes(plan)), parts=parts)


def why_labels_are_wrong(plan: merging.Plan) -> str:
    """Return what is wrong with the labels of ``plan``; empty if nothing is."""
    try:
        modes = send_modes(plan)
    except ValueError as error:
        return str(error)
    names_of = {
        "wires": {mode.codec for mode in modes},
        "exchanges": {mode.exchange for mode in modes},
        "quantizers": {f"{mode.quantiser} for {mode.workers} workers" for mode in modes},
    }
    for what, names in names_of.items():
        if len(names) > 1:
            return f"its merge buffers have different {what}: {', '.join(sorted(names))}. Use one for all"
    return ""


# A merge buffer cut into several messages.


def why_parts_impossible(plan: merging.Plan) -> str:
    """Return why the merge buffers of ``plan`` cannot travel in its parts; empty if they can."""
    for buffer, (count, parts, mode) in enumerate(zip(plan.counts, plan.parts, send_modes(plan), strict=True)):
        if parts > 1 and count > 1 and mode.ahead:
            return (
                f"merge buffer {buffer} has {parts} parts, but each of its {count} tensors is sparsified ahead, "
                "before it is complete. Use 1 part, or sparsify='behind'"
            )
    return ""


def split(group: Sequence[Segment], parts: int) -> list[list[Segment]]:
    """Cut the segments of one message into at most ``parts`` messages.

    Every sparse segment is cut into ``parts`` pieces, as far as it is long enough, and each message has one of each;
    dense segments go with the first.
    """
    messages: list[list[Segment]] = [[] for _ in range(parts)]
    for segment in group:
        for message, piece in zip(
            messages, cut(segment, parts) if segment.tensor_class.sparse else [segment], strict=False
        ):
            message.append(piece)
    return [message for message in messages if message]


def cut(segment: Segment, parts: int) -> list[Segment]:
    """Cut ``segment``, of whole tensors, into at most ``parts`` pieces of about the same length.

    Cuts are multiples of ``ALIGNMENT``, and between two tensors, or else two rows of one, where such a place is
    within a quarter of a piece's length: row-wise sparsifiers then see whole rows.
    """
    each = segment.length / parts
    places = {_place(segment, segment.start + i * each, each / 4) for i in range(1, parts)}
    cuts = sorted(places | {segment.start, segment.stop})
    if len(cuts) == 2:
        return [segment]
    return [
        Segment(
            segment.tensor_class,
            tuple(slot for slot in segment.slots if slot.offset < stop and start < slot.end),
            (start, stop),
        )
        for start, stop in pairwise(cuts)
    ]


def _place(segment: Segment, goal: float, tolerance: float) -> int:
    """Choose where to cut near ``goal``: between tensors, else between rows, else anywhere."""
    slot = next(slot for slot in segment.slots if goal < slot.end)
    row = math.prod(slot.shape[1:]) if len(slot.shape) > 1 else 1
    places = [slot.offset, slot.end]
    places += [_nearest(slot, goal, math.lcm(row, ALIGNMENT)), _nearest(slot, goal, ALIGNMENT)]
    return next((place for place in places if abs(place - goal) <= tolerance), places[-1])


def _nearest(slot: Slot, goal: float, step: int) -> int:
    """Return the place nearest to ``goal``: a multiple of ``step`` behind where the tensor begins, or its end."""
    return min(slot.offset + round((goal - slot.offset) / step) * step, slot.end)


# Traffic of exchanges by the number of workers, for predictions.
#
# A selection travels as indices and values. With W workers, k elements, i bytes an index and v bytes a value, a rank
# receives ``(W - 1) k (i + v)`` bytes of an all-gather (``sparse``). A sparse all-reduce (``oktopk``) brings it ``2 k
# (i + v) (W - 1) / W``. Where all agree on the indices (``masked``), it receives ``k (i + 2 v) (W - 1) / W``. Each may
# send as many, so a link that is shared has W times that.

WORD = 4  # bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes and rounds of an exchange of k elements of every rank, as one rank receives them."""

    rounds: int  # collectives, each of which begins when the one before has ended
    indices: float  # bytes, for each byte that k indices take
    values: float  # bytes, for each byte that k values take
    fixed: float = 0.0  # bytes, however many elements there are

    def received(self, indices: float, values: float) -> float:
        """Return the bytes that a rank receives; of k elements, k indices and k values have so many bytes."""
        return self.indices * indices + self.values * values + self.fixed


def traffic_of(exchange: str, workers: int, *, coded: bool) -> Traffic:
    """Return the traffic of a message of selections; ``coded``: values have a codec of their own.

    The surplus of oktopk, which depends on the values, is left out. KeyError for an exchange that has no such figures.
    """
    others = workers - 1
    part = others / workers
    return {
        "sparse": Traffic(1, others, others),
        # Votes, and an all-reduce; or every rank's values of a share, and the sums of shares.
        "masked": Traffic(3 if coded else 2, part, 2 * part),
        "oktopk": Traffic(6, 2 * part, 2 * part, others * WORD * (POINTS + workers + 3) + 2 * part * WORD * BINS),
    }[exchange]


def exchanged_by(exchange: str, sparse: Curve, workers: int, index: float, value: float, *, coded: bool) -> Curve:
    """Return the seconds of an exchange over elements, from those of ``sparse``, which were measured.

    A message takes as long as one of ``sparse`` that brings as many bytes, and a start-up more for each further round.

    Args:
        index, value: bytes of an element that is selected.
        coded: values have a codec of their own.
    """
    one, other = (traffic_of(name, workers, coded=coded) for name in ("sparse", exchange))
    start = (other.rounds - 1) * sparse(0)
    points = {0: start + sparse(other.fixed / one.received(index, value))}
    for elements, seconds in zip(sparse.elements, sparse.seconds, strict=True):
        as_many = (elements * one.received(index, value) - other.fixed) / (other.received(index, value) - other.fixed)
        if as_many >= 1:
            points[round(as_many)] = start + seconds
    return Curve(tuple(points), tuple(points.values()))


# Messages, and the segments that share one.

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

    Per device, sparse segments share one, and so do quantised ones. A low-rank segment has its own, and so has a custom
    one. Dense ones share a message with a kind of ``ride``: with factors, which are all-reduced like them, if they have
    its dtype and are not so large that they would better be summed where they lie; with quantised ones, or alone in
    that format, see :func:`goes_quantised`; else with sparse ones while an all-gather is not much dearer than an
    all-reduce: it receives ``(W-1) m`` bytes instead of ``2 (W-1)/W m``. Every other segment has a message of its own.

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
        messages += [[segment] for segment in on_device if segment.tensor_class.kind is Kind.CUSTOM]
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
