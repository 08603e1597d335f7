# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job with Trainers that it cannot have: each is refused with what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import agmerge

folder = Path(sys.argv[1])
config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0)
model = transformers.GPT2LMHeadModel(config)
ROWS = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Data set without a length."""

    def __iter__(self) -> Any:
        return iter(ROWS)


def trainer(data: Any = ROWS, **more: Any) -> transformers.Trainer:
    """Return a Trainer of one process."""
    given = {"max_steps": 2, **more}
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"), report_to=[], use_cpu=True, disable_tqdm=True, **given
    )
    return transformers.Trainer(model=model, args=args, train_dataset=data)


compress = agmerge.integrations.transformers.compress
early = trainer()
compress(early)
agmerge.init(elastic=True)
with pytest.raises(ValueError, match="AGM309"):
    early.train()
with pytest.raises(ValueError, match="AGM309"):
    compress(trainer(max_steps=-1))
with pytest.raises(ValueError, match="exchange='oktopk'"):
    unfit = trainer()
    compress(unfit, compression="topk", density=0.1, exchange="oktopk")
    unfit.train()
for data, more, named in (
    (Stream(), {}, "IterableDataset"),
    (ROWS, {"train_sampling_strategy": "group_by_length"}, "LengthGroupedSampler"),
):
    unfit = trainer(data, **more)
    compress(unfit)
    with pytest.raises(ValueError, match=named):
        unfit.train()
fits = trainer()
compress(fits)
assert fits.train().global_step == 2
agmerge.shutdown()
