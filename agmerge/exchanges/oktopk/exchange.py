# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce, ``oktopk``: all ranks get the k largest elements of the sum.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, Algorithm 1: selections are
cut by regions of the vector, each of which one rank adds up (split and reduce); the k largest of the sum are handed
round (balance and all-gather). That is at most ``6 k (W-1)/W`` words a rank, for any W; an all-gather of all selections
is ``2 k (W-1)``. Both with plain indices; here they are packed (:mod:`agmerge.exchanges.multi_round`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import InFlight, SegmentBuffers
from agmerge.exchanges.message import value_codec
from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.exchanges.message.scaled import clear_behind
from agmerge.exchanges.multi_round import IndexValuePairs, MultiRoundExchange, Phases, State, joined, unread
from agmerge.exchanges.oktopk import regions
from agmerge.exchanges.sparse import without_zeros
from sparsifiers import Selection

# The k largest of a vector that no rank has whole, by a histogram of magnitudes that is added up.
#
# A bin is an exponent and the first three bits of the mantissa, so it is an eighth of a power of two wide. Larger
# magnitudes are in later bins: the first round of a radix selection. One round is enough here, since elements of the
# bin at the edge, kept or left for later steps, differ by 12.5 % at most.

BINS = 2048
_SHIFT = 20  # of the 23 bits of a float32's mantissa: three are left
_MAGNITUDE = 0x7FFFFFFF


def bin_of(values: torch.Tensor) -> torch.Tensor:
    """Return the bin of each of ``values``, float32 or float64: int32, 0 for zero and nothing else, the last for NaN.

    float64 goes by its float32, which is in the same order; values that are zero or infinite there share a bin.
    """
    bins = (values.float().view(torch.int32) & _MAGNITUDE) >> _SHIFT
    return torch.maximum(bins, (values != 0).to(torch.int32))


def bin_counts(bins: torch.Tensor) -> torch.Tensor:
    """Return how many are in each bin: int32[BINS]."""
    return torch.bincount(bins, minlength=BINS).to(torch.int32)


def crossing(counts: torch.Tensor, k: int) -> tuple[int, int]:
    """Return (edge, room): all of the bins above ``edge`` are among the ``k`` largest, and ``room`` of bin ``edge``.

    ``counts``: int32[BINS], of all ranks together. (-1, 0) if there are no more than ``k``: all of them are.
    """
    larger = counts.to(torch.int64).flip(0).cumsum(0)  # larger[i]: in the last i + 1 bins
    if int(larger[-1]) <= k:
        return -1, 0
    place = int(torch.searchsorted(larger, k, right=True))
    above = int(larger[place - 1]) if place else 0
    return len(counts) - 1 - place, k - above


def allotted(at_edge: Sequence[int], room: int) -> list[int]:
    """Return how many of its ``at_edge[rank]`` elements each rank may keep of ``room``, the first ranks first."""
    before = [0, *accumulate(at_edge)]
    return [min(max(room - earlier, 0), own) for earlier, own in zip(before, at_edge, strict=False)]


def kept_in_bins(bins: torch.Tensor, edge: int, take: int) -> torch.Tensor:
    """Return which elements are above bin ``edge``, or the first ``take`` of it: bool, in the shape of ``bins``."""
    mask = bins > edge
    mask[(bins == edge).nonzero().view(-1)[:take]] = True
    return mask


# Pairs of indices and values, made, added up and checked by pure functions.


def nonzero(work: torch.Tensor, offer: Selection) -> Selection:
    """Return ``offer`` without the elements of ``work``, 1-D, that are 0; with as many entries."""
    values = clear_behind(work.index_select(0, offer.indices), offer.count)
    return without_zeros(offer, values)[0]


def offered(
    loads: Sequence[SegmentBuffers], offers: Sequence[Selection], starts: Sequence[int], dtype: torch.dtype
) -> IndexValuePairs:
    """Return the selections of all segments as pairs, ascending, in ``dtype``, saturated.

    Indices (int32) count from ``starts[i]`` in segment i. Counts on a device are not read: entries behind
    one get the index ``starts[-1]``, and come last. ValueError if the segments together have 2**31 elements or more.
    """
    if starts[-1] >= 2**31:
        raise ValueError(
            f"exchange='oktopk': a merge buffer of {starts[-1]} elements is too large for int32 indices. Use smaller "
            "merge buffers."
        )
    parts = []
    for load, offer, start in zip(loads, offers, starts, strict=False):
        known = not isinstance(offer.count, torch.Tensor)
        indices = offer.indices[: offer.count] if known else offer.indices
        values = load.work.index_select(0, indices)
        if values.dtype != dtype:
            limit = torch.finfo(dtype).max
            values = values.clamp_(-limit, limit).to(dtype)
        indices = indices + start
        if not known:
            behind = torch.arange(indices.numel(), device=indices.device) >= offer.count
            indices.masked_fill_(behind, starts[-1])
        parts.append(IndexValuePairs(indices, values))
    whole = joined(parts)
    if len(parts) > 1 and any(isinstance(offer.count, torch.Tensor) for offer in offers):
        order = torch.argsort(whole.indices, stable=True)
        whole = IndexValuePairs(whole.indices[order], whole.values[order])
    return whole


def added(pieces: Sequence[IndexValuePairs], dtype: torch.dtype, scale: float) -> IndexValuePairs:
    """Return the sum of ``scale * values`` of all pieces, in their order, in ``dtype``; each index once, ascending."""
    whole = torch.cat([piece.indices for piece in pieces])
    indices, places = torch.unique(whole, return_inverse=True)
    total = torch.zeros(indices.numel(), dtype=dtype, device=indices.device)
    for piece, targets in zip(pieces, torch.split(places, [piece.indices.numel() for piece in pieces]), strict=True):
        total.index_add_(0, targets, piece.values.to(dtype) * scale)
    return IndexValuePairs(indices, total)


def within(some: torch.Tensor, all_: torch.Tensor) -> torch.Tensor:
    """Return which of ``some`` are in ``all_``, both ascending: bool, in the shape of ``some``."""
    if not all_.numel():
        return torch.zeros(some.numel(), dtype=torch.bool, device=some.device)
    if some.device.type == "cpu":  # numpy goes on from the place of the index before: half of torch's time
        places = torch.from_numpy(np.searchsorted(all_.numpy(), some.numpy()))
    else:
        places = torch.searchsorted(all_, some)
    return all_[places.clamp_(max=all_.numel() - 1)] == some


def check_faults(name: str, faults: Sequence[int], cuts: Sequence[int]) -> None:
    """Raise :class:`agmerge.MessageError` if a rank was sent a piece that is damaged.

    ``faults``: by receiver, 1 + the sender of a damaged piece; else 0. ``cuts``: of the regions.
    """
    for rank, fault in enumerate(faults):
        if fault:
            raise MessageError(
                f"AGM501: {name}: the message of rank {fault - 1} to rank {rank} was damaged in transit, or its "
                f"indices are not ascending within {cuts[rank]} to {cuts[rank + 1] - 1}. Check the network and the "
                "memory of its machine. A sparsifier's indices must be ascending and in range."
            )


def check_kept(name: str, kept: Sequence[IndexValuePairs], fault: int) -> None:
    """Raise :class:`agmerge.MessageError` if ranks' results do not ascend from one to the next, or one is damaged.

    ``fault``: 1 + the rank of the damaged one; else 0.
    """
    last = -1
    for rank, parcel in enumerate(kept):
        indices = parcel.indices
        if fault == rank + 1 or (indices.numel() and int(indices[0]) <= last):
            raise MessageError(
                f"AGM501: {name}: the result of rank {rank} is damaged: its checksum is wrong, or its indices are not "
                f"ascending from {last + 1}"
            )
        last = int(indices[-1]) if indices.numel() else last


# The exchange.

SLACK = 1.125  # a rank's share of the result may be this much longer than the mean before any of it is moved


@dataclass
class _State(State):
    """State of a message under way. Indices count over all segments, one after the other."""

    layout: Format | None = None  # of the header
    starts: tuple[int, ...] = ()  # where each segment begins among the indices; the last of these is the length
    # This rank's selection, ascending; entries behind its count have the length as index.
    offer: IndexValuePairs | None = None
    kept: IndexValuePairs | None = None  # the result, ascending; None: not there yet
    # The quantisation error of sums that this rank has written, divided by the scale of sums.
    unread: list[IndexValuePairs] = field(default_factory=list)


class OkTopkExchange(MultiRoundExchange):
    """Sparse all-reduce of all ranks' selections to the k largest elements of their sum.

    1. Header: each rank sends its control numbers, its count and a sample of its selection, by an all-gather under
       backward. How long later messages are is known only when all headers are there, so they follow in ``wait``.
    2. Split and reduce: the samples cut the vector into one region a rank; every selection is cut along them, its
       pieces go to the ranks of their regions (all-to-all), and each rank adds up the pieces it gets, in rank order.
    3. One threshold: an all-reduce adds up the histograms of the sums' magnitudes. The counts give the last bin of
       which elements are kept, and how many of them each rank may keep.
    4. Balance and all-gather: where one rank holds much more than the mean, the surplus goes to others (all-to-all);
       then every rank gets all of the result.
    5. The update is the result. Each rank subtracts from its work the values of its selection that are kept, as read.

    Values travel in ``context.wire``. Each rank keeps the quantisation error of its own selection, and of the sums that
    it writes in phase 4: so nothing is lost. A codec that has no code for 0 is given no 0.

    With k the capacity of a selection, at most k elements are kept, and k where so many are selected: all above a
    bin of the magnitudes' histogram (see :func:`bin_of`), and of that bin those of lowest index. Selected elements that
    are not kept stay in the residual, though they have travelled. Values are scaled and added in rank order, as
    ``sparse`` does, so an element that is kept has the same bits. Which are kept depends neither on how regions are cut
    nor on timing. The segments of a message are of one tensor class.

    Better than ``sparse`` for large k on four ranks or more. Where a call is dear and k is small, its six or seven
    calls cost more than they save.
    """

    carries_dense = mixes_classes = False

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send the header; values stay here until all headers are there."""
        chosen = [offer for offer in offers if offer is not None]
        segments = [load.segment for load in loads]
        if len(chosen) < len(loads) or len({segment.tensor_class for segment in segments}) > 1:
            classes = ", ".join(str(segment.tensor_class) for segment in segments)
            raise ValueError(f"{name}: exchange='oktopk' requires tensors of one class, got {classes}")
        layout = self.format_of(name, loads, [offer.indices.numel() for offer in chosen])
        starts = (0, *accumulate(segment.length for segment in segments))
        tensor_class = segments[0].tensor_class
        if not value_codec(self.context.wire, tensor_class.dtype).has_zero:
            chosen = [nonzero(load.work, offer) for load, offer in zip(loads, chosen, strict=True)]
        offer = offered(
            loads, chosen, starts, tensor_class.dtype if self.context.wire == "auto" else tensor_class.storage
        )
        counts = [selection.count for selection in chosen]
        words = torch.empty(1 + regions.number(_budget(layout)), dtype=torch.int32, device=offer.indices.device)
        words[0] = sum(counts)
        words[1:] = regions.sample(offer.indices, sum(counts), words.numel() - 1)
        header = 4 * layout.words
        message = self.keep(("header", name), header + words.nbytes, torch.uint8, words.device)
        received = self.keep(("headers", name), self.comm.size * message.numel(), torch.uint8, words.device)
        layout.write_header(message, control, counts)
        message[header:].view(torch.int32).copy_(words)
        elements = sum(min(pick.indices.numel(), part.numel) for pick, part in zip(chosen, segments, strict=True))
        handle = self.comm.all_gather(received, message, name)
        state = _State(layout=layout, starts=starts, offer=offer)
        return self.schedule(
            InFlight(
                name,
                loads,
                control,
                handle,
                message.numel(),
                elements,
                message,
                received,
                state,
                codecs={"header": message.numel()},
            )
        )

    def phases(self, pending: InFlight) -> Phases[None]:
        """Collective. Reduce the selections to the result, once all headers are there: phases 2 to 4."""
        state, name, rank = pending.extra, pending.name, self.comm.rank
        k, length = _budget(state.layout), state.starts[-1]
        storage, dtype = pending.loads[0].work.dtype, state.offer.values.dtype
        headers = pending.received.view(self.comm.size, -1)
        state.control = state.layout.read_headers(headers, pending.control, name)
        words = headers[:, 4 * state.layout.words :].contiguous().view(torch.int32).cpu().numpy()
        counts: list[int] = words[:, 0].tolist()
        if not all(0 <= count <= k for count in counts):
            raise MessageError(f"AGM501: {name}: ranks sent {counts} elements, expected at most {k}")
        state.offer = state.offer.first(counts[rank])
        state.kept = state.offer.first(0)
        if not any(counts):
            return

        # 2. Split and reduce.
        cuts = regions.bounds(words[:, 1:], counts, length)
        table = yield from self.all_gather_ints(pending, "counts", regions.split(state.offer.indices, cuts))
        if [sum(row) for row in table] != counts or min(map(min, table)) < 0:
            raise MessageError(f"AGM501: {name}: ranks sent {counts} elements, but {table} by region")
        parts = [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
        everywhere = [parts] * len(parts)
        pieces, seen, fault = yield from self.all_to_all_pairs(pending, "pieces", state.offer, table, everywhere)
        state.offer = IndexValuePairs(state.offer.indices, seen)
        own = added(pieces, storage, self.scale)
        if not value_codec(self.context.wire, dtype).has_zero:
            own = own.where(own.values != 0)

        # 3. One threshold for all.
        bins = bin_of(own.values)
        total = yield from self.all_reduce(pending, "histogram", bin_counts(bins))
        edge, room = crossing(total, k)
        tally = [int((bins > edge).sum()), int((bins == edge).sum()), fault]
        tallies = yield from self.all_gather_ints(pending, "tally", tally)
        check_faults(name, [faulty for _, _, faulty in tallies], cuts)
        takes = allotted([at_edge for _, at_edge, _ in tallies], room)
        own = own.where(kept_in_bins(bins, edge, takes[rank]))
        own = IndexValuePairs(own.indices, own.values.to(dtype))

        # 4. Balance and all-gather.
        held = [above + take for (above, _, _), take in zip(tallies, takes, strict=True)]
        equal = regions.shares(sum(held), self.comm.size)
        if max(held) > SLACK * equal[0]:
            table, ranges = regions.moves(held, equal), [[part] * len(parts) for part in parts]
            pieces, seen, fault = yield from self.all_to_all_pairs(pending, "surplus", own, table, ranges)
            state.unread.append(unread(own, seen, 1 / self.scale))
            own, held, parts = joined(pieces), equal, regions.covered(table, parts)
        kept, seen, fault = yield from self.all_gather_pairs(pending, "kept", own, held, parts, sound=not fault)
        check_kept(name, kept, fault)
        state.unread.append(unread(own, seen, 1 / self.scale))
        state.kept = joined(kept)

    def finish(self, pending: InFlight) -> None:
        state: _State = pending.extra
        assert state.offer is not None and state.kept is not None
        sent = state.offer.where(within(state.offer.indices, state.kept.indices))
        parts = (pairs.by_part(state.starts) for pairs in (state.kept, sent))
        for load, total, own in zip(pending.loads, *parts, strict=True):
            load.update.zero_().index_copy_(0, total.indices.long(), total.values.to(load.update.dtype))
            self.store.subtract_sent(load.segment, own.indices, own.values)
        for errors in state.unread:
            if len(errors.indices):
                for load, part in zip(pending.loads, errors.by_part(state.starts), strict=True):
                    self.store.add_unsent(load.segment, part.indices, part.values)


def _budget(layout: Format) -> int:
    """Return k: the number of elements that each rank may select, and that all of them together keep."""
    return sum(section.capacity or 0 for section in layout.sections)
