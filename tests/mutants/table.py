# SPDX-License-Identifier: Apache-2.0
"""Table of mutants: by room, what breaks, where, and the tests that must fail."""

from __future__ import annotations

from mutant import Mutant

EXCHANGES = "tests/agmerge/exchanges"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "an owner does not announce a damaged shard",
        "agmerge/exchanges/quantised/two_phase.py",
        "return control, 1 + damaged[0] if damaged else 0",
        "return control, 0",
        (f"{EXCHANGES}/test_quantised.py",),
    ),
    Mutant(
        "second phases of an attempt that came to nothing are not started",
        "agmerge/exchanges/quantised/two_phase.py",
        "            self._add_up_all()\n        pending = super()",
        "            pass\n        pending = super()",
        (f"{EXCHANGES}/test_quantised.py",),
    ),
    Mutant(
        "first phases of an attempt that failed are kept",
        "agmerge/exchanges/quantised/two_phase.py",
        "            self._first_phase.clear()  # their",
        "            pass  # their",
        (f"{EXCHANGES}/test_quantised.py",),
    ),
    Mutant(
        "squares of a round that was given up are counted",
        "agmerge/exchanges/quantised/exchange.py",
        "            squares.zero_()\n        key =",
        "            pass\n        key =",
        ("tests/agmerge/step/test_gradient_norm.py",),
    ),
    Mutant(
        "keys of random signs are not compared",
        "agmerge/exchanges/quantised/layout.py",
        "            found = {number for number, pair in enumerate(zip(announced, own, strict=True)) if pair[0] != pair[1]}\n",
        "",
        (f"{EXCHANGES}/test_quantised.py",),
    ),
    Mutant(
        "dense 16-bit tensors overflow with their residual",
        "agmerge/exchanges/sparse.py",
        "saturated(load.work, torch.finfo(sent.dtype).max)",
        "load.work",
        (f"{EXCHANGES}/test_exchanges.py",),
    ),
    Mutant(
        "elements are counted with padding",
        "agmerge/exchanges/sparse.py",
        "elements += min(offer.capacity, load.segment.numel)",
        "elements += offer.capacity",
        (f"{EXCHANGES}/test_exchanges.py",),
    ),
)
