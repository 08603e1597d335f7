"""Exchanges in phases: what follows the first collective is written as one generator, and all messages go in step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from agmerge.backends import Backend, Handle
from agmerge.exchanges.base import Commit, Exchange, InFlight
from agmerge.exchanges.message.format import RoundHeader
from agmerge.exchanges.message.pairs import IndexValuePairs, PairFormat, read, write
from agmerge.ops import ReduceOp

T = TypeVar("T")
Phases = Generator[Handle, None, T]  # yields each collective that it starts; goes on when that has ended


@dataclass
class State:
    """``extra`` of a message under way. ``control``: what all ranks say together, once that is known."""

    phases: Phases[None] | None = None
    control: RoundHeader | None = None


class MultiRoundExchange(Exchange):
    """An exchange whose later messages depend on earlier ones. ``start`` sends the first and calls ``follow``.

    The rest happens in ``wait``, where all messages under way advance together, phase by phase in the order in which
    they were started. That is the plan's, so all ranks make the same calls in the same order, whatever arrives when;
    and a step pays the latency of a phase once, and not once for each message.

    ``payload``: whether checksums cover what later messages carry, beside the first one's header.
    """

    def __init__(self, comm: Backend, op: ReduceOp, commit: Commit, timeout: float, *, payload: bool = True) -> None:
        super().__init__(comm, op, commit, timeout)
        self.payload = payload
        self._under_way: dict[str, InFlight] = {}

    @abstractmethod
    def phases(self, pending: InFlight) -> Phases[None]:
        """Collective. Everything behind the first collective, which has ended when this begins. Sets the
        control numbers.
        """

    def follow(self, pending: InFlight) -> InFlight:
        """Have ``phases`` run in the next ``wait``; a message of this name that was never waited for is forgotten."""
        pending.extra.phases = self.phases(pending)
        self._under_way.pop(pending.name, None)  # the new one goes to the end
        self._under_way[pending.name] = pending
        return pending

    @property
    def can_poll(self) -> bool:
        return False  # without a wait nothing goes on

    def arrived(self, pending: InFlight) -> bool:
        return pending.name not in self._under_way

    def wait(self, pending: InFlight) -> RoundHeader:
        try:
            while pending.name in self._under_way:
                for one in list(self._under_way.values()):
                    self._advance(one)
        except BaseException:
            self._under_way.clear()  # what is left of them would be calls that other ranks do not make
            raise
        control: RoundHeader | None = pending.extra.control
        assert control is not None, f"{pending.name}: an earlier wait has failed"
        return control

    def _advance(self, pending: InFlight) -> None:
        pending.handle.wait(self.timeout)
        following = next(pending.extra.phases, None)
        if following is None:
            del self._under_way[pending.name]
        else:
            pending.handle = following

    # -- phases that exchanges are made of: ``yield from`` them ----------------------------------------------------

    def tell(self, pending: InFlight, what: str, numbers: Sequence[int]) -> Phases[list[list[int]]]:
        """Collective. What every rank says, as many numbers (int32) from each."""
        mine = torch.tensor(numbers, dtype=torch.int32, device=pending.message.device)
        rows = mine.new_empty(self.comm.size * len(numbers))
        pending.bytes += mine.nbytes
        yield self.comm.all_gather(rows, mine, f"{pending.name}/{what}")
        found: list[list[int]] = rows.view(self.comm.size, -1).tolist()
        return found

    def add_up(self, pending: InFlight, what: str, numbers: torch.Tensor) -> Phases[torch.Tensor]:
        """Collective. The sum of all ranks' ``numbers``, in place."""
        pending.bytes += numbers.nbytes
        yield self.comm.all_reduce(numbers, f"{pending.name}/{what}")
        return numbers

    def trade(
        self,
        pending: InFlight,
        what: str,
        mine: IndexValuePairs,
        table: list[list[int]],
        ranges: Sequence[Sequence[range]],
    ) -> Phases[tuple[list[IndexValuePairs], int]]:
        """Collective. Cut ``mine`` into ``table[own rank]`` pieces and send piece r to rank r; the pieces that
        arrive, by rank.

        Also 1 + the first rank whose piece is damaged, or does not ascend in its range, ``ranges[from][to]``; else 0.
        """
        dtype, rank = mine.values.dtype, self.comm.rank
        sent = [PairFormat(*one, dtype) for one in zip(ranges[rank], table[rank], strict=True)]
        arriving = [PairFormat(one[rank], row[rank], dtype) for one, row in zip(ranges, table, strict=True)]
        sizes, out_sizes = ([form.size for form in forms] for forms in (sent, arriving))
        message = self._bytes(pending, what, sum(sizes))
        received = self._bytes(pending, f"{what} received", sum(out_sizes))
        write(sent, mine.split(table[rank]), message, self.payload, sound=True)
        pending.bytes += message.numel()
        yield self.comm.all_to_all(received, message, out_sizes, sizes, f"{pending.name}/{what}")
        pieces, good = read(arriving, torch.split(received, out_sizes), self.payload)
        return pieces, 0 if all(good) else 1 + good.index(False)

    def spread(
        self,
        pending: InFlight,
        what: str,
        mine: IndexValuePairs,
        held: Sequence[int],
        ranges: Sequence[range],
        sound: bool,
    ) -> Phases[tuple[list[IndexValuePairs], int]]:
        """Collective. The pairs of all ranks, of which rank r has ``held[r]``, in ``ranges[r]``; messages are as long
        as the longest. Also 1 + the first rank whose pairs are damaged or not ``sound`` on the rank itself; else 0."""
        forms = [PairFormat(*one, mine.values.dtype) for one in zip(ranges, held, strict=True)]
        longest = max(form.size for form in forms)
        message = self._bytes(pending, what, longest)
        received = self._bytes(pending, f"{what} received", self.comm.size * longest)
        write([forms[self.comm.rank]], [mine], message, self.payload, sound)
        pending.bytes += message.numel()
        yield self.comm.all_gather(received, message, f"{pending.name}/{what}")
        parcels, good = read(forms, torch.split(received, [longest] * self.comm.size), self.payload)
        return parcels, 0 if all(good) else 1 + good.index(False)

    def _bytes(self, pending: InFlight, what: str, length: int) -> torch.Tensor:
        key: tuple[Any, ...] = (what, pending.name)
        return self.keep(key, length, torch.uint8, pending.message.device)
