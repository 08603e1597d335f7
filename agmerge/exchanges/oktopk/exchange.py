# SPDX-License-Identifier: Apache-2.0
"""Combine by a sparse all-reduce, ``oktopk``: all ranks get the k largest elements of the sum.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, Algorithm 1:
selections are cut by regions of the vector, each of which one rank adds up (split and reduce); the k largest of the sum
are handed round (balance and all-gather). That is at most ``6 k (W-1)/W`` words a rank, for any W; an all-gather
of all selections is ``2 k (W-1)``. Both with plain indices; here they are packed
(:mod:`agmerge.exchanges.message.pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import InFlight, SegmentBuffers
from agmerge.exchanges.message import value_codec
from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.exchanges.message.pairs import IndexValuePairs, joined, unread
from agmerge.exchanges.multi_round import MultiRoundExchange, Phases, State
from agmerge.exchanges.oktopk import histogram, regions
from agmerge.exchanges.oktopk.reduction import added, check_faults, check_kept, nonzero, offered, within
from sparsifiers import Selection

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
    bin of the magnitudes' histogram (see ``histogram``), and of that bin those of lowest index. Selected elements that
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
        bins = histogram.bin_of(own.values)
        total = yield from self.all_reduce(pending, "histogram", histogram.bin_counts(bins))
        edge, room = histogram.crossing(total, k)
        tally = [int((bins > edge).sum()), int((bins == edge).sum()), fault]
        tallies = yield from self.all_gather_ints(pending, "tally", tally)
        check_faults(name, [faulty for _, _, faulty in tallies], cuts)
        takes = histogram.allotted([at_edge for _, at_edge, _ in tallies], room)
        own = own.where(histogram.kept_in_bins(bins, edge, takes[rank]))
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
