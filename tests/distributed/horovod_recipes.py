# SPDX-License-Identifier: Apache-2.0
"""The recipes of Horovod's documentation, in its users' words, on several stacks: ``python horovod_recipes.py FOLDER``.

A recipe sees a module ``hvd`` and a ``DistributedOptimizer``. On ``horovod`` both are Horovod's; on ``mixed`` only the
optimizer is ours; on ``agmerge`` everything is (``import agmerge as hvd``). Every rank writes, per recipe and stack:
the digests of its parameters after every step, the recipe's numbers, and how far its parameters are from those that
Horovod's own optimizer has found on the same data.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import agmerge

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import batch, digest, loss_of, mlp, seeded  # noqa: E402

DENSITY = 0.05


@dataclass
class Seen:
    """What a recipe leaves behind."""

    model: nn.Module
    digests: list[str] = field(default_factory=list)
    numbers: dict[str, list[float]] = field(default_factory=dict)

    def stepped(self, **numbers: float) -> None:
        """A step has ended."""
        self.digests.append(digest(self.model))
        for name, number in numbers.items():
            self.numbers.setdefault(name, []).append(number)


Recipe = Callable[[Any, Callable[..., Any], Path], Seen]


def own_model(hvd: Any) -> nn.Module:
    """Other parameters on every rank: only a broadcast makes them equal."""
    return seeded(mlp, 100 + hvd.rank())


def plain(hvd: Any, DistributedOptimizer: Callable[..., Any], folder: Path) -> Seen:
    """As in Horovod's usage page, with the arguments of its MNIST example."""
    model = own_model(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        op=hvd.Average,
        gradient_predivide_factor=2.0,
    )
    seen = Seen(model)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        seen.stepped()
    return seen


def clipping(hvd: Any, DistributedOptimizer: Callable[..., Any], folder: Path) -> Seen:
    """The norm of the combined gradients is clipped, between synchronize() and step()."""
    model = own_model(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    seen = Seen(model)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        before = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        after = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        with optimizer.skip_synchronize():
            optimizer.step()
        seen.stepped(before=before.item(), after=after.item())
    return seen


def accumulation(hvd: Any, DistributedOptimizer: Callable[..., Any], folder: Path) -> Seen:
    """Three batches a step; seven batches are two full windows and one of a single batch, twice."""
    passes, batches = 3, 7
    model = own_model(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * passes * hvd.size(), momentum=0.9)
    optimizer = DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    seen = Seen(model)
    for epoch in range(2):
        for start in range(0, batches, passes):
            window = range(start, min(start + passes, batches))
            optimizer.zero_grad()
            for index in window:
                loss = loss_of(model, hvd.rank(), batches * epoch + index)
                loss.div_(len(window))
                loss.backward()
            optimizer.step()
            seen.stepped(window=len(window))
    return seen


def resume(hvd: Any, DistributedOptimizer: Callable[..., Any], folder: Path, wrap_first: bool) -> Seen:
    """Rank 0 saves after four steps; a new model with new optimizers goes on, beside one that was not interrupted.

    ``wrap_first``: load into the distributed optimizer and broadcast its state, as Horovod's ImageNet example does;
    else broadcast the plain optimizer's state before it is wrapped, as the MNIST example does.
    """
    path = folder / "checkpoint.pt"

    def fresh(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)

    def train(model: nn.Module, optimizer: Any, steps: range, seen: Seen) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            seen.stepped()

    model = own_model(hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = DistributedOptimizer(fresh(model), named_parameters=model.named_parameters())
    whole = Seen(model)
    train(model, optimizer, range(4), whole)
    if hvd.rank() == 0:
        torch.save({"step": 4, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    train(model, optimizer, range(4, 8), whole)

    model = seeded(mlp, 200 + hvd.rank())
    optimizer, start = fresh(model), 0
    if wrap_first:
        optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if hvd.rank() == 0:
        checkpoint = torch.load(path)
        start = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    start = hvd.broadcast(torch.tensor(start), root_rank=0, name="resume_from_step").item()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if not wrap_first:
        optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    seen = Seen(model)
    train(model, optimizer, range(start, 8), seen)
    seen.numbers["from whole"] = [apart(model, whole.model)]
    return seen


def learning_rate(hvd: Any, DistributedOptimizer: Callable[..., Any], folder: Path) -> Seen:
    """lr * size, reached gradually by editing param_groups; then a scheduler of torch's on the wrapper."""
    base, warmup = 0.05, 4
    model = own_model(hvd)
    optimizer = torch.optim.SGD(model.parameters(), lr=base * hvd.size(), momentum=0.9, nesterov=True)
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    seen = Seen(model)
    for step in range(12):
        if step < warmup:
            for group in optimizer.param_groups:
                group["lr"] = base * (1 + (hvd.size() - 1) * (step + 1) / warmup)
        used = optimizer.param_groups[0]["lr"]
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        if step >= warmup:
            scheduler.step()
        seen.stepped(lr=used)
    return seen


class Metric:
    """A running average over steps and workers, as in Horovod's ImageNet example."""

    def __init__(self, hvd: Any, name: str) -> None:
        self.hvd, self.name, self.sum, self.n = hvd, name, torch.tensor(0.0), 0

    def update(self, value: Tensor) -> None:
        """Another step's value."""
        self.sum += self.hvd.allreduce(value.detach(), name=self.name)
        self.n += 1

    @property
    def average(self) -> float:
        """Over all steps so far."""
        return (self.sum / self.n).item()


def metrics(hvd: Any, DistributedOptimizer: Callable[..., Any], folder: Path) -> Seen:
    """Loss, accuracy and a count, combined over workers by allreduce between the steps."""
    model = own_model(hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * hvd.size())
    optimizer = DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss_metric, accuracy_metric = Metric(hvd, "train_loss"), Metric(hvd, "train_accuracy")
    seen = Seen(model)
    for step in range(8):
        x, y = batch(hvd.rank(), step)
        optimizer.zero_grad()
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        hits = output.argmax(1) == y
        loss_metric.update(loss)
        accuracy_metric.update(hits.float().mean())
        loss.backward()
        optimizer.step()
        images = hvd.allreduce(torch.tensor(len(y)), name="images", op=hvd.Sum)
        seen.stepped(loss=loss_metric.average, accuracy=accuracy_metric.average, images=images.item())
    return seen


# -- running them ---------------------------------------------------------------------------------------------


def apart(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter, relative to the largest parameter of its tensor."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return torch.stack([(a - b).detach().abs().max() / b.detach().abs().max() for a, b in pairs]).max().item()


# Not by measured times: those of the two stacks differ, and bits follow the plan.
TOPK = {"compression": "topk", "density": DENSITY, "exchange": "sparse", "merging": "threshold"}
OURS = {"none": {"compression": "none"}, "topk": TOPK}
STACKS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "horovod": (hvd, hvd.DistributedOptimizer),
    **{f"mixed {how}": (hvd, partial(agmerge.DistributedOptimizer, **given)) for how, given in OURS.items()},
    **{f"agmerge {how}": (agmerge, partial(agmerge.DistributedOptimizer, **given)) for how, given in OURS.items()},
}
RECIPES: dict[str, Recipe] = {
    "plain": plain,
    "clipping": clipping,
    "accumulation": accumulation,
    "resume, wrapped first": partial(resume, wrap_first=True),
    "resume, broadcast first": partial(resume, wrap_first=False),
    "learning rate": learning_rate,
    "metrics": metrics,
}
# Where one rank alone has state, hvd.broadcast_optimizer_state() makes a step on the others only. Horovod knows how to
# do that with its own wrapper without an exchange, but not with ours: then it would be waited for. Horovod's wrapper,
# in turn, drops the state of what it wraps.
LEFT_OUT = {
    ("resume, wrapped first", "mixed none"),
    ("resume, wrapped first", "mixed topk"),
    ("resume, broadcast first", "horovod"),
}
# Both orders go on with the same training.
REFERENCE = {"resume, broadcast first": "resume, wrapped first"}


def main(folder: Path) -> None:
    """Each recipe on each stack."""
    warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
    torch.set_num_threads(1)
    hvd.init()
    agmerge.init()  # takes the Horovod that it finds
    references: dict[str, nn.Module] = {}
    for name, recipe in RECIPES.items():
        found = {}
        for stack, (module, optimizer) in STACKS.items():
            if (name, stack) in LEFT_OUT:
                continue
            seen = recipe(module, optimizer, folder)
            reference = references.setdefault(REFERENCE.get(name, name), seen.model)
            found[stack] = {"digests": seen.digests, "numbers": seen.numbers, "apart": apart(seen.model, reference)}
        (folder / f"{name}.{hvd.rank()}.json").write_text(json.dumps(found))
    agmerge.shutdown()
    assert hvd.is_initialized()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
