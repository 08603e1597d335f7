# SPDX-License-Identifier: Apache-2.0
"""A compressor without options, state or density of its own needs a name and a kind, and is one that sends all."""

from __future__ import annotations

import pickle

import pytest

import sparsifiers
from sparsifiers import Compressor, Kind


class Whole(Compressor):
    name = "whole"
    kind = Kind.DENSE


def test_defaults_are_those_of_a_compressor_that_sends_all_and_remembers_nothing() -> None:
    whole = Whole()
    assert (whole.density, whole.memory, whole.same_on_all_ranks) == (1.0, "none", False)
    assert whole.options() == whole.state_dict() == whole.snapshot() == {}
    assert whole.retain(["a"]) is None and repr(whole) == "whole()"
    whole.load_state_dict({})
    with pytest.raises(ValueError, match=r"whole\(\) has no state, got \['a'\]"):
        whole.load_state_dict({"a": 1})


@pytest.mark.parametrize("name", sparsifiers.names())
def test_every_sparsifier_is_a_sparse_compressor(name: str) -> None:
    made = sparsifiers.get(name, 0.125)
    assert isinstance(made, Compressor) and made.kind is Kind.SPARSE
    assert made.density == 0.125
    assert made.memory == ("dgc" if name == "dgc" else "residual")
    assert pickle.loads(pickle.dumps(made)).kind is Kind.SPARSE
