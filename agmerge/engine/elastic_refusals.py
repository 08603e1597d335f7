# SPDX-License-Identifier: Apache-2.0
"""Settings with which an exchange does not go on without a worker that is lost: refused in an elastic job, by name."""

from __future__ import annotations

import weakref

from agmerge.runtime import workers
from agmerge.step.config import AUTO, SPARSE, Config
from agmerge.step.gradient_exchange import GradientExchange
from sparsifiers import Kind

REFUSED = "AGM308: {what} is not supported in elastic training (init(elastic=True)). {instead} See docs/elastic.md."
LEAVE_OUT = "Remove it, or call agmerge.init() without elastic=True."
PLAIN = (
    "Use a plain PyTorch loop, or call agmerge.init() without elastic=True and restart from a checkpoint after a "
    "failure."
)
SECOND = "Wrap both in one list, agmerge.DistributedOptimizer([first, second], ...), or close() the first."

_process: weakref.ref[GradientExchange] | None = None  # the exchange of this process; written by admit alone


def refuse_elastic(config: Config) -> None:
    """Raise ``ValueError`` for the first setting of ``config`` that an elastic job cannot have."""
    exchange, sync, updates, compressor = (
        config.merging.exchange, config.sync, config.sync.updates, config.compression.compressor,
    )  # fmt: skip
    found = {
        f"exchange={exchange!r}": exchange not in (AUTO, SPARSE),
        f"compression={compressor.name!r}": Kind.LOW_RANK in compressor.kinds,
        "merging='dear'": sync.model is not None,
        "process_set=": bool(sync.process_set.ranks) or sync.process_set.horovod is not None,
        "dense='partial'": config.compression.partial is not None,
        "a GradScaler": config.guards.scaled and updates is None,
        "fragments=": updates is not None and updates.fragments > 1,
        "overlap=": updates is not None and updates.overlap > 0,
    }
    for what, is_there in found.items():
        if is_there:
            raise ValueError(REFUSED.format(what=what, instead=LEAVE_OUT))


def refuse_feature(what: str, instead: str = LEAVE_OUT) -> None:
    """Raise ``ValueError`` in an elastic job: ``what``, in words, is not for it; ``instead``: a sentence of advice."""
    if workers.can_regroup():
        raise ValueError(REFUSED.format(what=what, instead=instead))


def admit_elastic(exchange: GradientExchange) -> None:
    """Raise ``ValueError`` where this process has another exchange that is in use: ranks could not tell them apart."""
    global _process
    if workers.bound() is not None:
        return
    other = None if _process is None else _process()
    if other is not None and not other.fault:
        raise ValueError(REFUSED.format(what="a second optimizer", instead=SECOND))
    _process = weakref.ref(exchange)
