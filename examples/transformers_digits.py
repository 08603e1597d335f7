# SPDX-License-Identifier: Apache-2.0
"""Train a small vision transformer on the digits with the Trainer of transformers, AdamW and compressed messages.

    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/transformers_digits.py

One line differs from a script without agmerge: ``agmerge.integrations.transformers.compress(trainer)``.
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import load
from training.progress import add_log_dir, shows_bars
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed
from transformers.utils import logging

import agmerge

ROWS = list[dict[str, torch.Tensor]]


def accuracy(answers: EvalPrediction) -> dict[str, float]:
    """Return the share of images whose most likely digit is right."""
    return {"accuracy": float((answers.predictions.argmax(-1) == answers.label_ids).mean())}


def main() -> None:
    """Train on every worker's part of the images, and test the model on all the others."""
    parser = argparse.ArgumentParser(description="Digits, trained with transformers.Trainer")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", default="runs/transformers_digits", help="for checkpoints")
    parser.add_argument("--updates", action="store_true", help="exchange updates of AdamW: few bytes on a slow network")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    add_log_dir(parser)
    args = parser.parse_args()
    if not shows_bars(True):
        logging.disable_progress_bar()  # of files that are written
    if args.log_dir is not None:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(args.log_dir)  # what the Trainer's own curves go by

    set_seed(0)
    train_x, train_y, test_x, test_y = load()
    train: ROWS = [{"pixel_values": x, "labels": y} for x, y in zip(train_x, train_y, strict=True)]
    test: ROWS = [{"pixel_values": x, "labels": y} for x, y in zip(test_x, test_y, strict=True)]
    shape = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
        initializer_range=0.1,
    )
    trainer = Trainer(
        model=ViTForImageClassification(shape),
        args=TrainingArguments(
            output_dir=args.out,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=2e-3,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            logging_strategy="epoch",
            report_to="none" if args.log_dir is None else "tensorboard",
            disable_tqdm=not shows_bars(True),  # the Trainer shows those of its first process
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=accuracy,
    )

    # The one line. With --updates what AdamW does is sent instead, by default 5 % of it, as signs.
    if args.updates:
        compression = agmerge.integrations.transformers.compress(trainer, sync="updates", exchange="sparse")
    else:
        compression = agmerge.integrations.transformers.compress(trainer)
    trainer.train(resume_from_checkpoint=args.resume)
    found = trainer.evaluate()

    if trainer.is_world_process_zero():
        print(f"accuracy {found['eval_accuracy']:.4f}")
        if compression.compressed is not None:
            stats = compression.compressed.stats()
            print(f"bytes sent {stats['bytes_sent']}, dense {stats['bytes_dense']}")


if __name__ == "__main__":
    main()
