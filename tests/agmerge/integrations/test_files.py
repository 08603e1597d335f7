# SPDX-License-Identifier: Apache-2.0
"""A file a rank beside a checkpoint: who reads what, among ranks in memory."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp, on_ranks, residuals, seeded, sgd, train, wrap

import agmerge
from agmerge.checkpoint import rank_state
from agmerge.integrations import files, unsaved

STEPS = 3
SMALL: dict[str, Any] = {"compression": "topk", "density": 0.05, "merging": "threshold"}


class Kept:
    """What :class:`agmerge.integrations.ddp.Compressed` is for these functions, around an optimizer of ours."""

    def __init__(self, wrapper: agmerge.DistributedOptimizer) -> None:
        self._reducer = wrapper._reducer
        self.looks: list[unsaved.Look] = []  # what is to be looked at some steps later

    def look_later(self, look: unsaved.Look) -> None:
        self.looks.append(look)

    def flush(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {rank_state.SECTION: rank_state.save(self._reducer)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        rank_state.load(self._reducer, state_dict.get(rank_state.SECTION))


def trained(model: torch.nn.Module, rank: int, steps: int, **options: Any) -> agmerge.DistributedOptimizer:
    """An optimizer with residuals."""
    optimizer = wrap(model, sgd(model), **{**SMALL, **options})
    train(model, optimizer, rank, range(steps))
    return optimizer


def saved(folder: Path, ranks: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Let so many ranks save what they have; their residuals."""
    folder.mkdir(exist_ok=True)

    def body(rank: int, model: Any) -> dict[str, torch.Tensor]:
        optimizer = trained(model, rank, steps)
        files.save(Kept(optimizer), folder)
        return residuals(optimizer)

    return on_ranks(ranks, seeded(mlp), body)


def loaded(folder: Path, ranks: int) -> list[tuple[bool, dict[str, torch.Tensor], list[str]]]:
    """Let so many ranks, which have residuals of their own, load: whether they have, their residuals, and warnings."""

    def body(rank: int, model: Any) -> tuple[bool, dict[str, torch.Tensor]]:
        optimizer = trained(model, rank, 1)
        done = files.load(Kept(optimizer), folder)
        return done, residuals(optimizer)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = on_ranks(ranks, seeded(mlp), body)
    texts = [str(one.message) for one in said]
    return [(*one, texts) for one in found]


def still_to_come(ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean over ranks of what was not sent, by name."""
    names = {name for one in ranks for name in one}
    return {name: sum(one[name].double() for one in ranks if name in one) / len(ranks) for name in names}


def test_as_many_ranks_have_what_they_had(tmp_path: Path) -> None:
    before = saved(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agmerge-0-of-2.pt", "agmerge-1-of-2.pt"]
    for had, (done, has, said) in zip(before, loaded(tmp_path, 2), strict=True):
        assert done and said == [] and had.keys() == has.keys() and all(map(torch.equal, had.values(), has.values()))
        assert any(bool(one.any()) for one in had.values())


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_another_number_of_ranks_has_all_that_was_not_sent(tmp_path: Path, ranks: int) -> None:
    before, after = still_to_come(saved(tmp_path, 2)), loaded(tmp_path, ranks)
    assert all(done and said == [] for done, _, said in after)
    has = still_to_come([one for _, one, _ in after])
    for name, tensor in before.items():
        torch.testing.assert_close(has[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("ranks, missing", [(2, 0), (2, 1), (3, 1), (3, None)])
def test_of_an_incomplete_set_nobody_takes_anything(tmp_path: Path, ranks: int, missing: int | None) -> None:
    saved(tmp_path, 2)
    folder = tmp_path if missing is not None else tmp_path / "elsewhere"
    if missing is not None:
        (tmp_path / f"agmerge-{missing}-of-2.pt").unlink()
    for done, has, said in loaded(folder, ranks):
        assert not done and not any(bool(one.any()) for one in has.values())
        assert len(said) == 1 and f"agmerge-0-of-{ranks}.pt to agmerge-{ranks - 1}-of-{ranks}.pt" in said[0]


def test_what_another_number_of_ranks_has_left_goes(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    (tmp_path / "model.safetensors").touch()
    saved(tmp_path, 2)
    names = ["agmerge-0-of-2.pt", "agmerge-1-of-2.pt", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_what_a_framework_has_removed_does_not_come_back(tmp_path: Path) -> None:
    def body(rank: int, model: Any) -> None:
        files.save(Kept(trained(model, rank, 1)), tmp_path / "gone")

    on_ranks(2, seeded(mlp), body)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("when", ["before the file is written", "before it has its name"])
def test_nor_what_it_removes_at_this_moment(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer on rank 0 removes a checkpoint that later ones of an earlier run make too many, while others save."""
    folder, write = tmp_path / "checkpoint-4", torch.save

    def late(section: Any, part: Path) -> None:
        if when == "before it has its name":
            write(section, part)
        shutil.rmtree(folder)
        if when == "before the file is written":
            write(section, part)

    def body(rank: int, model: torch.nn.Module) -> None:
        files.save(Kept(trained(model, rank, 1)), folder)

    folder.mkdir()
    monkeypatch.setattr(torch, "save", late)
    on_ranks(1, seeded(mlp), body)
    assert not folder.exists()


def error(folder: Path, ranks: int = 2) -> set[str]:
    """What so many ranks say that cannot load."""

    def body(rank: int, model: Any) -> str:
        with pytest.raises(agmerge.AGMergeError) as said:
            files.load(Kept(trained(model, rank, 1)), folder)
        return str(said.value)

    return set(on_ranks(ranks, seeded(mlp), body))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("full", [[1], [0, 2]], ids=str)
def test_a_full_disk_is_an_error_of_the_rank_that_has_it_and_no_half_file_stays(
    tmp_path: Path, full: list[int]
) -> None:
    saved(tmp_path, 3)
    for rank in full:
        (tmp_path / f"agmerge-{rank}-of-3.pt.part").symlink_to("/dev/full")

    def body(rank: int, model: Any) -> str:
        kept = Kept(trained(model, rank, STEPS + 1))
        if rank not in full:
            files.save(kept, tmp_path)
            return ""
        with pytest.raises(agmerge.AGMergeError) as said:
            files.save(kept, tmp_path)
        return str(said.value)

    for rank, text in enumerate(on_ranks(3, seeded(mlp), body)):
        assert (f"rank {rank} could not write its residuals to {tmp_path}: " in text) is (rank in full)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"agmerge-{rank}-of-3.pt" for rank in range(3)]
    (text,) = error(tmp_path, 3)  # its older file is whole, and of another step than those of the others
    assert f"different steps ({STEPS}, {STEPS + 1})" in text
    saved(tmp_path, 3)
    assert all(done for done, _, _ in loaded(tmp_path, 3))


DEFAULT: dict[str, Any] = {"compression": "auto", "density": None, "exchange": "auto"}


def test_where_nothing_is_kept_one_rank_saves_and_each_loads_by_itself(tmp_path: Path) -> None:
    """As ``if accelerator.is_main_process: accelerator.save_state()``: no other rank takes part."""

    def body(rank: int, model: Any) -> tuple[int, int]:
        optimizer = trained(model, rank, STEPS, **DEFAULT)
        kept = Kept(optimizer)
        if rank == 0:
            files.save(kept, tmp_path, is_common=True)
        assert kept.looks == []
        agmerge.barrier()
        again = seeded(mlp)
        later = trained(again, rank, 1, **DEFAULT)
        assert rank == 1 or files.load(Kept(later), tmp_path)  # and one rank alone loads: rank 0's steps count
        train(again, later, rank, range(1))
        return later._reducer.exchange.agreed.steps, len(residuals(optimizer))

    assert on_ranks(2, seeded(mlp), body) == [(STEPS + 1, 0)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["agmerge-0-of-2.pt"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("now", [SMALL, DEFAULT], ids=["topk", "default"])
def test_the_first_ranks_file_is_enough_where_nothing_was_kept(tmp_path: Path, ranks: int, now: dict[str, Any]) -> None:
    saved(tmp_path, 2)  # of an older training, which rank 0 removes

    def save(rank: int, model: Any) -> None:
        files.save(Kept(trained(model, rank, STEPS, **DEFAULT)), tmp_path)

    def load(rank: int, model: Any) -> int:
        optimizer = trained(model, rank, 1, **now)
        assert files.load(Kept(optimizer), tmp_path)
        assert not any(bool(one.any()) for one in residuals(optimizer).values())
        return optimizer._reducer.exchange.agreed.steps

    on_ranks(2, seeded(mlp), save)
    assert [path.name for path in tmp_path.iterdir()] == ["agmerge-0-of-2.pt"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="AGM705")
        assert on_ranks(ranks, seeded(mlp), load) == [STEPS] * ranks


def test_without_files_a_training_that_keeps_nothing_goes_on_as_it_is(tmp_path: Path) -> None:
    def body(rank: int, model: Any) -> tuple[bool, int]:
        optimizer = trained(model, rank, STEPS, **DEFAULT)
        return files.load(Kept(optimizer), tmp_path), optimizer._reducer.exchange.agreed.steps

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_ranks(2, seeded(mlp), body) == [(False, STEPS)] * 2


@pytest.mark.parametrize("callers, missing", [([0], "rank 1 has"), ([1], "rank 0 has"), ([0, 1], "")], ids=str)
def test_who_saves_alone_what_all_keep_is_told_some_steps_later(
    tmp_path: Path, callers: list[int], missing: str
) -> None:
    """The others' older files do not count, and nobody waits for them."""
    saved(tmp_path, 2)

    def body(rank: int, model: Any) -> list[str]:
        kept = Kept(trained(model, rank, STEPS + 1))
        if rank in callers:
            files.save(kept, tmp_path, is_common=True)
        agmerge.barrier()
        return [unsaved.SAVED_ALONE.format(**lacks) if (lacks := look()) else "" for look in kept.looks]

    said = on_ranks(2, seeded(mlp), body)
    for rank, texts in enumerate(said):
        assert len(texts) == (rank in callers)
        words = f"{missing} not written agmerge-{{rank}}-of-2.pt"
        assert all(words in text if missing else not text for text in texts)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_framework_that_connects_no_processes_is_an_error_in_each(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Accelerate under torchrun on a machine without GPUs: each process would train by itself."""
    for count in ("1", "2"):
        monkeypatch.setenv(variable, count)
        with (
            pytest.warns(UserWarning, match="AGM601")
            if count == "1"
            else pytest.raises(
                ValueError, match=r"started 2 processes, .* each would train by itself.*Accelerator\(cpu=True\)"
            )
        ):
            files.warn_alone("Accelerator(cpu=True)")


def test_a_damaged_file_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    (tmp_path / "agmerge-1-of-2.pt").write_bytes(b"nonsense")
    (text,) = error(tmp_path)
    assert f"rank 1 cannot read its residuals from {tmp_path}" in text


def test_files_of_different_steps_are_an_error_of_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    saved(tmp_path / "later", 2, STEPS + 1)
    (tmp_path / "later" / "agmerge-1-of-2.pt").replace(tmp_path / "agmerge-1-of-2.pt")
    (text,) = error(tmp_path)
    assert f"different steps ({STEPS}, {STEPS + 1})" in text and "interrupted" in text


def test_some_of_the_ranks_have_no_files(tmp_path: Path) -> None:
    def body(rank: int, model: Any) -> str:
        optimizer = wrap(model, sgd(model), process_set=[0, 1], **SMALL)
        with pytest.raises(ValueError) as said:
            files.save(Kept(optimizer), tmp_path)
        return str(said.value)

    assert all("files next to a checkpoint require all ranks," in text for text in on_ranks(3, seeded(mlp), body))


def test_removing_leaves_what_others_have_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / name, 2)
    (tmp_path / "b" / "other").touch()
    for name in ("a", "b", "never there"):
        files.remove(tmp_path / name)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["b", "b/other"]


@pytest.mark.parametrize(
    "found, by",
    [
        ([[(0, 2), (1, 2)], [(0, 2), (1, 2)]], 2),
        ([[(0, 2)], [(1, 2)]], 2),  # a folder each
        ([[(0, 2)], [(0, 2)]], None),
        ([[(0, 1)], [(0, 1)]], 1),
        ([[(0, 1)], []], None),
        ([[(0, 3), (1, 3), (2, 3)]] * 2, 3),
        ([[(0, 3), (1, 3)]] * 2, None),
        ([[(0, 1), (0, 2), (1, 2)]] * 2, 2),
        ([[(0, 1), (0, 3), (1, 3), (2, 3)]] * 2, 3),
        ([[], []], None),
    ],
)
def test_all_ranks_read_a_set_that_is_whole(found: Any, by: int | None) -> None:
    assert files._complete(found) == by
