# SPDX-License-Identifier: Apache-2.0
"""Lightning, on two real workers: most of it in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_networks import check_few_bytes_left, check_logged, check_refused, check_taken_over, launched

pytest.importorskip("lightning")
SCRIPT = Path(__file__).parent / "lightning_scenarios.py"
Found = dict[str, Any]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What both ranks found in every scenario."""
    return launched(SCRIPT, tmp_path_factory.mktemp("lightning"))


@pytest.mark.parametrize("case", ["accumulation, clipping", "bf16", "manual"])
def test_without_compression_the_bits_are_lightnings_own(found: Found, case: str) -> None:
    ranks, _ = found["dense"]
    start, plain, ours = ranks[0][case]
    assert ranks[0] == ranks[1] and start != plain == ours


def test_a_tenth_of_the_bytes_leave(found: Found) -> None:
    ranks, _ = found["topk"]
    for seen in ranks:
        assert seen["stats"]["steps"] == 32
        assert seen["bits"] == ranks[0]["bits"]
        check_few_bytes_left(seen)
    assert [line["step"] for line in ranks[0]["log"]] == [7, 15, 23, 31]
    check_logged(ranks[0]["log"])


def test_a_scaler_changes_no_bit_and_leaves_out_steps_on_all_ranks(found: Found) -> None:
    ranks, _ = found["scaler"]
    plain, ours, large, updates = ranks[0]
    assert plain == ours and [bits for bits, _ in ranks[0]] == [bits for bits, _ in ranks[1]]
    assert 0 < large[1] < 8 and large == ranks[1][2] and 0 < updates[1] < 8


@pytest.mark.parametrize("way", ["topk", "updates"])
def test_four_steps_and_four_more_are_eight_to_the_bit(found: Found, way: str) -> None:
    ranks, _ = found["resume"]
    for seen in (rank[way] for rank in ranks):
        first, second = seen["last steps"]
        assert seen["steps"] == [8, 8] and first == second and len(first) == 4 and seen["bits"][0] == seen["bits"][1]
        assert seen["files"] == 3 * ["agmerge-0-of-2.pt"] + 3 * ["agmerge-1-of-2.pt"] and seen["by a link"] == 12
    assert ranks[0][way]["bits"] == ranks[1][way]["bits"]


@pytest.mark.parametrize("way, steps", [("default", 8), ("topk", 6), ("updates", 6)])
def test_the_first_rank_alone_saves_by_the_strategy_and_nobody_waits(found: Found, way: str, steps: int) -> None:
    """After two of eight steps; without what ranks keep, where they keep something, all begin anew from there."""
    ranks, said = found["saved_alone"]
    first, second = (rank[way] for rank in ranks)
    assert first == second and first[1:] == [steps, ["agmerge-0-of-2.pt"]]
    warned = [
        sum(f"{way}.ckpt.agmerge does not have all files agmerge-0-of-2.pt" in text for text in texts) for texts in said
    ]
    assert warned == [int(way != "default"), 0]


def test_without_the_files_of_all_ranks_rank_0_warns_and_all_begin_anew(found: Found) -> None:
    ranks, said = found["resume"]
    assert [rank["incomplete"] for rank in ranks] == [4, 4]
    assert [sum("does not have all files agmerge-0-of-2.pt" in text for text in texts) for texts in said] == [1, 0]


def test_updates_are_validated_and_saved_as_all_ranks_have_them(found: Found) -> None:
    """In ``fit()``; afterwards what the script has loaded is validated."""
    one, two = found["updates"][0]
    assert all(a != b for a, b in zip(one["step"], two["step"], strict=True))
    assert one["validation"] == two["validation"] and not set(one["validation"]) & {*one["step"], *two["step"]}
    assert one["saved"] == one["validated"] == one["validation"][3] and one["middle"] not in one["step"]
    assert one["end"] == two["end"] != one["saved"] and one["later"] == two["later"]
    kept = {"afterwards.ckpt", "middle.ckpt", "epoch=4.ckpt"}
    assert {path for path in one["files"] if path.endswith(".ckpt")} == kept
    assert {path for path in one["files"] if path.endswith(".agmerge")} == {f"{name}.agmerge" for name in kept}


def test_infinite_gradients_of_one_rank_move_nothing(found: Found) -> None:
    one, two = found["infinities"][0]
    assert one["skip"] == ["", 0, True] and two["skip"] == ["", 1, True]
    assert one["raise"][0] == two["raise"][0] and "rank 1: 'net.0.weight'" in one["raise"][0]
    assert one["raise"][2] and two["raise"][2]


@pytest.mark.parametrize("way", ["dense", "topk", "updates"])
def test_two_optimizers_are_one_with_the_groups_of_both(found: Found, way: str) -> None:
    """In one go, and from a checkpoint in the middle; with updates they are exchanged when both have stepped."""
    first, second = found["several_optimizers"][0]
    ours, theirs = first[way]
    whole, resumed, steps, _ = ours
    assert ours == theirs and first == second and whole == resumed and steps == 8


@pytest.mark.parametrize(
    "case, words",
    [
        ("gradients, never called", "integrations.ddp.compress"),
        ("updates, never called", "integrations.ddp.compress"),
        ("wrapped", "integrations.ddp.compress"),
        ("wrapped before", "DistributedOptimizer, so gradients would be"),
        ("out of step", "optimizers[0] (AdamW) stepped twice before optimizers[1] (AdamW) stepped once"),
        ("velocity", "AGM125"),
        ("clipping", "gradient_clip_val is not supported with fp16"),
        ("hook", "= is not supported: DDP has one communication"),
        ("optimizer", "optimizer= is not supported"),
        ("unknown", "unexpected keyword argument 'densities'"),
        ("url", "a local or mounted folder"),
    ],
)
def test_what_would_exchange_twice_is_refused_on_every_rank(found: Found, case: str, words: str) -> None:
    check_refused(found, case, words)


def test_the_strategy_has_a_name(found: Found) -> None:
    one, two = (rank["by name"] for rank in found["refusals"][0])
    assert one == two and one[0] == "CompressedDDPStrategy"


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_takes_over_what_was_not_sent(tmp_path: Path, workers: int) -> None:
    check_taken_over(SCRIPT, tmp_path, workers)
