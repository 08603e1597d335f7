# SPDX-License-Identifier: Apache-2.0
"""Profile of one model: measured sizes and times per tensor, in readiness order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from merging import storage
from merging.checks import Elements, Reals, elements, reals, tensor_names


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Profile:
    """Sizes and times of n tensors, index 0 being ready first. Immutable; the arrays are read-only copies.

    names: n distinct strings.
    numel: elements per tensor, int64 of shape (n,), each at least 1.
    backward: seconds from the readiness of tensor i-1 to that of tensor i, float64 of shape (n,).
    forward: seconds of forward per tensor, likewise, or None.
    work: elements handed to selection, int64 of shape (n,); 0 exempts a tensor. Given None, it is numel.
    load: elements expected on the wire, int64 of shape (n,). Given None, it is numel.
    noise: energy that selection leaves behind per tensor, float64 of shape (n,), or None.

    Raises TypeError for anything but names and numbers. Raises ValueError, which names the tensor, for a
    length other than n, a repeated name, an empty tensor, a negative or fractional count, and a
    negative or non-finite time.
    """

    names: tuple[str, ...]
    numel: Elements
    backward: Reals
    forward: Reals | None
    work: Elements
    load: Elements
    noise: Reals | None

    def __init__(
        self,
        names: Sequence[str],
        numel: ArrayLike,
        backward: ArrayLike,
        *,
        forward: ArrayLike | None = None,
        work: ArrayLike | None = None,
        load: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> None:
        names = tensor_names(names)
        checked = {
            "names": names,
            "numel": elements("numel", numel, names, least=1),
            "backward": reals("backward", backward, names),
            "forward": None if forward is None else reals("forward", forward, names),
            "work": elements("work", numel if work is None else work, names, least=0),
            "load": elements("load", numel if load is None else load, names, least=0),
            "noise": None if noise is None else reals("noise", noise, names),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Profile):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash((self.names, self.numel.tobytes()))

    def __repr__(self) -> str:
        return f"<Profile: {len(self)} tensors, {self.numel.sum()} elements, backward {self.backward.sum():.6g} s>"

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        # Pickling and copying forget that an array is read-only.
        Profile.__init__(self, **state)

    def plain(self) -> dict[str, Any]:
        """Return the arguments that make an equal profile, by name, as lists of Python numbers and strings."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path` as JSON, atomically; `read` gives back an equal one, to the bit."""
        storage.write(path, storage.seal("merging.Profile", self.plain()))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Return the profile saved at `path`. ValueError, with the path, for a foreign or damaged file.

        It is not called `load` because that is the array of elements on the wire.
        """
        return storage.read(path, "merging.Profile", cls)
