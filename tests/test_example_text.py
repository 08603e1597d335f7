# SPDX-License-Identifier: Apache-2.0
"""Models of language in the examples: how text is read and laid out, and what their jobs give the training loop."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data import small_text, text
from jobs import gpt, words
from jobs.base import Job, Settings
from jobs.perplexity import LanguageTask, unigram
from networks.lstm import lstm
from networks.transformer import transformer
from torch import Tensor

JOBS = {**words.JOBS, **gpt.JOBS}
STREAMED, SHUFFLED = "lstm-wikitext2", "gpt2-wikitext2"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what ``small_text`` writes."""
    folder = tmp_path_factory.mktemp("small")
    small_text.write(folder)
    return folder


def made(job: Job, data: Path, rank: int = 0, workers: int = 1, **changes: Any) -> LanguageTask:
    """Return the task of the tiny form of a job, with the same weights in every call; ``changes`` of its recipe."""
    torch.manual_seed(0)
    recipe = replace(job.settled(tiny=True), **changes)
    task = job.make(Settings(recipe, data, tiny=True, rank=rank, workers=workers))
    assert isinstance(task, LanguageTask)
    return task


def put(folder: Path, train: str, valid: str, name: str = "{}.txt") -> Path:
    """Write a text by hand, and return the folder."""
    for part, content in (("train", train), ("valid", valid)):
        (folder / name.format(part)).write_bytes(content.encode())
    return folder


@pytest.mark.parametrize("name", text.NAMES)
def test_words_are_numbered_as_they_come_and_lines_have_ends(tmp_path: Path, name: str) -> None:
    found = text.words(put(tmp_path, " the cat \n\n the\x0bdog", "the bird\n", name))
    assert found.train.tolist() == [0, 1, 2, 2, 0, 3, 2]  # the cat <eos> <eos> the dog <eos>
    assert found.valid.tolist() == [0, 4, 2] and found.vocabulary == 5  # "bird" is <unk>


def test_an_unknown_word_has_the_number_that_the_text_gives_it(tmp_path: Path) -> None:
    found = text.words(put(tmp_path, "a <unk> b\n", "c\n"))
    assert found.valid.tolist() == [1, 3] and found.vocabulary == 4


def test_without_a_tokenizer_a_byte_is_a_token(tmp_path: Path) -> None:
    found = text.tokens(put(tmp_path, "é\r\n", "ab\n"), None)
    assert found.train.tolist() == [0xC3, 0xA9, 13, 10] and found.valid.tolist() == [97, 98, 10]
    assert found.vocabulary == 256


def test_a_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"cat": 0, "the": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path / "tokenizer")
    found = text.tokens(put(tmp_path, "the cat\nthe\n", "cat dog\n"), tmp_path / "tokenizer")
    assert found.train.tolist() == [1, 0, 1] and found.valid.tolist() == [0, 2] and found.vocabulary == 3


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for part, rows in (("train-00000-of-00002", ["a \n", ""]), ("train-00001-of-00002", ["b"]), ("validation", ["b"])):
        parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{part}.parquet")
    assert list(text.lines(tmp_path, "train")) == ["a \n", "\n", "b\n"]
    assert list(text.lines(tmp_path, "valid")) == ["b\n"]
    for part, table in (("train", pyarrow.table({"other": ["a"]})), ("validation", None)):
        path = tmp_path / f"{part}-broken.parquet"
        parquet.write_table(table, path) if table is not None else path.write_bytes(b"PAR1")
        with pytest.raises(ValueError, match=f"{part}-broken.parquet is no parquet file with a column 'text'"):
            list(text.of_parquet(path))


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="train-00000-of-00001.parquet needs pyarrow: pip install pyarrow"):
        list(text.lines(tmp_path, "train"))


@pytest.mark.parametrize(
    "files, error, message",
    [
        ({}, FileNotFoundError, r"no text called train: put one of wiki.train.tokens, .*, train\*.parquet there"),
        ({"train.txt": b"a\n"}, FileNotFoundError, "no text called valid: put one of wiki.valid.tokens"),
        ({"train.txt": b"a\n", "valid.txt": b""}, ValueError, r"valid\.txt is empty"),
        ({"train.txt": b"a \xff\n", "valid.txt": b"a\n"}, ValueError, r"train\.txt is not UTF-8: .*0xff"),
        ({"train.txt": b"a b\n", "valid.txt": b"\n"}, ValueError, "text called valid has fewer than two words"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, files: Mapping[str, bytes], error: type[Exception], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=message):
        text.words(tmp_path)


def test_a_folder_that_holds_no_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="absent: there is no such folder"):
        text.load(tmp_path / "absent")
    with pytest.raises(ValueError, match=f"--tokenizer {tmp_path}: this is no folder of a tokenizer"):
        text.load(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--tokenizer needs transformers: pip install"):
        text.load(tmp_path)


def test_columns_follow_each_other_and_know_what_comes_next() -> None:
    x, y = text.columns(torch.arange(12), 3)  # 11 have one that comes next; 2 are left out
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and torch.equal(y, x + 1)
    with pytest.raises(ValueError, match="3 words, too few for 3 columns: take a smaller --batch-size"):
        text.columns(torch.arange(3), 3)


@pytest.mark.parametrize("length", [1, 4, 11, 20])
def test_in_rows_everything_but_the_first_comes_next_once(length: int) -> None:
    x, y = text.rows(torch.arange(12), length)
    real = y != text.IGNORED
    assert x.shape == y.shape == (math.ceil(11 / length), length)
    assert torch.equal(y[real], torch.arange(1, 12)) and torch.equal(x[real], torch.arange(11))


def test_small_text_is_the_same_in_every_run_and_what_is_held_out_is_new(small: Path, tmp_path: Path) -> None:
    small_text.write(tmp_path)
    files = sorted(path.relative_to(small) for path in small.rglob("*") if path.is_file())
    assert len(files) == 12
    assert all((small / path).read_bytes() == (tmp_path / path).read_bytes() for path in files)
    lines = {part: set((small / f"wikitext103/wiki.{part}.raw").read_text().splitlines()) for part in small_text.PARTS}
    assert not lines["train"] & (lines["valid"] | lines["test"]) and not lines["valid"] & lines["test"]
    assert len(lines["train"]) > 3 * (len(lines["valid"]) + len(lines["test"])) > 0
    raw, known = (text.words(small / name) for name in ("wikitext103", "wikitext2"))
    assert len(raw.train) == len(known.train) > 40_000 and raw.vocabulary > 2 * known.vocabulary > 2_000
    ptb = set((small / "ptb/ptb.train.txt").read_text().split())
    assert {"N", "<unk>"} <= ptb and not any(word.isdigit() or word != word.lower() for word in ptb - {"N"})


@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_reads_streams_of_its_own_without_a_gap(small: Path, workers: int) -> None:
    tasks = [made(JOBS[STREAMED], small, rank, workers) for rank in range(workers)]
    assert len({task.passes(0) for task in tasks}) == 1
    streams = []
    for task in tasks:
        batches = list(task.batches(0))
        assert len(batches) == task.passes(0) and [b.first for b in batches] == [True] + [False] * (len(batches) - 1)
        assert batches[0].x.numel() == task.samples
        x, y = torch.cat([b.x for b in batches], 1), torch.cat([b.y for b in batches], 1)
        assert torch.equal(x[:, 1:], y[:, :-1])
        streams.append(x)
    everything = torch.cat(streams).flatten()
    assert torch.equal(everything, tasks[0].text.train[: len(everything)].long())
    assert len(tasks[0].text.train) - len(everything) <= 4 * workers


@pytest.mark.parametrize("workers", [1, 3])
def test_blocks_are_shuffled_and_each_is_one_workers(small: Path, workers: int) -> None:
    tasks = [made(JOBS[SHUFFLED], small, rank, workers) for rank in range(workers)]
    assert len({task.passes(0) for task in tasks}) == 1
    epochs = []
    for epoch in (0, 1):
        batches = [list(task.batches(epoch)) for task in tasks]
        assert all(len(found) == task.passes(epoch) for found, task in zip(batches, tasks, strict=True))
        rows = [tuple(row) for found in batches for x, y in found for row in torch.cat([x, y[:, -1:]], 1).tolist()]
        epochs.append(rows)
        assert len(rows) > (len(tasks[0].text.train) - 1) // 64 - workers
    assert epochs[0] != epochs[1]
    raw = tasks[0].text.train.long()
    blocks = {tuple(raw[start : start + 65].tolist()) for start in range(0, len(raw) - 64, 64)}
    assert set(epochs[0]) <= blocks and len(set(epochs[0])) > 0.99 * len(blocks)


@pytest.mark.parametrize("name", [STREAMED, SHUFFLED])
def test_batches_go_on_from_any(small: Path, name: str) -> None:
    task = made(JOBS[name], small)
    whole, rest = list(task.batches(1)), list(task.batches(1, 5))
    assert len(rest) == len(whole) - 5
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(whole[5:], rest, strict=True))


def test_a_stream_goes_on_with_equal_bits_after_an_evaluation_and_after_a_resume(small: Path, tmp_path: Path) -> None:
    job = JOBS[STREAMED]
    task = made(job, small)
    batches = list(task.batches(0))[:4]
    expected = [task.loss(batch).item() for batch in batches]
    again = [task.loss(batch).item() for batch in batches]
    assert again == expected  # the first batch of an epoch begins without a state
    first = [task.loss(batch).item() for batch in batches[:2]]
    task.evaluate()
    torch.save(task.state_dict(), tmp_path / "state.pt")
    resumed = made(job, small)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert first + [resumed.loss(batch).item() for batch in islice(resumed.batches(0, 2), 2)] == expected
    forgetful = made(job, small)
    forgetful.load_state_dict(forgetful.state_dict())  # before the first batch, too
    assert forgetful.loss(batches[2]).item() != expected[2]


@pytest.mark.parametrize("name", [STREAMED, SHUFFLED, "transformer-wikitext2"])
def test_what_is_held_out_is_shared_by_workers_and_all_of_it_is_counted(small: Path, name: str) -> None:
    alone = made(JOBS[name], small)
    alone.model.eval()
    expected = alone.evaluate()
    assert expected["count"].item() == len(alone.text.valid) - 1
    tasks = [made(JOBS[name], small, rank, 12, batch_size=1) for rank in range(12)]  # more than there are streams
    for task in tasks:
        task.model.eval()
    found = [task.evaluate() for task in tasks]
    sums = {key: sum(part[key].item() for part in found) for key in expected}
    assert sums["count"] == expected["count"].item()
    assert sums["loss"] == pytest.approx(expected["loss"].item(), rel=1e-4)
    figures = alone.figures(sums)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["perplexity"] == pytest.approx(alone.text.vocabulary, rel=0.2)  # it knows nothing yet


def test_a_stream_goes_on_without_mixed_precision_where_it_began_with_it(small: Path) -> None:
    task = made(JOBS[STREAMED], small)
    first, second = islice(task.batches(0), 2)
    # oneDNN has an LSTM of bfloat16 only where the processor multiplies in it.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        task.loss(first)
    assert {part.dtype for part in task.state_dict()["state"]} == {torch.float32}
    assert task.loss(second).isfinite()


def test_a_loss_beyond_all_bounds_is_an_infinite_perplexity(small: Path) -> None:
    assert made(JOBS[STREAMED], small).figures({"loss": 1e6, "count": 1.0})["perplexity"] == math.inf


def test_a_unigram_model_counts_words_once_more() -> None:
    known = text.Text(torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32), 3)
    assert unigram(known) == pytest.approx((3 / 6 * 2 / 6) ** -0.5)


@pytest.mark.parametrize("name", JOBS)
def test_every_parameter_of_a_tiny_network_has_a_gradient(small: Path, name: str) -> None:
    task = made(JOBS[name], small)
    assert task.metric == "perplexity" and "perplexity" in task.notes()["of a unigram model"]
    loss = task.loss(next(iter(task.batches(0))))
    loss.backward()
    assert loss.dim() == 0 and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in task.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, part", [("transformer-wikitext2", 0.7), pytest.param(SHUFFLED, 0.7, marks=pytest.mark.long)]
)
def test_a_tiny_network_learns_more_than_how_frequent_words_are(small: Path, name: str, part: float) -> None:
    task = made(JOBS[name], small, batch_size=8)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.005)
    for batch in islice(task.batches(0), 150):
        optimizer.zero_grad()
        task.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
    task.model.eval()
    sums = {key: value.item() for key, value in task.evaluate().items()}
    assert task.figures(sums)["perplexity"] < part * unigram(task.text)


@pytest.mark.parametrize("network", [lstm, transformer])
def test_a_network_sees_nothing_of_what_comes(network: Any) -> None:
    torch.manual_seed(0)
    model = network(50, tiny=True)
    x = torch.randint(50, (2, 20))
    later = x.clone()
    later[:, 12:] = (later[:, 12:] + 1) % 50
    scores, other = model(x)[0], model(later)[0]
    assert torch.allclose(scores[:, :12], other[:, :12], atol=1e-6)
    assert not torch.allclose(scores[:, 12:], other[:, 12:], atol=1e-4)


@pytest.mark.parametrize(
    "name, parameters, tensors",
    [
        ("lstm-wikitext2", 37_319_278, 11),
        ("lstm-ptb", 66_034_000, 11),
        ("transformer-wikitext2", 34_367_678, 99),
        ("gpt2-wikitext2", 124_439_808, 148),
        ("gpt2-medium-wikitext2", 354_823_168, 292),
        ("gpt2-large-wikitext103", 774_030_080, 436),
    ],
)
def test_published_sizes(name: str, parameters: int, tensors: int) -> None:
    with torch.device("meta"):
        found: list[Tensor] = list(JOBS[name].network().parameters())
    assert (sum(p.numel() for p in found), len(found)) == (parameters, tensors)


@pytest.mark.parametrize(
    "option, why",
    [
        ({"weights": Path("w")}, "--weights has no meaning here: these networks begin with random weights"),
        ({"tokenizer": Path("t")}, "--tokenizer has no meaning here: words are what stands between spaces"),
        ({"uneven": True}, "--uneven has no meaning here: all streams are equally long"),
    ],
)
def test_streams_of_words_refuse_what_they_would_ignore(small: Path, option: dict[str, Any], why: str) -> None:
    job = JOBS[STREAMED]
    with pytest.raises(ValueError, match=why):
        job.make(Settings(job.settled(True), small, tiny=True, **option))


def test_weights_are_read_and_must_know_all_tokens(small: Path, tmp_path: Path) -> None:
    job = JOBS[SHUFFLED]
    saved = job.network(vocabulary=256, tiny=True)
    saved.save_pretrained(tmp_path / "enough")
    job.network(vocabulary=255, tiny=True).save_pretrained(tmp_path / "few")
    settings = Settings(job.settled(True), small, tiny=True, weights=tmp_path / "enough")
    found = job.make(settings).model
    assert torch.equal(found.get_input_embeddings().weight, saved.get_input_embeddings().weight)
    with pytest.raises(ValueError, match="few knows 255 tokens, and the data have 256"):
        job.make(replace(settings, weights=tmp_path / "few"))


def test_fewer_blocks_than_workers_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a" * 129, "b" * 10)
    assert made(JOBS[SHUFFLED], tmp_path, workers=2).passes(0) == 1
    with pytest.raises(ValueError, match="2 blocks of 64 tokens, fewer than workers"):
        made(JOBS[SHUFFLED], tmp_path, workers=3)
