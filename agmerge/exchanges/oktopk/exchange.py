"""``oktopk``: a sparse all-reduce. The k largest elements of the sum are what all ranks get.

Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022, Algorithm 1: what ranks
select is cut by regions of the vector, each of which one rank adds up (split and reduce); the k largest of the sum
are handed round (balance and all-gather). That is at most ``6 k (W-1)/W`` words a rank, whatever W is; an all-gather
of everything that is selected is ``2 k (W-1)``. Both with plain indices; here they are packed
(:mod:`agmerge.exchanges.message.pairs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from agmerge.errors import MessageError
from agmerge.exchanges.base import InFlight, SegmentBuffers
from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.exchanges.message.pairs import IndexValuePairs, joined
from agmerge.exchanges.multi_round import MultiRoundExchange, Phases, State
from agmerge.exchanges.oktopk import histogram, regions
from agmerge.exchanges.oktopk.reduction import added, check_faults, check_kept, offered, within
from sparsifiers import Selection

SLACK = 1.125  # a rank's part of the result may be this much longer than the mean before any of it is moved


@dataclass
class _Message(State):
    """Indices are those of all segments one after the other, from ``starts`` on; the last of these is the length."""

    layout: Format | None = None
    starts: tuple[int, ...] = ()
    offer: IndexValuePairs | None = (
        None  # what this rank selected, ascending; behind its count, the length stands for nothing
    )
    kept: IndexValuePairs | None = None  # the result, ascending


class OkTopkExchange(MultiRoundExchange):
    """Split and reduce, one threshold for all ranks, balanced all-gather. The segments of a message are of one lane.

    With k what a rank may offer, never more than k elements are kept, and k where so many are offered: all above a
    bin of the magnitudes' histogram (see ``histogram``), and of that bin those of lowest index. A rank
    has sent what it offered of the elements that are kept; the rest stays in its residual, though it has travelled.
    Values are scaled and added in rank order, as ``sparse`` does, so an element that is kept has the same bits. Which
    are kept depends neither on how regions are cut nor on timing.

    ``start`` sends a header with the control numbers and a sample of the offer. How long later messages are is known
    only when all headers are there, so they follow in ``wait``. Better than ``sparse`` for large k on four ranks or
    more; where a call is dear and k is small, its six or seven calls cost more than they save.
    """

    carries_dense = mixes_lanes = False

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        chosen = [offer for offer in offers if offer is not None]
        segments = [load.segment for load in loads]
        if len(chosen) < len(loads) or len({segment.lane for segment in segments}) > 1:
            found = ", ".join(str(segment.lane) for segment in segments)
            raise ValueError(f"{name}: oktopk sends what is selected from one lane, and was given {found}")
        layout = self.format_of(name, loads, [offer.indices.numel() for offer in chosen])
        starts = (0, *accumulate(segment.length for segment in segments))
        offer = offered(loads, chosen, starts)
        counts = [selection.count for selection in chosen]
        words = torch.empty(1 + regions.number(_budget(layout)), dtype=torch.int32, device=offer.indices.device)
        words[0] = sum(counts)
        words[1:] = regions.sample(offer.indices, sum(counts), words.numel() - 1)
        header = 4 * layout.words
        message = self.keep(("header", name), header + words.nbytes, torch.uint8, words.device)
        received = self.keep(("headers", name), self.comm.size * message.numel(), torch.uint8, words.device)
        layout.write_header(message, control, counts)
        message[header:].view(torch.int32).copy_(words)
        elements = sum(min(one.indices.numel(), part.numel) for one, part in zip(chosen, segments, strict=True))
        handle = self.comm.all_gather(received, message, name)
        state = _Message(layout=layout, starts=starts, offer=offer)
        return self.follow(InFlight(name, loads, control, handle, message.numel(), elements, message, received, state))

    def phases(self, pending: InFlight) -> Phases[None]:
        state, name, rank = pending.extra, pending.name, self.comm.rank
        k, length, storage = _budget(state.layout), state.starts[-1], pending.loads[0].work.dtype
        headers = pending.received.view(self.comm.size, -1)
        state.control = state.layout.read_headers(headers, pending.control, name)
        words = headers[:, 4 * state.layout.words :].contiguous().view(torch.int32).cpu().numpy()
        counts: list[int] = words[:, 0].tolist()
        if not all(0 <= count <= k for count in counts):
            raise MessageError(f"{name}: ranks announce {counts} elements where {k} fit")
        state.offer = state.offer.first(counts[rank])
        state.kept = state.offer.first(0)
        if not any(counts):
            return

        # Split and reduce.
        cuts = regions.bounds(words[:, 1:], counts, length)
        table = yield from self.tell(pending, "counts", regions.split(state.offer.indices, cuts))
        if [sum(row) for row in table] != counts or min(map(min, table)) < 0:
            raise MessageError(f"{name}: ranks announce {counts} elements, and by region {table}")
        parts = [range(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
        pieces, fault = yield from self.trade(pending, "pieces", state.offer, table, [parts] * len(parts))
        mine = added(pieces, storage, self.scale)

        # One threshold for all.
        found = histogram.bins(mine.values)
        everywhere = yield from self.add_up(pending, "histogram", histogram.counted(found))
        edge, room = histogram.crossing(everywhere, k)
        tally = [int((found > edge).sum()), int((found == edge).sum()), fault]
        tallies = yield from self.tell(pending, "tally", tally)
        check_faults(name, [faulty for _, _, faulty in tallies], cuts)
        takes = histogram.allotted([at_edge for _, at_edge, _ in tallies], room)
        mine = mine.where(histogram.kept(found, edge, takes[rank]))
        mine = IndexValuePairs(mine.indices, mine.values.to(state.offer.values.dtype))

        # Balance and all-gather.
        held = [above + take for (above, _, _), take in zip(tallies, takes, strict=True)]
        equal = regions.shares(sum(held), self.comm.size)
        if max(held) > SLACK * equal[0]:
            table, ranges = regions.moves(held, equal), [[part] * len(parts) for part in parts]
            pieces, fault = yield from self.trade(pending, "surplus", mine, table, ranges)
            mine, held, parts = joined(pieces), equal, regions.covered(table, parts)
        kept, fault = yield from self.spread(pending, "kept", mine, held, parts, sound=not fault)
        check_kept(name, kept, fault)
        state.kept = joined(kept)

    def finish(self, pending: InFlight) -> None:
        state: _Message = pending.extra
        assert state.offer is not None and state.kept is not None
        sent = state.offer.where(within(state.offer.indices, state.kept.indices))
        parts = (one.split(regions.split(one.indices, state.starts)) for one in (state.kept, sent))
        for load, start, total, mine in zip(pending.loads, state.starts, *parts, strict=False):
            load.update.zero_().index_copy_(0, (total.indices - start).long(), total.values)
            self.commit(load.segment, mine.indices - start, mine.values)


def _budget(layout: Format) -> int:
    """How many elements each rank may offer, and all of them keep."""
    return sum(section.capacity or 0 for section in layout.sections)
