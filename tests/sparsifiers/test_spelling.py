# SPDX-License-Identifier: Apache-2.0
"""Public names have American spelling, and their old British spelling still works, without a warning."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch

import agmerge
import sparsifiers
from agmerge import testing
from sparsifiers import Kind
from sparsifiers.quantising import base

NEW_OF = {
    "Quantiser": "Quantizer",
    "quantiser": "quantizer",
    "quantisers": "quantizers",
    "is_quantiser": "is_quantizer",
    "register_quantiser": "register_quantizer",
}


@pytest.mark.parametrize(("old", "new"), NEW_OF.items())
def test_the_old_spelling_is_the_same_object(old: str, new: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(sparsifiers, old) is getattr(sparsifiers, new)
    assert {old, new} <= set(sparsifiers.__all__)


def test_classes_of_scripts_may_derive_from_either_name() -> None:
    assert base.Quantiser is base.Quantizer is sparsifiers.Quantizer
    assert sparsifiers.Quantizer.__name__ == "Quantizer"


def test_the_kind_has_both_names_and_is_read_from_both_values() -> None:
    assert Kind.QUANTISED is Kind.QUANTIZED is Kind("quantised") is Kind("quantized")
    assert [kind.name for kind in Kind] == ["DENSE", "SPARSE", "LOW_RANK", "QUANTIZED", "CUSTOM"]
    with pytest.raises(ValueError, match="'quantiged' is not a valid Kind"):
        Kind("quantiged")


def test_pickles_of_the_old_spelling_are_read() -> None:
    """Protocol 0 is text, so that it can be written as an older version wrote it."""
    of_class = pickle.dumps(sparsifiers.Quantizer, 0).replace(b"Quantizer", b"Quantiser")
    of_kind = pickle.dumps(Kind.QUANTIZED, 0).replace(b"quantized", b"quantised").replace(b"QUANTIZED", b"QUANTISED")
    assert b"uantised" in of_kind.lower() and b"Quantiser" in of_class
    assert pickle.loads(of_class) is sparsifiers.Quantizer and pickle.loads(of_kind) is Kind.QUANTIZED


def test_statistics_have_both_keys() -> None:
    def body(rank: int) -> dict[str, object]:
        weight = torch.nn.Parameter(torch.ones(64, 64))
        inner = torch.optim.AdamW([weight])
        optimizer = agmerge.DistributedOptimizer(inner, [("w", weight)], compression="eden-2")
        weight.square().sum().backward()
        optimizer.step()
        return optimizer.stats()

    stats = testing.run(2, body)[0]
    assert stats["quantizer"] == stats["quantiser"] == "eden-2"
    assert stats["quantizer_why"] == stats["quantiser_why"] != ""
