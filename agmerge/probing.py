"""What selection and the exchange cost here: timed on the messages, the collective and the packing in use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from agmerge import advise
from agmerge.config import AUTO
from agmerge.exchanges import Exchange
from agmerge.handshake import gather_bytes
from agmerge.layout import Layout, Segment
from agmerge.session import Session
from agmerge.wire import Control
from merging import Curve
from sparsifiers import Selection

SPEND = 3.0  # seconds, about, for all probes together
GROWTH = 2.0  # of the sizes, at least
RUNS = (2, 12)  # least and most, of one size
SHARE = 6  # so many sizes share that time

BUSY = torch.ones(128, 128)  # a tenth of a millisecond of work

Samples = dict[int, list[float]]


class Found(NamedTuple):
    """Curves: of selection (None where nothing is selected), the exchange, and a dense one where that is a choice."""

    sparsify: Curve | None
    exchange: Curve
    dense: Curve | None


def probe(session: Session, step: int, backward: float) -> Found:
    """What selection and exchanges cost. ``backward``: seconds, this rank's. Collective, between steps.

    Runs of tensors of the largest lane, of sizes that double, are selected from and exchanged as in a step;
    nothing of it is written to a residual or an update. Selection is the mean of several calls with one key, since
    thresholds may be reused; an exchange is the median from the moment its message is packed. Both are the maximum
    over ranks. When sizes become too dear, the rest follows the slope.
    """
    config = session.config
    sparse, dense = session.exchanges()
    segments = sizes(session.layout)
    choice: Curve | None = None
    if segments[0].lane.sparse and config.sparsifier is not None:
        selections, travels = _measured(session, segments, sparse, step, backward)
        if config.exchange == AUTO or advise.active():
            choice = Curve.fit(_measured(session, segments, dense, step, backward)[1])
        config.sparsifier.retain(session.keys())
        return Found(Curve.fit(selections, zero=True), Curve.fit(travels), choice)
    return Found(None, Curve.fit(_measured(session, segments, dense, step, backward)[1]), None)


def _measured(
    session: Session, segments: list[Segment], exchange: Exchange, step: int, backward: float
) -> tuple[Samples, Samples]:
    """Seconds of selection by elements, and of the exchange by load, as far as there is time for them."""
    selections: Samples = {}
    travels: Samples = {}
    # One message to begin with: on a slow network the first size would take all the time there is.
    first = _Trial(session, segments[0], exchange, step, backward)
    cost, before = 2 * _agreed(session, first.exchange(1))[0], segments[0].numel
    spent = cost
    for segment in segments:
        # Every rank has the same figures, so all of them stop at the same size.
        expected = cost * segment.numel / before
        if spent + RUNS[0] * expected > SPEND and travels:
            break
        runs = int(min(max(SPEND / SHARE / expected, RUNS[0]), RUNS[1])) if expected else RUNS[1]
        trial = _Trial(session, segment, exchange, step, backward)
        select, travel = _agreed(session, trial.select(runs), trial.exchange(runs))
        travels.setdefault(trial.capacity if exchange.selects else segment.numel, []).append(travel)
        selections.setdefault(segment.numel, []).append(select)
        cost, before = select + 2 * travel, segment.numel  # selecting, a message is sent as well
        spent += runs * cost
    return selections, travels


def sizes(layout: Layout) -> list[Segment]:
    """Runs of tensors of the largest lane, sparse if there is one: from its smallest tensor to all of them."""
    lane = max(layout.lengths, key=lambda lane: (lane.sparse, layout.lengths[lane]))
    slots = [slot for slot in layout.slots if slot.lane == lane]
    runs = [Segment(lane, (slot,)) for slot in slots] + [Segment(lane, tuple(slots[:i])) for i in range(2, len(slots))]
    whole = Segment(lane, tuple(slots))
    chosen: list[Segment] = []
    for run in sorted(runs, key=lambda run: run.numel):
        if run.numel <= whole.numel / GROWTH**0.5 and (not chosen or GROWTH * chosen[-1].numel <= run.numel):
            chosen.append(run)
    return [*chosen, whole]


class _Trial:
    """One size: the same message again and again."""

    def __init__(self, session: Session, segment: Segment, exchange: Exchange, step: int, backward: float) -> None:
        self.session, self.segment, self.step, self._exchange = session, segment, step, exchange
        self._busy = backward / 2  # seconds, about, that backward goes on after a message has left
        self.load = session.load(segment)
        self._shares_cores = segment.lane.device.type == "cpu" and exchange.polls
        self.offer = self._select()
        self.capacity = 0 if self.offer is None else self.offer.indices.numel()

    def _select(self) -> Selection | None:
        sparsifier = self.session.config.sparsifier
        if sparsifier is None or not self._exchange.selects:
            return None
        work, k, shapes = self.session.vector(self.segment, self.step)
        return sparsifier.select(work, k=k, key=f"probe of {self.segment.numel}", step=self.step, shapes=shapes)

    def _send(self) -> Callable[[], object]:
        control = Control(self.step, self.session.fingerprint, 0, 0, (False,) * len(self.segment.slots))
        pending = self._exchange.start("probe", [self.load], [self.offer], control)

        def wait() -> None:
            # During backward the network's threads must share the cores: a message takes longer than on an idle host.
            start = time.monotonic()
            while self._shares_cores and time.monotonic() - start < self._busy:
                if self._exchange.arrived(pending):
                    break
                torch.mm(BUSY, BUSY)
            self._exchange.wait(pending)

        return wait

    def select(self, runs: int) -> float:
        """Seconds to select and pack, the mean."""
        took = 0.0
        for _ in range(runs):
            begin = self._now()
            self.offer = self._select()
            wait = self._send()
            took += self._now() - begin
            wait()
        return took / runs

    def exchange(self, runs: int) -> float:
        """Seconds from the packed message to its arrival, the median; dense, packing counts too."""
        took = []
        for _ in range(runs):
            begin = self._now()
            wait = self._send()
            begin = self._now() if self.offer is not None else begin
            wait()
            took.append(self._now() - begin)
        return statistics.median(took)

    def _now(self) -> float:
        device = self.segment.lane.device
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)  # between steps: nothing else runs
        return time.perf_counter()


def _agreed(session: Session, *seconds: float) -> list[float]:
    """The maximum over ranks of each."""
    mine = np.array(seconds, dtype=np.float64).tobytes()
    rows = gather_bytes(session.comm, mine, "probe/seconds", session.config.timeout)
    return [max(column) for column in zip(*(np.frombuffer(row).tolist() for row in rows), strict=True)]
