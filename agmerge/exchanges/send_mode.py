# SPDX-License-Identifier: Apache-2.0
"""How merge buffers are sent: the one record of it, and its text as the label of a merge buffer in a plan.

A label is words with spaces between them; without any, a buffer has the default mode, until times are measured. So
whatever stores a plan, a checkpoint or the user's cache, stores its send modes with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import merging
import sparsifiers
from agmerge.exchanges.message.values import VALUES
from agmerge.exchanges.quantised.exchange import SEED
from sparsifiers.quantising.blocks import VERSION

AHEAD = "ahead"
OWN = "auto"  # the codec of a gradient's own dtype; the exchange that the options name; no quantiser chosen
MASKED, OKTOPK = SUMS = (
    "masked",
    "oktopk",
)  # exchanges that send k elements of the sum, which exchange="fastest" tries
# Versions that the bits of a quantiser depend on, in both phases: a plan with others is refused.
_VERSIONS = {"codec": str(VERSION), "seed": str(SEED)}
_THIS_VERSION = " ".join(f"{key}={value}" for key, value in _VERSIONS.items())
_STORED = {"quantizer": "quantiser"}  # plans are stored with the old spelling, and both are read
_WORDS = {"wire": "codec", "exchange": "exchange", "quantiser": "quantiser", "workers": "workers"}  # fields by word


@dataclass(frozen=True)
class SendMode:
    """Send mode of a merge buffer. All merge buffers of a plan have the same one, but for ``ahead``."""

    ahead: bool = False  # tensors are selected from one by one, before they are merged
    codec: str = OWN  # of selected values
    exchange: str = OWN  # of selections
    quantiser: str = OWN  # of quantised tensors, where there is a choice
    workers: int = 0  # among which the quantiser was chosen; 0: it was not

    @classmethod
    def parse(cls, label: str) -> SendMode:
        """Return the send mode of ``label``. Raises ``ValueError`` for an unknown word."""
        fields: dict[str, Any] = {}
        for word in label.split():
            key, _, value = word.partition("=")
            key = _STORED.get(key, key)
            if word == AHEAD:
                fields[AHEAD] = True
            elif _VERSIONS.get(key) == value:
                continue
            elif key in _VERSIONS:
                raise ValueError(
                    f"labels: {label!r} has {word!r}, but this version sends other bits, with {_THIS_VERSION}. Create "
                    "a new plan."
                )
            elif key == "workers" and value.isdigit():
                fields[key] = int(value)
            elif (
                (key == "wire" and value in VALUES)
                or (key == "exchange" and value in SUMS)
                or (key == "quantiser" and sparsifiers.is_quantiser(value))
            ):
                fields[_WORDS[key]] = value
            else:
                raise ValueError(
                    f"labels: {label!r} has the word {word!r}; there are {AHEAD!r} and, with a value codec, "
                    f"'wire=int8', with one of {', '.join(SUMS)} 'exchange={MASKED}', with a quantiser "
                    "'quantiser=eden-2' and the number of workers that it was chosen for 'workers=4'"
                )
        return cls(**fields)

    @property
    def label(self) -> str:
        """Return the label of this send mode: the words for what is not the default."""
        fields = asdict(self)
        words = [AHEAD] if self.ahead else []
        words += [f"{word}={fields[field]}" for word, field in _WORDS.items() if fields[field] not in (OWN, 0)]
        return " ".join(words + ([_THIS_VERSION] if self.quantiser != OWN else []))


def send_modes(plan: merging.Plan) -> list[SendMode]:
    """Return the send mode of each merge buffer. Raises as :meth:`SendMode.parse` does."""
    return [SendMode.parse(label) for label in plan.labels]


def send_mode(plan: merging.Plan) -> SendMode:
    """Return the send mode of the plan; it is ahead if any merge buffer is. Raises as :meth:`SendMode.parse` does."""
    modes = send_modes(plan)
    return replace(modes[0], ahead=any(mode.ahead for mode in modes))


def with_send_mode(plan: merging.Plan, **changes: Any) -> merging.Plan:
    """Return ``plan`` with other send modes; with one of ``SUMS``, each merge buffer is one message.

    ``changes``: fields of :class:`SendMode`, for all merge buffers.
    """
    parts = plan.parts if changes.get("exchange", OWN) == OWN else ()
    return replace(plan, labels=tuple(replace(mode, **changes).label for mode in send_modes(plan)), parts=parts)


def why_labels_are_wrong(plan: merging.Plan) -> str:
    """Return what is wrong with the labels of ``plan``; empty if nothing is."""
    try:
        modes = send_modes(plan)
    except ValueError as error:
        return str(error)
    names_of = {
        "wires": {mode.codec for mode in modes},
        "exchanges": {mode.exchange for mode in modes},
        "quantizers": {f"{mode.quantiser} for {mode.workers} workers" for mode in modes},
    }
    for what, names in names_of.items():
        if len(names) > 1:
            return f"its merge buffers have different {what}: {', '.join(sorted(names))}. Use one for all"
    return ""
