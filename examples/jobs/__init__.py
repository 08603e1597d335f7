# SPDX-License-Identifier: Apache-2.0
"""Find jobs by name, MODEL-DATA: a module here is a kind of task, and has the table of its jobs."""

from __future__ import annotations

import difflib

from jobs import digits, gpt, images, squad, stdlib, words
from jobs.base import Job

TABLES = (digits.JOBS, stdlib.JOBS, images.JOBS, words.JOBS, gpt.JOBS, squad.JOBS)
JOBS: dict[str, Job] = {name: job for table in TABLES for name, job in table.items()}


def get(name: str) -> Job:
    """Return the job called ``name``. Raises ``ValueError`` that lists the names."""
    if name in JOBS:
        return JOBS[name]
    close = difflib.get_close_matches(name, JOBS, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown job {name!r}{hint}; jobs: {', '.join(JOBS)}")
