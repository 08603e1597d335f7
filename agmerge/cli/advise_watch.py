# SPDX-License-Identifier: Apache-2.0
"""Watch what a plain script does to gradients by itself: in which lines it averages or clips, and how many passes."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

WATCHED = 3  # steps that are watched
COLLECTIVES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
DELETE = "it averages gradients itself in {where}. Delete this, because agmerge averages them. Then run advise again"
NORM = "Replace the clipping in {where} by {optimizer}.clip_grad_norm_({norm})."
VALUE = (
    "Call {optimizer}.synchronize() before the clipping in {where}, and put the following step() into "
    "`with {optimizer}.skip_synchronize():`."
)
FOREIGN = "Put the backward pass in {where} into `with {optimizer}.no_sync():`, because it is for another optimizer."


class Place(NamedTuple):
    """Line of a script."""

    file: str
    line: int

    def told(self, script: str) -> str:
        """Return it in words, of ``script`` itself without the name."""
        own = os.path.abspath(self.file) == os.path.abspath(script)
        return f"line {self.line}" if own else f"line {self.line} of {os.path.basename(self.file)}"


@dataclass
class Habits:
    """What a script does around the steps of one optimizer."""

    passes: set[int] = field(default_factory=set)  # backward passes of its own loss in a step
    foreign: set[Place] = field(default_factory=set)  # backward passes of others' losses through its parameters
    clips: dict[Place, tuple[str, Any]] = field(default_factory=dict)  # the function, and its limit
    steps: int = 0


class Watch:
    """Watch over all optimizers of ``script`` that step. Files beside the script and below count as the script's."""

    def __init__(self, script: str) -> None:
        self._folder = os.path.join(os.path.dirname(os.path.abspath(script)), "")
        self.averages: Place | None = None  # the line that averages gradients, once it is known
        self.habits: dict[torch.optim.Optimizer, Habits] = {}
        self._owners: dict[int, torch.optim.Optimizer] = {}  # by the identity of a parameter
        self._passes: dict[Place | None, Counter[int]] = {}  # since the last step: gradients by parameter
        self._sent: Counter[Place] = Counter()  # since the last step: elements that a line has handed over
        self._hooks: list[Any] = []
        self._restore: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Note, from now on, which lines call collectives and clip."""
        clipping = torch.nn.utils.clip_grad
        targets = [(sys.modules.get("torch.distributed"), name, self._collective) for name in COLLECTIVES]
        targets += [(module, name, self._clip) for module in (torch.nn.utils, clipping) for name in CLIPS]
        for module, name, note in targets:
            given = getattr(module, name, None)
            if given is not None:
                self._restore.append((module, name, given))
                setattr(module, name, _noting(given, note))

    def uninstall(self) -> None:
        """End it: everything is as it was."""
        for module, name, given in reversed(self._restore):
            setattr(module, name, given)
        for hook in self._hooks:
            hook.remove()
        self._restore, self._hooks = [], []

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has stepped: the passes since any has were of its loss."""
        if optimizer not in self.habits:
            self.habits[optimizer] = Habits()
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                self._owners[id(parameter)] = optimizer
                if parameter.requires_grad and parameter.is_leaf:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient))
        else:
            self._judge(optimizer)
        self._passes, self._sent = {}, Counter()

    def edits(self, script: str, names: dict[torch.optim.Optimizer, str]) -> list[str]:
        """Return what to change in the script beside pasting lines, in sentences. ``names``: of the optimizers."""
        if self.averages is not None:
            return [DELETE.format(where=self.averages.told(script))]
        found = []
        for optimizer, habits in self.habits.items():
            name = names.get(optimizer, "optimizer")
            found += [FOREIGN.format(optimizer=name, where=each.told(script)) for each in sorted(habits.foreign)]
            for place, (function, limit) in sorted(habits.clips.items()):
                text = NORM if function == CLIPS[0] else VALUE
                norm = _written(place, function) or repr(limit)
                found.append(text.format(optimizer=name, where=place.told(script), norm=norm))
        return found

    # -- what is noted ------------------------------------------------------------------------------------------------

    def _gradient(self, parameter: torch.Tensor) -> None:
        self._passes.setdefault(self._place(), Counter())[id(parameter)] += 1

    def _collective(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        place = self._place(direct=True)
        values = [*given, *named.values()]
        tensors = [each for value in values for each in (value if isinstance(value, list) else [value])]
        if place is not None and self._passes:
            floats = (each for each in tensors if isinstance(each, torch.Tensor) and each.is_floating_point())
            self._sent[place] += sum(each.numel() for each in floats)

    def _clip(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        place, parameters = self._place(direct=True), given[0] if given else named.get("parameters", ())
        limit = given[1] if len(given) > 1 else named.get("max_norm", named.get("clip_value"))
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        if place is None or not isinstance(parameters, (list, tuple)):
            return
        for optimizer in {self._owners[id(each)] for each in parameters if id(each) in self._owners}:
            self.habits[optimizer].clips[place] = name, limit

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """Note what the passes and calls since the last step were."""
        own = Counter[int]()
        for place, counts in self._passes.items():
            for number, count in counts.items():
                owner = self._owners[number]
                if owner is optimizer:
                    own[number] += count
                elif place is not None:
                    self.habits[owner].foreign.add(place)
        habits = self.habits[optimizer]
        habits.steps += 1
        if own:
            habits.passes.add(max(own.values()))
        elements = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
        for place, sent in self._sent.items():
            if 2 * sent >= elements:
                self.averages = place

    def _place(self, *, direct: bool = False) -> Place | None:
        """Return the innermost line of the script that has called; None: there is none.

        ``direct``: it has to be the first caller outside of this file, not one that has called a library.
        """
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back  # type: ignore[assignment]
        while frame is not None:
            file = os.path.abspath(frame.f_code.co_filename)
            if file.startswith(self._folder) and f"{os.sep}site-packages{os.sep}" not in file:
                return Place(file, frame.f_lineno)
            if direct:
                return None
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _noting(function: Any, note: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> Any:
    """Return ``function``, calls of which are noted. Parameters that are an iterator are made a list before."""
    name = function.__name__

    @functools.wraps(function)
    def noted(*given: Any, **named: Any) -> Any:
        if name in CLIPS and given and not isinstance(given[0], (torch.Tensor, list, tuple)):
            given = ([*given[0]], *given[1:])
        note(name, given, named)
        return function(*given, **named)

    return noted


def _written(place: Place, function: str) -> str:
    """Return the limit of a clipping as its line has it; empty: it is not in one line."""
    try:
        tree = ast.parse(linecache.getline(place.file, place.line).strip())
    except SyntaxError:
        return ""
    calls: list[Any] = [node for node in ast.walk(tree) if hasattr(node, "func")]
    for call in calls:
        if ast.unparse(call.func).split(".")[-1] == function:
            limits = [each.value for each in call.keywords if each.arg == "max_norm"] or call.args[1:2]
            return ast.unparse(limits[0]) if limits else ""
    return ""
