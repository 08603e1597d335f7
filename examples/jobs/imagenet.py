# SPDX-License-Identifier: Apache-2.0
"""Classify pictures in folders of classes, such as ImageNet's: processes read and change them ahead."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext

import torch
from data import augment, folders
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset

from jobs.base import Settings, folder, generator
from jobs.classification import Batch, Classification

MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet's red, green and blue, of 255


class FromFolders(Classification):
    """Train with the pictures of ``imagenet/train``, and evaluate with those of ``imagenet/val``."""

    def __init__(self, settings: Settings, network: Callable[..., nn.Module], *, weights: bool = False) -> None:
        self.listings = folders.splits(folder(settings, "imagenet"))
        counts = (len(self.listings[0].names), len(self.listings[1].names))
        super().__init__(settings, network, counts, weights, classes=len(self.listings[0].classes))
        self.mean, self.deviation = (
            torch.tensor(values, device=settings.device).view(-1, 1, 1) for values in (MEAN, DEVIATION)
        )

    def batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        return self._read(Reader(self.listings[0], self.order(epoch), self.settings, epoch), first)

    def held_batches(self) -> Iterator[Batch]:
        return self._read(Reader(self.listings[1], self.held.split(self.samples), self.settings, None), 0)

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {**super().figures(sums), "top5": sums["hits5"] / sums["count"]}

    def _read(self, reader: Reader, first: int) -> Iterator[Batch]:
        readers, device = self.settings.readers, self.settings.device
        loader = DataLoader(
            reader,
            batch_size=None,  # one item is a batch
            sampler=range(first, len(reader)),
            num_workers=readers,
            pin_memory=device.type == "cuda",
            generator=Generator(),  # without it torch's own is drawn from, and dropout has other bits after a resume
            multiprocessing_context=processes() if readers else None,
            worker_init_fn=stay,
        )
        for pictures, classes in loader:
            pictures = pictures.to(device, non_blocking=True).float()
            yield (pictures - self.mean) / self.deviation, classes.to(device, non_blocking=True)


def processes() -> BaseContext:
    """Return how reading processes begin: as copies of one that has no threads, whose locks they could inherit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "PIL.Image"])  # once, and not in every process of every epoch
    return context


def stay(_: int) -> None:
    """Leave a signal to end, which a launcher sends to all processes, to the training, which then ends its readers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Reader(Dataset[Batch]):
    """Read batches by their numbers, each by itself, so that any process may read any; pictures are bytes.

    epoch: of training, where a part of each picture is drawn, and its side; None: the middle, of what is held out.
    """

    def __init__(
        self, listing: folders.Listing, order: tuple[Tensor, ...], settings: Settings, epoch: int | None
    ) -> None:
        self.listing = listing
        self.order = order  # the pictures of each batch
        self.settings = settings
        self.epoch = epoch
        self.side = 32 if settings.tiny else 224  # pixels

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, step: int) -> Batch:
        places = self.order[step]
        classes = self.listing.labels[places]
        paths = [self.listing.folder / self.listing.names[place] for place in places.tolist()]
        if self.epoch is None:
            return torch.stack([folders.picture(path, self.side, folders.centre) for path in paths]), classes
        draws = generator(self.settings, self.epoch, step)
        pictures = [folders.picture(path, self.side, folders.anywhere(draws)) for path in paths]
        return augment.flip(torch.stack(pictures), draws), classes
