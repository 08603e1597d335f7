# SPDX-License-Identifier: Apache-2.0
"""Records in files: canonical JSON with a checksum, one spelling per value, and files that are never half written."""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

FORMAT = 1
_SEAL = ("crc32", "format", "kind")

Record = TypeVar("Record")


def seal(kind: str, body: Mapping[str, Any], version: int = FORMAT) -> str:
    """Return `body` as one line of ASCII JSON: sorted keys, no blanks, floats to the last bit.

    Three fields are added: `kind` and `format`, the type of the record and its version; `crc32`, of
    everything else, shows damage.
    """
    record = {**body, "kind": kind, "format": version}
    crc = zlib.crc32(_canonical(record).encode("ascii"))
    return _canonical({**record, "crc32": f"{crc:08x}"})


def unseal(text: str, kind: str, build: Callable[..., Record]) -> Record:
    """Return `build(**body)` for a text made by `seal(kind, body)`.

    Raises TypeError where `text` is no string, ValueError where it is foreign, damaged, of another
    format version, or where `build` refuses its fields.
    """
    if not isinstance(text, str):
        raise TypeError(f"a record must be a str, got {type(text).__name__}. Decode it first.")
    text = text.removesuffix("\n")
    record = _parse(text)
    if record.get("kind") != kind:
        raise ValueError(f"this is not a {kind} record, or it is damaged. It starts with {text[:40]!r}")
    version = record.get("format")
    body = {key: value for key, value in record.items() if key not in _SEAL}
    # Sealing it again compares the checksum and also details that a parser ignores: blanks, escapes, double keys.
    if not isinstance(version, int) or seal(kind, body, version) != text:
        raise ValueError(f"this {kind} record is damaged or was edited. Use an undamaged copy or create a new one.")
    if version != FORMAT:
        raise ValueError(f"this {kind} record has format {version}, but only format {FORMAT} is supported")
    try:
        return build(**body)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this {kind} record is undamaged, but its content is invalid: {error}") from error


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` and a newline to `path`, atomically: readers see the old file or the new one."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(text.encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str], kind: str, build: Callable[..., Record]) -> Record:
    """Return `unseal` of the text in the file at `path`; a ValueError names the file."""
    text = Path(path).read_bytes().decode("ascii", errors="replace")
    try:
        return unseal(text, kind, build)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def _canonical(record: Mapping[str, Any]) -> str:
    """Return the one spelling of a record."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _parse(text: str) -> dict[str, Any]:
    """Return the JSON object in `text`, {} where it is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
