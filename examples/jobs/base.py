# SPDX-License-Identifier: Apache-2.0
"""Say what a job is: the hyper-parameters that were published, and what the training loop asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jobs.schedules import Constant, Schedule

LESS_IS_BETTER = ("perplexity", "loss")  # of metrics


@dataclass(frozen=True)
class Recipe:
    """Hold the hyper-parameters of an experiment, for one worker."""

    optimizer: str  # "sgd", "adam" or "adamw"
    lr: float  # the highest learning rate, for one worker
    batch_size: int  # samples per worker and backward pass
    epochs: int
    growth: str = "none"  # of the rate with W workers: "none", "workers" (W times) or "root" (the root of W times)
    momentum: float = 0.0  # of sgd
    wd: float = 0.0  # weight decay
    spared: bool = False  # whether biases and norms, the parameters of one dimension, do not decay
    clip: float | None = None  # the largest norm of the gradients
    schedule: Schedule = Constant()  # of the rate
    length: int = 0  # words or tokens a sequence, where samples are sequences; 0: they are not
    compressor: str = "topk"  # whose part of the gradients is sent, unless the command line says otherwise


@dataclass(frozen=True)
class Settings:
    """Hold what a task is made from; equal on all workers but for ``rank``."""

    recipe: Recipe
    data: Path | None = None  # the folder of ``--data``, which holds the data set itself or in a folder of its name
    seed: int = 0  # of the order of samples; whatever is drawn depends on it, on the epoch and on the step alone
    tiny: bool = False  # a network of some thousand parameters
    weights: Path | None = None  # a folder that ``save_pretrained`` has written
    tokenizer: Path | None = None  # a folder with a tokenizer, of gpt2
    rank: int = 0
    workers: int = 1
    uneven: bool = False  # each worker takes all samples that are its own, also where others have fewer
    readers: int = 0  # processes a worker that read pictures ahead
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    init_checkpoint: Path | None = None  # a file of NVIDIA's that a BERT begins with
    vocab_file: Path | None = None  # a BERT's word pieces, where they do not lie beside the data


class Task(ABC):
    """Give the loop a model, its batches, their loss and what they are measured by.

    A subclass sets the attributes. The loop moves nothing to a device and draws nothing at random: batches are on
    ``settings.device``, and what is random about them comes from generators seeded by (seed, epoch, step). The model is
    in its mode for training when :meth:`loss` is called, and in the other one for :meth:`evaluate`.
    """

    model: nn.Module  # on the settings' device
    unit: str  # what a sample is, in the plural: "images", "sequences", "words"
    metric: str  # the figure that a target is about: "accuracy", "perplexity" or "f1"
    samples: int  # how many a worker trains with in one backward pass

    @abstractmethod
    def passes(self, epoch: int) -> int:
        """Return how many batches this worker has in an epoch; equally many on every one, unless uneven."""

    @abstractmethod
    def batches(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Yield this worker's batches of an epoch, from number ``first`` on: the same ones as if it began with 0."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of a batch, with no dimensions, to be derived."""

    @abstractmethod
    def evaluate(self) -> dict[str, Tensor]:
        """Return sums over this worker's part of what is held out, which the loop adds up over workers."""

    @abstractmethod
    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics, that of the target among them, from the sums over all workers."""

    def notes(self) -> dict[str, str]:
        """Return lines for the table at the end, by their heads: what the figures are to be compared with."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what goes from one batch to the next beside the parameters: the state of a recurrent network."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned. Raises ``ValueError`` for what is not this task's."""
        if state:
            raise ValueError(f"the checkpoint's task has {', '.join(state)}, and this one has nothing to go on from")


@dataclass(frozen=True)
class Job:
    """Name an experiment, MODEL-DATA, and say how it is made."""

    name: str
    about: str  # a line for ``--list``
    recipe: Recipe  # as published
    network: Callable[..., nn.Module]  # network(tiny=False, **sizes): random weights; sizes have the published defaults
    task: Callable[[Settings, Callable[..., nn.Module]], Task]  # reads the data and makes the network with their sizes
    tiny: Mapping[str, Any] = field(default_factory=dict)  # what ``--tiny`` changes of the recipe
    options: Mapping[str, Any] = field(default_factory=dict)  # of the library, where the command line says nothing

    def settled(self, tiny: bool) -> Recipe:
        """Return the recipe, of the tiny form if ``tiny``."""
        return replace(self.recipe, **self.tiny) if tiny else self.recipe

    def make(self, settings: Settings) -> Task:
        """Read the data and make the network. Raises ``OSError`` or ``ValueError`` where data are missing or broken."""

        def network(**sizes: Any) -> nn.Module:
            return self.network(tiny=settings.tiny, **sizes).to(settings.device)

        return self.task(settings, network)


def share(count: int, settings: Settings, epoch: int) -> Tensor:
    """Return the samples of this worker in an epoch, int64 [n]: a part of one permutation of ``count`` for all.

    Parts are disjoint. They are equally long, so that up to W - 1 samples wait for another epoch, unless ``uneven``.
    """
    seed = 10_000 * settings.seed + epoch
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    if not settings.uneven:
        order = order[: count - count % settings.workers]
    return order[settings.rank :: settings.workers]


def generator(settings: Settings, epoch: int, step: int) -> torch.Generator:
    """Return a source of what is drawn for one batch of this worker, which depends on nothing that was drawn before."""
    seed = 0
    for number in (settings.seed, epoch, step, settings.rank):
        seed = (seed * 1_000_003 + number) % 2**63
    return torch.Generator().manual_seed(seed)


def held_out(count: int, settings: Settings) -> slice:
    """Return this worker's part of ``count`` samples that are evaluated: all of them are some worker's."""
    return slice(settings.rank, count, settings.workers)


def folder(settings: Settings, name: str) -> Path:
    """Return where the data set ``name`` lies: in the folder of that name in ``--data``, or in ``--data`` itself.

    Raises ``FileNotFoundError`` that says what to put where.
    """
    if settings.data is None:
        raise FileNotFoundError(
            f"--data DIR is missing: the folder that holds {name}, or {name}/; examples/README.md lists the files. "
            "Nothing is downloaded. `python examples/data/small.py DIR` writes small data of every kind"
        )
    for place in (settings.data / name, settings.data):
        if place.is_dir():
            return place
    raise FileNotFoundError(f"--data {settings.data}: there is no such folder")
