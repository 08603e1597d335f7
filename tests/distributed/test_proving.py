# SPDX-License-Identifier: Apache-2.0
"""Ranks in memory, of which ``prove.py`` has the losses, are real workers to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from evidence.training import train_in_memory
from launching import torchrun
from proving import CONTENDERS, WORKERS, corpus_in, training_of


@pytest.mark.timeout(200)
def test_parameters_and_bytes_are_those_of_real_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpus_in(tmp_path)
    ended = torchrun(WORKERS, Path(__file__).with_name("proving.py"), str(tmp_path), timeout=150)
    assert ended.code == 0, ended.output
    real = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORKERS)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for contender in CONTENDERS:
            training = training_of(contender)
            row = train_in_memory(training, corpus, tmp_path / "checkpoint.pt", dense_sum="ordered")
            sent = sum(one[contender][1] for one in real) / WORKERS / training.steps
            assert ({one[contender][0] for one in real}, sent) == ({row["digest"]}, row["bytes_per_step"]), contender
    finally:
        torch.set_num_threads(threads)
