"""Who moves the bytes: one small file per backend, the same calls in each.

Backend libraries are imported when a backend is opened, never when this package is imported.
"""

from __future__ import annotations

from agmerge.backends.base import Backend, Handle, matched

__all__ = ["Backend", "Handle", "matched"]
