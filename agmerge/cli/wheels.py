# SPDX-License-Identifier: Apache-2.0
"""Keep wheels that were built here, and take back only those that no other user can have put there.

Installed code runs with the rights of the user who installs it. So a wheel, its folder and the folder of all of them
have to belong to this user and be writable by no other. The wheel must be the one that was kept, by its hash.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path

from agmerge.errors import AGMergeError

OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the rights of all but the owner to write


def keep(wheel: Path, folder: Path) -> Path:
    """Copy ``wheel`` into ``folder`` and return the copy; an interrupted copy is never taken for a whole one.

    Its hash is written beside ``folder``. Raises :class:`agmerge.AGMergeError` where ``folder``, or the one that it is
    in, is another user's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        if not _is_own(each):
            raise AGMergeError(f"AGM012: {each} belongs to another user. Set XDG_CACHE_HOME to a folder of your own.")
        _close_to_others(each)
    part, digest = folder / f".{os.getpid()}.part", _hash_file(folder).with_suffix(f".{os.getpid()}.part")
    try:
        shutil.copyfile(wheel, part)
        _close_to_others(part)
        digest.write_text(_hash_of(part), encoding="ascii")
        digest.replace(_hash_file(folder))
        return part.replace(folder / wheel.name)
    finally:
        part.unlink(missing_ok=True)
        digest.unlink(missing_ok=True)


def refusal(wheel: Path) -> str:
    """Return why ``wheel``, which lies where :func:`keep` has put one, must not be installed; empty if it may."""
    for each in (wheel.parent.parent, wheel.parent, wheel):
        if not _is_own(each):
            return f"{each} belongs to another user"
        if each.stat().st_mode & OTHERS:
            return f"other users can write to {each}"
    try:
        kept = _hash_file(wheel.parent).read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return "its hash is missing"
    return "" if kept == _hash_of(wheel) else "its hash differs from the cached one"


def _is_own(path: Path) -> bool:
    """Return whether ``path`` belongs to this user; where there are no users, everything does."""
    return not hasattr(os, "geteuid") or path.stat().st_uid == os.geteuid()


def _close_to_others(path: Path) -> None:
    """Take from all but the owner the right to write to ``path``."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS)


def _hash_file(folder: Path) -> Path:
    """Return where the hash of the wheel in ``folder`` lies."""
    return folder.parent / f"{folder.name}.sha256"


def _hash_of(file: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
