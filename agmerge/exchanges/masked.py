# SPDX-License-Identifier: Apache-2.0
"""Agree on one index set for all ranks, and add up values there by an all-reduce: ``masked``.

No rank sends indices of its own with its values, so messages do not grow with the number of workers: an index for each
of k elements, in votes, and an all-reduce of k values, where an all-gather receives ``k (W-1)`` of both. Where the
sparsifier draws the same coordinates on every rank by itself (randomk), there is no vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from agmerge.errors import MessageError
from agmerge.exchanges import dense, mask_votes
from agmerge.exchanges.base import ExchangeContext, InFlight, SegmentBuffers
from agmerge.exchanges.dense import decode, largest_summand, tail_of
from agmerge.exchanges.message.format import Flag, Format, RoundHeader
from agmerge.exchanges.multi_round import MultiRoundExchange, Phases, State
from sparsifiers import Selection

_DIGITS, _BASE = 4, 8  # of a checksum, one-hot
_NUMBER = 4  # bytes of the number, behind the votes, that stands for masks without a vote


@dataclass
class _State(State):
    """State of a message under way; lists are by load."""

    header: Format | None = None  # in front of the votes
    votes: mask_votes.VoteFormat | None = None  # None: nothing is voted on
    known: list[torch.Tensor | None] = field(default_factory=list)  # the mask of a load; None: it is voted on
    masks: list[torch.Tensor] = field(default_factory=list)  # int32 or int64, once all ranks agree on them
    sums: list[dense.Sum] = field(default_factory=list)  # values under way, one for each dtype
    totals: dict[int, torch.Tensor] = field(default_factory=dict)  # by load: its slice of a sum, a view
    tail: torch.Tensor | None = None  # numbers behind the first sum: digits of the masks, then the header


class MaskedExchange(MultiRoundExchange):
    """Exchange of values at a mask that all ranks agree on; one all-reduce adds them up.

    1. Each rank names k/W of the coordinates of its share in this step (:mod:`agmerge.exchanges.mask_votes`).
       One all-gather brings the votes to all ranks, under backward.
    2. All coordinates that are named make the mask: at most k elements, and at least 0.8 k. Each rank subtracts its
       values at the mask from its work. An all-reduce adds them up, after backward, for all merge buffers together.
    3. The update is the sum at the mask, and zero elsewhere.

    Where ``context.wire`` names a codec, values do not add up on their way: each rank is sent a share of the mask from
    all others, adds it up in rank order, and hands the sums round (:meth:`MultiRoundExchange.add_up_values`). A rank
    keeps the quantisation error of its own values, and of its share of the sums. Values then leave after backward.

    Two masks need no vote. With ``context.same_on_all_ranks`` selections depend on (seed, key, step) alone, so they
    are the mask; and where k is all of a segment, the mask is all of it. Without a vote, and without a codec,
    there is one round: a checksum of the mask and the control numbers travel behind the values. With
    ``context.ordered`` values are added in rank order.

    A mask by vote is no rank's own selection. With gradients that have little in common, residuals are about as large
    as with an own selection of k/W; with gradients that agree, about as large as with ``sparse``.
    """

    carries_dense = False  # a dense segment is an all-reduce already
    sends_zeros = True  # at indices that other ranks have named

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        self.drawn, self.ordered, self.coded = context.same_on_all_ranks, context.ordered, context.wire != "auto"
        self.can_poll = self.drawn and not self.ordered  # else something is sent after the first handle

    def start(
        self, name: str, loads: Sequence[SegmentBuffers], offers: Sequence[Selection | None], control: RoundHeader
    ) -> InFlight:
        """Collective. Send this rank's votes, or its values where no vote is needed."""
        chosen = [offer for offer in offers if offer is not None]
        if len(chosen) < len(loads):
            raise ValueError(
                f"{name}: a segment without a selection is not supported in a message of exchange='masked'"
            )
        whole = [offer.indices.numel() >= load.segment.numel for offer, load in zip(chosen, loads, strict=True)]
        known = [
            _all(load) if all_of_it else offer.indices if self.drawn else None
            for load, offer, all_of_it in zip(loads, chosen, whole, strict=True)
        ]
        if not self.coded and (self.drawn or all(whole)):
            return self._start_agreed(name, loads, [mask for mask in known if mask is not None], control)
        workers, device = self.comm.size, loads[0].work.device
        budgets = [offer.indices.numel() if mask is None else 0 for offer, mask in zip(chosen, known, strict=True)]
        slots = [mask_votes.slots(k, workers) for k in budgets]
        votes = mask_votes.VoteFormat([load.segment.length for load in loads], slots, workers)
        header = self.format_of(name, loads, [0] * len(loads))  # votes follow it
        size = header.size + votes.size + (_NUMBER if self.drawn else 0)
        message = self.keep(("votes", name), size, torch.uint8, device)
        received = self.keep(("all votes", name), size * workers, torch.uint8, device)
        header.write_header(message, control, [0] * len(loads))
        share = mask_votes.share_of(self.comm.rank, workers, control.step)
        named = [torch.empty(0, dtype=torch.int64, device=device)] * len(loads)
        for i, (load, offer, k) in enumerate(zip(loads, chosen, budgets, strict=True)):
            if k and not control.flags & Flag.REPLAN:
                most = mask_votes.quota(k, workers, share)
                named[i] = mask_votes.vote(load.work, offer.trimmed(), share, workers, most)
        votes.write(named, share, message[header.size : header.size + votes.size])
        if self.drawn:
            message[-_NUMBER:].view(torch.int32).copy_(number_of([mask for mask in known if mask is not None], device))
        handle = self.comm.all_gather(received, message, name)
        state = _State(header=header, votes=votes, known=known)
        codecs = {"votes": votes.size, "header": size - votes.size}
        return self.schedule(InFlight(name, loads, control, handle, size, 0, message, received, state, codecs=codecs))

    def _start_agreed(
        self,
        name: str,
        loads: Sequence[SegmentBuffers],
        masks: list[torch.Tensor],
        control: RoundHeader,
    ) -> InFlight:
        """Collective. Send values at masks that all ranks know already."""
        state = _State(masks=masks)
        digits = checksum(masks)
        self._send(name, loads, state, torch.cat([digits, tail_of(control, torch.float32, digits.device)]))
        first = state.sums[0]
        elements = sum(_real(load, mask) for load, mask in zip(loads, state.masks, strict=True))
        size = sum(part.bytes for part in state.sums)
        return InFlight(name, loads, control, first.handle, size, elements, first.message, first.message, state)

    def arrived(self, pending: InFlight) -> bool:
        return self.can_poll and all(part.handle.done() for part in pending.extra.sums)

    def wait(self, pending: InFlight) -> RoundHeader:
        """Collective. Count the votes of all messages under way, if there are any; then wait for this one's values."""
        state: _State = pending.extra
        control = None if state.votes is None else super().wait(pending)
        for part in state.sums:
            dense.wait_for_sum(self.comm, part, self.timeout)
        return self._decode(pending, state) if control is None else control

    def phases(self, pending: InFlight) -> Phases[None]:
        """Collective. Make the mask of all votes and send the values; none, if the round will be repeated."""
        state: _State = pending.extra
        assert state.header is not None and state.votes is not None
        messages = pending.received.view(self.comm.size, -1)
        state.control = state.header.read_headers(messages, pending.control, pending.name)
        if state.control.flags & Flag.REPLAN:
            return
        by_rank = []
        for rank, message in enumerate(messages):
            share = mask_votes.share_of(rank, self.comm.size, pending.control.step)
            named = state.votes.read(message[state.header.size :][: state.votes.size], share)
            if named is None:
                raise MessageError(
                    f"AGM501: {pending.name}: the selection of rank {rank} was damaged in transit, or is out of "
                    "range. Check the network and the memory of its machine. A sparsifier's indices must be in range."
                )
            by_rank.append(named)
        if self.drawn and (messages[:, -_NUMBER:] != messages[0, -_NUMBER:]).any():
            raise _drawn_apart(pending.name, state.control)
        for mask, named_by_all in zip(state.known, zip(*by_rank, strict=True), strict=True):
            state.masks.append(mask_votes.merge_votes(named_by_all) if mask is None else mask)
        pending.elements = sum(_real(load, mask) for load, mask in zip(pending.loads, state.masks, strict=True))
        if self.coded:
            yield from self._add_up(pending, state)
            return
        # `wait` waits for sums one by one, so that an update is written while those behind it travel.
        self._send(f"{pending.name}/values", pending.loads, state, torch.empty(0, device=messages.device))
        pending.count({"plain": sum(part.bytes for part in state.sums)})

    def _add_up(self, pending: InFlight, state: _State) -> Phases[None]:
        """Collective. Add up the values at the masks in the codec, all of one dtype together; commit them."""
        for number, dtype in enumerate(dict.fromkeys(load.work.dtype for load in pending.loads)):
            members = [i for i, load in enumerate(pending.loads) if load.work.dtype == dtype]
            lengths = [state.masks[i].numel() for i in members]
            if not any(lengths):
                continue
            values = torch.cat([pending.loads[i].work.index_select(0, state.masks[i]) for i in members])
            sums, seen, errors, fault = yield from self.add_up_values(pending, f"values {number}", values)
            if fault:
                raise MessageError(
                    f"AGM501: {pending.name}: the sums that rank {fault - 1} sent or received are damaged. Check the "
                    "network and the memory of its machine."
                )
            ends = [0, *accumulate(lengths)]
            by_load = (torch.split(sums, lengths), torch.split(seen, lengths), errors.by_part(ends))
            for i, total, sent, unread in zip(members, *by_load, strict=True):
                state.totals[i], segment, mask = total, pending.loads[i].segment, state.masks[i]
                self.store.subtract_sent(segment, mask, sent)
                self.store.add_unsent(segment, mask[unread.indices], unread.values)

    def _send(self, name: str, loads: Sequence[SegmentBuffers], state: _State, tail: torch.Tensor) -> None:
        """Collective. Start the sums of values at the masks, one for each dtype; ``tail`` goes behind the first.

        ``tail``: 1-D, the same length on all ranks.
        """
        for number, dtype in enumerate(dict.fromkeys(load.segment.tensor_class.dtype for load in loads)):
            members = [i for i, load in enumerate(loads) if load.segment.tensor_class.dtype == dtype]
            lengths = [state.masks[i].numel() for i in members]
            behind = tail if number == 0 else tail[:0]
            used = sum(lengths) + behind.numel()
            length = used + (-used % self.comm.size if self.ordered else 0)  # whole shards
            if not length:
                continue
            message = self.keep(("values", name, number), length, dtype, loads[0].work.device)
            *parts, sent_tail, padding = torch.split(message, [*lengths, behind.numel(), length - used])
            for i, part in zip(members, parts, strict=True):
                part.copy_(_values(loads[i], state.masks[i], self.comm.size))
                self.store.subtract_sent(loads[i].segment, state.masks[i], part)  # before it is summed in place
                state.totals[i] = part
            sent_tail.copy_(behind)
            padding.zero_()
            if number == 0:
                state.tail = sent_tail
            received = self.keep(("shards", name, number), length, dtype, message.device) if self.ordered else None
            state.sums.append(dense.start_sum(self.comm, message, received, f"{name}/{number}" if number else name))

    def _decode(self, pending: InFlight, state: _State) -> RoundHeader:
        """Return the merged header behind the values; :class:`agmerge.MessageError` if masks differ."""
        assert state.tail is not None
        numbers = state.tail.tolist()
        digits, header = numbers[: _DIGITS * _BASE], numbers[_DIGITS * _BASE :]
        control = decode(header, pending.control, pending.name)
        # A rank that sends nothing but a flag has drawn nothing.
        hot = [sum(value != 0.0 for value in digits[at : at + _BASE]) for at in range(0, len(digits), _BASE)]
        if not control.flags & Flag.REPLAN and hot != [1] * _DIGITS:
            raise _drawn_apart(pending.name, control)
        return control

    def finish(self, pending: InFlight) -> None:
        state: _State = pending.extra
        for i, (load, mask) in enumerate(zip(pending.loads, state.masks, strict=True)):
            load.update.zero_()
            if mask.numel():
                load.update.index_copy_(0, mask.long(), (state.totals[i] * self.scale).to(load.update.dtype))


def number_of(masks: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a number below 4093 that stands for ``masks`` (int32 or int64): int64, 0-dim. Waits for no device."""
    number = torch.zeros((), dtype=torch.int64, device=device)
    for mask in masks:
        places = torch.arange(1, mask.numel() + 1, device=mask.device)
        number = (31 * number + ((mask.long() + 1) * (2 * places + 1)).sum()) % 4093
    return number


def checksum(masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digits of the number that stands for ``masks`` (int32 or int64): one-hot, float32[32].

    One-hot digits can be summed: where all ranks have the same, one position of each is not zero. Waits for no device.
    """
    number = number_of(masks, masks[0].device)
    digits = torch.stack([number // _BASE**i % _BASE for i in range(_DIGITS)])
    return (digits[:, None] == torch.arange(_BASE, device=digits.device)).flatten().float()


def _drawn_apart(name: str, control: RoundHeader) -> MessageError:
    """Return the error of ranks that do not have the same mask."""
    return MessageError(
        f"AGM504: {name}: ranks selected different coordinates in step {control.step}. Use the same compressor and "
        "seed on every rank, and load a checkpoint of the same step on all of them."
    )


def _all(load: SegmentBuffers) -> torch.Tensor:
    """Return the mask of all elements: int64[length]."""
    return torch.arange(load.segment.length, device=load.work.device)


def _values(load: SegmentBuffers, mask: torch.Tensor, workers: int) -> torch.Tensor:
    """Return ``work`` at the mask; where it is wider than the gradient, saturated so that the sum of all ranks fits."""
    values = load.work.index_select(0, mask)
    if load.segment.tensor_class.dtype != values.dtype:
        limit = largest_summand(load.segment.tensor_class.dtype, workers)
        values = values.clamp_(-limit, limit)
    return values


def _real(load: SegmentBuffers, mask: torch.Tensor) -> int:
    """Count the elements that a mask sends, padding apart where everything is sent."""
    return min(mask.numel(), load.segment.numel)
