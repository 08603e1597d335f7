# SPDX-License-Identifier: Apache-2.0
"""What a running script has, found when its optimizer steps: its models, its framework, and its own names of them."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agmerge.cli import advice

# By modules that are among the callers of a step.
CALLERS = {
    "transformers.trainer": advice.TRAINER,
    "lightning": advice.LIGHTNING,
    "pytorch_lightning": advice.LIGHTNING,
}
SCALER = "torch.amp.grad_scaler"  # the module of GradScaler.step


@dataclass(frozen=True)
class Script:
    """What was found. ``names``: the script's own, by word of ``advice.WORDS``; empty where not all of them are known.

    ``scaler``: the GradScaler that called the step, None where there is none.
    """

    framework: str  # one of advice.LINES
    scaler: torch.amp.GradScaler | None
    names: Mapping[str, str]


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return all of torch's optimizers that step parameters of ``model``, and no others; the oldest first."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    plain = [each for each in found if getattr(each, "param_groups", None) and not hasattr(each, "optimizer")]
    return [each for each in plain if holds(model, each)]


def known_as(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Callable[[Any], bool]]:
    """Return by word how to know each of several optimizers: the words are those of :func:`described`."""
    return {f"optimizer {number}": functools.partial(_is, each) for number, each in enumerate(optimizers)}


def _is(known: Any, each: Any) -> bool:
    return each is known


def pairs(file: str, optimizers: Sequence[torch.optim.Optimizer]) -> list[tuple[str, str]]:
    """Return the names that one frame of the script has for each optimizer and its model; []: none has all of them.

    A model is one with no more parameters than the optimizer steps, if there is one, else any that has all of them.
    """
    frames = list(_callers())
    for exact in (True, False):
        wanted: dict[str, Callable[[Any], bool]] = {}
        for number, optimizer in enumerate(optimizers):
            wanted[f"optimizer {number}"] = functools.partial(_is, optimizer)
            wanted[f"model {number}"] = _steps_all_of(optimizer) if exact else holding(optimizer)
        names = _names(file, frames, wanted)
        if names:
            numbers = range(len(optimizers))
            return [(names[f"optimizer {number}"], names[f"model {number}"]) for number in numbers]
    return []


def _steps_all_of(optimizer: torch.optim.Optimizer) -> Callable[[Any], bool]:
    """Return a function that knows a model with the parameters of ``optimizer`` and no others that need gradients."""
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}

    def known(each: Any) -> bool:
        if not _is_module(each) or not holds(each, optimizer):
            return False
        return all(id(parameter) in own for parameter in each.parameters() if parameter.requires_grad)

    return known


def models() -> list[DistributedDataParallel]:
    """Return all models in DistributedDataParallel that this process has."""
    gc.collect()  # a model that was dropped may be part of a cycle
    return [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]


def holds(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``model`` has all parameters that ``optimizer`` steps."""
    own = {id(parameter) for parameter in model.parameters()}
    return all(id(each) in own for group in optimizer.param_groups for each in group["params"])


def holding(optimizer: torch.optim.Optimizer) -> Callable[[Any], bool]:
    """Return a function that knows a model with all parameters of ``optimizer``."""
    return lambda each: _is_module(each) and holds(each, optimizer)


def _is_module(each: Any) -> bool:
    return issubclass(type(each), nn.Module)  # isinstance() asks the object, and some of torch's then warn


def described(file: str, framework: str, objects: Mapping[str, Callable[[Any], bool]]) -> Script:
    """Return what the callers of this function are and have: a step of an optimizer, inside of a script.

    Args:
        file: the script.
        framework: where no caller is a framework of its own.
        objects: by word how to know what it stands for; a framework's line needs some of them.
    """
    frames = list(_callers())
    modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
    known = (name for start, name in CALLERS.items() if any(module.startswith(start) for module in modules))
    framework = next(known, advice.ACCELERATE if framework == advice.DDP and uses_accelerate() else framework)
    scaling = (frame.f_locals.get("self") for frame, module in zip(frames, modules, strict=True) if module == SCALER)
    scaler = next((each for each in scaling if isinstance(each, torch.amp.GradScaler)), None)
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    trainers = [frame.f_locals.get("self") for frame, name in zip(frames, modules, strict=True) if name in CALLERS]
    found = {
        **objects,
        "scaler": lambda each: scaler is not None and each is scaler,
        "trainer": lambda each: any(each is trainer for trainer in trainers),
        "accelerator": lambda each: type(each).__name__ == "Accelerator",
    }
    words = [*advice.words(framework, scaled=scaler is not None)]
    several = [word for word in objects if word.startswith("optimizer ")]
    if several and "optimizer" in words:
        words = [word for word in words if word != "optimizer"] + several
    names = _names(file, frames, {word: found[word] for word in words}) if words else {}
    if several and names:
        names = {**names, "optimizer": f"[{', '.join(names[word] for word in several)}]"}
        names = {word: name for word, name in names.items() if word not in several}
    return Script(framework, scaler, names)


def uses_accelerate() -> bool:
    """Return whether the script has an Accelerator."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def is_model(model: nn.Module) -> Callable[[Any], bool]:
    """Return a function that knows ``model``, also where torch.compile has wrapped it."""
    return lambda each: each is model or (_is_module(each) and each._modules.get("_orig_mod") is model)


def _callers() -> Iterator[FrameType]:
    """Yield the frames that have called the caller of this function, the innermost one first."""
    frame = sys._getframe(2).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _names(file: str, frames: list[FrameType], wanted: Mapping[str, Callable[[Any], bool]]) -> dict[str, str]:
    """Return the names that one frame of the script has for all that is wanted: of several the outermost; else none.

    ``file``: the script; files beside it and below count as well.
    """
    folder = os.path.join(os.path.dirname(os.path.abspath(file)), "")
    for frame in reversed(frames):
        place = os.path.abspath(frame.f_code.co_filename)
        if not place.startswith(folder) or f"{os.sep}site-packages{os.sep}" in place:
            continue
        there = {word: _name(frame.f_locals, known) for word, known in wanted.items()}
        if all(there.values()):
            return there
    return {}


def _name(variables: Mapping[str, Any], known: Callable[[Any], bool]) -> str:
    """Return the name of a variable that is known, or of an attribute of a variable; empty: there is none."""
    for name, value in variables.items():
        if name.isidentifier() and not name.startswith("_") and known(value):
            return name
    for name, value in variables.items():
        if name.startswith("_") or issubclass(type(value), (type, ModuleType)):
            continue
        for part, inner in _attributes(value).items():
            if not part.startswith("_") and known(inner):
                return f"{name}.{part}"
    return ""


def _attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's own attributes; none of a module of torch's: its parts are not in a script's hands."""
    try:
        found = {} if _is_module(value) else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}
