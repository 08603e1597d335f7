# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's checkpoints of BERT in the examples: what they hold is taken to the bit, and what does not fit is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from data import small_text, windows
from networks import bert_checkpoint
from networks.bert import bert
from support.example_trainings import locked, results  # noqa: F401
from torch import Tensor

pytest.importorskip("transformers")

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what ``small_text`` writes."""
    folder = tmp_path_factory.mktemp("small")
    small_text.write(folder)
    return folder


def weights(pieces: int, seed: int = 3) -> State:
    """Return random weights of a tiny network, norms among them, under the names of transformers."""
    torch.manual_seed(seed)
    state = bert(vocabulary=pieces, tiny=True).state_dict()
    return {name: torch.randn_like(tensor) / 10 for name, tensor in state.items()}


def nvidias(state: State, *, norms: bool = True, prefix: str = "") -> State:
    """Return ``state`` as NVIDIA's pre-training writes it: its names, its heads, and nothing that answers questions."""
    found = {}
    for name, tensor in state.items():
        name = re.sub(r"(intermediate|pooler)\.dense\.", r"\1.dense_act.", name)
        if norms:
            name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        if not name.startswith("qa_outputs."):
            found[prefix + name] = tensor
    heads = {
        "bert.pooler.dense_act.weight": torch.randn(32, 32),
        "bert.pooler.dense_act.bias": torch.randn(32),
        "cls.predictions.bias": torch.randn(8),
        "cls.predictions.transform.dense_act.weight": torch.randn(32, 32),
        "cls.predictions.transform.LayerNorm.gamma": torch.randn(32),
        "cls.seq_relationship.weight": torch.randn(2, 32),
    }
    return {**found, **{prefix + name: tensor for name, tensor in heads.items()}}


def same(found: State, wanted: State, without: str = "qa_outputs.") -> bool:
    """Return whether two states are equal to the bit, but for names that begin with ``without``."""
    assert set(found) == set(wanted)
    return all(torch.equal(found[name], wanted[name]) for name in wanted if not name.startswith(without))


@pytest.mark.parametrize("prefix", ["", "module.", "module.module."])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("bare", [True, False])
def test_what_nvidia_wrote_is_read_to_the_bit(prefix: str, norms: bool, bare: bool, tmp_path: Path) -> None:
    state = weights(104)  # 100 word pieces, filled up
    written = nvidias(state, norms=norms, prefix=prefix)
    kept: Any = written if bare else {"model": written, "optimizer": {"state": {}}, "epoch": 3, "files": ["a"]}
    torch.save(kept, tmp_path / "bert.pt")
    found = bert_checkpoint.read(tmp_path / "bert.pt")
    network = bert(vocabulary=100, checkpoint=found, tiny=True)
    assert same(network.state_dict(), state)
    assert network.training and network.config.vocab_size == 104
    assert found.about == (
        f"--init_checkpoint {tmp_path / 'bert.pt'}: {len(state) - 2} tensors are taken; left out, as pre-training's: "
        "bert.pooler (2), cls.predictions (3), cls.seq_relationship (1); "
        "qa_outputs.* begins at random"
    )


def test_a_checkpoint_that_answers_questions_is_taken_whole_and_16_bits_are_widened(tmp_path: Path) -> None:
    state = {name: tensor.half() for name, tensor in weights(104).items()}
    head = {name: tensor for name, tensor in state.items() if name.startswith("qa_outputs.")}
    written = {name: tensor for name, tensor in nvidias(state).items() if not name.startswith(("cls", "bert.pooler"))}
    found = bert_checkpoint.of_state({**written, **head}, tmp_path)
    network = bert(vocabulary=104, checkpoint=found, tiny=True)
    assert same(network.state_dict(), {name: tensor.float() for name, tensor in state.items()}, without="nothing")
    assert "left out" not in found.about and "random" not in found.about


@pytest.mark.slow
def test_a_small_checkpoint_trains_some_steps(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = small / "squad/vocab.txt"
    pieces = windows.tokenizer(vocabulary).get_vocab_size()
    state = weights(pieces + -pieces % 8)
    torch.save({"model": nvidias(state)}, tmp_path / "bert.pt")
    line = f"bert-base-squad --tiny --data {small} --init_checkpoint {tmp_path / 'bert.pt'} --max-steps 3"
    found = results(f"{line} --compressor dgc --density=0.1 --memory=", tmp_path)
    assert found[0]["replicas_equal"] and found[0]["step"] == 3
    assert capsys.readouterr().err.count("qa_outputs.* begins at random\n") == 1  # of two workers, the first says so


# -- what does not fit ---------------------------------------------------------------------------------------------


def loaded(state: Any, tiny: bool = True, size: str = "bert-base", vocabulary: int = 100) -> None:
    """Load ``state`` as a checkpoint."""
    found = bert_checkpoint.of_state(state, Path("b.pt"))
    with torch.device("meta"):
        bert(size, vocabulary, checkpoint=found, tiny=tiny)


def renamed(state: State, old: str, new: str | None) -> State:
    """Return ``state`` with another name, or without it."""
    return {(new or "") if name == old else name: one for name, one in state.items() if new or name != old}


QUERY = "bert.encoder.layer.1.attention.self.query.bias"


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (lambda s: renamed(s, QUERY, "bert.encoder.layer.1.rotary.bias"), f"unknown: .*rotary.bias; missing: {QUERY}"),
        (lambda s: renamed(s, QUERY, None), f"is not of this network; missing: {QUERY}$"),
        (lambda s: {**s, "classifier.weight": torch.zeros(2, 32)}, "unknown: classifier.weight$"),
        (lambda s: {**s, "qa_outputs.weight": torch.zeros(2, 32)}, "missing: qa_outputs.bias$"),
        (lambda s: {**s, QUERY: torch.zeros(31)}, rf"of another shape: {QUERY} \(31,\) for \(32,\)"),
        (lambda s: {**s, "module." + QUERY: torch.zeros(32)}, f"has {QUERY} twice, the second time as module"),
        (lambda s: {n: t for n, t in s.items() if "word_emb" not in n}, "is of no BERT: bert.embeddings.word_emb"),
        (lambda s: {n: t for n, t in s.items() if ".layer.1." not in n}, "width 32 and 1 layers, and the network 32"),
        (lambda s: {"model": s, "epoch": 3}, "holds no tensors by name"),
        (lambda s: list(s), "holds no tensors by name"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_does_not_fit_is_named_with_the_reason(state: Any, error: str) -> None:
    with pytest.raises(ValueError, match=f"--init_checkpoint b.pt.*{error}"):
        loaded(state(nvidias(weights(104))))


def test_a_file_that_would_run_something_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"model": {}, "loader": Path("a")}, tmp_path / "code.pt")
    (tmp_path / "noise.pt").write_bytes(b"noise")
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("code", "noise", "empty"):
        with pytest.raises(ValueError, match=rf"{name}.pt is no file of torch.save .*torch.save\(torch.load\(FILE"):
            bert_checkpoint.read(tmp_path / f"{name}.pt")
    with pytest.raises(FileNotFoundError, match="no.pt: there is no such file"):
        bert_checkpoint.read(tmp_path / "no.pt")
