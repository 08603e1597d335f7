# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, on two real workers: most of it in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_networks import check_few_bytes_left, check_logged, check_refused, check_taken_over, launched

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SCRIPT = Path(__file__).parent / "trainer_scenarios.py"
Found = dict[str, Any]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks found in every scenario."""
    return launched(SCRIPT, tmp_path_factory.mktemp("trainer"))


def test_without_compression_the_bits_are_the_trainers_own(found: Found) -> None:
    """Accumulation that does not divide the epoch, clipping, bf16, checkpointed gradients."""
    ranks, _ = found["dense"]
    assert ranks[0] == ranks[1]
    for start, plain, ours in (bits for _, *bits in ranks[0].values()):
        assert start != plain == ours
    assert [steps for steps, *_ in ranks[0].values()] == [6, 16]


def test_a_tenth_of_the_bytes_leave_in_both_trainings(found: Found) -> None:
    ranks, _ = found["topk"]
    for seen in ranks:
        assert seen["stats"]["steps"] == 24
        assert seen["residual"] > 1e-3 and seen["bits"] == ranks[0]["bits"]
        assert [entry["agmerge/bytes_sent"] * 4 for entry in seen["log"]] == [
            3 * seen["stats"]["bytes_sent"],
            4 * seen["stats"]["bytes_sent"],
        ]
        check_few_bytes_left(seen)
        check_logged(seen["log"])


@pytest.mark.parametrize("way", ["topk", "updates"])
def test_four_steps_and_four_more_are_eight_to_the_bit(found: Found, way: str) -> None:
    as_in_one_go(found["resume"][0], way)


@pytest.mark.long
def test_so_they_are_in_other_ways(tmp_path: Path) -> None:
    ranks, _ = launched(SCRIPT, tmp_path, "resume_others")["resume_others"]
    for way in ranks[0]:
        as_in_one_go(ranks, way)


@pytest.mark.long
def test_a_second_training_in_another_ddp_begins_anew(tmp_path: Path) -> None:
    ranks, _ = launched(SCRIPT, tmp_path, "another_ddp")["another_ddp"]
    assert ranks[0] == ranks[1]
    for is_first, steps, end, before in ranks[0].values():
        assert not is_first and steps == 8 and end != before


def as_in_one_go(ranks: list[Any], way: str) -> None:
    """A training that was interrupted has ended as one that was not."""
    for seen in (rank[way] for rank in ranks):
        assert seen["steps"] == [8, 8] and len(set(seen["bits"])) == 1 and len(set(seen["residuals"])) == 1
        assert seen["files"] == ["agmerge-0-of-2.pt", "agmerge-1-of-2.pt"]
    assert ranks[0][way]["bits"] == ranks[1][way]["bits"]
    if way == "topk":
        assert ranks[0][way]["residuals"] != ranks[1][way]["residuals"]


def test_without_the_files_of_all_ranks_rank_0_warns_and_all_begin_anew(found: Found) -> None:
    ranks, said = found["resume"]
    (bits, steps), other = (rank["incomplete"] for rank in ranks)
    assert [bits, steps] == other and steps == 4 and bits != ranks[0]["topk"]["bits"][0]
    first, second = (sum("does not have all files agmerge-0-of-2.pt" in text for text in texts) for texts in said)
    assert (first, second) == (1, 0)


@pytest.mark.parametrize("best", [False, True])
def test_updates_are_evaluated_and_saved_as_all_ranks_have_them(found: Found, best: bool) -> None:
    ranks, _ = found["updates"]
    one, two = (rank[str(best)] for rank in ranks)
    assert all(a != b for a, b in zip(one["step"], two["step"], strict=True))
    assert one["evaluation"] == two["evaluation"] and one["loss"] == two["loss"]
    assert not set(one["evaluation"][:4]) & {*one["step"], *two["step"]}
    assert one["start"][0] == one["start"][1]
    saved = {"checkpoint-2": one["evaluation"][0], "checkpoint-8": one["evaluation"][3]}
    assert one["models"] == saved and one["files"] == [2, 2]
    assert one["end"] == two["end"] and one["later"] == two["later"] != one["end"]
    assert (one["end"] == saved["checkpoint-2"]) == best


def test_a_scaler_changes_no_bit(found: Found) -> None:
    for none, scaled in found["scaler"][0]:
        assert none == scaled and none[1:3] == [8, 0]


@pytest.mark.parametrize("way", ["dense", "topk", "updates"])
def test_a_list_of_two_optimizers_is_one_with_the_groups_of_both(found: Found, way: str) -> None:
    """In one go, and from a checkpoint in the middle."""
    first, second = found["several_optimizers"][0]
    ours, theirs = first[way]
    assert ours == theirs and first == second and ours[0] == ours[2] and ours[1] == ours[3] == 8


@pytest.mark.parametrize(
    "case, words",
    [
        ("gradients, False", "integrations.ddp.compress"),
        ("updates, False", "integrations.ddp.compress"),
        ("gradients, True", "exchanged twice. Use the plain optimizer"),
        ("updates, True", "exchanged twice. Use the plain optimizer"),
        ("in a list", "exchanged twice. Use the plain optimizer"),
        ("is_deepspeed_enabled", "DeepSpeed averages gradients in its own engine"),
        ("is_fsdp_enabled", "FSDP averages gradients of shards itself"),
        ("several GPUs", "torchrun --nproc_per_node"),
        ("scaler", "scaler= is not supported"),
        ("options", "density must be in (0, 1]"),
        ("twice", "DistributedDataParallel already has a"),
        ("velocity", "AGM125"),
    ],
)
def test_what_would_exchange_twice_is_refused_on_every_rank(found: Found, case: str, words: str) -> None:
    check_refused(found, case, words)


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_takes_over_what_was_not_sent(tmp_path: Path, workers: int) -> None:
    check_taken_over(SCRIPT, tmp_path, workers)
