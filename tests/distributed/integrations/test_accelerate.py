# SPDX-License-Identifier: Apache-2.0
"""Accelerate, on two real workers, in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_networks import check_few_bytes_left, check_logged, check_refused, check_taken_over, launched

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "accelerate_scenarios.py"
Found = dict[str, Any]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks found in every scenario."""
    return launched(SCRIPT, tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize("case", ["accumulation", "bf16", "scaler"])
def test_without_compression_the_bits_are_accelerates_own(found: Found, case: str) -> None:
    ranks, _ = found["dense"]
    start, plain, ours = ranks[0][case]
    assert ranks[0] == ranks[1] and start != plain == ours


def test_a_tenth_of_the_bytes_leave(found: Found) -> None:
    ranks, _ = found["topk"]
    for seen in ranks:
        assert seen["stats"]["steps"] == 32
        assert seen["bits"] == ranks[0]["bits"]
        check_few_bytes_left(seen)
    check_logged(ranks[0]["log"])  # Accelerate logs on rank 0
    assert [(line["loss"], line["step"]) for line in ranks[0]["log"]] == [(1.0, 32)]


def test_clipping_is_of_the_combined_update(found: Found) -> None:
    (ours, wrapper), other = found["clipping"][0]
    assert ours == wrapper and other == [ours, wrapper]


@pytest.mark.parametrize("way", ["topk", "updates"])
def test_an_epoch_and_another_one_are_two_to_the_bit(found: Found, way: str) -> None:
    """The model's file has the parameters that all ranks have in common; ``load_state()`` puts back the rank's own."""
    ranks, _ = found["resume"]
    for seen in (rank[way] for rank in ranks):
        assert seen["steps"] == [16, 16] and seen["bits"][0] == seen["bits"][1] and seen["saved"] == seen["file"]
        assert seen["files"] == ["agmerge-0-of-2.pt", "agmerge-1-of-2.pt"]
    assert (ranks[0][way]["bits"] == ranks[1][way]["bits"]) == (way != "updates")
    assert ranks[0][way]["shared"] == ranks[1][way]["shared"]


def test_without_the_files_of_all_ranks_rank_0_warns_and_all_begin_anew(found: Found) -> None:
    """From the parameters that were saved, whatever a rank had carried meanwhile."""
    ranks, said = found["resume"]
    assert all(rank["incomplete"][0] == rank["incomplete"][1] for rank in ranks)
    assert [sum("does not have all files agmerge-0-of-2.pt" in text for text in texts) for texts in said] == [1, 0]


@pytest.mark.parametrize("way", ["default", "topk", "updates", "overlap"])
def test_the_main_process_alone_saves_and_nobody_waits(found: Found, way: str) -> None:
    """By default all goes on from there; else without what ranks keep, which two warnings of rank 0 say."""
    ranks, said = found["saved_alone"]
    first, second = (rank[way] for rank in ranks)
    assert first == second and first["saved"] == first["loaded"] != first["end"]
    assert first["files"] == ["agmerge-0-of-2.pt"] and first["steps"] == (16 if way == "default" else 8)
    for words in (f"{way} was saved on rank 0 only", f"{way} does not have all files agmerge-0-of-2.pt"):
        assert [sum(words in text for text in texts) for texts in said] == [int(way != "default"), 0]


def test_each_model_has_its_files(found: Found) -> None:
    for norms, files in found["several_models"][0]:
        saved, later, loaded = norms
        assert saved == loaded and all(a != b for a, b in zip(saved, later, strict=True))
        names = ["agmerge-0-of-2.pt", "agmerge-1-of-2.pt"]
        assert files == names + [f"agmerge_1/{name}" for name in names]


@pytest.mark.parametrize("way", ["dense", "topk", "updates"])
def test_two_optimizers_are_one_with_the_groups_of_both(found: Found, way: str) -> None:
    """In one go, and from a checkpoint in the middle; with updates they are exchanged when both have stepped."""
    (first, second), _ = found["several_optimizers"]
    ours, theirs = first[way]
    assert ours == theirs and first == second
    assert ours[0] == ours[2] and ours[1] == ours[3] == 8


@pytest.mark.parametrize(
    "case, words",
    [
        ("gradients, never called", "integrations.ddp.compress"),
        ("updates, never called", "integrations.ddp.compress"),
        ("wrapped", "DistributedOptimizer, so gradients would be"),
        ("hook", "DistributedDataParallel already has a"),
        ("scaler", "scaler= is not supported"),
        ("not prepared", "accelerator.prepare()"),
        ("velocity", "AGM125"),
        ("no optimizer", "Prepare the model together with its optimizer"),
        ("FSDP", "FSDP averages gradients of shards itself"),
        ("DEEPSPEED", "DeepSpeed averages gradients in its own engine"),
        ("MEGATRON_LM", "Megatron-LM averages"),
        ("XLA", "XLA averages"),
    ],
)
def test_what_would_exchange_twice_is_refused_on_every_rank(found: Found, case: str, words: str) -> None:
    check_refused(found, case, words)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_takes_over_what_was_not_sent(tmp_path: Path, workers: int) -> None:
    check_taken_over(SCRIPT, tmp_path, workers)
