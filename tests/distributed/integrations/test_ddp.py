# SPDX-License-Identifier: Apache-2.0
"""agmerge.integrations.ddp on two real workers: nearly all of it in one launch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from launching import results, torchrun

SCRIPT = Path(__file__).parent / "ddp_scenarios.py"
Found = dict[str, list[Any]]
pytestmark = pytest.mark.timeout(400)


def launched(folder: Path, *scenarios: str, workers: int = 2) -> Found:
    """What all ranks wrote."""
    ended = torchrun(workers, SCRIPT, str(folder), *scenarios, timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    return results(folder, workers)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All scenarios but the long one."""
    return launched(tmp_path_factory.mktemp("ddp"))


def test_the_hook_gives_the_bits_of_the_wrapper(found: Found) -> None:
    """Of parameters, residuals and momenta; and parameters have moved."""
    for cases in found["bits"]:
        assert len(cases) == 14 and all(all(same) for same in cases.values()), cases


@pytest.mark.long
def test_the_hook_gives_the_bits_of_the_wrapper_in_every_combination(tmp_path: Path) -> None:
    for cases in launched(tmp_path, "matrix")["matrix"]:
        assert len(cases) == 90 and all(all(same) for same in cases.values()), cases


def test_uncompressed_it_gives_the_bits_of_ddp_itself(found: Found) -> None:
    for seen in found["plain"]:
        assert seen["ours"] == seen["theirs"] and seen["steps"] == 6 and seen["sent"] > 0


def test_residuals_go_on_when_buckets_are_rebuilt(found: Found) -> None:
    for seen in found["rebuilt"]:
        assert seen["before"] != seen["after"] and seen["worst"] < 1e-6


def test_what_nobody_has_used_is_applied_later(found: Found) -> None:
    """In two steps of three, by one rank, by all: applied is the mean of what was given less what is kept."""
    for seen in found["unused"]:
        for compression, one in seen.items():
            assert one["worst"] < 1e-7 and one["parameters that no rank used are not changed,"] == 10, (
                compression,
                one,
            )
            assert (one["kept"] > 1e-3) == (compression != "none")


def test_what_nobody_has_used_keeps_residual_and_momentum(found: Found) -> None:
    for seen in found["leaves_alone"]:
        first, second, third, fourth, fifth = seen["kept"]
        assert first != second == third == fourth != fifth
        assert all(a != b for a, b in zip(second, fifth, strict=True)) and seen["bias"]


def test_replicas_of_an_awkward_model_stay_equal(found: Found) -> None:
    first, second = found["awkward"]
    assert first == second and len(set(first)) == len(first) == 15


def test_a_rank_without_batches_joins_as_with_the_wrapper(found: Found) -> None:
    for seen in found["uneven"]:
        assert seen["ours"] == seen["theirs"] and seen["steps"] == 7
        assert "AGM603" in seen["said"]
    assert len({seen["ours"] for seen in found["uneven"]}) == 1


def test_a_checkpoint_goes_on_to_the_bit(found: Found) -> None:
    """That of each rank, and that of all ranks together."""
    for rank, seen in enumerate(found["checkpoints"]):
        assert seen["again"] == [seen["whole"], seen["whole"]] and seen["keys"] == ["agmerge"]
        assert seen["gathered"] == (rank == 0)


def test_another_compressor_and_the_end(found: Found) -> None:
    for seen in found["changes"]:
        before, after = seen["kept"]
        assert before > 0 and after == 0 and seen["report"].startswith("buffer") and seen["closed"]


def test_the_group_is_that_of_the_model(found: Found) -> None:
    for seen in found["groups"]:
        assert seen == {"equal": True, "steps": 4}


@pytest.mark.long
def test_two_groups_of_two_are_two_process_sets(tmp_path: Path) -> None:
    """With the bits of the wrapper, by gradients and by updates; the two groups come to different parameters."""
    ranks = launched(tmp_path, "halves", workers=4)["halves"]
    assert all(same for seen in ranks for same in seen["same"])
    assert ranks[0]["digest"] == ranks[1]["digest"] != ranks[2]["digest"] == ranks[3]["digest"]


def test_compiled_models_are_the_same(found: Found) -> None:
    assert found["compiled"] == [[True] * 4] * 2


def test_a_copy_is_no_part_of_it_and_what_is_dropped_is_free(found: Found) -> None:
    for seen in found["copied"]:
        assert len(seen["said"]) == 1 and "AGM604" in seen["said"][0] and seen["steps"] == [0, 2]
        assert seen["free"] == [True] * 4


def test_nobody_has_to_keep_what_compress_returns(found: Found) -> None:
    assert found["unkept"] == [[True, True]] * 2


def test_local_steps_give_the_bits_of_the_wrapper_around_the_plain_model(found: Found) -> None:
    for cases in found["updates"]:
        assert len(cases) == 5 and all(all(same) for same in cases.values()), cases


@pytest.mark.long
def test_local_steps_in_other_ways_do_too(tmp_path: Path) -> None:
    for cases in launched(tmp_path, "updates_others")["updates_others"]:
        assert len(cases) == 5 and all(all(same) for same in cases.values()), cases


def test_a_clipped_velocity_is_an_error_and_a_clipped_selection_a_warning(found: Found) -> None:
    first, second = found["harms"]
    assert first["velocity"] == second["velocity"] and re.match("0: .*a velocity", first["velocity"][0])
    assert first["selection"][0] == second["selection"][0] and len(first["selection"]) == 2 > len(second["selection"])


def test_steps_of_shards_are_refused_with_updates_and_work_with_gradients(found: Found) -> None:
    """By the name of torch's class, and by what it does where that is not known."""
    first, second = found["harms"]
    assert first["alike"] == second["alike"]
    assert first["alike"][:2] == first["alike"][2:]
    for said in (first, second):
        for how in ("wrapper", "hooks"):
            assert said[how].startswith("ZeroRedundancyOptimizer steps a shard") and "sync='gradients'" in said[how]
        for how in ("seen", "seen by hooks"):
            assert said[how] == first["seen"] and "exchanges parameters or gradients in its own step" in said[how]


def test_local_steps_are_refused_where_others_would_wait(found: Found) -> None:
    for said in found["updates_refused"]:
        assert "the same number of batches" in said["join"]


def test_local_steps_average_no_gradient_whatever_the_script_sets(found: Found) -> None:
    """nanoGPT sets ``require_backward_grad_sync`` in each pass, in place of ``no_sync()``."""
    first, second = found["updates_refused"]
    assert first["gradients"] != second["gradients"] and first["parameters"] == second["parameters"]


def test_local_steps_go_on_to_the_bit(found: Found) -> None:
    """With the optimizer of each rank, though a framework has loaded rank 0's on all."""
    bits = [seen["bits"] for seen in found["updates_resumed"]]
    assert all(len(set(of_rank)) == 1 for of_rank in bits) and bits[0][0] != bits[1][0]
    assert all(seen["keys"] == ["agmerge", "param_groups", "state"] for seen in found["updates_resumed"])


def test_several_optimizers_have_the_bits_of_one_wrapper_around_them(found: Found) -> None:
    """Each is stepped by the script; with updates what they did together is exchanged after the last of them."""
    first, second = found["several"]
    for way, seen in first["ways"].items():
        assert len(seen) == 6 and all(seen[:-1]) and second["ways"][way] == seen, way
    for seen in (first, second):
        assert seen["resumed"][0] == seen["resumed"][1]
        shared, twice = seen["said"]
        assert "parameter '2.weight' is in two of the optimizers" in shared
        assert "optimizers[0] (Muon) stepped twice before optimizers[1] (AdamW) stepped once" in twice


SAID = {
    "plain": "TypeError: .* got Sequential",
    "data parallel": "TypeError: .* torchrun",
    "fsdp 1": "TypeError: .* fully_shard",
    "fsdp 2": "TypeError: .* process_set",
    "deepspeed": "TypeError: .* ZeRO stage 0",
    "torchft": "TypeError: .* its groups change",
    "hooked": "ValueError: .* already has a communication hook",
    "twice": "ValueError: .* already has a communication hook",
    "wrapped already": "ValueError: .* another DistributedOptimizer",
    "a wrapper": "TypeError: .* Wrap the plain optimizer",
    "other parameters": "ValueError: AGM311: .* steps other parameters than",
    "embedding": "ValueError: .* sparse=False",
    "delayed": "ValueError: .* delay_all_reduce_named_params",
    "skipping": "ValueError: .* skip_all_reduce_unused_params",
    "steps in backward": r"ValueError: .* Call step\(\) afterwards",
    "passes": "ValueError: .*no_sync",
    "process set": "ValueError: .* process_group",
    "dear": "ValueError: .*dear",
    "unknown": "TypeError: .* unexpected keyword argument 'colour'",
    "density": "ValueError: .* Pass optimizer=",
    "dgc": "ValueError: .* Pass optimizer=",
    "updates": "ValueError: .* requires optimizer=",
    "updates, static": "ValueError: .* static_graph",
    "every": "ValueError: .* sync='updates'",
}


@pytest.mark.parametrize("what", SAID)
def test_what_cannot_be_compressed_is_refused(found: Found, what: str) -> None:

    for said in found["refused"]:
        assert re.match(SAID[what], said[what], re.DOTALL), said[what]


def test_every_refusal_is_looked_at(found: Found) -> None:
    assert all(set(said) == set(SAID) for said in found["refused"])


def test_a_wrapper_beside_ddp_is_an_error_on_every_rank(found: Found) -> None:
    for said in found["guarded"]:
        for what in ("outside", "inside", "updates", "compressed"):
            assert "AGM107" in said[what] and "ddp.compress(" in said[what], what
        assert said["gone"] == said["no_sync"] == ""
        for views in (False, True):
            assert "AGM103" in said[f"later, {views}"]
            assert "ddp.compress(" in said[f"later, {views}"]


def test_an_infinite_gradient_ends_the_run_on_every_rank_alike(found: Found) -> None:
    first, second = found["infinite"]
    assert first["said"] == second["said"] and "rank 1: " in first["said"] and "from a checkpoint" in first["said"]
    assert first["kept"] and second["kept"]


def test_gradients_that_a_script_throws_away_leave_no_trace(found: Found) -> None:
    """A GAN's, those of a step that is left out, and of the first pass of sharpness-aware steps."""
    for seen in found["decided"]:
        assert len(seen["moved"]) == 16 and all(moved < 1e-6 for moved in seen["moved"].values()), seen["moved"]
        assert len(seen["bits"]) == 7 and all(seen["bits"].values()), seen["bits"]
        assert len(seen["plain"]) == 3 and all(seen["plain"].values()), seen["plain"]


def test_passes_that_add_up_without_no_sync_lose_nothing_and_a_velocity_is_an_error(found: Found) -> None:
    for seen in found["added_up"]:
        for views in (False, True):
            assert seen[f"worst, {views}"] < 1e-6 < 1e-3 < seen[f"kept, {views}"]
        assert "which is a velocity with memory='dgc'" in seen["velocity"]
    assert found["added_up"][0]["velocity"] == found["added_up"][1]["velocity"]


def test_a_script_repairs_or_skips_what_is_not_finite_as_in_plain_ddp(found: Found) -> None:
    assert found["repaired"] == [{"repairs False": [True] * 3, "repairs True": [True] * 3}] * 2


def test_steps_with_gradients_that_the_model_has_not_averaged_are_said(found: Found) -> None:
    """An error on all ranks where they would train different models, else one warning; none where all is well."""
    first, second = found["averaged"]
    assert first["replaced"] == second["replaced"] and "'1.weight', '1.bias'" in first["replaced"][0]
    assert len(first["past"]) == len(first["anew"]) == len(first["on each rank"]) == 1
    assert "AGM134" in first["past"][0] and "'0.weight'" in first["past"][0]
    assert "AGM134" in first["anew"][0]
    assert "shape [32, 32], which is not in DistributedDataParallel" in first["on each rank"][0]
    for silent in ("again", "two models", "ignored"):
        assert first[silent] == second[silent] == []
    assert all(second[said] == [] for said in ("past", "anew", "on each rank"))
