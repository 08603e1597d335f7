# SPDX-License-Identifier: Apache-2.0
"""How many words does a sparse all-reduce move, and from how many ranks on is it less than an all-gather?

    python benchmarks/exchange_volume.py --k 100000 --ranks 2 3 4 6 8 12 16 --json volume.json

Ranks are threads of one in-memory group; gradients are drawn, and each rank selects the k largest elements of gradient
plus residual, exchanges them with ``oktopk``, and then with ``sparse``, for a few steps. A word is four bytes; what a
rank keeps for itself does not count. Collectives count as in ``stats()["link_bytes"]``, as their usual algorithms move
data: an all-gather of n words sends and receives ``n (W-1)``, an all-reduce ``2 n (W-1)/W``, an all-to-all what it is
given for others. Payload is pairs of index and value, with the padding of the last all-gather; the histogram and
control (headers, counts) stand beside it. Figures are of the worst rank in the worst step, and the bound is ``6 k
(W-1)/W`` (Li and Hoefler, PPoPP 2022): words of plain indices and values, without padding.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import platform
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import agmerge
from agmerge import testing
from agmerge.backends import Handle
from agmerge.backends.local import LocalBackend
from agmerge.exchanges import Exchange, ExchangeContext, Ranks, SegmentBuffers, SparseExchange, Store
from agmerge.exchanges.message.format import Format, RoundHeader
from agmerge.exchanges.multi_round import PairFormat
from agmerge.exchanges.oktopk.exchange import BINS, OkTopkExchange
from agmerge.exchanges.oktopk.regions import number
from agmerge.metrics import totals
from agmerge.runtime import workers as runtime
from agmerge.tensors.arena import subtract
from agmerge.tensors.layout import Layout, Segment, TensorClass
from sparsifiers import Kind, Selection

WAIT = 300.0
PAYLOAD = ("pieces", "surplus", "kept")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Volume:
    """Words of one rank in one step, or of several the largest."""

    sent: float  # payload, padding included
    received: float  # payload, padding included
    histogram: float
    control: float
    elements: int  # kept

    @property
    def payload(self) -> float:
        """The larger of the two directions."""
        return max(self.sent, self.received)

    @property
    def total(self) -> float:
        """Everything that the busier direction of a link carries."""
        return self.payload + self.histogram + self.control


class Counting(LocalBackend):
    """A communicator that notes the words that it sends to others and gets from them, by what the message is for."""

    def __init__(self, world: LocalBackend) -> None:
        super().__init__(world.group, world.ranks, world.rank, "counted")
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def _note(self, name: str, sent: float, received: float) -> None:
        what = name.partition("/")[2]
        self.sent[what] += sent / 4  # type: ignore[assignment]
        self.received[what] += received / 4  # type: ignore[assignment]

    def all_reduce(self, tensor: torch.Tensor, name: str, op: str = "sum") -> Handle:
        moved = totals.all_reduce_bytes(tensor.nbytes, self.size)
        self._note(name, moved, moved)
        return super().all_reduce(tensor, name, op)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, name: str) -> Handle:
        moved = totals.all_gather_bytes(tensor.nbytes, self.size)
        self._note(name, moved, moved)
        return super().all_gather(out, tensor, name)

    def all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        name: str,
    ) -> Handle:
        width = tensor.element_size()
        sent, received = ([width * length for length in lengths] for lengths in (splits, out_splits))
        self._note(name, *(totals.all_to_all_bytes(sizes, self.rank) for sizes in (sent, received)))
        return super().all_to_all(out, tensor, out_splits, splits, name)


# -- gradients --------------------------------------------------------------------------------------------------


def stationary(numel: int, rank: int, workers: int, step: int) -> torch.Tensor:
    """The same scale everywhere; half of the variance is common to all ranks."""
    common, own = (_normal(numel, seed) for seed in (step, 1000 * (rank + 1) + step))
    return common.add_(own)


def skewed(numel: int, rank: int, workers: int, step: int) -> torch.Tensor:
    """As stationary, times scales that fall by e every 200th of the vector: most of the large ones are in 2 % of it."""
    return stationary(numel, rank, workers, step).mul_(_peak(numel, 0.3))


def moving(numel: int, rank: int, workers: int, step: int) -> torch.Tensor:
    """As skewed, around another place at every step."""
    return stationary(numel, rank, workers, step).mul_(_peak(numel, 0.37 * (step + 1) % 1.0))


def apart(numel: int, rank: int, workers: int, step: int) -> torch.Tensor:
    """As skewed, every rank around a place of its own."""
    return stationary(numel, rank, workers, step).mul_(_peak(numel, (rank + 0.5) / workers))


def opposed(numel: int, rank: int, workers: int, step: int) -> torch.Tensor:
    """In one half of the vector ranks select the same and cancel each other: what is kept lies in the other half."""
    values, half = _normal(numel, 1000 * (rank + 1) + step), numel // 2
    values[:half] = _normal(numel, step)[:half] * (-1) ** rank
    return values


CASES: dict[str, Callable[[int, int, int, int], torch.Tensor]] = {
    one.__name__: one for one in (stationary, skewed, moving, apart, opposed)
}


def _normal(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _peak(numel: int, place: float) -> torch.Tensor:
    distance = torch.linspace(-place, 1 - place, numel).abs_()
    return distance.mul_(-200).exp_().add_(1e-3)


# -- volumes ----------------------------------------------------------------------------------------------------


def bound(k: int, workers: int) -> float:
    """The paper's, in words."""
    return 6 * k * (workers - 1) / workers


def model(k: int, workers: int, density: float = 0.1) -> tuple[float, float]:
    """Words of a step with ``oktopk``, at most, and with ``sparse``: what the crossover is predicted from.

    How long indices are depends on the density. At most three times, a rank sends and receives a W-th of k for every
    other rank, wherever it lies in the vector.
    """
    segment = _segment(round(k / density))
    whole = Format([segment], [k])
    part = PairFormat(range(segment.length), -(-k // workers), torch.float32).size / 4
    side = (whole.words + 1 + number(k) + workers + 3) * (workers - 1) + 2 * BINS * (workers - 1) / workers
    return 3 * part * (workers - 1) + side, whole.size / 4 * (workers - 1)


def crossover(k: int, density: float = 0.1) -> int | None:
    """The least number of ranks, up to 1024, with which ``oktopk`` moves less than ``sparse``."""
    for workers in range(2, 1025):
        ours, theirs = model(k, workers, density)
        if ours < theirs:
            return workers
    return None


@functools.cache
def _segment(numel: int) -> Segment:
    tensor_class = TensorClass(CPU, torch.float32, Kind.SPARSE)
    (segment,) = Layout([("gradient", (numel,), tensor_class)]).segments(0, 1)
    return segment


def measure(kind: type[Exchange], case: str, workers: int, k: int, numel: int, steps: int) -> Volume:
    """The largest figures of any rank in any step."""
    segment, draw = _segment(numel), CASES[case]

    def body(rank: int) -> list[Volume]:
        world = runtime.world()
        assert isinstance(world, LocalBackend)
        work, found = torch.zeros(segment.length), []

        comm = Counting(world)
        exchange = kind(ExchangeContext(Ranks(comm, WAIT), agmerge.Average, _Work(work)))
        load = SegmentBuffers(segment, work, torch.zeros(segment.length))
        for step in range(steps):
            comm.sent.clear()
            comm.received.clear()
            work[:numel] += draw(numel, rank, workers, step)
            largest = work.abs().topk(k).indices.sort().values.to(torch.int32)
            pending = exchange.start("gradient", [load], [Selection(largest, k)], RoundHeader(step, 0, 0, 0, (True,)))
            exchange.wait(pending)
            exchange.finish(pending)
            kept = pending.extra.kept.indices.numel() if kind is OkTopkExchange else int(load.update.count_nonzero())
            found.append(_volume(comm, k, kept, kind is SparseExchange))
        return found

    every = [volume for volumes in testing.run(workers, body) for volume in volumes]
    worst = {field: max(getattr(volume, field) for volume in every) for field in asdict(every[0])}
    return Volume(**worst)


class _Work(Store):
    """Store of one segment, of which the residual is ``work``."""

    def __init__(self, work: torch.Tensor) -> None:
        self._work = work

    def subtract_sent(self, segment: Segment, indices: torch.Tensor | None, sent: Any) -> None:
        subtract(self._work, indices, sent)


def _volume(comm: Counting, k: int, kept: int, whole: bool) -> Volume:
    if whole:  # one message
        return Volume(float(comm.sent[""]), float(comm.received[""]), 0.0, 0.0, kept)
    sent, received = (float(sum(way[what] for what in PAYLOAD)) for way in (comm.sent, comm.received))
    control = sum(words for what, words in comm.sent.items() if what not in (*PAYLOAD, "histogram"))
    return Volume(sent, received, float(comm.sent["histogram"]), float(control), kept)


# -- report -----------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="words that exchanges move, against the bound and each other")
    add = parser.add_argument
    add("--k", type=int, default=100_000, help="elements that a rank selects")
    add("--density", type=float, default=0.05, help="k over the elements of the vector")
    add("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16])
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    add("--steps", type=int, default=4)
    add("--json", type=Path, metavar="FILE", help="write every number there")
    args = parser.parse_args(argv)
    if args.k < 1 or not 0 < args.density <= 1 or min(args.ranks) < 2 or args.steps < 1:
        parser.error("--k and --steps are 1 or more, --ranks 2 or more, and --density is in (0, 1]")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = arguments(argv)
    torch.set_num_threads(1)
    numel = round(args.k / args.density)
    print(f"k {args.k:,} of {numel:,}; words, largest of all ranks and {args.steps} steps")
    print(f"the model's crossover: oktopk moves less than sparse from {crossover(args.k, args.density)} ranks on")
    print(
        "| gradients | ranks | bound | sent | received | / bound | bytes / kept | histogram | control | kept / k "
        "| sparse | all / sparse |\n|---|" + "---:|" * 11
    )
    rows = []
    for case in args.cases:
        for workers in args.ranks:
            ours = measure(OkTopkExchange, case, workers, args.k, numel, args.steps)
            theirs = measure(SparseExchange, case, workers, args.k, numel, 1)  # a pure function of k and W
            limit = bound(args.k, workers)
            print(
                f"| {case} | {workers} | {limit:,.0f} | {ours.sent:,.0f} | {ours.received:,.0f} "
                f"| {ours.payload / limit:.3f} | {4 * ours.payload / ours.elements:.2f} "
                f"| {ours.histogram:,.0f} | {ours.control:,.0f} "
                f"| {ours.elements / args.k:.3f} | {theirs.total:,.0f} | {ours.total / theirs.total:.3f} |",
                flush=True,
            )
            row = {"case": case, "ranks": workers, "bound": limit, "oktopk": asdict(ours), "sparse": asdict(theirs)}
            rows.append({**row, "model": model(args.k, workers, args.density)})
    if args.json:
        about = {
            "command": shlex.join([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "k": args.k,
            "elements": numel,
            "steps": args.steps,
            "crossover": crossover(args.k, args.density),
        }
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
