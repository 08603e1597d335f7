# SPDX-License-Identifier: Apache-2.0
"""What two workers do with Accelerate: ``torchrun ... accelerate_scenarios.py FOLDER [SCENARIO ...]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType
from frameworks import DENSE, TOPK, UPDATES, Scenarios, bits, bytes_on_the_wire, layers, lose, refused, two, waiting
from support import batch, seeded
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import agmerge
from agmerge.integrations.accelerate import compress

scenario = Scenarios()
BATCHES = 8  # of each worker, an epoch


def fresh(**more: Any) -> Accelerator:
    """An accelerator with settings of its own; all that are alive have those of the last one."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **more)


class Training:
    """A model that an accelerator has prepared, with SGD or AdamW. ``scale``: of a GradScaler; None: there is none."""

    def __init__(self, adamw: bool = False, scale: float | None = None, **more: Any) -> None:
        self.accelerator = fresh(**more)
        if scale is not None:
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        net = seeded(layers)
        inner: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if adamw:
            inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        parts = [batch(0, step, 16) for step in range(BATCHES)]
        data = TensorDataset(*(torch.cat(one) for one in zip(*parts, strict=True)))
        self.net, self.optimizer, self.loader = self.accelerator.prepare(net, inner, DataLoader(data, batch_size=8))

    def epoch(self, clip: float | None = None) -> None:
        """Go through the data once."""
        for x, y in self.loader:
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(F.cross_entropy(self.net(x).float(), y))
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def bits(self) -> str:
        """Those of the parameters."""
        return bits(self.net)


class Tracker:
    """A tracker that keeps what it is given."""

    name = "kept"

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Keep the values."""
        self.logged.append({**values, "step": step})


@scenario
def dense(folder: Path) -> Any:
    """The bits of Accelerate without us, and with us and no compression."""
    cases: dict[str, dict[str, Any]] = {
        "accumulation": {"gradient_accumulation_steps": 3},  # of eight batches
        "bf16": {"mixed_precision": "bf16"},
        "scaler": {"scale": 1024.0},
    }
    seen = {}
    for name, more in cases.items():
        plain, ours = Training(**more), Training(**more)
        compress(ours.accelerator, ours.net, **DENSE)
        for one in (plain, ours):
            one.epoch(clip=None if name == "scaler" else 0.05)
            one.epoch()
        seen[name] = [bits(seeded(layers)), plain.bits(), ours.bits()]
    return seen


@scenario
def topk(folder: Path) -> Any:
    """Bytes on the wire, with and without us."""
    seen: dict[str, Any] = {"bytes": []}
    for ours in (False, True):
        one = Training()
        compressed = compress(one.accelerator, one.net, **TOPK) if ours else None
        one.epoch()
        before = bytes_on_the_wire()
        for _ in range(3):
            one.epoch()
        one.accelerator.wait_for_everyone()
        after = bytes_on_the_wire()
        seen["bytes"].append(None if before is None or after is None else after - before)
    assert compressed is not None
    stats = compressed.stats()
    tracker = Tracker()
    one.accelerator.trackers = [tracker]
    one.accelerator.log({"loss": 1.0}, step=32)
    seen["log"] = tracker.logged
    return {**seen, "stats": {key: stats[key] for key in ("steps", "bytes_sent", "bytes_dense")}, "bits": one.bits()}


@scenario
def clipping(folder: Path) -> Any:
    """Clipping is of the combined update: the bits of a DistributedOptimizer around the plain model, by one plan."""
    one = Training()
    compressed = compress(one.accelerator, one.net, **TOPK)
    assert compressed is not None
    one.epoch(clip=0.05)
    net = seeded(layers)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = agmerge.DistributedOptimizer(inner, net.named_parameters(), **{**TOPK, "merging": compressed.plan})
    for x, y in one.loader:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.close()
    return [one.bits(), bits(net)]


def resumed(folder: Path, **options: Any) -> dict[str, Any]:
    """Two epochs in one go, and the second one once more by another accelerator, from a checkpoint."""
    seen: dict[str, Any] = {"bits": [], "shared": [], "steps": []}
    for again in (False, True):
        one = Training(adamw="sync" in options)
        compressed = compress(one.accelerator, one.net, **options)
        assert compressed is not None
        if again:
            one.epoch()
            one.epoch()  # what is loaded takes the place of all this
            one.accelerator.load_state(str(folder))
        else:
            one.epoch()
            with compressed.shared():
                seen["saved"] = one.bits()
            one.accelerator.save_state(str(folder), safe_serialization=False)
        one.epoch()
        seen["bits"].append(one.bits())
        seen["steps"].append(compressed.stats()["steps"])
        compressed.consolidate()
        seen["shared"].append(one.bits())
    model = seeded(layers)
    model.load_state_dict(torch.load(folder / "pytorch_model.bin", weights_only=True))
    return {**seen, "file": bits(model), "files": sorted(path.name for path in folder.glob("agmerge*"))}


@scenario
def resume(folder: Path) -> Any:
    """To the bit, whatever is exchanged; and without our files, with a warning."""
    seen = {
        "topk": resumed(folder / "topk", **TOPK),
        "updates": resumed(folder / "updates", **UPDATES),
    }
    lose(folder / "updates" / "agmerge-1-of-2.pt")
    one = Training(adamw=True)
    compressed = compress(one.accelerator, one.net, **UPDATES)
    assert compressed is not None
    one.epoch()
    one.accelerator.load_state(str(folder / "updates"))
    return {**seen, "incomplete": [seen["updates"]["saved"], one.bits(), compressed.stats()["steps"]]}


def diffusers_hooks(accelerator: Accelerator) -> None:
    """Register hooks as in diffusers' scripts: they write the model themselves, and empty the lists that all get."""

    def save(models: list[torch.nn.Module], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            for model in models:
                torch.save(accelerator.unwrap_model(model).state_dict(), Path(folder, "unet.pt"))
                weights.pop()

    def load(models: list[torch.nn.Module], folder: str) -> None:
        while models:
            accelerator.unwrap_model(models.pop()).load_state_dict(torch.load(Path(folder, "unet.pt")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


@scenario
def saved_alone(folder: Path) -> Any:
    """The main process alone saves, as in diffusers' scripts, with their hooks before and after ours; all load."""
    seen: dict[str, Any] = {}
    ways: dict[str, Any] = {"default": {}, "topk": TOPK, "updates": UPDATES, "overlap": {**UPDATES, "overlap": 1}}
    for way, options in ways.items():
        where, now = str(folder / way), seen.setdefault(way, {})
        for again in (False, True):
            one = Training(adamw=True)
            if not again:
                diffusers_hooks(one.accelerator)
            compressed = compress(one.accelerator, one.net, **options)
            assert compressed is not None
            if again:
                diffusers_hooks(one.accelerator)
                one.accelerator.load_state(where)
                now["loaded"] = one.bits()
            else:
                one.epoch()
                with compressed.shared():
                    now["saved"] = one.bits()
                if one.accelerator.is_main_process:
                    one.accelerator.save_state(where)
            one.epoch()
            compressed.consolidate()
            now["end"] = one.bits()
            one.accelerator.wait_for_everyone()
        now |= {"steps": compressed.stats()["steps"], "files": [path.name for path in Path(where).glob("agmerge*")]}
    return seen


WAYS = {"topk": TOPK, "updates": UPDATES, "hold": {**UPDATES, "carry": "hold"}}


@scenario.if_named
def saved(folder: Path) -> Any:
    """What waits after an epoch, and is saved."""
    seen = {}
    for name, options in WAYS.items():
        one = Training(adamw="sync" in options)
        compressed = compress(one.accelerator, one.net, **options)
        one.epoch()
        one.accelerator.save_state(str(folder / name))
        seen[name] = waiting(compressed)
    return seen


@scenario.if_named
def taken_over(folder: Path) -> Any:
    """What waits for another number of ranks that goes on."""
    seen = {}
    for name, options in WAYS.items():
        one = Training(adamw="sync" in options)
        compressed = compress(one.accelerator, one.net, **options)
        assert compressed is not None
        one.accelerator.load_state(str(folder.with_name("saved.out") / name))
        at_first = waiting(compressed)
        one.epoch()
        compressed.consolidate()
        seen[name] = [at_first, compressed.stats()["steps"], one.bits()]
    return seen


@scenario
def several_models(folder: Path) -> Any:
    """Each has its files."""
    accelerator = fresh()
    nets = [seeded(layers, seed) for seed in (0, 1)]
    inner = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    first, second, one, two = accelerator.prepare(*nets, *inner)
    pairs = [(first, one), (second, two)]
    compressed = [compress(accelerator, net, **TOPK) for net, _ in pairs]
    norms: list[list[float]] = []
    for step in range(4):
        for net, optimizer in pairs:
            x, y = batch(accelerator.process_index, step)
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net(x), y))
            optimizer.step()
        norms.append([left.stats()["residual_norm"] for left in compressed if left is not None])
        if step == 2:
            accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    norms.append([left.stats()["residual_norm"] for left in compressed if left is not None])
    return [norms[2:], sorted(str(path.relative_to(folder)) for path in folder.rglob("agmerge*.pt"))]


def of_several(folder: Path, several: bool, **options: Any) -> list[Any]:
    """Some steps, and from a checkpoint once more those after it, with two optimizers or one that has their groups."""
    seen: list[Any] = []
    for again in (False, True):
        accelerator, net = fresh(), seeded(layers)
        inner = two(net, several) if several else [two(net, several)]
        model, *optimizers = accelerator.prepare(net, *inner)
        compressed = compress(accelerator, model, **options)
        assert compressed is not None and compressed.optimizers == inner
        for step in range(8):
            if again and step < 4:
                continue
            if step == 4 and not again:
                accelerator.save_state(str(folder), safe_serialization=False)
                accelerator.wait_for_everyone()
            elif step == 4:
                accelerator.load_state(str(folder))
            x, y = batch(accelerator.process_index, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
        compressed.consolidate()
        seen += [bits(net), compressed.stats()["steps"]]
    return seen


@scenario
def several_optimizers(folder: Path) -> Any:
    """Two of one model: what one with the groups of both comes to, in one go and resumed."""
    return {
        name: [of_several(folder / f"{name} {several}", several, **options) for several in (True, False)]
        for name, options in {"dense": DENSE, "topk": TOPK, "updates": UPDATES}.items()
    }


@scenario
def refusals(folder: Path) -> Any:
    """What is refused, and what it says."""

    def prepared(wrapped: dict[str, Any] | None, **more: Any) -> tuple[Any, ...]:
        accelerator, net = fresh(**more), seeded(layers)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        if wrapped is not None:
            optimizer = agmerge.DistributedOptimizer(optimizer, net.named_parameters(), **wrapped)
        return accelerator, *accelerator.prepare(net, optimizer)

    def stepped(wrapped: dict[str, Any]) -> None:
        accelerator, net, optimizer = prepared(wrapped)
        for step in range(2):
            x, y = batch(accelerator.process_index, step)
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net(x), y))
            optimizer.step()

    def compressed(change: Callable[[Any], None], **more: Any) -> None:
        accelerator, net, _ = prepared(None)
        change(accelerator)
        compress(accelerator, net, **{**TOPK, **more})

    def velocity() -> None:
        one = Training()
        compress(one.accelerator, one.net, **{**TOPK, "compression": "dgc"})
        one.epoch(clip=0.01)

    def of_type(kind: DistributedType) -> Callable[[Any], None]:
        return lambda accelerator: setattr(accelerator.state, "distributed_type", kind)

    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator, net, _ = prepared(TOPK)
    said = {
        "gradients, never called": refused(partial(stepped, TOPK)),
        "updates, never called": refused(partial(stepped, UPDATES)),
        "wrapped": refused(partial(compress, accelerator, net, **TOPK)),
        "hook": refused(lambda: compress(*prepared(None, kwargs_handlers=[hook])[:2], **TOPK)),
        "scaler": refused(partial(compressed, lambda accelerator: None, scaler=None)),
        "not prepared": refused(partial(compress, fresh(), seeded(layers), **TOPK)),
        "velocity": refused(velocity),
        "no optimizer": refused(partial(compressed, lambda accelerator: accelerator._optimizers.clear(), **UPDATES)),
    }
    for kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        said[kind.value] = refused(partial(compressed, of_type(kind)))
    return said


if __name__ == "__main__":
    agmerge.init("torch")
    scenario.main(Path(sys.argv[1]), *sys.argv[2:])
    agmerge.shutdown()
