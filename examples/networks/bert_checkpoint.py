# SPDX-License-Identifier: Apache-2.0
"""Read NVIDIA's checkpoints of BERT, a file of torch each, as weights of transformers' BERT for questions."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FLAG = "--init_checkpoint"
WORDS = "bert.embeddings.word_embeddings.weight"
HEAD = "qa_outputs."  # what a checkpoint of pre-training does not have, and begins at random then
LEFT_OUT = ("cls.", "bert.pooler.", "bert.embeddings.position_ids")  # heads of pre-training, and no weights
NAMES = {"gamma": "weight", "beta": "bias"}  # of norms, in TensorFlow's words
LAYER = re.compile(r"bert\.encoder\.layer\.(\d+)\.")
SHOWN = 4  # names in an error


@dataclass(frozen=True)
class Checkpoint:
    """What a file has of a BERT, under the names of transformers."""

    path: Path
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...]  # names, as they are in the file

    @property
    def pieces(self) -> int:
        """Return how many word pieces it knows, those that fill up a multiple of 8 included."""
        return len(self.tensors[WORDS])

    @property
    def sizes(self) -> tuple[int, int]:
        """Return its width and its number of layers."""
        layers = [int(found[1]) for name in self.tensors if (found := LAYER.match(name))]
        return self.tensors[WORDS].shape[1], max(layers, default=-1) + 1

    @property
    def about(self) -> str:
        """Return a line that says what is taken of the file and what is not."""
        kinds = Counter(".".join(name.split(".")[:2]) for name in map(plain, self.left_out))
        left = ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
        said = f"{FLAG} {self.path}: {len(self.tensors)} tensors are taken"
        said += f"; left out, as pre-training's: {left}" if left else ""
        return said if any(name.startswith(HEAD) for name in self.tensors) else f"{said}; {HEAD}* begins at random"

    def load(self, model: nn.Module) -> None:
        """Put the tensors into ``model``. Raises ``ValueError`` that names what does not go together.

        16-bit tensors become those of the model's dtype. What answers questions may be missing, and is left as it is.
        """
        wanted = model.state_dict()
        head = any(name.startswith(HEAD) for name in self.tensors)
        missing = [name for name in wanted if name not in self.tensors and (head or not name.startswith(HEAD))]
        problems = {"unknown": [name for name in self.tensors if name not in wanted], "missing": missing}
        problems["of another shape"] = [
            f"{name} {tuple(tensor.shape)} for {tuple(wanted[name].shape)}"
            for name, tensor in self.tensors.items()
            if name in wanted and tensor.shape != wanted[name].shape
        ]
        told = "; ".join(f"{kind}: {shown(names)}" for kind, names in problems.items() if names)
        if told:
            raise ValueError(f"{FLAG} {self.path} is not of this network; {told}")
        model.load_state_dict(self.tensors, strict=False)


def read(path: Path) -> Checkpoint:
    """Return what the file holds: ``{"model": tensors by name, ...}``, or the tensors themselves.

    Nothing in the file is run. Raises ``FileNotFoundError``, or ``ValueError`` if it holds no BERT.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{FLAG} {path}: there is no such file")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{FLAG} {path} is no file of torch.save with tensors and numbers alone ({' '.join(reason)}). If you trust "
            "it, keep its weights: torch.save(torch.load(FILE, weights_only=False)['model'], OTHER)"
        ) from error
    return of_state(found.get("model", found) if isinstance(found, dict) else found, path)


def of_state(state: Any, path: Path) -> Checkpoint:
    """Return the tensors of ``state`` under the names of transformers. Raises ``ValueError`` if it is of no BERT."""
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{FLAG} {path} holds no tensors by name, and no such under 'model'")
    tensors: dict[str, Tensor] = {}
    left_out = []
    for given, tensor in state.items():
        name = plain(given)
        if name.startswith(LEFT_OUT):
            left_out.append(given)
        elif name in tensors:
            raise ValueError(f"{FLAG} {path} has {name} twice, the second time as {given}")
        else:
            tensors[name] = tensor
    if WORDS not in tensors or tensors[WORDS].dim() != 2:
        raise ValueError(f"{FLAG} {path} is of no BERT: {WORDS} is missing; it has {shown(list(tensors) or left_out)}")
    return Checkpoint(path, tensors, tuple(left_out))


def plain(name: str) -> str:
    """Return what transformers calls the tensor that NVIDIA, DistributedDataParallel or TensorFlow call ``name``."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    name = name.replace(".dense_act.", ".dense.")
    before, _, last = name.rpartition(".")
    return f"{before}.{NAMES[last]}" if last in NAMES and before.endswith("LayerNorm") else name


def shown(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
