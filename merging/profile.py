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
    """Keep sizes and times of n tensors, in the order in which gradients become ready. Immutable.

    Args:
        names (list of str): n different names.
        numel (array): Values of each tensor, at least 1.
        backward (array): Seconds from the readiness of the tensor before to that of each tensor.
        forward (array): Seconds of the forward pass for each tensor. Default: None.
        work (array): Values that selection reads, 0 for tensors that are not selected from. Default: ``numel``.
        load (array): Values that are expected to be sent. Default: ``numel``.
        noise (array): Energy that selection leaves behind. Default: None.

    Raises:
        TypeError: For anything but names and numbers.
        ValueError: For wrong lengths, repeated names, empty tensors, and negative or infinite numbers. The text names
            the tensor.
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
        """Return the arguments that make an equal profile, as lists of numbers and strings."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, as JSON and atomically. ``read`` returns it, bitwise equal."""
        storage.write(path, storage.seal("merging.Profile", self.plain()))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Profile:
        """Return the profile in a file. Raises ``ValueError``, with the path, if the file is damaged or of another
        kind.

        It is not called ``load``, because that is the number of values that are sent.
        """
        return storage.read(path, "merging.Profile", cls)
