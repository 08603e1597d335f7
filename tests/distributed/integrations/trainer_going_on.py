# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job that trains by a ``transformers.Trainer``, and writes a line at each step.

Told to end, by SIGTERM, it leaves after a whole step. All end at the step that the file ``end`` names.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import agmerge

folder, steps, setting = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
transformers.set_seed(os.getpid() % 2**16)  # each worker begins with other values


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of numbers that count up; it writes down which ones are drawn."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn.append(index)
        row = (torch.arange(8) + index) % 32
        return {"input_ids": row, "labels": row}


class Told(transformers.TrainerCallback):
    """Callback that writes a line at each step, and ends the training."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the digest of the parameters before a step, with what this worker has seen."""
        optimizer = training.compressed
        assert optimizer is not None
        with optimizer.shared():
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        line = [state.global_step, agmerge.size(), digest, time.monotonic(), *drawn[-4:]]
        with open(folder / f"{os.getpid()}.lines", "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")
        time.sleep(0.03)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where all are to stop."""
        if (folder / "end").exists() and state.global_step >= int((folder / "end").read_text()):
            control.should_training_stop = True


drawn: list[int] = []
config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0)
model = transformers.GPT2LMHeadModel(config)
resumes = bool(setting.pop("resumes", False))
args = transformers.TrainingArguments(
    output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
    logging_steps=20, save_steps=40, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
    eval_strategy="steps", eval_steps=40,
)  # fmt: skip
trainer = transformers.Trainer(
    model=model, args=args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=[Told()]
)
options = {"suspect": 2.0, "patience": 30.0, **setting.pop("elastic", {})}
agmerge.init(elastic=agmerge.Elastic(**options))
training = agmerge.integrations.transformers.compress(trainer, check_every=1, **setting)
signal.signal(signal.SIGTERM, lambda *_: training.leave())
result = trainer.train(resume_from_checkpoint=resumes)
trainer.save_model(str(folder / "last"))
print("left" if training.has_left else "ended", result.global_step, json.dumps(trainer.state.log_history[-1]))
agmerge.shutdown()
