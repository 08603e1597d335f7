# SPDX-License-Identifier: Apache-2.0
"""Unpickle numpy arrays, dicts, lists, tuples, bytes, strings and numbers, and nothing that could run anything."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {  # what an array's pickle names, by numpy 1 and 2 alike
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
}


class _Arrays(pickle.Unpickler):
    """Find what the pickle of an array needs, by a table; everything else is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a file of arrays has no use for")
        return _NAMES[module, name]


def load(path: Path) -> Any:
    """Return what is pickled in a file, of Python 2 or 3; strings of Python 2 are bytes.

    Raises ``ValueError`` that names the file if it is broken, or asks for anything but arrays and plain values.
    """
    try:
        return _Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # a broken pickle may raise nearly anything
        raise ValueError(f"{path}: this pickle cannot be read: {error or type(error).__name__}") from None
