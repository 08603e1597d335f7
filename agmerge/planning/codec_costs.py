"""Measure what value codecs make of the values that all ranks have selected, between steps."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from agmerge.exchanges.message.sample import Handling, handling
from agmerge.exchanges.message.values import value_codec
from agmerge.exchanges.way import OWN
from agmerge.planning.cost_probe import measured_lane
from agmerge.planning.measuring import bytes_of_element, gather_seconds
from agmerge.planning.wire_choice import Codec
from agmerge.step.merge_buffers import MergeBuffers

NOTHING = Handling(0.0, 0.0, 0.0, 0.0)


def measure_codecs(buffers: MergeBuffers, values: Tensor | None, step: int) -> dict[str, Codec]:
    """Collective. Return the codecs that plans may take, by name, the gradient's own dtype first, and the one in use.

    Of the others those that are smaller than the gradient's own. It is the energy that arrives of all ranks' values,
    and the seconds of the slowest rank that count. Where some rank has no values, nothing is known of any codec. The
    same on every rank.

    Args:
        buffers: whose codecs are asked for.
        values: that this rank has selected, some of them, see :meth:`MergeBuffers.sample_values`.
        step: the one to come, whose density counts.
    """
    lane = measured_lane(buffers.layout)
    sizes = {wire: bytes_of_element(buffers, lane, step, wire) for wire in (OWN, buffers.wire, *buffers.config.wires)}
    wires = [wire for wire, size in sizes.items() if wire in (OWN, buffers.wire) or size < sizes[OWN]]
    own = [
        NOTHING if values is None else handling(value_codec(wire, lane.dtype), values.to(lane.dtype)) for wire in wires
    ]
    columns = gather_seconds(buffers, *np.array(own).T)
    energy, lost = columns[0].sum(axis=0), columns[1].sum(axis=0)
    encode, decode = columns[2].max(axis=0), columns[3].max(axis=0)
    known = {
        wire: Codec(
            wire,
            sizes[wire],
            1.0 if wire == OWN else float(1 - lost[i] / energy[i]) if energy[i] else 0.0,
            float(encode[i]),
            float(decode[i]),
        )
        for i, wire in enumerate(wires)
    }
    return known if columns[0].all() else {}
