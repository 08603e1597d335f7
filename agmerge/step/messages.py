# SPDX-License-Identifier: Apache-2.0
"""Messages of each merge buffer of a plan: a pure function, the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import merging
from agmerge.exchanges import Exchange, routing
from agmerge.exchanges.routing import Message, group_by, group_by_dtype, group_into_messages, message_name
from agmerge.exchanges.send_mode import send_modes
from agmerge.exchanges.splitting import split
from agmerge.tensors.layout import Layout, Segment
from sparsifiers import Kind


def messages_of(
    plan: merging.Plan, layout: Layout, exchanges: Mapping[Kind, Exchange], workers: int, *, ordered: bool
) -> list[list[Message]]:
    """Return the messages of each merge buffer.

    Args:

        plan: of the tensors in ``layout``, in its order.
        layout: where they lie.
        exchanges: by kind of tensor class; that of ``Kind.DENSE`` also serves merge buffers that the plan sends dense.
        workers: the number of ranks that exchange messages.
        ordered: sums are in rank order, whatever the plan: dense tensors do not share messages with others.
    """
    ride = [kind for kind, each in exchanges.items() if each.carries_dense and not ordered]
    mixes_classes = all(each.mixes_classes for each in exchanges.values())
    bytes_of = exchanges[Kind.SPARSE].whole_bytes if Kind.SPARSE in exchanges else None
    messages: list[list[Message]] = []
    kinds = zip(plan.bounds, send_modes(plan), plan.dense, plan.parts, strict=True)
    for index, (bounds, mode, goes_dense, parts) in enumerate(kinds):
        segments = routing.segments(layout, *bounds, mode.ahead and not goes_dense)
        if goes_dense:
            groups = group_by_dtype(segments)
        elif mixes_classes:
            groups = group_into_messages(segments, workers, ride, bytes_of)
        else:
            groups = group_by(segments, lambda tensor_class: tensor_class)
        if parts > 1:
            groups = [message for group in groups for message in split(group, parts)]
        messages.append(
            [
                Message(message_name(index, number), index, _carrier(exchanges, group, goes_dense, ride), tuple(group))
                for number, group in enumerate(groups)
            ]
        )
    return messages


def _carrier(
    exchanges: Mapping[Kind, Exchange], group: Sequence[Segment], goes_dense: bool, ride: Collection[Kind]
) -> Exchange:
    """Return the exchange for a message of these segments."""
    kind = group[0].tensor_class.kind
    if kind is Kind.DENSE and not goes_dense and all(routing.goes_quantised(segment, ride) for segment in group):
        kind = Kind.QUANTISED
    return exchanges[Kind.DENSE if goes_dense else kind]


def presparsified(messages: list[list[Message]], plan: merging.Plan) -> dict[int, Segment]:
    """Return, by slot, the segment of each tensor that is selected from before it is merged.

    Where messages are split, each slice is selected from when it is sent, and is not listed.
    """
    found: dict[int, Segment] = {}
    for row, mode, parts in zip(messages, send_modes(plan), plan.parts, strict=True):
        if mode.ahead and parts == 1:
            for message in row:
                for part, selected in zip(message.segments, message.selected, strict=True):
                    if selected:
                        found[part.slots[0].index] = part
    return found
