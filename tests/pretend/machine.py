# SPDX-License-Identifier: Apache-2.0
"""Devices of several ranks, on which kernels of collectives wait for each other, as strictly as NCCL's manual says.

A collective is launched without waiting, and its kernels run until all of its ranks have launched it. A device runs
one at a time, in the order of their launches: that those of two communicators fit on it together is promised nowhere.
Memory of a size that is not in the cache waits for all that is launched.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from pretend.clocks import Clock, Stream
from pretend.device import Kernels
from pretend.hosts import Hosts


class Collective:
    """A collective on devices: kernels on ``ranks`` of the world."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.has_ended = ranks, False


class Machine:
    """What ranks share: their hosts, what is queued on their devices, and who has come to which meeting."""

    def __init__(self, hosts: Hosts, size: int) -> None:
        self.hosts = hosts
        self.queues: list[deque[Collective]] = [deque() for _ in range(size)]  # by rank of the world
        self.collectives: dict[tuple[int, int], Collective] = {}  # by group and number in it
        self._come: defaultdict[object, set[int]] = defaultdict(set)  # by meeting

    def meet(self, rank: int, ranks: Iterable[int], meeting: object, *, idle: bool) -> None:
        """Wait for ``ranks`` at a meeting; ``idle``: when this device has nothing to do any more."""
        if idle:
            self.hosts.wait(rank, lambda: not self.queues[rank], f"its device, before {meeting}")
        self._come[meeting].add(rank)
        self.hosts.wait(rank, lambda: self._come[meeting].issuperset(ranks), str(meeting))

    def launch(self, rank: int, ranks: Sequence[int], key: tuple[int, int]) -> Collective:
        """Queue a rank's kernel of a collective."""
        collective = self.collectives.setdefault(key, Collective(ranks))
        self.queues[rank].append(collective)
        self._advance()
        return collective

    def abort(self, rank: int, collectives: Iterable[Collective]) -> None:
        """Take a rank's kernels off its device. Those of other ranks run on."""
        for collective in collectives:
            if collective in self.queues[rank]:
                self.queues[rank].remove(collective)
        self._advance()

    def _advance(self) -> None:
        """End what all of its ranks run."""
        ended = True
        while ended:
            heads = [queue[0] for queue in self.queues if queue]
            ended = [one for one in set(heads) if heads.count(one) == len(one.ranks)]
            for one in ended:
                one.has_ended = True
                for rank in one.ranks:
                    self.queues[rank].popleft()


class Launched(Kernels):
    """The kernels of one rank's device, for :class:`Device`."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine, self._rank = machine, rank
        self.places: dict[Collective, tuple[Stream, int]] = {}  # of those on the device: stream, and number in it

    def have_ended(self, clock: Clock) -> bool:
        self._machine.hosts.pause(self._rank)
        return self._before(clock)

    def wait(self, clock: Clock, seconds: float, what: str) -> bool:
        return self._machine.hosts.wait(self._rank, lambda: self._before(clock), f"{what} behind its device", seconds)

    def allocate(self) -> None:
        self._machine.hosts.wait(self._rank, lambda: not self._machine.queues[self._rank], "memory")

    def _before(self, clock: Clock) -> bool:
        """Whether none of the device's kernels is before ``clock``."""
        places = (self.places[one] for one in self._machine.queues[self._rank])
        return not any(clock.get(stream, 0) >= number for stream, number in places)
