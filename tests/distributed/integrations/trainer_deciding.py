# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job: its Trainer evaluates often, stops early, and ends with its best model.

Each worker alone would decide something else: it has statistics of BatchNorm, and scores, of its own. Saving takes a
while. ``halts``: where the oldest worker waits to be killed, "evaluating" or "saving", at the step ``halts_at``.
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
transformers.set_seed(os.getpid() % 2**16)
halts, halts_at, best_at = setting.pop("halts", ""), setting.pop("halts_at", 0), setting.pop("best_at", 6)
EVERY = 2  # steps
more = setting.pop("training", {"eval_strategy": "steps", "eval_steps": EVERY, "save_strategy": "steps"})


class Model(torch.nn.Module):
    """Model with buffers that depend on the samples it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and what is computed."""
        logits = self.layers(x)
        return {"loss": (logits[:, 0] - labels).square().mean(), "logits": logits}


class Deciding(transformers.Trainer):
    """Trainer that takes its time to save."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        time.sleep(0.3)
        super()._save(output_dir, state_dict)
        halt("saving")


class Told(transformers.TrainerCallback):
    """Callback that writes a line at each step, and one for each evaluation."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the digest of the parameters before a step."""
        optimizer = training.compressed
        assert optimizer is not None
        with optimizer.shared():
            line = [state.global_step, agmerge.size(), digest(model.parameters())]
        with open(folder / f"{os.getpid()}.lines", "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Write what is evaluated, and the digest of the buffers."""
        said = [state.global_step, metrics["eval_score"], metrics["eval_loss"], digest(model.buffers())]
        if trainer.is_in_train:
            print("evaluated", json.dumps(said), flush=True)


def digest(tensors: Any) -> str:
    """Return a digest of tensors."""
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


def halt(where: str) -> None:
    """Wait here to be killed, if this is where the oldest worker is to die."""
    if halts == where and agmerge.rank() == 0 and trainer.state.global_step == halts_at and not marked.exists():
        marked.write_text(str(os.getpid()))
        time.sleep(100)


def score(predicted: Any) -> dict[str, float]:
    """Return a score: that of the oldest worker is best at the step ``best_at``, others' at their first evaluation."""
    halt("evaluating")
    step = trainer.state.global_step
    others = -step if halts else 1000 - step  # who is the oldest later has scored less
    return {"score": float(min(step, 2 * best_at - step) if agmerge.rank() == 0 else others)}


marked = folder / "halted"
source = torch.Generator().manual_seed(0)
rows = [{"x": torch.randn(8, generator=source), "labels": torch.randn((), generator=source)} for _ in range(48)]
model = Model()
args = transformers.TrainingArguments(
    output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=4, save_steps=EVERY,
    load_best_model_at_end=True, metric_for_best_model="eval_score", greater_is_better=True, save_total_limit=2,
    report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **more,
)  # fmt: skip
trainer = Deciding(
    model=model, args=args, train_dataset=rows, eval_dataset=rows, compute_metrics=score,
    callbacks=[transformers.EarlyStoppingCallback(2), Told()],
)  # fmt: skip
agmerge.init(elastic=agmerge.Elastic(**{"suspect": 2.0, "patience": 60.0, "min_workers": 2}))
training = agmerge.integrations.transformers.compress(trainer, check_every=1, **setting)
signal.signal(signal.SIGTERM, lambda *_: training.leave())
trainer.train()
state = trainer.state
best = Path(state.best_model_checkpoint or "none").name
print("ended", json.dumps([state.global_step, best, state.best_metric, digest(model.state_dict().values())]))
print("alone", trainer.evaluate()["eval_loss"], flush=True)
