"""Send modes of merge buffers: the labels of a plan.

A label is words with spaces between them; without any, a buffer has the default mode, until times are measured. So
whatever stores a plan, a checkpoint or the user's cache, stores its send modes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import merging
import sparsifiers
from agmerge.exchanges.message.values import VALUES
from agmerge.exchanges.quantised.exchange import SEED
from sparsifiers.quantising.blocks import VERSION

AHEAD = "ahead"
OWN = "auto"  # the wire of a gradient's own dtype; the exchange that the options name
MASKED, OKTOPK = SUMS = (
    "masked",
    "oktopk",
)  # exchanges that send k elements of the sum, which exchange="fastest" tries
_WIRE, _EXCHANGE, _QUANTISER, _WORKERS = "wire=", "exchange=", "quantiser=", "workers="
# Versions that the bits of a quantiser depend on, in both phases: a plan with others is refused.
_CODEC, _SEED = f"codec={VERSION}", f"seed={SEED}"


@dataclass(frozen=True)
class Way:
    """Send mode of a merge buffer, as its label says it."""

    ahead: bool = False  # tensors are selected from one by one, before they are merged
    wire: str = OWN  # the value codec of selections
    exchange: str = OWN  # of selections
    quantiser: str = OWN  # of quantised tensors, where there is a choice
    workers: int = 0  # among which the quantiser was chosen; 0: it was not

    @classmethod
    def of(cls, label: str) -> Way:
        """Return the send mode of ``label``. Raises ``ValueError`` for an unknown word."""
        way = cls()
        for word in label.split():
            wire, exchange = word.removeprefix(_WIRE), word.removeprefix(_EXCHANGE)
            quantiser, workers = word.removeprefix(_QUANTISER), word.removeprefix(_WORKERS)
            if word == AHEAD:
                way = replace(way, ahead=True)
            elif word in (_CODEC, _SEED):
                continue
            elif word.startswith(("codec=", "seed=")):
                raise ValueError(
                    f"labels: {label!r} has {word!r}, and this version sends other bits, with {_CODEC} {_SEED}: plan "
                    "anew"
                )
            elif wire in VALUES and wire != word:
                way = replace(way, wire=wire)
            elif exchange in SUMS and exchange != word:
                way = replace(way, exchange=exchange)
            elif quantiser != word and sparsifiers.is_quantiser(quantiser):
                way = replace(way, quantiser=quantiser)
            elif workers != word and workers.isdigit():
                way = replace(way, workers=int(workers))
            else:
                raise ValueError(
                    f"labels: {label!r} has the word {word!r}; there are {AHEAD!r} and, with a value codec, "
                    f"{_WIRE + 'int8'!r}, with one of {', '.join(SUMS)} {_EXCHANGE + MASKED!r}, with a quantiser "
                    f"{_QUANTISER + 'eden-2'!r} and the number of workers that it was chosen for {_WORKERS + '4'!r}"
                )
        return way

    @property
    def label(self) -> str:
        """Return the label of this send mode."""
        words = [(AHEAD, self.ahead), (_WIRE + self.wire, self.wire != OWN)]
        words.append((_EXCHANGE + self.exchange, self.exchange != OWN))
        words.append((_QUANTISER + self.quantiser, self.quantiser != OWN))
        words.append((f"{_WORKERS}{self.workers}", self.workers > 0))
        words += [(_CODEC, self.quantiser != OWN), (_SEED, self.quantiser != OWN)]
        return " ".join(word for word, is_said in words if is_said)


def ways(plan: merging.Plan) -> list[Way]:
    """Return the send mode of each merge buffer of ``plan``. Raises as :meth:`Way.of` does."""
    return [Way.of(label) for label in plan.labels]


def why_labels_are_wrong(plan: merging.Plan) -> str:
    """Return what is wrong with the labels of ``plan``; empty if nothing is."""
    try:
        found = ways(plan)
    except ValueError as error:
        return str(error)
    said = {
        "wires": {way.wire for way in found},
        "exchanges": {way.exchange for way in found},
        "quantisers": {f"{way.quantiser} for {way.workers} workers" for way in found},
    }
    for what, names in said.items():
        if len(names) > 1:
            return f"its merge buffers have the {what} {', '.join(sorted(names))}: give all the same one"
    return ""


def wire_of(plan: merging.Plan) -> str:
    """Return the value codec of all selections."""
    return ways(plan)[0].wire


def with_wire(plan: merging.Plan, wire: str) -> merging.Plan:
    """Return ``plan`` with this value codec."""
    return replace(plan, labels=tuple(replace(way, wire=wire).label for way in ways(plan)))


def is_ahead(plan: merging.Plan) -> bool:
    """Return whether ``plan`` was made to select from tensors before they are merged."""
    return any(way.ahead for way in ways(plan))


def with_ahead(plan: merging.Plan, ahead: bool) -> merging.Plan:
    """Return ``plan``, selecting before tensors are merged, or not."""
    return replace(plan, labels=tuple(replace(way, ahead=ahead).label for way in ways(plan)))


def exchange_of_plan(plan: merging.Plan) -> str:
    """Return the exchange of all selections."""
    return ways(plan)[0].exchange


def with_exchange(plan: merging.Plan, exchange: str) -> merging.Plan:
    """Return ``plan`` with this exchange; of ``SUMS``, none sends merge buffers in several messages."""
    parts = plan.parts if exchange == OWN else (1,) * len(plan.counts)
    return replace(plan, labels=tuple(replace(way, exchange=exchange).label for way in ways(plan)), parts=parts)


def quantiser_of(plan: merging.Plan) -> tuple[str, int]:
    """Return the quantiser, and the number of workers that it was chosen for; ("auto", 0): none was chosen."""
    return ways(plan)[0].quantiser, ways(plan)[0].workers


def with_quantiser(plan: merging.Plan, quantiser: str, workers: int = 0) -> merging.Plan:
    """Return ``plan`` with this quantiser. ``workers``: the number it was chosen for; 0: it was not chosen, so far."""
    labels = (replace(way, quantiser=quantiser, workers=workers).label for way in ways(plan))
    return replace(plan, labels=tuple(labels))
