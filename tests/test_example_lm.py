"""The language model of the examples; ``tests/distributed`` runs it under a launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpt
import numpy as np
import options
import pytest
import torch
import train_lm

import agmerge
from agmerge.testing import run


@pytest.mark.parametrize(
    "line, expected",
    [
        ("", {"sync": "updates", "exchange": "sparse"}),
        ("--dense", {"sync": "gradients", "compression": "none"}),
        (
            "--every 8 --overlap 2 --fragments 2 --density 1 --wire int4 --carry apply",
            {"sync": "updates", "every": 8, "overlap": 2, "fragments": 2, "density": 1.0, "wire": "int4"}
            | {"carry": "apply", "exchange": "sparse"},
        ),
        ("--sync gradients --compression topk", {"sync": "gradients", "compression": "topk", "exchange": "sparse"}),
    ],
)
def test_the_language_model_exchanges_updates_unless_told(line: str, expected: dict[str, object]) -> None:
    assert options.given(train_lm.arguments(line.split()), "the model") == expected


def test_dense_and_a_sparsifier_contradict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_lm.arguments(["--dense", "--compression", "topk"])
    assert "contradict" in capsys.readouterr().err


def test_a_model_that_guesses_and_one_that_counts_have_their_losses() -> None:
    train, held_out = gpt.corpus()
    assert len(train) + len(held_out) == 3_000_000 and int(train.max()) < gpt.VOCABULARY
    assert 2.5 < gpt.unigram_loss(train, held_out) < 3.5
    torch.manual_seed(0)
    model = gpt.GPT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 817_920
    x, y = gpt.windows(train, torch.tensor([0, 100]), 64)
    assert torch.equal(x[0, 1:], y[0, :-1]) and model(x).shape == (2, 64, gpt.VOCABULARY)
    assert model.loss(x, y).item() == pytest.approx(np.log(gpt.VOCABULARY), abs=0.1)
    later = x.clone()
    later[:, 40:] = 0
    assert torch.allclose(model(x)[:, :40], model(later)[:, :40], atol=1e-5)  # it sees nothing of what comes


def lm_run(line: str, workers: int = 2) -> tuple[dict[str, object], list[str]]:
    """The results of worker 0 of a small model, and all workers' parameters as digests."""
    args = train_lm.arguments([*line.split(), "--batch-size", "2", "--merging", "threshold", "--lr", "0.01"])
    torch.manual_seed(0)
    models = [gpt.GPT(width=32, layers=1, heads=2) for _ in range(workers)]

    def body(rank: int) -> dict[str, object]:
        return train_lm.train(args, models[rank], train_lm.wrapped(args, models[rank]), None)

    found = run(workers, body)
    return found[0], [str([parameter.double().sum().item() for parameter in model.parameters()]) for model in models]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, ahead",
    [
        ("", True),
        ("--carry hold", False),
        ("--overlap 1", True),
        ("--every 4 --density 1 --wire int4", True),
        ("--compression none", False),
        ("--sync gradients --compression topk --density 0.1", False),
        ("--dense", False),
    ],
)
def test_the_language_model_trains_whatever_is_exchanged(line: str, ahead: bool) -> None:
    found, seen = lm_run(f"--steps 60 {line}")
    assert found["replicas_equal"] and found["steps"] == 60
    assert found["validation_loss"] < 3.4
    assert (seen[0] != seen[1]) == ahead  # a worker's own parameters hold what it has not sent
    shown = train_lm.table(found)
    assert f"{found['settings']['sync']}: " in shown and "bitwise equal" in shown


@pytest.mark.slow
@pytest.mark.parametrize("line", ["", "--carry hold", "--overlap 1", "--every 3", "--dense"])
def test_a_language_model_goes_on_where_it_has_ended(line: str, tmp_path: Path) -> None:
    found, straight = lm_run(f"--steps 12 {line}")
    lm_run(f"--steps 12 --stop 7 --save {tmp_path} {line}")
    again, resumed = lm_run(f"--steps 12 --resume {tmp_path} {line}")
    assert again["steps"] == 12
    if "overlap" in line:  # saving takes in what is under way, a step earlier than going on would have
        assert again["validation_loss"] == pytest.approx(found["validation_loss"], rel=0.02)
    else:
        assert resumed == straight  # to the bit
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved.keys() == gpt.GPT(width=32, layers=1, heads=2).state_dict().keys()


@pytest.mark.slow
def test_the_language_model_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", f"train_lm.py --steps 3 --batch-size 1 --json {out}".split())
    train_lm.main()
    assert "of a unigram model" in capsys.readouterr().out
    assert json.loads(out.read_text())["workers"] == 1


def test_options_of_updates_with_gradients_end_with_the_librarys_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", "train_lm.py --sync gradients --every 4".split())
    with pytest.raises(SystemExit, match="every=4 is about sync='updates'"):
        train_lm.main()
    agmerge.shutdown()
