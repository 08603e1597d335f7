# SPDX-License-Identifier: Apache-2.0
"""Change pictures at random, a batch at a time and on its device: cropped, flipped and rotated."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

# Draws are made on the CPU, so that they are the same whatever the pictures lie on.


def crop(pictures: Tensor, padding: int, source: Generator) -> Tensor:
    """Return a part of each picture [n, channels, side, side] in its size, after ``padding`` pixels of 0 around it."""
    count, side = len(pictures), pictures.shape[-1]
    windows = F.pad(pictures, (padding,) * 4).unfold(2, side, 1).unfold(3, side, 1)
    top, left = torch.randint(2 * padding + 1, (2, count), generator=source).to(pictures.device)
    return windows[torch.arange(count, device=pictures.device), :, top, left]


def flip(pictures: Tensor, source: Generator) -> Tensor:
    """Return the pictures, each with a chance of one half from right to left."""
    flipped = (torch.rand(len(pictures), generator=source) < 0.5).to(pictures.device)
    return torch.where(flipped[:, None, None, None], pictures.flip(3), pictures)


def rotate(pictures: Tensor, degrees: float, source: Generator) -> Tensor:
    """Return the pictures, of floats, each turned by up to ``degrees`` either way; 0 comes in at the corners."""
    angle = (2 * torch.rand(len(pictures), generator=source) - 1) * math.radians(degrees)
    zero = torch.zeros_like(angle)
    rows = torch.stack([angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos(), zero], 1).view(-1, 2, 3)
    places = F.affine_grid(rows.to(pictures.device), list(pictures.shape), align_corners=False)
    return F.grid_sample(pictures, places, align_corners=False)


def moments(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel, [channels, 1, 1], of pictures of bytes, without a copy as floats."""
    shades = torch.arange(256, dtype=torch.float64, device=pictures.device)
    means, deviations = [], []
    for channel in pictures.unbind(1):
        part = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (part * shades).sum()
        means.append(mean)
        deviations.append((part * (shades - mean) ** 2).sum().sqrt())
    return torch.stack(means).float().view(-1, 1, 1), torch.stack(deviations).float().view(-1, 1, 1)
