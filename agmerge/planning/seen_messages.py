"""Add to what was probed what training itself has shown: how long its messages took, which are larger. Pure functions.

On a slow link, where even a small message takes long, probes end before the sizes that messages have. Of one size, or
two that take their start-up alone, nothing can be said of larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import merging
from agmerge.metrics.step_times import Seconds
from agmerge.planning.cost_probe import MeasuredCosts, measured_lane
from agmerge.planning.measuring import bytes_of_element, profile
from agmerge.step.merge_buffers import MergeBuffers
from merging import Curve

FAR = 4.0  # times the largest size that was probed: of what is nearer, the probes know more


def with_training(
    costs: MeasuredCosts, buffers: MergeBuffers, plan: merging.Plan, step: int, travel: Seconds
) -> MeasuredCosts:
    """Return ``costs`` with what training has shown under ``plan``. ``step``: the one to come; ``travel``: as below."""
    lane = measured_lane(buffers.layout)
    load = profile(buffers, np.zeros(len(buffers.layout.slots)), step).load.tolist()
    exchange = with_seen(costs.exchange, plan, load, travel)
    if costs.dense is None:
        return costs._replace(exchange=exchange)
    each = bytes_of_element(buffers, lane, step, buffers.wire)
    as_many = 2 * lane.dtype.itemsize / (buffers.across.size * each)  # of an all-reduce, beside an all-gather
    dense = with_volume(costs.dense, exchange, buffers.layout.numel, as_many)
    return costs._replace(exchange=exchange, dense=dense)


def with_seen(curve: Curve, plan: merging.Plan, load: Sequence[int], travel: Seconds) -> Curve:
    """Return the cost of exchanges with the largest message of training as its last point, where probes end far before.

    Args:
        curve: seconds over elements, as probed.
        plan: that training has sent by.
        load: elements of each tensor in messages, n of them.
        travel: seconds of each merge buffer's exchange in training, (m,), on the slowest rank.
    """
    sizes = [sum(load[start:stop]) for start, stop in plan.bounds]
    compressed = [number for number, dense in enumerate(plan.dense) if not dense]
    if not compressed:
        return curve
    largest = max(compressed, key=sizes.__getitem__)
    size, seconds = sizes[largest], float(travel[largest])
    if size <= FAR * curve.elements[-1] or not seconds > curve.seconds[-1]:
        return curve
    return Curve((*curve.elements, size), (*curve.seconds, seconds))


def with_volume(dense: Curve, exchange: Curve, whole: int, as_many: float) -> Curve:
    """Return the cost of dense exchanges, where one size alone was probed, with all elements as another point.

    They take as long as a message of ``exchange`` that brings as many bytes: a constant would have them cost nothing.

    Args:
        dense, exchange: seconds over elements.
        whole: elements, more than the one size.
        as_many: elements of ``exchange`` that bring as many bytes as one that is sent whole.
    """
    if len(dense.elements) > 1 or whole <= dense.elements[0]:
        return dense
    return Curve((*dense.elements, whole), (*dense.seconds, max(dense.seconds[0], float(exchange(as_many * whole)))))
