"""Simulate W workers of an adaptive optimizer in one process: what they exchange, and how, is the contender's.

Averages are exact, nothing is sent, and no engine of the library takes part. Three ways to train are told apart.
With "gradients" a worker selects from its gradients, and its optimizer steps with the average of what was selected;
this is what the library does. With "hold" and "apply" a worker's own optimizer steps with its own gradient first, and
what is selected is the change that this made to the parameters. What is not sent yet is carried to the next exchange:
with "hold" beside the parameters, which are equal on all workers, with "apply" (step-ahead error feedback, Xu, Huo and
Huang, 2020) in the parameters that the worker computes with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from agmerge.options.config import is_small

if TYPE_CHECKING:
    from parity_tasks import Task

BLOCK = 256  # selected elements that share a magnitude or a scale
LEVELS = 7  # the largest magnitude of int4 that is used: symmetric
VALUE_BYTES = {"fp32": 4.0, "int4": 1 / 2 + 4 / BLOCK, "sign": 1 / 8 + 4 / BLOCK}  # of a selected element


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Describe one way to train."""

    way: str = "gradients"  # or "hold" or "apply": what is exchanged, and where the rest is carried
    density: float = 1.0  # share of the elements of a large tensor that a worker sends in an exchange
    wire: str = "fp32"  # or "int4" or "sign": how the selected values of large tensors arrive
    every: int = 1  # steps from one exchange to the next; for updates only


@dataclass(frozen=True)
class Recipe:
    """Hold the hyperparameters, the same for all contenders."""

    steps: int
    lr: float  # highest of the one-cycle schedule
    decay: float  # decoupled weight decay


def sign(values: Tensor) -> Tensor:
    """Return values as one bit each would bring them: their sign, times the mean magnitude of their block."""
    block = torch.arange(len(values)) // BLOCK
    sums = torch.zeros(math.ceil(len(values) / BLOCK)).index_add_(0, block, values.abs())
    magnitudes = (sums / block.bincount())[block]
    return torch.where(values < 0, -magnitudes, magnitudes)


def int4(values: Tensor) -> Tensor:
    """Return values rounded to the nearest of 15 levels, the largest of a block being the outermost."""
    block = torch.arange(len(values)) // BLOCK
    largest = torch.zeros(math.ceil(len(values) / BLOCK)).scatter_reduce_(0, block, values.abs(), "amax")
    scale = (largest / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)[block]
    return (values / scale).round_() * scale


WIRES: dict[str, Callable[[Tensor], Tensor]] = {"fp32": torch.clone, "int4": int4, "sign": sign}


class Layout:
    """Tell the large tensors of a flat vector, which are selected from, from the small ones, which are sent whole."""

    def __init__(self, model: nn.Module, scope: str = "tensor"):
        """Take the layout of ``model``; scope "model" selects from all large tensors together, not from each."""
        named = list(model.named_parameters())
        sizes = torch.tensor([parameter.numel() for _, parameter in named])
        large = torch.tensor([not is_small(name, parameter) for name, parameter in named])
        places = torch.arange(int(sizes.sum()))
        owners = [places for places, is_large in zip(places.split(sizes.tolist()), large, strict=True) if is_large]
        self.groups = owners if scope == "tensor" else [torch.cat(owners)]  # places among which the largest are sought
        self.small = ~large.repeat_interleave(sizes)  # of every element

    def select(self, work: Tensor, density: float) -> Tensor:
        """Return the places of the largest magnitudes of every group, in ascending order."""
        if density == 1:
            return torch.cat(self.groups)
        chosen = []
        for group in self.groups:
            count = max(1, math.ceil(density * len(group)))
            chosen.append(group[work[group].abs().topk(count).indices.sort().values])
        return torch.cat(chosen)

    def send(self, work: Tensor, contender: Contender) -> Tensor:
        """Return what receivers read of ``work``: small tensors as they are, the selected of large ones, and zeros."""
        sent = work * self.small
        places = self.select(work, contender.density)
        sent[places] = WIRES[contender.wire](work[places])
        return sent

    def fewer_bytes(self, contender: Contender) -> tuple[float, float]:
        """Return how many times fewer bytes than dense fp32 a step takes: of large tensors, and of all.

        An index takes 2 + log2(1 / density) bits (Elias-Fano); small tensors are sent in fp32.
        """
        index = (2 - math.log2(contender.density)) / 8 if contender.density < 1 else 0.0
        sparse = contender.density * (index + VALUE_BYTES[contender.wire])
        share = self.small.float().mean().item()
        return 4 * contender.every / sparse, 4 * contender.every / (sparse * (1 - share) + 4 * share)


class Worker:
    """Train one replica: a model and an AdamW of its own, whose parameters and gradients lie in flat vectors."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        """Start from a copy of ``model``."""
        self.model = copy.deepcopy(model)
        parameters = list(self.model.parameters())
        self.parameters = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradients = torch.zeros_like(self.parameters)
        self.carried = torch.zeros_like(self.parameters)  # what has not been sent yet
        sizes = [parameter.numel() for parameter in parameters]
        parts = zip(parameters, self.parameters.split(sizes), self.gradients.split(sizes), strict=True)
        for parameter, values, gradient in parts:  # the model's tensors become views of the flat ones
            parameter.data = values.view_as(parameter)
            parameter.grad = gradient.view_as(parameter)
        self.optimizer = torch.optim.AdamW(parameters, lr=recipe.lr, weight_decay=recipe.decay)
        self.schedule = OneCycleLR(self.optimizer, recipe.lr, recipe.steps, pct_start=0.2, cycle_momentum=False)


class Simulation:
    """Train all workers in turn, step by step; ``shared`` are the parameters that all of them know."""

    def __init__(self, task: Task, contender: Contender, recipe: Recipe, workers: int, scope: str = "tensor"):
        """Start ``workers`` replicas of the task's model."""
        self.task, self.contender = task, contender
        self.layout = Layout(task.model, scope)
        self.workers = [Worker(task.model, recipe) for _ in range(workers)]
        self.shared = self.workers[0].parameters.clone()

    def step(self, step: int) -> None:
        """Let every worker take a step with its part of the batch, exchanging what the contender does."""
        for rank, worker in enumerate(self.workers):
            worker.gradients.zero_()
            self.task.loss(worker.model, *self.task.batch(step, rank, len(self.workers))).backward()
        if self.contender.way == "gradients":
            self.exchange_gradients()
        else:
            for worker in self.workers:
                worker.optimizer.step()
            if (step + 1) % self.contender.every == 0:
                self.exchange_updates()
        for worker in self.workers:
            worker.schedule.step()

    def exchange_gradients(self) -> None:
        """Step all optimizers with the average of what was selected from the gradients and what was left of them."""
        for worker in self.workers:
            worker.carried += worker.gradients
        average = self.average_of_sent()
        for worker in self.workers:
            worker.gradients.copy_(average)
            worker.optimizer.step()
        self.shared.copy_(self.workers[0].parameters)

    def exchange_updates(self) -> None:
        """Move the shared parameters by the average of what was selected from the workers' changes."""
        hold = self.contender.way == "hold"
        for worker in self.workers:
            change = self.shared - worker.parameters
            worker.carried = worker.carried + change if hold else change
        self.shared -= self.average_of_sent()
        for worker in self.workers:
            worker.parameters.copy_(self.shared if hold else self.shared - worker.carried)

    def average_of_sent(self) -> Tensor:
        """Take what every worker sends from what it carries; its average over workers, added in their order."""
        total = torch.zeros_like(self.shared)
        for worker in self.workers:
            sent = self.layout.send(worker.carried, self.contender)
            worker.carried = worker.carried - sent
            total += sent
        return total / len(self.workers)

    def score(self, parameters: Tensor) -> float:
        """Return the task's final score of these parameters, leaving the workers as they are."""
        model = Worker(self.task.model, Recipe(1, 0.0, 0.0))
        model.parameters.copy_(parameters)
        with torch.no_grad():
            return self.task.score(model.model, True)
