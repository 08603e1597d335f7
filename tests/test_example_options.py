# SPDX-License-Identifier: Apache-2.0
"""What the command line of ``examples/train.py`` comes to, and which part of the samples is a worker's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jobs
import pytest
import train
from jobs.base import Recipe, Settings, share
from training import options as train_options

import merging
import sparsifiers


def options(line: str) -> dict[str, Any]:
    args = train_options.arguments(line.split())
    return train_options.library_options(args, jobs.get(args.job), "the model")  # type: ignore[arg-type]


def test_a_dry_run_says_what_the_library_makes_of_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="AGM707: compression='dgc' uses memory='residual' with AdamW"):
        train.main("gpt2-wikitext2 --tiny --compression dgc --dry-run".split())
    assert capsys.readouterr().out.splitlines()[-1] == "  dgc, density 0.01, sparse exchange, memory residual"
    train.main("mnist --compression dgc --dry-run".split())
    assert capsys.readouterr().out.splitlines()[-1] == "  dgc, density 0.01, sparse exchange, memory dgc"
    train.main("digits --tiny --compression S-SGD --dry-run".split())
    assert capsys.readouterr().out.splitlines()[-1] == "  none"


@pytest.mark.parametrize(
    "line, words",
    [
        ("gpt2-wikitext2 --tiny --compression dgc --memory dgc", "AdamW has its own .*Pass memory='residual'"),
        ("digits --tiny --compression topk --rank 4", "rank=4 has no effect .* sends no factors"),
        ("digits --tiny --compression Ok-Topk", "write compression='topk', exchange='oktopk'"),
        ("digits --tiny --merging topk", "write compression='topk'"),
        ("digits --tiny --exchange Ok-Topk", "did you mean 'oktopk'"),
    ],
)
def test_what_training_refuses_a_dry_run_refuses(line: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        train.main([*line.split(), "--dry-run"])


@pytest.mark.parametrize(
    "line, expected",
    [
        ("digits", {"compression": "topk", "exchange": "sparse"}),
        ("digits --compression topk --density 0.1", {"compression": "topk", "density": 0.1, "exchange": "sparse"}),
        ("digits --compressor none", {"compression": "none"}),
        ("digits --compression auto", {"compression": "auto", "exchange": "sparse"}),
        ("mnist", {"compression": "dgc", "exchange": "sparse"}),
        ("digits --density 0.1", {"compression": "topk", "density": 0.1, "exchange": "sparse"}),
        ("digits --merging agtf --exchange auto", {"compression": "topk", "merging": "agtf", "exchange": "auto"}),
        ("digits --merging dear", {"merging": "dear", "model": "the model", "compression": "none"}),
        (
            "digits --threshold 1000",
            {"compression": "topk", "merging": merging.get("threshold", bytes=4000), "exchange": "sparse"},
        ),
        ("digits --compression powersgd --rank 8", {"compression": "powersgd", "rank": 8, "exchange": "sparse"}),
        (
            "digits --memory none --dense .*bias fc2.* --warmup-density 20",
            {"compression": "topk", "memory": "none", "dense": [".*bias", "fc2.*"], "warmup": 20, "exchange": "sparse"},
        ),
        (
            "digits --warmup-density dgc --dense partial",
            {"compression": "topk", "warmup": "dgc", "dense": "partial", "exchange": "sparse"},
        ),
        ("gpt-stdlib", {"compression": "topk", "sync": "updates", "exchange": "sparse"}),
        ("gpt-stdlib --sync gradients --compression none", {"sync": "gradients", "compression": "none"}),
        (
            "gpt-stdlib --every 8 --overlap 2 --fragments 2 --density 1 --wire int4 --carry apply",
            {"sync": "updates", "every": 8, "overlap": 2, "fragments": 2, "density": 1.0, "wire": "int4"}
            | {"compression": "topk", "carry": "apply", "exchange": "sparse"},
        ),
        ("gpt-stdlib --local-steps 8 --wire int8", {"wire": "int8", "exchange": "sparse"}),
    ],
)
def test_what_was_asked_for_is_passed_on_and_the_jobs_compressor(line: str, expected: dict[str, Any]) -> None:
    assert options(line) == expected


def recipe(line: str) -> Recipe:
    args = train_options.arguments(line.split())
    return train_options.recipe_of(jobs.get(args.job), args)


def test_a_recipe_is_as_published_unless_a_flag_says_otherwise() -> None:
    published = jobs.get("digits").recipe
    assert recipe("digits") == published
    changed = recipe("digits --lr 0.5 --epochs 3 --train_batch_size 4 --momentum 0.1 --wd 0 --clip 2")
    assert changed == replace(published, lr=0.5, epochs=3, batch_size=4, momentum=0.1, wd=0.0, clip=2.0)
    assert recipe("digits --tiny").epochs < published.epochs


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "a job is missing"),
        ("digit", "did you mean 'digits'"),
        ("digits --resume", "--resume goes on from --checkpoint-dir"),
        ("digits --portable", "--portable is about --checkpoint-dir"),
        ("digits --stop-at-target", "--stop-at-target needs --target"),
        ("digits --local-steps 4 --sync updates", "leave --sync out"),
        ("digits --epochs 0", "no whole number above 0"),
        ("digits --use-adasum", "--use-adasum"),
        ("digits --merging threshold:bites=3", "bites"),
    ],
)
def test_what_has_no_meaning_is_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train_options.arguments(line.split())
    assert ended.value.code == 2 and words in capsys.readouterr().err


# -- a worker's part -------------------------------------------------------------------------------------------


def settings(rank: int, workers: int, uneven: bool = False) -> Settings:
    return Settings(jobs.get("digits").recipe, seed=3, rank=rank, workers=workers, uneven=uneven)


@pytest.mark.parametrize("uneven", [False, True])
def test_parts_are_disjoint_and_as_many_as_there_are(uneven: bool) -> None:
    parts = [share(11, settings(rank, 3, uneven), epoch=1).tolist() for rank in range(3)]
    assert [len(part) for part in parts] == ([4, 4, 3] if uneven else [3, 3, 3])
    together = [sample for part in parts for sample in part]
    assert len(set(together)) == len(together)
    assert share(11, settings(0, 3), 1).tolist() == parts[0][: 3 if not uneven else 4][:3]
    assert share(11, settings(0, 3), 2).tolist() != share(11, settings(0, 3), 1).tolist()


def test_every_job_names_a_compressor_and_no_quantiser() -> None:
    for name in jobs.JOBS:
        assert options(name)["compression"] in sparsifiers.names()
