# SPDX-License-Identifier: Apache-2.0
"""Compare facts between ranks before a collective of which the shape depends on them (guarantee G1).

Every rank states its view as a list of named facts. Digests of equal size travel first, so that
ranks which disagree still make the same calls; only then do the texts, and every rank finds the same first
difference and raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from agmerge.backends import Backend
from agmerge.errors import RankMismatchError, printable

Fact = tuple[str, str]  # (name, value)
LARGEST = 1 << 26  # bytes of one message
LONGEST = 10_000  # characters of a value in an error
_NOTHING = ("", "nothing")  # in place of an entry that a shorter list lacks


def require_agreement(
    comm: Backend, facts: Sequence[Fact], *, what: str, advice: str, timeout: float, name: str | None = None
) -> None:
    """Collective. Raise :class:`agmerge.RankMismatchError` on every rank unless all ranks state the same ``facts``.

    One all-gather of 16 bytes a rank, two more on a mismatch. ``facts`` are (name, value) in a
    fixed order; ``what`` names the occasion, ``advice`` says what to do. ``timeout`` in seconds. ``name``: of
    the collectives, where ``what`` does not tell enough.
    """
    name = name or what
    text = json.dumps(list(facts)).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    digests = gather_bytes(comm, digest, f"{name}/digest", timeout)
    if len(set(digests)) == 1:
        return
    stated = [json.loads(facts_of_rank) for facts_of_rank in gather_texts(comm, text, name, timeout)]
    raise RankMismatchError(f"AGM101: {what}: {first_difference(stated)}. {advice}")


def first_difference(facts_of_ranks: Sequence[Sequence[Sequence[str]]]) -> str:
    """Return a sentence about the first fact on which ranks differ, with each value and the ranks that hold it.

    ``facts_of_ranks``: by rank, a list of (name, value).
    """
    length = max(len(facts) for facts in facts_of_ranks)
    for index in range(length):
        stated = [tuple(facts[index]) if index < len(facts) else _NOTHING for facts in facts_of_ranks]
        if len(set(stated)) == 1:
            continue
        names = {name for name, _ in stated} - {""}
        same_name = len(names) == 1
        shown = [value if same_name else f"{name} {value}".strip() for name, value in stated]
        title = names.pop() if same_name else f"entry {index}"
        parts = [f"{printable(value, LONGEST)} on {ranks_of(shown, value)}" for value in dict.fromkeys(shown)]
        return f"ranks disagree on {printable(title)}: " + "; ".join(parts)
    return "ranks disagree"


def ranks_of(values: Sequence[object], value: object) -> str:
    """Return ``"rank 0"`` or ``"ranks 1, 2"``: the places at which ``values`` holds ``value``."""
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def gather_bytes(comm: Backend, data: bytes, name: str, timeout: float) -> list[bytes]:
    """Collective. Return every rank's ``data``, which has the same length on all of them. ``timeout``: seconds."""
    if not data:
        return [b""] * comm.size
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    out = torch.empty(comm.size * len(data), dtype=torch.uint8)
    comm.all_gather(out, own, name).wait(timeout)
    whole = out.numpy().tobytes()
    return [whole[start : start + len(data)] for start in range(0, len(whole), len(data))]


def gather_texts(comm: Backend, data: bytes, name: str, timeout: float) -> list[bytes]:
    """Collective. Return every rank's ``data``, of any length. ``timeout``: seconds, for each of the two messages."""
    lengths = [
        int(np.frombuffer(text, dtype=np.int64)[0])
        for text in gather_bytes(comm, np.int64(len(data)).tobytes(), f"{name}/length", timeout)
    ]
    longest = max(lengths)
    padded = gather_bytes(comm, data.ljust(longest, b"\0"), f"{name}/text", timeout)
    return [text[:length] for text, length in zip(padded, lengths, strict=True)]


def broadcast_bytes(comm: Backend, data: bytes, root: int, name: str, timeout: float) -> bytes:
    """Collective. Return rank ``root``'s ``data``; the other ranks' is ignored.

    It travels in messages of at most ``LARGEST`` bytes. ``timeout``: seconds, for each of them.
    """
    length = torch.tensor([len(data)], dtype=torch.int64)
    comm.broadcast(length, root, f"{name}/length").wait(timeout)
    size, parts = int(length), []
    for start in range(0, size, LARGEST):
        part = torch.zeros(min(LARGEST, size - start), dtype=torch.uint8)
        if comm.rank == root:
            part.copy_(torch.frombuffer(bytearray(data[start : start + LARGEST]), dtype=torch.uint8))
        comm.broadcast(part, root, f"{name}/data").wait(timeout)
        parts.append(part.numpy().tobytes())
    return b"".join(parts)
