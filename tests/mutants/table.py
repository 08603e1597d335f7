# SPDX-License-Identifier: Apache-2.0
"""Table of mutants: what breaks, where, and the tests that must fail. Those of one room are in one file."""

from __future__ import annotations

from mutants import of_exchanges, of_jobs, of_loops, of_steps
from mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = tuple(one for room in (of_exchanges, of_steps, of_jobs, of_loops) for one in room.MUTANTS)
