"""Say how merge buffers are sent: what the labels of a plan mean.

A label is words with spaces between them; without any, everything is as it is until times are measured. So whatever
keeps a plan, a checkpoint or the user's cache, keeps this with it.
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
# What else decides about the bits that a quantiser sends, in both phases: a plan that says otherwise is refused.
_CODEC, _SEED = f"codec={VERSION}", f"seed={SEED}"


@dataclass(frozen=True)
class Way:
    """Hold what a label says."""

    ahead: bool = False  # tensors are selected from one by one, before they are merged
    wire: str = OWN  # the value codec of what is selected
    exchange: str = OWN  # of what is selected
    quantiser: str = OWN  # of what is quantised, where there is a choice
    workers: int = 0  # among which that was chosen; 0: it was not

    @classmethod
    def of(cls, label: str) -> Way:
        """Return what ``label`` says. Raises ``ValueError`` for a word that says nothing."""
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
        """Return the label that says this."""
        words = [(AHEAD, self.ahead), (_WIRE + self.wire, self.wire != OWN)]
        words.append((_EXCHANGE + self.exchange, self.exchange != OWN))
        words.append((_QUANTISER + self.quantiser, self.quantiser != OWN))
        words.append((f"{_WORKERS}{self.workers}", self.workers > 0))
        words += [(_CODEC, self.quantiser != OWN), (_SEED, self.quantiser != OWN)]
        return " ".join(word for word, is_said in words if is_said)


def ways(plan: merging.Plan) -> list[Way]:
    """Return how each merge buffer of ``plan`` is sent. Raises as :meth:`Way.of` does."""
    return [Way.of(label) for label in plan.labels]


def why_labels_are_wrong(plan: merging.Plan) -> str:
    """Say what is wrong with the labels of ``plan``; empty if nothing is."""
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
    """Return the value codec of all that is selected."""
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
    """Return the exchange of all that is selected."""
    return ways(plan)[0].exchange


def with_exchange(plan: merging.Plan, exchange: str) -> merging.Plan:
    """Return ``plan`` with this exchange; of ``SUMS``, none sends merge buffers in several messages."""
    parts = plan.parts if exchange == OWN else (1,) * len(plan.counts)
    return replace(plan, labels=tuple(replace(way, exchange=exchange).label for way in ways(plan)), parts=parts)


def quantiser_of(plan: merging.Plan) -> tuple[str, int]:
    """Return the quantiser of what is quantised, and among how many workers it was chosen; ("auto", 0): none was."""
    return ways(plan)[0].quantiser, ways(plan)[0].workers


def with_quantiser(plan: merging.Plan, quantiser: str, workers: int = 0) -> merging.Plan:
    """Return ``plan`` with this quantiser. ``workers``: among which it was chosen; 0: it was not, so far."""
    labels = (replace(way, quantiser=quantiser, workers=workers).label for way in ways(plan))
    return replace(plan, labels=tuple(labels))
