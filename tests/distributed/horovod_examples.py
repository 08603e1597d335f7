# SPDX-License-Identifier: Apache-2.0
"""Run Horovod's own examples, unmodified, with agmerge in its place.

``python tests/distributed/horovod_examples.py CHECKOUT [NAME ...]``: CHECKOUT is one of Horovod v0.28.1, whose examples
are no part of this repository, nor of its package. Each runs on two ranks with tiny data: a folder on the PYTHONPATH
stands in for the libraries of data sets and models that they import. ``--blocked`` hides an installed Horovod, instead
of ``--instead``. Prints a table of Markdown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds an example
EXAMPLES = {  # by name: file and arguments, and those of the launcher
    "mnist": ("pytorch/pytorch_mnist.py --epochs 2 --batch-size 16 --no-cuda", "-np 2"),
    "mnist fp16": ("pytorch/pytorch_mnist.py --epochs 1 --batch-size 16 --fp16-allreduce --no-cuda", "-np 2"),
    "mnist compressed": (
        "pytorch/pytorch_mnist.py --epochs 2 --batch-size 16 --no-cuda",
        "-np 2 --compression eden-4",
    ),
    "resnet50": (
        "pytorch/pytorch_imagenet_resnet50.py --epochs 1 --batch-size 4 --val-batch-size 4 --batches-per-allreduce 2 "
        "--no-cuda --log-dir {folder}/logs --checkpoint-format {folder}/checkpoint-{{epoch}}.tar",
        "-np 2",
    ),
    "synthetic": (
        "pytorch/pytorch_synthetic_benchmark.py --num-iters 2 --num-warmup-batches 1 --num-batches-per-iter 1 "
        "--batch-size 1 --no-cuda",
        "-np 2",
    ),
    "mnist elastic": (
        "elastic/pytorch/pytorch_mnist_elastic.py --epochs 1 --batch-size 16 --no-cuda",
        "-np 2 --min-np 2 --max-np 2",
    ),
}
STAND_INS = {
    "torchvision/__init__.py": "from torchvision import datasets, models, transforms\n",
    "torchvision/transforms.py": "def __getattr__(name):\n    return lambda *given, **options: None\n",
    "torchvision/datasets.py": (
        "import torch\n"
        "def _data(shape, classes, count):\n"
        "    source = torch.Generator().manual_seed(0)\n"
        "    labels = torch.arange(count) % classes\n"
        "    images = torch.randn(count, *shape, generator=source) + labels.view(-1, 1, 1, 1) / classes\n"
        "    return torch.utils.data.TensorDataset(images, labels)\n"
        "def MNIST(*given, train=True, **options):\n"
        "    return _data((1, 28, 28), 10, 256 if train else 64)\n"
        "def ImageFolder(*given, **options):\n"
        "    return _data((3, 16, 16), 10, 32)\n"
    ),
    "torchvision/models.py": (
        "from torch import nn\n"
        "def resnet50():\n"
        "    body = [nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()]\n"
        "    return nn.Sequential(*body, nn.Linear(8, 1000))\n"
    ),
    "tensorboard_stand_in.py": (
        "class SummaryWriter:\n"
        "    def __init__(self, *given, **options): pass\n"
        "    def add_scalar(self, *given, **options): pass\n"
    ),
    "sitecustomize.py": (
        "import os, sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'horovod' and 'HIDE_HOROVOD' in os.environ:\n"
        "            found = PathFinder.find_spec(name, [one for one in sys.path if not one.endswith('-packages')])\n"
        "            if found is None:\n"
        "                raise ModuleNotFoundError('horovod is hidden', name=name)\n"
        "            return found\n"
        "        if name == 'torch.utils.tensorboard':\n"
        "            import tensorboard_stand_in\n"
        "            return PathFinder.find_spec('tensorboard_stand_in', [os.path.dirname(__file__)])\n"
        "sys.meta_path.insert(0, Hidden())\n"
    ),
}


def run(checkout: Path, folder: Path, name: str, *, hides: bool) -> str:
    """Run an example, and say how it ended."""
    for path, text in STAND_INS.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    script, launcher = EXAMPLES[name]
    file, *arguments = script.format(folder=folder).split()
    command = [sys.executable, "-m", "agmerge", "horovodrun", *launcher.split(), *([] if hides else ["--instead"])]
    command += [sys.executable, str(checkout / "examples" / file), *arguments]
    hidden = {"HIDE_HOROVOD": "1"} if hides else {}
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        "PYTHONPATH": f"{folder}:{ROOT}",
        **hidden,
    }
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired as error:
        return f"no end within {LIMIT} s: {error.stdout!r}"
    last = [line for line in done.stdout.splitlines() if line.strip() and not line.endswith(":")]
    said = last[-1] if last else ""
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        return f"failed with {done.returncode}"
    return f"passed in {time.monotonic() - began:.0f} s, and ended with: {said}"


def main(checkout: Path, given: list[str]) -> int:
    """Run all examples, or those that are named; 1 if one fails."""
    hides, chosen = "--blocked" in given, [name for name in given if name != "--blocked"]
    results = {}
    for name in chosen or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(checkout, Path(folder), name, hides=hides)
        sys.stdout.write(f"| {name} | {results[name]} |\n")
        sys.stdout.flush()
    return int(any(not result.startswith("passed") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
