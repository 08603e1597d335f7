# SPDX-License-Identifier: Apache-2.0
"""The two tasks of ``parity.py``: digits with a small CNN, and Python source text with a small GPT.

A :class:`Case` is one training run; :func:`train` runs it on the threads of one in-memory group. Cases that differ
in the exchange only see the same weights and the same batches, so they can be compared in pairs.
"""

from __future__ import annotations

import copy
import functools
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import DigitsCNN, load
from replicas import replicas_equal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR, LRScheduler, OneCycleLR

import agmerge
import agmerge.testing
import sparsifiers
from accuracy import parity_optimizers
from accuracy.parity_optimizers import ON_LM
from agmerge.step.config import is_small

FOLDS = 5
BETAS, EPS = (0.9, 0.999), 1e-8
REMEDIES = ("", "lr", "momentum", "update")
CALM = ((1 - BETAS[0]) / (1 + BETAS[0])) ** 0.5  # a running mean's deviation, of what it averages; 0.23


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained, whatever is exchanged. ``batch`` is that of all workers together."""

    steps: int
    batch: int
    lr: dict[str, float]
    decay: dict[str, float]
    curve: int


RECIPES = {
    "digits": Recipe(
        steps=616, batch=32, lr={"sgd": 0.05, "adamw": 2e-3}, decay={"sgd": 5e-4, "adamw": 1e-2}, curve=14
    ),
    "lm": Recipe(
        steps=800,
        batch=8,
        lr={name: lr for name, (lr, _) in ON_LM.items()},
        decay={name: decay for name, (_, decay) in ON_LM.items()},
        curve=10,
    ),
}
HIGHER_IS_BETTER = {"digits": True, "lm": False}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describe one training run; what is named as an argument of the library is that argument."""

    task: str  # of TASKS
    optimizer: str = "sgd"  # or "adamw"
    workers: int = 2  # that share a batch
    compressor: str = "none"
    density: float = 1.0
    rank: int = 0  # of "powersgd" and "acpsgd", which have no density
    memory: str = "none"  # or "residual" or "dgc"
    remedy: str = ""  # of REMEDIES
    sync: str = "gradients"  # or "updates"; what follows is about these
    carry: str | None = None
    wire: str = "auto"
    merging: str = "agmerge"  # "threshold": no plan by times, which would change what is selected, too
    every: int = 1
    fragments: int = 1
    overlap: int = 0
    clip: float = 0.0  # the norm that gradients are clipped to; 0: they are not
    rate: float = 1.0  # times the recipe's learning rate, which is about dense's best
    flat: bool = False  # at a constant learning rate; else it rises and falls once
    halves: bool = False  # every worker sees a part of the corpus of its own; "lm" only
    fold: int = 0
    seed: int = 0

    @property
    def group(self) -> tuple[Any, ...]:
        """What cases to be averaged have in common."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in ("fold", "seed"))

    @property
    def dense(self) -> Case:
        """The run this one is held against."""
        names = ("task", "optimizer", "workers", "clip", "rate", "flat", "halves", "fold", "seed")
        same = {name: getattr(self, name) for name in names}
        return Case(**same)

    def recipe(self, steps: int | None = None) -> dict[str, Any]:
        """What a stored result must agree with to stand for this case."""
        recipe = asdict(RECIPES[self.task])
        chosen = {name: value[self.optimizer] if isinstance(value, dict) else value for name, value in recipe.items()}
        chosen["lr"] *= self.rate
        if self.remedy in ("lr", "momentum"):  # Adam divides by the deviation of what it gets
            chosen["lr"] *= CALM
        return {**chosen, "steps": steps or recipe["steps"]}


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its batches and its score. ``batch(step, rank, workers)``."""

    model: nn.Module
    batch: Callable[[int, int, int], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    score: Callable[[nn.Module, bool], float]


def digits(fold: int, seed: int, batch: int, halves: bool = False) -> Task:
    """Accuracy on one fold of scikit-learn's digits, with the CNN of the examples. Raises ValueError for ``halves``."""
    if halves:
        raise ValueError("halves: the images have no order that workers could share them by")
    train_x, train_y, test_x, test_y = load(fold, FOLDS, seed)
    torch.manual_seed(seed)
    model = DigitsCNN()
    per_epoch = len(train_x) // batch

    @functools.lru_cache(2)
    def order(epoch: int) -> Tensor:
        return torch.randperm(len(train_x), generator=torch.Generator().manual_seed(10_000 * seed + epoch))

    def of(step: int, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, per_epoch)
        mine = order(epoch)[place * batch : (place + 1) * batch][rank::workers]
        return train_x[mine], train_y[mine]

    def score(model: nn.Module, final: bool) -> float:
        return (model(test_x).argmax(1) == test_y).float().mean().item()

    return Task(model=model, batch=of, loss=lambda model, x, y: cross_entropy(model(x), y), score=score)


@functools.lru_cache(1)
def corpus(size: int = 3_000_000) -> Tensor:
    """Python's own standard library as text: the first bytes of its sorted sources, other than ASCII as "?"."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= size:
            break
    values = np.frombuffer(bytes(text[:size]), dtype=np.uint8)
    return torch.from_numpy(np.where(values < 128, values, ord("?")).astype(np.int64))


def lm(fold: int, seed: int, batch: int, halves: bool = False, length: int = 64) -> Task:
    """Cross-entropy per character (nats) on the last tenth of the corpus, with a GPT-2 of 0.8 million parameters.

    ``halves``: worker r of W draws from part r of W equal parts of the training text only.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    text = corpus()
    cut = len(text) * 9 // 10
    config = GPT2Config(
        vocab_size=128,
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config)
    window = torch.arange(length + 1)

    def of(step: int, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_000 * seed + step)
        starts = torch.randint(cut - length, (batch,), generator=generator)[rank::workers]
        if halves:
            starts = starts // workers + rank * ((cut - length) // workers)
        rows = text[starts[:, None] + window]
        return rows[:, :-1], rows[:, 1:]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x).logits.flatten(0, 1), y.flatten())

    def score(model: nn.Module, final: bool) -> float:
        starts = torch.linspace(cut, len(text) - length - 1, 512 if final else 64).long()
        rows = text[starts[:, None] + window]
        return sum(loss(model, part[:, :-1], part[:, 1:]).item() * len(part) for part in rows.split(32)) / len(rows)

    return Task(model=model, batch=of, loss=loss, score=score)


TASKS = {"digits": digits, "lm": lm}


def local_momentum(parameters: Sequence[Tensor], beta: float) -> None:
    """Remedy: every worker averages its own gradients over time, and selection sees that first moment."""
    for parameter in parameters:
        mean = torch.zeros_like(parameter)

        def hook(gradient: Tensor, mean: Tensor = mean) -> Tensor:
            return mean.lerp_(gradient, 1 - beta).clone()

        parameter.register_hook(hook)


def local_update(parameters: Sequence[Tensor], betas: tuple[float, float], eps: float) -> None:
    """Remedy: every worker makes Adam's direction of its own gradients; that is what is selected from and summed."""
    for parameter in parameters:
        state = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
        step = [0]

        def hook(gradient: Tensor, state: list[Tensor] = state, step: list[int] = step) -> Tensor:
            step[0] += 1
            mean = state[0].lerp_(gradient, 1 - betas[0])
            square = state[1].mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
            denominator = square.div(1 - betas[1] ** step[0]).sqrt_().add_(eps)
            return mean.div(1 - betas[0] ** step[0]).div_(denominator)

        parameter.register_hook(hook)


def inner_optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers as a script would make them: one, but for Muon."""
    recipe, parameters = case.recipe(), list(model.parameters())
    lr, decay = recipe["lr"], recipe["decay"]
    if case.remedy == "momentum":
        local_momentum(parameters, BETAS[0])
    if case.remedy == "update":
        # SGD's weight decay is decoupled where there is no momentum: lr * (direction + decay * p), as in AdamW.
        local_update(parameters, BETAS, EPS)
        return [torch.optim.SGD(parameters, lr=lr, weight_decay=decay)]
    if case.remedy == "momentum":
        return [torch.optim.AdamW(parameters, lr=lr, betas=(0.0, BETAS[1]), eps=EPS, weight_decay=decay)]
    return parity_optimizers.made(case.optimizer, model, lr, decay)


def wrapped(case: Case, model: nn.Module) -> agmerge.DistributedOptimizer:
    """The distributed optimizer of the case."""
    inner = inner_optimizers(case, model)
    selects = not case.rank and case.compressor in (*sparsifiers.names(), "none")
    share = {"rank": case.rank} if case.rank else {"density": case.density} if selects else {}
    return agmerge.DistributedOptimizer(
        inner if len(inner) > 1 else inner[0],
        named_parameters=model.named_parameters(),
        compression=case.compressor,
        **share,
        memory=case.memory,
        wire=case.wire,
        merging=case.merging,
        exchange="sparse",
        **{name: getattr(case, name) for name in ("sync", "carry", "every", "fragments", "overlap")},
    )


def sparse_share(model: nn.Module) -> float:
    """The share of the elements that a sparsifier selects from; the rest is sent whole."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    sparse = sum(sizes[name] for name, parameter in model.named_parameters() if not is_small(name, parameter))
    return sparse / sum(sizes.values())


def schedule_of(case: Case, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    """The learning rates of the case: each group's own is the highest."""
    if case.flat:
        return ConstantLR(optimizer, 1.0, steps)
    rates = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, rates, steps, pct_start=0.2, cycle_momentum=False)


def step_clipped(optimizer: agmerge.DistributedOptimizer, model: nn.Module, case: Case) -> None:
    """Step, with gradients that are clipped where the case says so, as a script would."""
    if not case.clip:
        optimizer.step()
        return
    if case.sync == "updates":  # this worker's own, as without the library
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        return
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    with optimizer.skip_synchronize():
        optimizer.step()


def train(case: Case, steps: int | None = None) -> dict[str, Any]:
    """Run a case; its score, curve and traffic."""
    recipe = case.recipe(steps)
    task = TASKS[case.task](case.fold, case.seed, recipe["batch"], case.halves)
    every = max(1, recipe["steps"] // recipe["curve"])
    start = time.perf_counter()

    def worker(rank: int) -> dict[str, Any]:
        model = copy.deepcopy(task.model)
        optimizer = wrapped(case, model)
        schedule = schedule_of(case, optimizer, recipe["steps"])
        curve: list[tuple[int, float]] = []
        for step in range(recipe["steps"]):
            optimizer.zero_grad()
            task.loss(model, *task.batch(step, rank, case.workers)).backward()
            step_clipped(optimizer, model, case)
            schedule.step()
            if rank == 0 and (step + 1) % every == 0:
                with torch.no_grad(), optimizer.shared():
                    curve.append((step + 1, task.score(model, False)))
        optimizer.flush()
        stats = optimizer.stats()
        kept = ("bytes_sent", "bytes_dense", "link_bytes", "link_bytes_dense", "wire", "exchanges", "density")
        kept = (*kept, "residual_norm", "buffers")
        facts = {name: stats[name] for name in kept}
        with torch.no_grad(), optimizer.shared():
            score = task.score(model, True) if rank == 0 else 0.0
            facts["equal"] = replicas_equal(model)
        return {"score": score, "curve": curve, **facts}

    results = agmerge.testing.run(case.workers, worker)
    if not all(result.pop("equal") for result in results):
        raise RuntimeError(f"replicas differ after {case}")
    facts = {"sparse_share": sparse_share(task.model), "parameters": sum(p.numel() for p in task.model.parameters())}
    return {"recipe": recipe, "seconds": time.perf_counter() - start, **results[0], **facts}
