# SPDX-License-Identifier: Apache-2.0
"""Choice among several compressors, of which training takes one by the time of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sparsifiers.compressor import Compressor, Kind

NONE = "none"  # among candidates: every element, as it is
NARROW = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that quantisers are given; wider ones travel dense


class Choice(Compressor):
    """Choice among candidates that send every element without error feedback, the most exact one first.

    candidates: names of quantisers, after "none" if elements may travel as they are.
    until_chosen: the one that is used before one is chosen; not "none".
    """

    name = "auto"
    kind = Kind.QUANTISED

    def __init__(self, candidates: Sequence[str], until_chosen: str) -> None:
        self.candidates, self.until_chosen = tuple(candidates), until_chosen
        if until_chosen not in self.candidates or until_chosen == NONE:
            raise ValueError(
                f"until_chosen={until_chosen!r}: expected one of {', '.join(self.candidates)} except {NONE!r}"
            )

    def is_for(self, dtype: torch.dtype) -> bool:
        return dtype in NARROW

    def options(self) -> dict[str, object]:
        return {"candidates": self.candidates, "until_chosen": self.until_chosen}
