# SPDX-License-Identifier: Apache-2.0
"""The networks of the jobs with pictures: their published sizes, counted without memory, and what tiny ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from jobs.images import JOBS
from torch import nn

SIZES = {  # job: parameters, tensors
    "mnist": (1_625_866, 8),
    "resnet20-cifar10": (269_722, 59),
    "resnet56-cifar10": (853_018, 167),
    "resnet110-cifar10": (1_727_962, 329),
    "vgg16-cifar10": (14_728_266, 54),
    "resnet50-cifar100": (23_705_252, 161),
    "vgg16-cifar100": (34_015_396, 58),
    "vit-base-cifar100": (85_875_556, 200),
    "vit-large-cifar100": (303_404_132, 392),
    "resnet50-imagenet": (25_557_032, 161),
    "resnet152-imagenet": (60_192_808, 467),
    "vgg16-imagenet": (138_357_544, 32),
    "vgg19-imagenet": (143_667_240, 38),
    "vit-base-imagenet": (86_567_656, 200),
    "vit-large-imagenet": (304_326_632, 392),
}


def made(name: str, **sizes: Any) -> nn.Module:
    """Return a job's network on the meta device, where weights take no memory."""
    if name.startswith("vit"):
        pytest.importorskip("transformers")
    with torch.device("meta"):
        return JOBS[name].network(**sizes)


@pytest.mark.parametrize("name", SIZES)
def test_a_network_has_its_published_size(name: str) -> None:
    sizes = [parameter.numel() for parameter in made(name).parameters()]
    assert (sum(sizes), len(sizes)) == SIZES[name]


@pytest.mark.parametrize("name", SIZES)
def test_a_tiny_network_has_some_thousand_parameters(name: str) -> None:
    sizes = {"classes": 10} if "imagenet" in name else {}
    assert 1_000 < sum(parameter.numel() for parameter in made(name, tiny=True, **sizes).parameters()) < 160_000


def test_a_vit_takes_weights_of_a_folder_and_begins_a_last_layer_for_other_classes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from networks.vit import ViT

    torch.manual_seed(0)
    saved = ViT("base", classes=7, tiny=True)
    saved.inner.save_pretrained(tmp_path)
    same, other = ViT("base", classes=7, weights=tmp_path), ViT("base", classes=3, weights=tmp_path)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(saved.parameters(), same.parameters(), strict=True))
    different = [
        name
        for (name, ours), theirs in zip(saved.named_parameters(), other.parameters(), strict=True)
        if ours.shape != theirs.shape or not torch.equal(ours, theirs)
    ]
    assert different == ["inner.classifier.weight", "inner.classifier.bias"]


# -- benchmarks' models ----------------------------------------------------------------------------------------


def test_the_benchmarks_networks_are_those_of_the_jobs() -> None:
    for name, job in {"vgg19": "vgg19-imagenet", "resnet152": "resnet152-imagenet"}.items():
        with torch.device("meta"):
            model = models.build(name, 1, 32).model
        assert [p.shape for p in model.parameters()] == [p.shape for p in made(job).parameters()]
