# SPDX-License-Identifier: Apache-2.0
"""Compare the ranks' next calls, before any tensor travels.

All agreements of a communicator are one call to the backend, whatever they are about: ranks that make different calls
meet here, and all of them get the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from agmerge.backends import Backend, timeouts
from agmerge.backends.handshake import Fact, first_difference, gather_bytes, gather_texts, ranks_of
from agmerge.errors import AGMergeError, RankMismatchError

JOINED = bytes(16)  # in the place of a digest: this rank makes no more calls
ADVICE = "Every rank must make the same call."


def agree(comm: Backend, label: str, facts: Sequence[Fact], what: str = "collective", advice: str = ADVICE) -> None:
    """Collective. Raise :class:`agmerge.RankMismatchError` on every rank unless all ranks state the same ``facts``.

    ``label``: the call's name in messages and errors. ``facts``: (name, value) in a fixed order. ``what``: the subject
    of the error; ``advice``: what to do. One all-gather of 16 bytes a rank, more on a mismatch or where a rank has
    joined: then :class:`agmerge.AGMergeError` is raised unless the call can do without it.
    """
    text = json.dumps(list(facts)).encode()
    digests = exchange_digests(comm, label, hashlib.blake2b(text, digest_size=16).digest())
    if len(set(digests)) == 1:
        return
    texts = exchange_texts(comm, label, text)
    stated = [json.loads(answer) if answer else None for answer in texts]
    making = next(facts for facts in stated if facts)
    assumed = [facts or making for facts in stated]  # one that has joined agrees to anything
    if any(facts != making for facts in assumed):
        raise RankMismatchError(f"AGM101: {what}: {first_difference(assumed)}. {advice}")
    if not joinable(making):
        gone = ranks_of(digests, JOINED)
        raise AGMergeError(
            f"AGM121: {label}: {gone} called join(), after which only sums and averages are supported. Make other "
            "calls before join()."
        )


def exchange_digests(comm: Backend, label: str, own: bytes) -> list[bytes]:
    """Collective. Return a digest of every rank's next call, 16 bytes each, by rank."""
    return gather_bytes(comm, own, f"agreement ({label})", timeouts.default())


def exchange_texts(comm: Backend, label: str, own: bytes) -> list[bytes]:
    """Collective. Return every rank's next call in full, by rank; b"" of one that has joined."""
    return gather_texts(comm, own, f"agreement ({label})", timeouts.default())


def joinable(facts: Sequence[Sequence[str]]) -> bool:
    """Return whether ranks that have joined can take part, with zeros, in the call that ``facts`` describe."""
    values = dict((name, value) for name, value in facts)
    return values.get("call") == "allreduce" and values.get("op") in ("sum", "average")


def share_numbers(comm: Backend, label: str, numbers: Sequence[int]) -> list[list[int]]:
    """Collective. Return every rank's ``numbers`` (int64), of which all have equally many, by rank."""
    own = np.asarray(numbers, dtype=np.int64).tobytes()
    gathered = gather_bytes(comm, own, f"numbers ({label})", timeouts.default())
    return [np.frombuffer(packed, dtype=np.int64).tolist() for packed in gathered]
