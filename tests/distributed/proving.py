# SPDX-License-Identifier: Apache-2.0
"""One of two workers that make short trainings of ``prove.py``, and write the digest of their parameters.

torchrun --nproc-per-node 2 tests/distributed/proving.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from evidence.models import SIZES, Size  # noqa: E402
from evidence.text import BYTES, Corpus  # noqa: E402
from evidence.training import Training, first_model, train_rank  # noqa: E402

import agmerge  # noqa: E402

WORKERS, STEPS = 2, 12
CONTENDERS = ("split", "default", "updates", "local-4", "local-8", "topk", "powersgd-4", "int8", "bf16")
SIZES["tiny"] = Size(layers=1, width=32, heads=2, context=16, batch=64, rate=1e-2)


def corpus_in(folder: Path) -> Corpus:
    """Return a text of random tokens, the same in every process, written if it is not there."""
    sizes = {"train": 4096, "held_out": 1024}
    for number, (name, size) in enumerate(sizes.items()):
        tokens = np.random.default_rng(number).integers(0, 64, size, dtype=np.uint8)
        if not (folder / f"{name}.bin").exists():
            (folder / f"{name}.bin").write_bytes(tokens.tobytes())
    return Corpus(str(folder), BYTES, "digest", "random", 2, sizes["train"], sizes["held_out"], 1.0)


def training_of(contender: str, workers: int = WORKERS, steps: int = STEPS) -> Training:
    """Return a training of the size that this file adds."""
    return Training("tiny", contender, "adamw", workers, 64 * steps, 64, 3, 1e-2)


def main(folder: Path) -> None:
    """Make the trainings, a line of ``FOLDER/RANK.json`` each."""
    agmerge.init("torch")
    torch.set_num_threads(1)
    corpus, found = corpus_in(folder), {}
    for contender in CONTENDERS:
        training = training_of(contender)
        trained = train_rank(training, corpus, first_model(training), agmerge.rank(), dense_sum="ordered")
        found[contender] = [trained["digest"], trained["sent"]["link_bytes"]]
    (folder / f"{agmerge.rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    agmerge.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
