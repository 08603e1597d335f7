# SPDX-License-Identifier: Apache-2.0
"""What two workers do with Lightning: ``torchrun ... lightning_scenarios.py FOLDER [SCENARIO ...]``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from frameworks import DENSE, TOPK, UPDATES, Scenarios, bits, bytes_on_the_wire, layers, lose, refused, two, waiting
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from support import batch, seeded
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import agmerge
from agmerge.integrations.lightning import CompressedDDPStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
scenario = Scenarios()


class Net(LightningModule):
    """Learn classes. ``wrapped``: options of a DistributedOptimizer around the optimizer, which is a mistake."""

    def __init__(self, adamw: bool = False, wrapped: dict[str, Any] | None = None, bad: int = -1) -> None:
        super().__init__()
        self.net, self.adamw, self.wrapped, self.bad = seeded(layers), adamw, wrapped, bad
        self.seen: dict[str, list[Any]] = {"step": [], "validation": [], "loss": []}

    def training_step(self, one: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(one[0]).float(), one[1])
        bad = index == self.bad and self.global_rank == 1
        return loss * torch.inf if bad else loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen["step"].append(bits(self.net))

    def validation_step(self, one: list[torch.Tensor], index: int) -> None:
        self.seen["validation"].append(bits(self.net))
        self.log("loss", F.cross_entropy(self.net(one[0]).float(), one[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        inner: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.adamw:
            inner = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.wrapped is None:
            return inner
        return agmerge.DistributedOptimizer(inner, self.named_parameters(), **self.wrapped)


class Manual(Net):
    """Step by itself, with clipped gradients."""

    automatic_optimization = False

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.automatic_optimization = False

    def training_step(self, one: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(one, index))
        self.clip_gradients(optimizer, 0.05, "norm")
        optimizer.step()


class Two(Manual):
    """Have two optimizers, or one that has the groups of both. ``often``: how often the first one steps in a step."""

    def __init__(self, several: bool = True, often: int = 1) -> None:
        super().__init__()
        self.several, self.often = several, often

    def configure_optimizers(self) -> Any:
        return (two(self.net), []) if self.several else two(self.net, several=False)

    def training_step(self, one: list[torch.Tensor], index: int) -> None:
        first, *others = self.optimizers() if self.several else [self.optimizers()]
        self.net.zero_grad()
        self.manual_backward(Net.training_step(self, one, index))
        for optimizer in [first] * self.often + others:
            optimizer.step()


class Kept(Logger):
    """A logger that keeps what it is given."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep the metrics."""
        self.lines.append({**metrics, "step": step})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""


class Prewrapped(Net):
    """Have an optimizer that is distributed since before there was a DDP."""

    def __init__(self) -> None:
        super().__init__()
        inner = torch.optim.SGD(self.parameters(), lr=0.1)
        self.made = agmerge.DistributedOptimizer(inner, self.named_parameters(), **TOPK)

    def configure_optimizers(self) -> Any:
        return self.made


def loader(batches: int, first: int = 0) -> DataLoader[Any]:
    """So many batches for each of two workers."""
    parts = [batch(0, step, 16) for step in range(first, first + batches)]
    return DataLoader(TensorDataset(*(torch.cat(one) for one in zip(*parts, strict=True))), batch_size=8)


def fitted(net: Net, strategy: Any, epochs: int = 2, batches: int = 4, path: Any = None, **more: Any) -> Trainer:
    """Train, and validate after every epoch."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=epochs,
        logger=more.pop("logger", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in more.get("callbacks", [])),
        num_sanity_val_steps=1,
        **more,
    )
    trainer.fit(net, loader(batches), loader(1, first=90), ckpt_path=path)
    return trainer


@scenario
def dense(folder: Path) -> Any:
    """The bits of Lightning without us, and with us and no compression."""
    cases: dict[str, tuple[type[Net], dict[str, Any]]] = {
        "accumulation, clipping": (Net, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
        "bf16": (Net, {"precision": "bf16-mixed"}),
        "manual": (Manual, {}),
    }
    seen = {}
    for name, (kind, more) in cases.items():
        plain, ours = kind(), kind()
        fitted(plain, DDPStrategy(), **more)
        fitted(ours, CompressedDDPStrategy(**DENSE), **more)
        seen[name] = [bits(seeded(layers)), bits(plain.net), bits(ours.net)]
    return seen


@scenario
def topk(folder: Path) -> Any:
    """Bytes on the wire, with and without us."""
    seen: dict[str, Any] = {"bytes": []}
    for strategy in (DDPStrategy(), CompressedDDPStrategy(**TOPK)):
        net, before = Net(), bytes_on_the_wire()
        logger = Kept()
        fitted(net, strategy, epochs=8, logger=logger, log_every_n_steps=8)
        agmerge.barrier()
        after = bytes_on_the_wire()
        seen["bytes"].append(None if before is None or after is None else after - before)
    stats = strategy.compressed.stats()
    seen["log"] = [line for line in logger.lines if "agmerge/bits" in line]
    return {**seen, "stats": {key: stats[key] for key in ("steps", "bytes_sent", "bytes_dense")}, "bits": bits(net.net)}


@scenario
def scaler(folder: Path) -> Any:
    """A GradScaler: the bits of Lightning without us, and steps that are left out because of an infinity."""
    seen = []
    for strategy, scale, clip in (
        (DDPStrategy(), 1024.0, 0.05),
        (CompressedDDPStrategy(**DENSE), 1024.0, 0.05),
        (CompressedDDPStrategy(**TOPK), 2.0**18, 0.05),
        (CompressedDDPStrategy(**UPDATES), 2.0**18, None),
    ):
        net = Net()
        fitted(net, strategy, gradient_clip_val=clip, plugins=[in_fp16(scale)])
        compressed = getattr(strategy, "compressed", None)
        seen.append([bits(net.net), compressed.stats()["steps_skipped"] if compressed else 0])
    return seen


def in_fp16(scale: float) -> MixedPrecision:
    """Mixed precision with a scaler, on the CPU."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def resumed(folder: Path, **options: Any) -> dict[str, Any]:
    """Two epochs in one go, and the second one once more in another Trainer, from a checkpoint."""
    adamw = "sync" in options
    keep = partial(ModelCheckpoint, folder, "{epoch}", save_top_k=-1, save_last="link")
    whole, again = Net(adamw), Net(adamw)
    first = fitted(whole, CompressedDDPStrategy(**options), callbacks=[keep()])
    second = fitted(again, CompressedDDPStrategy(**options), callbacks=[keep()], path=folder / "epoch=0.ckpt")
    seen = {
        "steps": [one.strategy.compressed.stats()["steps"] for one in (first, second)],
        "bits": [bits(whole.net), bits(again.net)],
        "last steps": [whole.seen["step"][4:], again.seen["step"]],
        "files": sorted(path.name for path in folder.glob("*/agmerge*")),
    }
    more = Net(adamw)
    third = fitted(more, CompressedDDPStrategy(**options), epochs=3, path=folder / "last.ckpt")
    return {**seen, "by a link": third.strategy.compressed.stats()["steps"]}


@scenario
def resume(folder: Path) -> Any:
    """To the bit, whatever is exchanged; and without our files, with a warning."""
    seen = {
        "topk": resumed(folder / "topk", **TOPK),
        "updates": resumed(folder / "updates", **UPDATES),
    }
    lose(folder / "topk" / "epoch=0.ckpt.agmerge" / "agmerge-0-of-2.pt")
    trainer = fitted(Net(), CompressedDDPStrategy(**TOPK), path=folder / "topk" / "epoch=0.ckpt")
    return {**seen, "incomplete": trainer.strategy.compressed.stats()["steps"]}


@scenario
def several_optimizers(folder: Path) -> Any:
    """Two of one model: what one with the groups of both comes to, in one go and resumed."""
    seen: dict[str, Any] = {}
    for name, options in {"dense": DENSE, "topk": TOPK, "updates": UPDATES}.items():
        for several in (True, False):
            where = folder / f"{name} {several}"
            keep = partial(ModelCheckpoint, where, "{epoch}", save_top_k=-1)
            whole, again = Two(several), Two(several)
            first = fitted(whole, CompressedDDPStrategy(**options), callbacks=[keep()])
            fitted(again, CompressedDDPStrategy(**options), callbacks=[keep()], path=where / "epoch=0.ckpt")
            steps = first.strategy.compressed.stats()["steps"]
            seen.setdefault(name, []).append([bits(whole.net), bits(again.net), steps, whole.seen["validation"]])
    return seen


class Look(Callback):
    """Look at what waits before the first step, and after four of them."""

    seen: Any = None

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        self.seen = waiting(trainer.strategy.compressed)

    def on_save_checkpoint(self, trainer: Trainer, *args: Any) -> None:
        self.seen = waiting(trainer.strategy.compressed)


WAYS = {"topk": TOPK, "updates": UPDATES, "hold": {**UPDATES, "carry": "hold"}}


@scenario.if_named
def saved(folder: Path) -> Any:
    """What waits after four steps, and is saved."""
    seen = {}
    for name, options in WAYS.items():
        look = Look()
        calls = [ModelCheckpoint(folder / name, "{epoch}"), look]
        fitted(Net(adamw="sync" in options), CompressedDDPStrategy(**options), epochs=1, callbacks=calls)
        seen[name] = look.seen
    return seen


@scenario.if_named
def taken_over(folder: Path) -> Any:
    """What waits for another number of ranks that goes on."""
    seen = {}
    for name, options in WAYS.items():
        look, net = Look(), Net(adamw="sync" in options)
        path = folder.with_name("saved.out") / name / "epoch=0.ckpt"
        trainer = fitted(net, CompressedDDPStrategy(**options), callbacks=[look], path=path)
        seen[name] = [look.seen, trainer.strategy.compressed.stats()["steps"], bits(net.net)]
    return seen


class SaveInTheMiddle(Callback):
    """Save where no validation is."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(trainer.default_root_dir, "middle.ckpt"))


@scenario
def updates(folder: Path) -> Any:
    """What is validated, saved, and there in the end; rotation; and a second ``fit()``."""
    net = Net(adamw=True)
    best = ModelCheckpoint(folder, "{epoch}", monitor="loss", save_top_k=1, mode="max")
    strategy = CompressedDDPStrategy(**UPDATES)
    trainer = fitted(net, strategy, epochs=3, callbacks=[best, SaveInTheMiddle()], default_root_dir=folder)
    saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    middle = torch.load(folder / "middle.ckpt", weights_only=True)["state_dict"]
    end = bits(net.net)
    trainer.validate(net, loader(1, first=90), ckpt_path="best", verbose=False)
    validated = net.seen["validation"][-1]
    trainer.save_checkpoint(folder / "afterwards.ckpt")
    trainer.fit_loop.max_epochs = 5
    trainer.fit(net, loader(4), loader(1, first=90))
    return {
        **net.seen,
        "saved": bits(saved.values()),
        "middle": bits(middle.values()),
        "end": end,
        "validated": validated,
        "later": bits(net.net),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
    }


@scenario
def saved_alone(folder: Path) -> Any:
    """A callback of the first rank saves by the strategy; all resume from there."""
    seen: dict[str, Any] = {}
    for way, options in {"default": {}, "topk": TOPK, "updates": UPDATES}.items():
        path = folder / f"{way}.ckpt"

        class Save(Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == 2 and trainer.is_global_zero:
                    checkpoint = trainer._checkpoint_connector.dump_checkpoint()
                    trainer.strategy.save_checkpoint(checkpoint, path)  # noqa: B023

        fitted(Net(adamw=True), CompressedDDPStrategy(**options), epochs=1, callbacks=[Save()])
        net, strategy = Net(adamw=True), CompressedDDPStrategy(**options)
        fitted(net, strategy, epochs=2, path=path)
        files = [one.name for one in Path(f"{path}.agmerge").glob("*")]
        seen[way] = [bits(net.net), strategy.compressed.stats()["steps"], files]
    return seen


@scenario
def infinities(folder: Path) -> Any:
    """With updates, one worker's step is left out and all go on; an error on all of them if that is asked for."""
    seen = {}
    for policy in ("skip", "raise"):
        net = Net(adamw=True, bad=2)
        strategy = CompressedDDPStrategy(**UPDATES, nonfinite=policy)
        said = refused(partial(fitted, net, strategy, epochs=1))
        seen[policy] = [
            said,
            strategy.compressed.stats()["steps_skipped"],
            all(map(torch.isfinite, map(torch.sum, net.parameters()))),
        ]
    return seen


@scenario
def refusals(folder: Path) -> Any:
    """What is refused, and what it says."""
    ours = partial(CompressedDDPStrategy, **TOPK)
    said = {
        "gradients, never called": refused(partial(fitted, Net(wrapped=TOPK), "ddp")),
        "updates, never called": refused(partial(fitted, Net(wrapped=UPDATES), "ddp")),
        "wrapped": refused(partial(fitted, Net(wrapped=TOPK), ours())),
        "wrapped before": refused(partial(fitted, Prewrapped(), ours())),
        "out of step": refused(partial(fitted, Two(often=2), CompressedDDPStrategy(**UPDATES))),
        "velocity": refused(
            partial(fitted, Net(), CompressedDDPStrategy(**{**TOPK, "compression": "dgc"}), gradient_clip_val=0.01)
        ),
        "clipping": refused(
            partial(fitted, Net(), CompressedDDPStrategy(**UPDATES), gradient_clip_val=1.0, plugins=[in_fp16(8.0)])
        ),
        "hook": refused(partial(ours, ddp_comm_hook=print)),
        "optimizer": refused(partial(ours, optimizer=None)),
        "unknown": refused(partial(fitted, Net(), ours(densities=0.1))),
        "url": refused(partial(fitted(Net(), ours()).save_checkpoint, "s3://bucket/x.ckpt")),
    }
    net = Net()
    trainer = fitted(net, "ddp_agmerge")
    return {**said, "by name": [type(trainer.strategy).__name__, bits(net.net)]}


if __name__ == "__main__":
    agmerge.init("torch")
    scenario.main(Path(sys.argv[1]), *sys.argv[2:])
    agmerge.shutdown()
