# SPDX-License-Identifier: Apache-2.0
"""Check that no function hides a collective: a rank that skips one makes all others wait for it.

The docstring of every public function of this library that starts a collective, itself or through other functions,
opens with the word "Collective.". The in-memory backend can check that of all functions on the call stack when a
collective starts, so that tests find functions without the mark.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

from agmerge.errors import AGMergeError

MARK = "Collective."
PACKAGE = Path(__file__).resolve().parents[1]
# Backends are collectives, and say so in their base class; testing runs the ranks.
EXEMPT = (str(PACKAGE / "backends"), str(PACKAGE / "testing.py"))
NESTED, HAS_DOCSTRING = 0x10, 0x4000000  # bits of co_flags; the second one from Python 3.14 on

# By id: hashing a code object reads all of it. They are kept alive, so that an id means one of them.
_fine: dict[int, CodeType] = {}


def require_marks(name: str, frame: FrameType | None) -> None:
    """Raise :class:`agmerge.AGMergeError` unless ``frame`` and all its callers are marked, as far as they must be.

    ``name``: of the collective that starts. ``frame``: of the function that starts it. Takes some microseconds, since
    every function is looked at once.
    """
    while frame is not None:
        code = frame.f_code
        if id(code) not in _fine:
            if _must_be_marked(frame) and not _inherited_docstring(frame).startswith(MARK):
                raise AGMergeError(
                    f"{name}: {code.co_name}() in {code.co_filename}, line {code.co_firstlineno}, starts a collective; "
                    f"let its docstring open with {MARK!r}"
                )
            _fine[id(code)] = code
        frame = frame.f_back


def docstring(code: CodeType) -> str | None:
    """Return the docstring of the function that ``code`` belongs to; None if it has none."""
    if sys.version_info >= (3, 14) and not code.co_flags & HAS_DOCSTRING:
        return None
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


def _must_be_marked(frame: FrameType) -> bool:
    """Return whether ``frame`` is of a public function or method of this library, outside of backends.

    Names with an underscore, functions in functions, lambdas and properties are details of their owners.
    """
    code = frame.f_code
    if code.co_name.startswith(("_", "<")) or code.co_flags & NESTED:
        return False
    if not code.co_filename.startswith(str(PACKAGE)) or code.co_filename.startswith(EXEMPT):
        return False
    return not any(isinstance(attribute, property) for attribute in _attributes(frame))


def _inherited_docstring(frame: FrameType) -> str:
    """Return the docstring of the function that ``frame`` runs, or of the method that it overrides; else empty."""
    texts = [docstring(frame.f_code), *(getattr(attribute, "__doc__", None) for attribute in _attributes(frame))]
    return next(filter(None, texts), "")


def _attributes(frame: FrameType) -> list[object]:
    """Return the attributes of the first argument's classes that have the function's name, subclass first."""
    name, first = frame.f_code.co_name, frame.f_code.co_varnames[: frame.f_code.co_argcount][:1]
    return [vars(kind)[name] for key in first for kind in type(frame.f_locals.get(key)).__mro__ if name in vars(kind)]
