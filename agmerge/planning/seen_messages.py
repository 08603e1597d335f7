# SPDX-License-Identifier: Apache-2.0
"""Bounds on the results of probes: how long training's own messages took to be made and to travel.

Probes are short, and most of them small. On a slow link they end before the sizes of training's messages. On a busy
machine one delayed probe makes every larger size look costly: a message was predicted to take 1 s, not 0.04. Training
has sent its messages in many steps, so the seconds that all of one step took together are known well. They bound every
curve. Messages in one take no longer than one after the other, and beside its start-up a message of a share of the
elements takes about that share of the seconds.

Dense messages are much larger than those that training has sent. What the curve of these says so far beyond them is no
bound: on a busy machine probes of small messages take as long as training's messages, so the curve is flat, and a dense
exchange of 0.5 s would take 28 ms. As many seen messages as have its bytes, one after the other, are a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import merging
from agmerge.exchanges.send_mode import send_mode
from agmerge.metrics.step_times import Seconds
from agmerge.planning.cost_probe import MeasuredCosts, measured_class, probe
from agmerge.planning.measuring import bytes_of_element
from agmerge.planning.probe_budget import Budget
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve
from sparsifiers import Kind

SLACK = 2.0  # times its share of the seconds seen: limit of a message beside its start-up


class SeenMessages(NamedTuple):
    """Times of the compressed messages of one training step together."""

    work: int  # elements that are selected from
    load: int  # elements of the messages
    making: float  # seconds of the slowest rank to select and pack; NaN: not all of it is timed
    travel: float  # seconds of the exchanges, waiting for late ranks left out


def measure_costs(
    buffers: MergeBuffers, step: int, backward: float, budget: Budget, seen: SeenMessages | None
) -> Iterator[MeasuredCosts | None]:
    """Collective. Yield as :func:`agmerge.planning.cost_probe.probe`, with costs bounded by seen messages.

    ``seen``: None: nothing was.
    """
    for costs in probe(buffers, step, backward, budget, bounded=seen is not None):
        yield costs if costs is None or seen is None else bounded(costs, seen, *_whole(buffers, step))


def _whole(buffers: MergeBuffers, step: int) -> tuple[int, float]:
    """Return the elements of a dense exchange of everything, and how many message elements have one's bytes."""
    tensor_class = measured_class(buffers.layout)
    as_many = tensor_class.dtype.itemsize / bytes_of_element(buffers, tensor_class, step, buffers.wire)
    if tensor_class.kind is not Kind.QUANTISED:  # those are exchanged by shards, or between two, as in an all-reduce
        as_many *= 2 / buffers.across.size  # of an all-reduce, beside an all-gather
    return buffers.layout.numel, as_many


def seen_in(plan: merging.Plan, profile: merging.Profile, making: Seconds, travel: Seconds) -> SeenMessages | None:
    """Return the times of steps under ``plan``; None where nothing is compressed.

    Args:

        plan: that training has sent by.
        profile: of the tensors.
        making, travel: seconds of each merge buffer, (W, m). The last rank to reach an exchange sees its own duration;
            the others waited for that rank, so of ``travel`` the minimum counts.
    """
    compressed = [number for number, dense in enumerate(plan.dense) if not dense]
    if not compressed:
        return None
    bounds = [plan.bounds[number] for number in compressed]
    # Else messages are made while others travel, or tensors come.
    whole = max(plan.parts) == 1 and not send_mode(plan).ahead
    return SeenMessages(
        work=sum(int(profile.work[start:stop].sum()) for start, stop in bounds),
        load=sum(int(profile.load[start:stop].sum()) for start, stop in bounds),
        making=float(making.max(axis=0)[compressed].sum()) if whole else math.nan,
        travel=float(travel.min(axis=0)[compressed].sum()),
    )


def bounded(costs: MeasuredCosts, seen: SeenMessages, numel: int, as_many: float) -> MeasuredCosts:
    """Return ``costs``, bounded by seen messages. Pure.

    Args:

        costs: as probed.
        seen: in training.
        numel: elements of all tensors.
        as_many: elements of a message with as many bytes as one dense element.
    """
    exchange = bounded_exchange(costs.exchange, seen.load, seen.travel)
    sparsify, message = costs.sparsify, costs.message
    if sparsify is not None and message is not None and seen.work:
        sparsify, message = bounded_making(sparsify, message, seen)
    dense = None
    if costs.dense is not None:
        dense = bounded_dense(costs.dense, numel, _most(exchange, seen, as_many * numel))
    return MeasuredCosts(sparsify, exchange, dense, message)


def bounded_exchange(curve: Curve, load: int, seconds: float) -> Curve:
    """Return the cost of exchanges where messages of ``load`` elements together took so many seconds."""
    if not (load and seconds > 0.0):
        return curve
    within = _below(curve, min(curve.seconds[0], seconds), load, seconds)
    capped = [min(value, seconds) if at <= load else value for at, value in zip(*within, strict=True)]
    return _ending(Curve(within[0], tuple(capped)), load, seconds)


def bounded_making(sparsify: Curve, message: Curve, seen: SeenMessages) -> tuple[Curve, Curve]:
    """Return the costs of selection and of messages where making all messages of a step took ``seen.making`` seconds.

    Other processor time of a message, ``message(0)``, is not among the seconds seen.
    """
    if not seen.making > 0.0:
        return sparsify, message
    start = message.seconds[0]
    message = Curve(*_below(message, start, seen.load, seen.making))
    message = _ending(message, seen.load, min(message(seen.load), start + seen.making))
    sparsify = Curve(*_below(sparsify, sparsify(1), seen.work, seen.making))
    return _ending(sparsify, seen.work, seen.making - (message(seen.load) - start)), message


def _below(curve: Curve, start: float, elements: int, seconds: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the points of a curve, none above ``start`` and ``SLACK`` times its share of ``seconds``."""
    most = [start + SLACK * seconds * at / elements for at in curve.elements]
    return curve.elements, tuple(min(pair) for pair in zip(curve.seconds, most, strict=True))


def _ending(curve: Curve, elements: int, seconds: float) -> Curve:
    """Return the curve with one more point where it ends before ``elements``; it does not fall."""
    if elements <= curve.elements[-1]:
        return curve
    return Curve((*curve.elements, elements), (*curve.seconds, max(seconds, curve.seconds[-1])))


def _most(exchange: Curve, seen: SeenMessages, elements: float) -> float:
    """Return the most seconds of a message of so many elements: by its curve, or in seen messages one after the other.

    ``exchange``: seconds over elements, bounded.
    """
    in_a_row = seen.travel * elements / seen.load if seen.load else 0.0
    return max(float(exchange(elements)), in_a_row)


def bounded_dense(dense: Curve, whole: int, seconds: float) -> Curve:
    """Return the cost of dense exchanges where one of everything takes about ``seconds`` at most. Pure.

    Where only one size was probed, all elements are another point: a constant would make them cost nothing.

    Args:

        dense: seconds over elements, as probed.
        whole: elements of all tensors.
        seconds: of compressed messages with the bytes of all tensors, at most.
    """
    start = dense.seconds[0]
    within = Curve(*_below(dense, start, whole, seconds))
    if len(dense.elements) == 1:
        return _ending(within, whole, min(seconds, start * whole / dense.elements[0]))
    most = start + SLACK * seconds
    return within if within(whole) <= most else _ending(within, whole, most)
