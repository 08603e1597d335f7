# SPDX-License-Identifier: Apache-2.0
"""Real workers, two and four of them, under every launcher: one script, unchanged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import collective_scenarios
import pytest
from exchange_scenarios import EXCHANGES, STEPS, in_memory
from launching import (
    HERE,
    LAUNCHERS,
    ROOT,
    by_hand,
    launch,
    missing,
    results,
    run,
    start_by_hand,
    torchrun,
)
from scenarios import AWKWARD, PLANNED
from updates_scenarios import JOINED, SAVED, WAYS
from updates_scenarios import in_memory as updates_in_memory

import merging

Results = dict[str, list[Any]]


OVER = "horovodrun, MPI"  # starts mpirun, as the second launcher of MPI
EACH = ["torchrun", "horovodrun, Gloo", "mpirun, mpi4py"]  # one of each backend
# What a backend decides: each collective and each exchange, to the bit, and who is told what. The library alone decides
# the rest, for which two workers under torchrun are enough in `make test`.
BY_BACKEND = ("collectives", "every_collective", "density_one", "mismatches", "uneven", "exchanges")


def cases(short: list[tuple[str, int]], *workers: int) -> list[Any]:
    """Return the cases ``short``, and those of all launchers with these numbers of workers, which are long."""
    rest = [(name, size) for size in workers for name in LAUNCHERS if (name, size) not in short]
    return [pytest.param(one, id=f"{one[0]}, {one[1]} workers") for one in short] + [
        pytest.param(one, id=f"{one[0]}, {one[1]} workers", marks=pytest.mark.long) for one in rest
    ]


class Launches:
    """Each launch is made once; its results serve all tests."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[Any, ...], Results] = {}

    def of(self, launcher: str, workers: int, *scenarios: str) -> Results:
        """What every rank wrote in these scenarios, or in every one."""
        case = (launcher, workers, *scenarios)
        if case not in self._found:
            folder = self._folder / " ".join(map(str, case))
            folder.mkdir()
            ended = launch(launcher, workers, HERE / "scenarios.py", str(folder), *scenarios, timeout=300)
            assert ended.code == 0, ended.output[-6000:]
            self._found[case] = results(folder, workers)
        return self._found[case]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """All launches of this file."""
    return Launches(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module", params=cases([("torchrun", 2)], 2, 4))
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A launcher and a number of workers. Where it is not installed there is nothing to test, unless it must be."""
    launcher, workers = request.param
    need(launcher)
    return launcher, workers


@pytest.fixture(scope="module", params=cases([(name, 2) for name in EACH], 2, 4))
def backend_case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The same, of each backend in ``make test``."""
    launcher, workers = request.param
    need(launcher)
    return launcher, workers


def need(launcher: str) -> None:
    """Skip where it is not installed, unless it must be."""
    why = missing(launcher)
    if why and os.environ.get("AGMERGE_TEST_ALL_LAUNCHERS") != "1":
        pytest.skip(why)
    assert not why, why


@pytest.fixture(scope="module")
def found(case: tuple[str, int], launches: Launches) -> Results:
    """Return what every rank wrote in every scenario, from one launch."""
    return launches.of(*case)


@pytest.fixture(scope="module")
def of_backend(backend_case: tuple[str, int], launches: Launches) -> Results:
    """Return what every rank wrote in those of `BY_BACKEND`."""
    return launches.of(*backend_case, *(() if backend_case[0] == "torchrun" else BY_BACKEND))


pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("compression", ["topk", "none", "fp16", "bf16", "powersgd", "acpsgd"])
def test_replicas_are_equal_after_every_step_of_an_awkward_model(found: Results, compression: str) -> None:
    ranks = [seen[compression] for seen in found["awkward"]]
    assert len(ranks[0]) == AWKWARD and len(set(ranks[0])) == len(ranks[0])  # it does move, at every step
    assert all(seen == ranks[0] for seen in ranks)


def test_an_optimizer_that_was_dropped_holds_no_threads_and_files(found: Results) -> None:
    """A sweep, or a cell of a notebook that is run again: `close()` is what nobody calls."""
    for seen in found["dropped"]:
        assert seen[-1] <= seen[2] + 4, seen  # one optimizer more would be eight


def test_what_is_not_sent_is_kept(found: Results) -> None:
    assert all(seen["worst"] < 1e-6 for seen in found["conservation"])
    assert all(seen["kept"] > 1e-3 for seen in found["conservation"])


def test_none_equals_one_process_with_all_the_data(found: Results) -> None:
    assert all(difference < 1e-5 for difference in found["large_batch"])


def test_density_one_equals_dense_to_the_bit_under_any_plan(of_backend: Results) -> None:
    for seen in of_backend["density_one"]:
        assert seen["none"] == seen["none, layerwise"] == seen["density 1"] == seen["density 1, single"]
        assert len(set(seen["none"])) == 10


def test_every_planner_trains_the_digits_with_equal_replicas(found: Results) -> None:
    ranks = found["planners"]
    assert set(ranks[0]) == set(merging.names())
    assert all(seen == ranks[0] for seen in ranks)
    for name, seen in ranks[0].items():
        assert len(set(seen["digests"])) == PLANNED, name
        assert sum(seen["losses"][-4:]) < 0.95 * sum(seen["losses"][:4]), name
    assert len({tuple(seen["plan"]) for seen in ranks[0].values()}) > 2


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_trains_the_digits_and_loses_nothing(of_backend: Results, name: str) -> None:
    ranks = [seen[name] for seen in of_backend["exchanges"]]
    assert all(seen["digests"] == ranks[0]["digests"] for seen in ranks) and ranks[0]["buffers"] > 1
    assert len(set(ranks[0]["digests"])) == STEPS
    assert all(seen["worst"] < 16 and seen["kept"] > 1e-3 for seen in ranks)
    losses = [sum(step) for step in zip(*(seen["losses"] for seen in ranks), strict=True)]
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_trains_as_ranks_in_memory_do_to_the_bit(of_backend: Results, name: str) -> None:
    seen = of_backend["exchanges"]
    assert seen[0][name]["digests"] == in_memory(len(seen))[name][0]["digests"]


@pytest.mark.parametrize("way", WAYS)
def test_updates_leave_the_shared_parameters_equal_and_resume_to_the_bit(found: Results, way: str) -> None:
    ranks = [seen[way] for seen in found["updates"]]
    for kind in ("shared", "consolidated"):
        assert len({seen[kind] for seen in ranks}) == 1
    for seen in ranks:
        assert len(set(seen["own"])) == len(seen["own"])
        if way in SAVED:
            assert seen["again"] == [seen["own"][len(seen["own"]) // 2 :], seen["shared"]]


@pytest.mark.parametrize("way", JOINED)
def test_joining_with_updates_ends_at_equal_parameters(found: Results, way: str) -> None:
    ranks = [seen[f"join, {way}"] for seen in found["updates"]]
    assert all(seen == ranks[0] for seen in ranks) and ranks[0]["last"] == len(ranks) - 1


def test_updates_are_exchanged_as_ranks_in_memory_do_to_the_bit(found: Results) -> None:
    assert found["updates"] == updates_in_memory(len(found["updates"]))


def test_sparsified_ahead_and_added_in_order_the_plan_does_not_matter(found: Results) -> None:
    for seen in found["plan_free"]:
        assert seen["layerwise"] == seen["single"] == seen["agmerge"] == found["plan_free"][0]["single"]
        assert len(set(seen["single"])) == 14


def test_every_rank_is_told_the_same_of_a_mismatch(of_backend: Results) -> None:
    told = of_backend["mismatches"]
    last = len(told) - 1
    for name, words in {
        "density": ["density: 0.01", f"0.02 on rank {last}"],
        "compressor": ["compression: topk", f"none on rank {last}"],
        "memory": ["memory: residual", f"none() on rank {last}"],
        "planner": ["merging: threshold", f"single() on rank {last}"],
        "plan": ["merging: plan", f"on rank {last}"],
        "shape": ["tensor 0: 0.weight float32[64, 40]", f"0.weight float32[65, 40] cpu sparse on rank {last}"],
        "extra layer": ["tensor 6: nothing on rank", f"1.weight float32[10, 10] cpu dense on rank {last}"],
    }.items():
        texts = {one[name] for one in told}
        assert len(texts) == 1, f"{name}: {texts}"
        (text,) = texts
        assert all(word in text for word in words), text


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_resuming_from_rank_0_with_weight_decay_leaves_ranks_equal(found: Results, optimizer: str) -> None:
    assert len({tuple(seen[optimizer]) for seen in found["resume"]}) == 1


def test_changed_parameters_are_agreed_on_anew(found: Results) -> None:
    assert len({tuple(seen) for seen in found["changes"]}) == 1
    assert len(set(found["changes"][0])) == 12


@pytest.mark.parametrize("recipe", ["clip", "two", "closure"])
def test_recipes_keep_replicas_equal(found: Results, recipe: str) -> None:
    ranks = [seen[recipe] for seen in found["recipes"]]
    assert all(seen == ranks[0] for seen in ranks) and len(set(ranks[0])) == len(ranks[0]) > 0


@pytest.mark.parametrize("compression", ["adtopk", "none", "powersgd", "acpsgd"])
def test_ranks_with_fewer_batches_join(of_backend: Results, compression: str) -> None:
    ranks = [seen[compression] for seen in of_backend["uneven"]]
    assert all(seen == ranks[0] for seen in ranks) and ranks[0][0] == (len(ranks) - 1) // 2 * 2
    assert len(set(ranks[0][1:])) == 3


def test_process_sets_exchange_among_themselves(found: Results) -> None:
    seen = found["some_ranks"]
    size = len(seen)
    assert len({tuple(rank["all"]) for rank in seen}) == 1
    assert len({tuple(rank["last"]) for rank in seen}) == size
    first, second = seen[: size // 2], seen[size // 2 :]
    assert len({tuple(rank["halves"]) for rank in first}) == len({tuple(rank["halves"]) for rank in second}) == 1
    assert first[0]["halves"] != second[0]["halves"]


def test_the_sentinel_names_parameter_and_ranks(found: Results) -> None:
    texts = set(found["sentinel"])
    assert len(texts) == 1
    (text,) = texts
    assert "'2.weight'" in text and "on rank 1" in text


@pytest.mark.long
def test_all_backends_train_alike(case: tuple[str, int], found: Results, launches: Launches) -> None:
    reference = launches.of("torchrun", case[1])
    # A sum of two does not depend on the order of adding, one of four does: there only ordered sums are equal.
    always = ["density_one", "plan_free"]
    of_two = ["awkward", "large_batch", "resume", "changes", "recipes", "some_ranks"]
    for name in always + (of_two if case[1] == 2 else []):
        assert found[name] == reference[name], name
    assert all(difference < 1e-5 for difference in found["large_batch"])


def test_the_modules_own_collectives(backend_case: tuple[str, int], of_backend: Results) -> None:
    check_collectives(*backend_case, of_backend)


def test_every_backend_gives_the_bits_of_torch(
    backend_case: tuple[str, int], of_backend: Results, launches: Launches
) -> None:
    """Sums in rank order depend on nothing else."""
    reference = launches.of("torchrun", backend_case[1])
    for name in ("density_one", "exchanges"):
        assert of_backend[name] == reference[name], name


@pytest.mark.long
def test_horovodrun_starts_the_same_over_mpi(launches: Launches) -> None:
    need(OVER)
    found = launches.of(OVER, 2, "collectives", "density_one", "changes")
    check_collectives(OVER, 2, found)
    reference = launches.of("torchrun", 2)
    assert all(found[name] == reference[name] for name in ("density_one", "changes"))


@pytest.mark.long
def test_four_workers_in_a_few_scenarios(launches: Launches) -> None:
    """All of them with four take a minute and more; from three on a native sum depends on the place of an element."""
    found = launches.of("torchrun", 4, "collectives", "awkward", "density_one")
    check_collectives("torchrun", 4, found)
    test_density_one_equals_dense_to_the_bit_under_any_plan(found)
    for compression in found["awkward"][0]:
        test_replicas_are_equal_after_every_step_of_an_awkward_model(found, compression)


def check_collectives(launcher: str, size: int, found: Results) -> None:
    """Assert that every rank knows where it is and that each call did what it says."""
    backend = LAUNCHERS[launcher][1]
    for rank, seen in enumerate(found["collectives"]):
        assert (seen["backend"], seen["rank"], seen["size"], seen["local"]) == (backend, rank, size, [rank, size])
        assert seen["average"] == (size - 1) / 2 and seen["sum"] == size * (size - 1) // 2
        assert seen["gathered"] == [i for r in range(size) for i in range(r + 1)]
        assert seen["broadcast"] == size - 1 and seen["object"] == {"rank": 1}
        assert "float32[4] on rank 0; float32[3] on rank" in seen["mismatch"]
    assert len({seen["mismatch"] for seen in found["collectives"]}) == 1


def test_every_collective_gives_what_ranks_in_memory_get(of_backend: Results) -> None:
    seen = of_backend["every_collective"]
    expected = json.loads(json.dumps(collective_scenarios.in_memory(len(seen))))
    for one, other in zip(seen, expected, strict=True):
        assert {name: value for name, value in one.items() if value != other[name]} == {}
    assert len(seen[0]["told"]) == 3 and all(one["told"] == seen[0]["told"] for one in seen)


def test_a_rank_that_never_answers_is_not_waited_for_for_ever() -> None:
    told, silent = start_by_hand(2, HERE / "waiting.py")
    try:
        output, _ = told.communicate(timeout=300)
    finally:
        told.kill()
        silent.kill()
        silent.communicate()
    assert told.returncode not in (0, None)
    assert "buffer 0" in output and "CollectiveTimeout" in output


def test_a_script_keeps_its_own_process_group(tmp_path: Path) -> None:
    for ended in by_hand(2, HERE / "borrowing.py", str(tmp_path), timeout=300):
        assert ended.code == 0, ended.output[-3000:]
    assert results(tmp_path, 2)["borrowed"] == [["torch", 2.0, 0], ["torch", 2.0, 0]]


@pytest.mark.long  # in memory: tests/test_example_train.py
def test_the_main_job_reaches_its_accuracy(tmp_path: Path) -> None:
    out = tmp_path / "digits.json"
    options = ["--compression", "topk", "--density", "0.01", "--log-dir", str(tmp_path), "--json", str(out)]
    options += ["--epochs", "10"]
    ended = torchrun(2, ROOT / "examples" / "train_digits.py", *options, timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    found = json.loads(out.read_text())
    assert found["accuracy"] >= 0.95
    assert found["bytes_sent"] < 0.1 * found["bytes_dense"]


@pytest.mark.long  # in memory it learns in tests/test_example_train.py, and it runs here in test_example_jobs.py
def test_the_language_model_learns_from_updates(tmp_path: Path) -> None:
    out = tmp_path / "lm.json"
    options = ["--max-steps", "60", "--batch-size", "2", "--lr", "0.01", "--log-dir", str(tmp_path), "--json", str(out)]
    ended = torchrun(2, ROOT / "examples" / "train_lm.py", *options, timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    found = json.loads(out.read_text())
    assert found["workers"] == 2 and found["perplexity"] < 50  # a guess has 128
    assert found["bytes_sent"] < found["bytes_dense"] / 40


def test_the_main_job_runs_alone(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "train_digits.py")
    ended = run([sys.executable, script, "--epochs", "1", "--log-dir", str(tmp_path)], timeout=300)
    assert ended.code == 0, ended.output[-3000:]
    assert "local" in ended.output
