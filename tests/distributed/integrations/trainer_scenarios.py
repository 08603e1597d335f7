# SPDX-License-Identifier: Apache-2.0
"""What two workers do with the Trainer of transformers: ``torchrun ... trainer_scenarios.py FOLDER [SCENARIO ...]``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frameworks import DENSE, TOPK, UPDATES, Scenarios, bits, bytes_on_the_wire, lose, refused, two, waiting
from gpt import VOCABULARY, corpus, windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import agmerge
from agmerge.integrations.transformers import Compression, compress

LENGTH = 16  # tokens of a piece of text
scenario = Scenarios()


def pieces(count: int, first: int = 0) -> list[dict[str, torch.Tensor]]:
    text, _ = corpus(50_000)
    rows, _ = windows(text, 997 * torch.arange(first, first + count) % (len(text) - LENGTH - 1), LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def gpt() -> GPT2LMHeadModel:
    set_seed(3)
    shape = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape))


def made(folder: Path, samples: int = 32, model: Any = None, optimizer: Any = None, **args: Any) -> Trainer:
    """A Trainer of two samples a step and worker, AdamW unless there is another optimizer."""
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    return Trainer(
        model=model or gpt(),
        args=TrainingArguments(**{**usual, **args}),
        train_dataset=pieces(samples),
        eval_dataset=pieces(8, first=samples),
        optimizers=(optimizer, None),
    )


@scenario
def dense(folder: Path) -> Any:
    """The bits of the Trainer without us, and with us and no compression."""
    cases: dict[str, dict[str, Any]] = {
        # Seven batches an epoch: the last step of each has one.
        "accumulation, clipping": {"samples": 28, "gradient_accumulation_steps": 3, "max_grad_norm": 0.05},
        "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True, "ddp_find_unused_parameters": False},
    }
    seen = {}
    for name, args in cases.items():
        plain, ours = made(folder, num_train_epochs=2, **args), made(folder, num_train_epochs=2, **args)
        compress(ours, **DENSE)
        for trainer in (plain, ours):
            set_seed(4)
            trainer.train()
        seen[name] = [plain.state.global_step, bits(gpt()), bits(plain.model), bits(ours.model)]
    return seen


@scenario
def topk(folder: Path) -> Any:
    """Bytes on the wire, with and without us; what the log says; a second ``train()``."""
    seen: dict[str, Any] = {"bytes": []}
    for ours in (False, True):
        trainer = made(folder, samples=48, logging_steps=6)
        compression = compress(trainer, **TOPK) if ours else None
        trainer.train()  # DDP and the ranks agree, and replicas are compared
        before = bytes_on_the_wire()
        trainer.train()
        agmerge.barrier() if agmerge.is_initialized() else None
        after = bytes_on_the_wire()
        seen["bytes"].append(None if before is None or after is None else after - before)
    assert compression is not None and compression.compressed is not None
    seen["stats"] = {key: compression.compressed.stats()[key] for key in ("steps", "bytes_sent", "bytes_dense")}
    seen["residual"] = compression.compressed.stats()["residual_norm"]
    seen["log"] = [entry for entry in trainer.state.log_history if "loss" in entry]
    seen["bits"] = bits(trainer.model)
    return seen


def resumed(folder: Path, **options: Any) -> dict[str, Any]:
    """Eight steps in one go, and the last four of them once more by another Trainer, from a checkpoint."""
    args: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = made(folder, **args)
    first = compress(whole, **options)
    whole.train()
    again = made(folder, **args)
    second = compress(again, **options)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert first.compressed is not None and second.compressed is not None
    return {
        "steps": [whole.state.global_step, second.compressed.stats()["steps"]],
        "bits": [bits(whole.model), bits(again.model)],
        "residuals": [first.compressed.stats()["residual_norm"], second.compressed.stats()["residual_norm"]],
        "files": sorted(path.name for path in (folder / "checkpoint-4").glob("agmerge*")),
    }


@scenario
def resume(folder: Path) -> Any:
    """To the bit, whatever is exchanged; and without our files, with a warning."""
    seen = {
        "topk": resumed(folder / "topk", **TOPK),
        "updates": resumed(folder / "updates", **UPDATES),
    }
    lose(folder / "topk" / "checkpoint-4" / "agmerge-1-of-2.pt")
    trainer = made(folder / "topk")
    compression = compress(trainer, **TOPK)
    trainer.train(resume_from_checkpoint=str(folder / "topk" / "checkpoint-4"))
    assert compression.compressed is not None
    return {**seen, "incomplete": [bits(trainer.model), compression.compressed.stats()["steps"]]}


@scenario.if_named
def resume_others(folder: Path) -> Any:
    """To the bit in other ways of keeping what is not sent."""
    return {
        "hold": resumed(folder / "hold", **UPDATES, carry="hold"),
        "overlap": resumed(folder / "overlap", **UPDATES, overlap=1),
        "local steps": resumed(folder / "local", **UPDATES, every=3),
    }


class Resuming(TrainerCallback):
    """Look at what waits before the first step."""

    def __init__(self, compression: Compression) -> None:
        self.compression, self.seen = compression, {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.seen = waiting(self.compression.compressed)


WAYS = {"topk": TOPK, "updates": UPDATES}


@scenario.if_named
def saved(folder: Path) -> Any:
    """What waits after four steps, and is saved."""
    seen = {}
    for name, options in WAYS.items():
        trainer = made(folder / name, save_strategy="steps", save_steps=4, max_steps=4)
        compression = compress(trainer, **options)
        at_save = Resuming(compression)
        at_save.on_save = at_save.on_train_begin  # consolidated in the end
        trainer.add_callback(at_save)
        trainer.train()
        seen[name] = at_save.seen
    return seen


@scenario.if_named
def taken_over(folder: Path) -> Any:
    """What waits for another number of ranks that goes on."""
    seen = {}
    for name, options in WAYS.items():
        trainer = made(folder.with_name("saved.out") / name, max_steps=6)
        compression = compress(trainer, **options)
        look = Resuming(compression)
        trainer.add_callback(look)
        trainer.train(resume_from_checkpoint=True)
        seen[name] = [look.seen, trainer.state.global_step, bits(trainer.model)]
    return seen


@scenario.if_named
def another_ddp(folder: Path) -> Any:
    """A second ``train()`` in another DDP, around the same model."""
    seen = {}
    for name, options in WAYS.items():
        trainer = made(folder, auto_find_batch_size=True)
        compression = compress(trainer, **options)
        trainer.train()
        first, before = compression.compressed, bits(trainer.model)
        trainer.train()
        assert compression.compressed is not None
        steps = compression.compressed.stats()["steps"]
        seen[name] = [compression.compressed is first, steps, bits(trainer.model), before]
    return seen


@scenario
def several_optimizers(folder: Path) -> Any:
    """A list of two in place of an optimizer: what one with the groups of both comes to, in one go and resumed."""
    seen: dict[str, Any] = {}
    for name, options in {"dense": DENSE, "topk": TOPK, "updates": UPDATES}.items():
        for several in (True, False):
            where, ends = folder / f"{name} {several}", []
            for again in (False, True):
                model = gpt()
                settings = {"save_strategy": "steps", "save_steps": 4, "optimizer": two(model, several)}
                trainer = made(where, model=model, **settings)
                compression = compress(trainer, **options)
                trainer.train(resume_from_checkpoint=str(where / "checkpoint-4") if again else None)
                assert compression.compressed is not None
                ends += [bits(model), compression.compressed.stats()["steps"]]
            seen.setdefault(name, []).append(ends)
    return seen


class Watch(TrainerCallback):
    """Note the model's bits where a Trainer calls back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.seen = model, {"step": [], "evaluation": []}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen["step"].append(bits(self.model))

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.seen["evaluation"].append(bits(self.model))


@scenario
def updates(folder: Path) -> Any:
    """What is evaluated, saved, and there in the end; and the best model again, and training that goes on from it."""
    found = {}
    for best in (False, True):
        where = folder / str(best)
        trainer = made(
            where,
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=2,
            eval_steps=2,
            save_total_limit=2,
            load_best_model_at_end=best,
            metric_for_best_model="loss",
            greater_is_better=True,  # the first one is the best then, so that it is another than the last
        )
        compression = compress(trainer, **UPDATES)
        watch = Watch(trainer.model)
        trainer.add_callback(watch)
        trainer.train()
        assert compression.compressed is not None
        saved = sorted(path.name for path in where.iterdir())
        models = {name: bits(GPT2LMHeadModel.from_pretrained(where / name)) for name in saved}
        found[str(best)] = {**watch.seen, "models": models, "end": bits(trainer.model)}
        found[str(best)]["files"] = [len(list((where / name).glob("agmerge-*.pt"))) for name in saved]
        found[str(best)]["loss"] = trainer.evaluate()["eval_loss"]
        end = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.model.load_state_dict(gpt().state_dict())  # the script's own affair now
        trainer.evaluate()
        found[str(best)]["start"] = [watch.seen["evaluation"].pop(), bits(gpt())]
        trainer.model.load_state_dict(end)
        trainer.train()
        found[str(best)]["later"] = bits(trainer.model)
    return found


@scenario
def scaler(folder: Path) -> Any:
    """With a GradScaler the bits are those without one, residuals included."""
    seen = []
    for scale in (None, 16.0):
        trainer = made(folder, max_grad_norm=0.0)  # the Trainer would clip before it unscales, for it has no fp16 here
        if scale is not None:
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        compression = compress(trainer, **TOPK)
        trainer.train()
        assert compression.compressed is not None
        left = compression.compressed.stats()
        seen.append([bits(trainer.model), left["steps"], left["steps_skipped"], left["residual_norm"]])
    return seen


@scenario
def refusals(folder: Path) -> Any:
    """What is refused, and what it says."""
    said = {}
    for name, options in (("gradients", TOPK), ("updates", UPDATES)):
        for called in (False, True):
            model = gpt()
            wrapped = agmerge.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
            trainer = made(folder, model=model, optimizer=wrapped)
            said[f"{name}, {called}"] = refused(partial(compress, trainer, **TOPK) if called else trainer.train)
            wrapped.close()
    model = gpt()
    wrapped = agmerge.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **TOPK)
    trainer = made(folder, model=model, optimizer=[wrapped])
    said["in a list"] = refused(partial(compress, trainer, **TOPK))
    wrapped.close()
    for flag in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        trainer = made(folder)
        setattr(trainer, flag, True)
        said[flag] = refused(partial(compress, trainer, **TOPK))
    trainer = made(folder)
    trainer.args._n_gpu = 2
    said["several GPUs"] = refused(lambda: compress(trainer, **TOPK))
    said["scaler"] = refused(lambda: compress(made(folder), scaler=None))
    trainer = made(folder)
    compress(trainer, density=2.0)
    said["options"] = refused(trainer.train)
    trainer = made(folder)
    compress(trainer, **TOPK)
    compress(trainer, **TOPK)
    said["twice"] = refused(trainer.train)
    trainer = made(folder, optim="sgd", max_grad_norm=0.01)
    compress(trainer, **{**TOPK, "compression": "dgc"})
    said["velocity"] = refused(trainer.train)
    return said


if __name__ == "__main__":
    agmerge.init("torch")
    scenario.main(Path(sys.argv[1]), *sys.argv[2:])
    agmerge.shutdown()
