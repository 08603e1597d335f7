# SPDX-License-Identifier: Apache-2.0
"""Acts between two steps, on every road: ``torchrun ... roads.py FOLDER ROAD [ACT ...]`` trains each act in every way.

Each rank writes FOLDER/RANK.json: by act and way, how a training ended.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from acts import ACTS, STEPS, Act, Script, network, samples  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import agmerge  # noqa: E402
from agmerge.planning import cost_probe  # noqa: E402

SMALL: dict[str, Any] = {"merging": "threshold", "check_every": 1, "timeout": 20.0}  # nothing is measured
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "none": {"compression": "none", "dense_sum": "native", **SMALL},
    "default": {"exchange": "sparse", **SMALL},
    "topk": {"compression": "topk", "density": 0.1, "exchange": "sparse", **SMALL},
    "updates": {"sync": "updates", **SMALL},
}


def made(net: nn.Module, act: Act, script: Script) -> torch.optim.Optimizer:
    """Return AdamW for what an act says that it steps."""
    later = {id(p) for p in script.kept.get("later", ())}
    own = [p for p in net.parameters() if p.requires_grad and id(p) not in later]
    return torch.optim.AdamW(own, lr=1e-2, weight_decay=0.0)


def loop(script: Script, act: Act) -> None:
    """Train as a script does by itself."""
    optimizer = script.optimizer
    wrapped = isinstance(optimizer, agmerge.DistributedOptimizer)
    for script.step in range(STEPS):
        optimizer.zero_grad()
        act.before(script)
        act.loss(script).backward()
        if act.skips(script):
            continue
        if wrapped and act.touches_gradients and optimizer._reducer.combines_gradients:
            optimizer.synchronize()
            act.between(script)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            act.between(script)
            optimizer.step()
        act.after(script)
    act.end(script)


def wrapper(script: Script, act: Act, options: dict[str, Any] | None, folder: Path) -> Any:
    """Train with a DistributedOptimizer; plainly, with DistributedDataParallel."""
    if options is None:
        return ddp(script, act, None, folder)
    script.model = script.net
    inner = made(script.net, act, script)
    script.optimizer = agmerge.DistributedOptimizer(inner, script.net.named_parameters(), **options)
    loop(script, act)
    return script.optimizer


def ddp(script: Script, act: Act, options: dict[str, Any] | None, folder: Path) -> Any:
    """Train a DistributedDataParallel."""
    script.model = DistributedDataParallel(script.net, find_unused_parameters=act.find_unused)
    script.optimizer = made(script.net, act, script)
    compressed = None
    if options is not None:
        compressed = agmerge.integrations.ddp.compress(script.model, optimizer=script.optimizer, **options)
    loop(script, act)
    return compressed


def accelerate(script: Script, act: Act, options: dict[str, Any] | None, folder: Path) -> Any:
    """Train with Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=act.find_unused)]
    )
    inner = made(script.net, act, script)
    script.model, script.optimizer = accelerator.prepare(script.net, inner)
    compressed = None
    if options is not None:
        compressed = agmerge.integrations.accelerate.compress(accelerator, script.model, **options)
    loop(script, act)
    return compressed


def trainer(script: Script, act: Act, options: dict[str, Any] | None, folder: Path) -> Any:
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Hooks(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            script.step = state.global_step
            script.model = theirs.model_wrapped
            act.before(script)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            act.between(script)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            act.after(script)

    class Theirs(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Tensor:
            script.model = model
            return act.loss(script)

    script.optimizer = made(script.net, act, script)
    data = [{"x": torch.zeros(1)} for _ in range(STEPS * dist.get_world_size())]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=act.find_unused,
    )
    theirs = Theirs(
        model=script.net,
        args=arguments,
        train_dataset=data,
        optimizers=(script.optimizer, None),
        callbacks=[Hooks()],
    )
    compression = None
    if options is not None:
        compression = agmerge.integrations.transformers.compress(theirs, **options)
    theirs.train()
    act.end(script)
    return compression.compressed if compression is not None else None


def lightning(script: Script, act: Act, options: dict[str, Any] | None, folder: Path) -> Any:
    """Train with Lightning."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from agmerge.integrations.lightning import CompressedDDPStrategy

    class Theirs(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = script.net

        def configure_optimizers(self) -> Any:
            script.optimizer = made(script.net, act, script)
            return script.optimizer

        def on_train_batch_start(self, inputs: Any, index: int) -> None:
            script.step, script.model = index, script.net
            act.before(script)

        def training_step(self, inputs: Any, index: int) -> Tensor:
            return act.loss(script)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            act.between(script)

        def on_train_batch_end(self, *arguments: Any) -> None:
            act.after(script)

    given = {"find_unused_parameters": act.find_unused}
    strategy = DDPStrategy(**given) if options is None else CompressedDDPStrategy(**given, **options)
    theirs = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    rows = TensorDataset(torch.zeros(STEPS * dist.get_world_size(), 1))
    theirs.fit(Theirs(), DataLoader(rows, batch_size=1))
    act.end(script)
    return None if options is None else theirs.strategy.compressed


ROADS = {one.__name__: one for one in (wrapper, ddp, accelerate, trainer, lightning)}


def digest(values: Any) -> str:
    """Return a digest of tensors' bits."""
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def trained(road: str, name: str, way: str, folder: Path) -> dict[str, Any]:
    """Train one act in one way; return how the training ended."""
    options, act, rank = WAYS[way], ACTS[name](), dist.get_rank()
    script = Script(network(), rank)
    act.start(script)
    seen: dict[str, Any] = {"error": "", "steps": 0}
    begin, compressed = time.perf_counter(), None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            compressed = ROADS[road](script, act, options, folder)
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
            seen["clear"] = isinstance(error, agmerge.AGMergeError | ValueError | TypeError)
        seen["steps"] = script.step + 1
        if not seen["error"]:
            if way == "updates" and compressed is not None:
                compressed.consolidate()
            seen["loss"] = loss_of(script.net, dist.get_world_size())
        seen["bits"] = digest(script.net.parameters())
        seen["teacher"] = digest(script.kept["teacher"].parameters()) if "teacher" in script.kept else ""
    seen["facts"] = script.facts
    seen["said"] = sorted({str(one.message)[:400] for one in heard if one.category is UserWarning})
    seen["seconds"] = time.perf_counter() - begin
    closing = compressed if compressed is not None else script.optimizer
    if hasattr(closing, "close"):
        try:
            closing.close()
        except Exception as error:
            seen["closing"] = str(error)[:200]
    return seen


def loss_of(net: nn.Module, workers: int) -> float:
    """Return the loss over all that was trained on, and some more."""
    net.eval()
    with torch.no_grad():
        pairs = [samples(step, rank) for step in range(STEPS + 4) for rank in range(workers)]
        x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
        return float(F.cross_entropy(net(x), y))


def main() -> None:
    """Join the workers, and train all acts in all ways."""
    folder, road = Path(sys.argv[1]), sys.argv[2]
    faulthandler.dump_traceback_later(float(os.environ.get("LIMIT", "280")), exit=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cost_probe.SECONDS, cost_probe.VISITS = 0.1, 1  # plans need not be good ones
    dist.init_process_group("gloo")
    agmerge.init()
    ways = os.environ.get("WAYS", "").split() or [way for way in WAYS if way != "updates" or road in ("wrapper", "ddp")]
    found: dict[str, Any] = {}
    for name in sys.argv[3:] or ACTS:
        if road in ("trainer", "lightning") and ACTS[name].skips is not Act.skips:
            continue
        found[name] = {}
        for way in ways:
            found[name][way] = trained(road, name, way, folder)
            (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
            dist.barrier()


if __name__ == "__main__":
    main()
