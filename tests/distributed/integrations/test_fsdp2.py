# SPDX-License-Identifier: Apache-2.0
"""FSDP2 and HSDP on four workers: what replicas exchange of their shards is what plain tensors of these would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, results, torchrun

WORKERS = 4
SCRIPT = Path(__file__).with_name("fsdp2_scenarios.py")
NEAR = 1e-6  # of data parallel: sums are of other orders
Results = dict[str, list[Any]]

pytestmark = pytest.mark.timeout(400)


def launched(folder: Path, *scenarios: str, workers: int = WORKERS) -> Results:
    """What every rank wrote, from one launch."""
    ended = torchrun(workers, SCRIPT, str(folder), *scenarios, timeout=300)
    assert ended.code == 0, ended.output[-6000:]
    found = results(folder, workers)
    for path in folder.glob("*.json"):  # another launch goes on with the checkpoints in this folder
        path.unlink()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All scenarios of ``make test``."""
    return launched(tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_dense_is_data_parallel_on_all_ranks(found: Results, inner: str) -> None:
    assert all(0 < one[inner] < NEAR for one in found["dense"])


def test_passes_that_reduce_nothing_and_clipping_by_the_norm_of_all_shards(found: Results) -> None:
    assert all(one["far"] < NEAR for one in found["accumulated_and_clipped"])


def test_clipping_what_was_handed_over_is_an_error_on_every_rank(found: Results) -> None:
    for one in found["accumulated_and_clipped"]:
        kind, text = one["refused"]
        assert kind == "AGMergeError" and "'0.weight'" in text and "AGM103" in text


@pytest.mark.parametrize("what", ["passes", "sums"])
def test_backward_passes_per_step_and_sums_over_shards_and_replicas(found: Results, what: str) -> None:
    assert all(one[what] < NEAR for one in found["passes_and_sums"])


def check_sparse(of_ranks: list[dict[str, Any]], names: set[str]) -> None:
    for one in of_ranks:
        assert one.keys() == names
        for name, cell in one.items():
            assert cell["equal"] and cell["kept"] and cell["replicas"], name
            assert cell["density"] < 0.5 or name in ("fp16", "ordered"), name


def test_selections_of_shards_have_the_bits_of_plain_tensors(found: Results) -> None:
    check_sparse(found["sparse"], {"topk, sgd", "adtopk, adamw", "dgc", "powersgd"})


@pytest.mark.parametrize(
    "case, kind, text",
    [
        ("no set", "RankMismatchError", "disagree on the shard of '0.weight'"),
        ("another set", "RankMismatchError", "disagree on the shard of '0.weight'"),
        ("updates", "RankMismatchError", "disagree on the shard of '0.weight'"),
        ("replicated", "ValueError", "replicated over mesh dimension 'replicate'"),
        ("two dimensions", "ValueError", "Pass one of them, such as mesh['replicate']"),
        ("mixed", "ValueError", "'0.weight' is a DTensor but 'own' is not"),
        ("dear", "ValueError", "merging='dear' is not supported with parameter '0.weight'"),
        ("two levels", "ValueError", "exchange='two-level' is not supported with parameter '0.weight'"),
        ("two levels of plain tensors", "AGMergeError", "AGM305"),
        ("skip", "ValueError", "nonfinite='skip' is not supported with parameter '0.weight'"),
        ("broadcast", "RankMismatchError", "shard 1/2 S(0) on ranks 1, 3"),
    ],
)
def test_what_does_not_belong_together_is_the_same_error_on_every_rank(
    found: Results, case: str, kind: str, text: str
) -> None:
    errors = [one[case] for one in found["refusals"]]
    assert all(error[0] == kind and text in error[1] for error in errors)
    alone = [0, 3] if case == "another set" else range(WORKERS)  # who is compared with whom
    assert len({errors[rank][1] for rank in alone}) == 1


def test_replicas_start_from_the_first_one_with_its_optimizer(found: Results) -> None:
    for rank, one in enumerate(found["broadcasts"]):
        assert not one["before"] and one["after"] == [True, True]
        assert one["kinds"] == ["DTensor", "Tensor"] and one["state"] == 6
        assert one["mean"] == 1.0 + rank % 2  # of ranks 0 and 2, and of 1 and 3


def test_replicas_that_differ_are_noticed_by_those_that_hold_the_shard(found: Results) -> None:
    errors = found["other_replicas_are_noticed"]
    assert errors[0] == errors[2] == []
    assert errors[1] == errors[3] and errors[1][0] == "DivergenceError" and "'0.weight'" in errors[1][1]


def test_mixed_precision_exchanges_float32(found: Results) -> None:
    assert found["mixed_precision"] == [{"replicas": True, "dtypes": ["torch.float32"]}] * WORKERS


def test_one_infinite_shard_makes_all_ranks_skip_the_step(found: Results) -> None:
    expected = {"moved": [True, False, True, True], "scales": [1024.0, 512.0, 512.0, 512.0], "replicas": True}
    assert found["scaled"] == [expected] * WORKERS


def test_a_replica_that_runs_out_of_batches_joins(found: Results) -> None:
    assert found["uneven"] == [{"last": rank % 2, "steps": 6, "replicas": True} for rank in range(WORKERS)]


def test_local_steps_of_replicas_are_averaged(found: Results) -> None:
    for one in found["updates"]:
        assert 0 < one["whole"] < NEAR
        assert all(one[carry]["shared"] and one[carry]["consolidated"] for carry in ("apply", "hold"))
    assert len({one["apply"]["loss"] for one in found["updates"]}) == 1  # of the parameters that all have in common


def test_saved_and_resumed_by_torch_distributed_checkpoint_to_the_bit(found: Results) -> None:
    check_resumed(found["saved_and_resumed"])


def check_resumed(of_ranks: list[dict[str, Any]]) -> None:
    for one in of_ranks:
        assert len(one) == 3
        for name, cell in one.items():
            assert cell["equal"], name
            assert cell["waiting"][0] == cell["waiting"][1] != 0.0, name


@pytest.mark.long
def test_other_options_are_saved_and_resumed_to_the_bit(tmp_path: Path) -> None:
    check_resumed(launched(tmp_path, "others_saved_and_resumed")["others_saved_and_resumed"])


def test_the_state_of_a_shard_is_gathered_among_its_replicas(found: Results) -> None:
    assert [one["who"] for one in found["gathered"]] == [True, True, False, False]
    for one in found["gathered"]:
        before, dropped, after = one["waiting"]
        assert before == after != 0.0 == dropped  # the file of a rank with another shard is dropped
        assert len(one["told"]) == 1 and "(shard" in one["told"][0]


@pytest.mark.long
def test_the_long_list_of_selections(tmp_path: Path) -> None:
    names = {"fp16", "gaussiank", "randomk", "adtopk-row", "redsync", "acpsgd", "masked", "oktopk", "layerwise"}
    check_sparse(launched(tmp_path, "more_sparse")["more_sparse"], names | {"ordered", "importance"})


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_another_number_of_replicas_goes_on_with_all_that_was_not_sent(tmp_path: Path, sizes: tuple[int, int]) -> None:
    saved, loaded = (launched(tmp_path, "by_others", workers=workers)["by_others"] for workers in sizes)
    for rank, one in enumerate(loaded):
        assert one == pytest.approx(saved[rank % 2], abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--local-steps", "4")])
def test_the_example_learns(options: tuple[str, ...]) -> None:
    ended = torchrun(WORKERS, ROOT / "examples" / "fsdp2_digits.py", "--epochs", "2", *options, timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    found = re.search(r"accuracy (\S+), (\d+) bytes sent, (\d+) without", ended.output)
    assert found is not None, ended.output
    assert float(found[1]) > 0.85  # of ten kinds
    assert int(found[2]) < int(found[3]) / 5
