# SPDX-License-Identifier: Apache-2.0
"""Planners by the names of papers and their code: what is published works, and what is not gets the right hint."""

from __future__ import annotations

import pytest

import merging

WRITTEN = {
    "SNA-MGS-SGD": "agtf",
    "AGTF-SGD": "agtf",
    "LAGS-SGD": "layerwise",
    "WFBP": "layerwise",
    "MG-WFBP": "mgwfbp",
    "OMGS-SGD": "omgs",
    "SyncEASGD": "single",
    "AGM-(Inter+Intra)": "agmerge",
    "SAFusion": "agmerge",
    "FGBuff": "fgbuff",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_published_names_are_planners_with_their_defaults(name: str) -> None:
    assert merging.get(name) == merging.get(WRITTEN[name])


def test_the_ablation_without_intra_worker_merging_keeps_its_one_plan() -> None:
    planner = merging.get("AGM-Inter")
    assert planner == merging.get("agmerge", intra=False, check_every=0)
    assert planner.recheck_every == 0
    assert merging.get("AGM-Inter", check_every=25, phases=8) == merging.get("agmerge", intra=False, phases=8)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("treshold", "did you mean 'threshold'"),
        ("omgss-sgd", "did you mean 'omgs'"),
        ("agm-intre", "did you mean merging.get('agmerge', intra=False, check_every=0)"),
        ("ByteScheduler", "did you mean 'dear'"),
        ("DDP", "did you mean 'threshold'"),
    ],
)
def test_what_is_unknown_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="is unknown") as raised:
        merging.get(name)
    assert hint in str(raised.value)


@pytest.mark.parametrize("name", ["Ok-SGD", "topk", "xyz-sgd", "acpsgd", ""])
def test_what_is_like_nothing_gets_none(name: str) -> None:
    """Not every method that ends in "SGD" is meant for another one that does."""
    with pytest.raises(ValueError, match="is unknown") as raised:
        merging.get(name)
    assert "did you mean" not in str(raised.value)


def test_a_name_of_papers_is_taken() -> None:
    with pytest.raises(ValueError, match="'agm-inter' is already used"):
        merging.register("agm-inter", type(merging.get("single")))
