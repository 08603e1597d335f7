# SPDX-License-Identifier: Apache-2.0
"""Group of ranks that exchange with each other: their communicators, and this rank's place among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agmerge.backends import Backend, topology
from agmerge.backends.handshake import Fact, require_agreement
from agmerge.backends.warm_up import warm_up
from agmerge.step.config import TWO_LEVEL, Config
from agmerge.step.kept_results import KeptBackend, KeptResults
from agmerge.step.side_streams import SideStreams


class Group:
    """Ranks of one exchange, from :meth:`connect` to :meth:`leave`; none before and after.

    ``kept``: keeps the results of collectives, for ranks that go on when one is lost; None: they do not.
    """

    def __init__(self, kept: KeptResults | None = None) -> None:
        self.kept = kept
        self.world: Backend | None = None  # from which it was connected
        self.comm: Backend | None = None  # of its own
        self.second: Backend | None = None  # another one of the same ranks, for second phases; None: not needed, so far
        self.outside = False  # of the process set: this rank exchanges nothing
        self.shard: tuple[int, int] | None = None  # of every tensor, this rank's: which of how many (two-level)
        self.nodes: topology.Nodes | None = None  # exchange="two-level"
        self._devices: Sequence[torch.device] = ()  # on which communicators are used
        self.side = SideStreams()  # kept: memory that was used in a stream is of use to that stream alone

    @property
    def settled(self) -> bool:
        """True if there is a group, or this rank is known to be outside of it."""
        return self.comm is not None or self.outside

    @property
    def alone(self) -> bool:
        """True if this rank has no other one to exchange with."""
        return self.comm is None or self.comm.size == 1

    def connect(
        self,
        world: Backend,
        comm: Backend | None,
        second: Backend | None,
        config: Config,
        facts: Sequence[Fact],
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Collective. Exchange among the ranks of ``comm`` (None: not this one), and compare ``facts`` first (G1).

        ``comm`` is a communicator of this exchange's own among the workers of ``world``, and ``second`` another one of
        the same ranks, for the second phases of messages. ``devices``: those outside the host's memory with tensors
        that are exchanged. Raises :class:`agmerge.RankMismatchError` on every rank where facts differ.
        """
        self.world, self.comm, self.second, self.outside = world, comm, second, comm is None
        self._devices = devices
        if comm is None:
            return
        if self.kept is not None:
            self.comm = comm = KeptBackend(comm, self.kept)
            self.second = None if second is None else KeptBackend(second, self.kept)
        self.side.serve(devices)
        advice = "Use the same model and the same arguments on every rank."
        require_agreement(comm, facts, what="DistributedOptimizer", advice=advice, timeout=config.guards.timeout)
        if config.merging.exchange == TWO_LEVEL:
            self.nodes = topology.form(comm, config.guards.timeout, wants_second=config.quantises)
        self.shard = None if self.nodes is None else self.nodes.shard  # also where a checkpoint has assumed another one
        for made in self._communicators():
            warm_up(made, devices, config.guards.timeout)

    def connect_second(self, config: Config) -> None:
        """Collective. Make the communicator of second phases, where ``config`` needs one now and all ranks take part.

        Making it needs all ranks of ``world``: those outside the process set do not call this. There messages are
        gathered.
        """
        if self.comm is None or self.world is None or self.second is not None or not config.quantises:
            return
        if 2 < self.comm.size == self.world.size and self.nodes is None:
            self.second = self.comm.duplicate("agmerge optimizer, second phases", config.guards.timeout)
            warm_up(self.second, self._devices, config.guards.timeout)
            if self.kept is not None:
                self.second = KeptBackend(self.second, self.kept)

    def assume(self, shard: tuple[int, int] | None) -> None:
        """Use a checkpoint's ``shard`` until there is a group, which has its own."""
        self.shard = shard

    @property
    def second_across(self) -> Backend | None:
        """Communicator of second phases between the ranks that exchange messages; None: there is none."""
        return self.second if self.nodes is None else self.nodes.second

    def leave(self) -> None:
        """Forget the group."""
        self.comm = self.second = self.nodes = None
        self.outside = False

    def abort(self) -> None:
        """End what is under way, without the other ranks: one of them is lost."""
        for comm in self._communicators():
            comm.abort()

    def close(self) -> None:
        """Close the communicators."""
        for comm in self._communicators():
            comm.close()

    def _communicators(self) -> list[Backend]:
        """Return those that there are, in the same order on all ranks."""
        made = [] if self.nodes is None else self.nodes.communicators
        return [*made, *(comm for comm in (self.comm, self.second) if comm is not None)]
