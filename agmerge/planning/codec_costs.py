# SPDX-License-Identifier: Apache-2.0
"""Costs of value codecs, measured between steps on the values that all ranks have selected."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from agmerge.exchanges.message.scaled import Handling, handling, value_codec
from agmerge.exchanges.routing import OWN
from agmerge.planning.codec_choice import Codec
from agmerge.planning.cost_probe import measured_class
from agmerge.planning.measuring import bytes_of_element, gather_seconds
from agmerge.step.merge_buffers import MergeBuffers

NOTHING = Handling(0.0, 0.0, 0.0, 0.0)


class SampledValues:
    """Sample of the values that the last step before planning has selected, where a codec is to be chosen for them."""

    def __init__(self, buffers: MergeBuffers) -> None:
        self._buffers = buffers
        self._is_on = False  # the step to come makes a sample
        self.last: Tensor | None = None  # None: there was no such step so far

    def end_step(self) -> None:
        """Take the sample of a step that has ended. A step that overflows has none: the one before counts."""
        if self._is_on:
            values = self._buffers.store.end_sample()
            self.last = self.last if values is None else values

    def begin_step(self, step: int, is_wanted: bool) -> None:
        """Sample the values of ``step``, the one to come, if that is wanted and there is a choice of codecs."""
        self._is_on = is_wanted and bool(self._buffers.config.wires)
        if self._is_on:
            self._buffers.sample_values(step)


def measure_codecs(buffers: MergeBuffers, values: Tensor | None, step: int) -> dict[str, Codec]:
    """Collective. Return the codecs that plans may use, by name: the gradient's own dtype first, then the one in use.

    Other codecs follow if they are smaller than the gradient's own dtype. The delivered energy of all ranks' values
    counts, and the seconds of the slowest rank. Empty where some rank has no values. The same on every rank.

    Args:

        buffers: the merge buffers in use.
        values: a sample of those that this rank has selected, see :meth:`MergeBuffers.sample_values`.
        step: the one to come; its density counts.
    """
    tensor_class = measured_class(buffers.layout)
    sizes = {
        name: bytes_of_element(buffers, tensor_class, step, name) for name in (OWN, buffers.wire, *buffers.config.wires)
    }
    names = [name for name, size in sizes.items() if name in (OWN, buffers.wire) or size < sizes[OWN]]
    own = [
        NOTHING if values is None else handling(value_codec(name, tensor_class.dtype), values.to(tensor_class.dtype))
        for name in names
    ]
    columns = gather_seconds(buffers, *np.array(own).T)
    energy, lost = columns[0].sum(axis=0), columns[1].sum(axis=0)
    encode, decode = columns[2].max(axis=0), columns[3].max(axis=0)
    known = {
        name: Codec(
            name,
            sizes[name],
            1.0 if name == OWN else float(1 - lost[i] / energy[i]) if energy[i] else 0.0,
            float(encode[i]),
            float(decode[i]),
        )
        for i, name in enumerate(names)
    }
    return known if columns[0].all() else {}
