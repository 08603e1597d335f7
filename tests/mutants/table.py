# SPDX-License-Identifier: Apache-2.0
"""Table of mutants: by room, what breaks, where, and the tests that must fail."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a nonfinite element is not noted",
        "agmerge/tensors/arena.py",
        "return gradient.clone() if gradient.data_ptr() == update.data_ptr() else gradient",
        "return gradient",
        ("tests/agmerge/tensors",),
    ),
    Mutant(
        "a scan loses its last element",
        "sparsifiers/native/kernel_quantise.c",
        "the",
        "the",
        ("tests/sparsifiers/test_kernel.py",),
    ),
)
