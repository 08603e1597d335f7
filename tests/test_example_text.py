# SPDX-License-Identifier: Apache-2.0
"""Models of language in the examples: how text is read and laid out, and what their jobs give the training loop."""

from __future__ import annotations

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


def test_a_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"cat": 0, "the": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path / "tokenizer")
    found = text.tokens(put(tmp_path, "the cat\nthe\n", "cat dog\n"), tmp_path / "tokenizer")
    assert found.train.tolist() == [1, 0, 1] and found.valid.tolist() == [0, 2] and found.vocabulary == 3


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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name, part", [("transformer-wikitext2", 0.7), (SHUFFLED, 0.7)])
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
