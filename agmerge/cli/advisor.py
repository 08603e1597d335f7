# SPDX-License-Identifier: Apache-2.0
"""Watch over one script: its steps, what exchanges in them, and the advice at their end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

import agmerge
from agmerge.cli import advise_script
from agmerge.cli.advise_script import Script
from agmerge.cli.advise_turns import OTHERS, ROUNDS, STEPS, TURN, Enough, Swappable, Turns
from agmerge.cli.advise_updates import exchanging_updates
from agmerge.options.arguments import Options
from agmerge.options.named_costs import told_cost, told_cost_of_updates
from agmerge.options.named_uses import wanted
from agmerge.planning import advice
from agmerge.step.config import AUTO
from agmerge.step.updates import UPDATES
from sparsifiers.quantising.choice import NONE
from sparsifiers.registry import spelling

# No plan changes while steps are timed.
STILL: dict[str, Any] = {"merging": "threshold", "check_every": 0}
GIVEN: dict[str, Any] = {"compression": NONE, **STILL}
LINK = "AGMERGE_LINK"
NOT_USED, NO_ANSWER = 3, 4  # exit codes: "do not use agmerge here", and that nothing can be said
ONE_WORKER = "one worker exchanges nothing: start at least two, for example by --workers 2, without a launcher"
SEVERAL = (
    "it has {count} DistributedDataParallel models, and only what one model exchanges is compared. Each of them can "
    "have a line (docs/frameworks.md)"
)
NO_MODEL = (
    "no DistributedDataParallel has the parameters that its {optimizer} steps. If nothing else averages gradients, "
    "each worker trains by itself. For Horovod and FSDP2 see docs/frameworks.md, else this makes the script one for "
    "several workers; then ask again"
)
SPAWNS = (
    "it starts its workers itself, by torch.multiprocessing, where nothing can be watched. Have them started for this "
    "question: call what each of them runs with the rank and the number of workers that torchrun puts into RANK and "
    "WORLD_SIZE"
)


class Advisor:
    """Watch over one script. ``as_json``: print the result as JSON. There is one in a process."""

    def __init__(self, script: str, as_json: bool, result: str) -> None:
        self.script, self._as_json, self._result = script, as_json, result
        self.code: int | None = None  # the exit code, once it is known
        self.steps = 0  # of the first optimizer that steps
        self.ended = ""  # how the script has ended by itself, in words
        self._ours = False  # the script has a DistributedOptimizer
        self._has_default = False  # which names no compressor
        self._link = os.environ.get(LINK, "")  # it would not hold back the script's own exchange
        self._main: torch.optim.Optimizer | None = None
        self._turns: Turns | None = None
        self._found: Script | None = None  # at the first step

    # -- what the script has ------------------------------------------------------------------------------------------

    def uses_ours(self, *, has_default: bool) -> None:
        """Note that the script has an optimizer of this library's, which tells of its steps by itself."""
        self._ours, self._has_default = True, has_default

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step of any optimizer of torch's."""
        if self._ours:
            return
        self.leave_if_done()
        self._main = self._main or optimizer
        if optimizer is not self._main:
            return
        self.steps += 1
        if self._turns is None:
            self._begin(optimizer)
        assert self._turns is not None and self._found is not None
        try:
            over = self._turns.step()
        except (TypeError, ValueError) as refused:  # on all ranks alike, before anything is exchanged
            self.give_up(f"it is refused: {refused}")
        if over:
            self.conclude(self._turns, optimizer, self._found)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the script, and begin to take turns; end it with a message where no answer can be had."""
        models = advise_script.models()
        if len(models) > 1:
            self.give_up(SEVERAL.format(count=len(models)))
        framework = advice.DDP if models else advice.PLAIN
        holding = advise_script.is_model(models[0]) if models else advise_script.holding(optimizer)
        found = {"model": holding, "optimizer": lambda each: each is optimizer}
        self._found = script = advise_script.described(self.script, framework, found)
        if not models or not advise_script.holds(models[0], optimizer):
            lines = advice.pasted(advice.PLAIN, script.names if not models else {}, scaled=script.scaler is not None)
            self.give_up("\n".join([NO_MODEL.format(optimizer=type(optimizer).__name__), "", *lines]))
        model = models[0]
        if model.process_group.size() == 1:
            self.give_up(ONE_WORKER)

        def compressed(_: torch.optim.Optimizer) -> Swappable:
            line = agmerge.integrations.ddp.compress
            exchange: Swappable = line(model, optimizer=optimizer, scaler=script.scaler, **GIVEN)
            return exchange

        def updates(_: torch.optim.Optimizer) -> AbstractContextManager[None]:
            return exchanging_updates(model, optimizer, **STILL)

        # A GradScaler leaves out steps of one worker then, and the others would count on.
        refused = model.static_graph or script.scaler is not None
        self._turns = Turns(optimizer, compressed, None if refused else updates, as_it_is=not self._link)

    # -- the end ------------------------------------------------------------------------------------------------------

    def conclude(self, turns: Turns, optimizer: torch.optim.Optimizer, script: Script) -> None:
        """Collective. Print the advice on rank 0, and end the script on every rank."""
        candidates = []
        for name, own in turns.seconds.items():
            told = told_cost(name, OTHERS.get(name), optimizer)
            if name == UPDATES:
                told = told_cost_of_updates(agmerge.size(), optimizer)
            everyones = agmerge.allgather_object(own)
            by_turn = [[each[turn * TURN :][:TURN] for each in everyones] for turn in range(ROUNDS)]
            took = tuple(map(advice.median_of_slowest, by_turn))
            whole = advice.median_of_slowest(everyones)
            candidates.append(advice.Candidate(name, whole, name in turns.defaults, told, took, wanted(name)))
        base = next(one for name in ("", NONE) for one in candidates if one.name == name)
        found = advice.Facts(
            script.framework,
            type(optimizer).__name__,
            agmerge.size(),
            sum(one.numel() for group in optimizer.param_groups for one in group["params"]),
            base.seconds,
            tuple(one for one in candidates if one.name),
            base.turns,
            script.names,
            script.scaler is not None,
            self._has_default,
            self._link,
        )
        chosen = advice.choose(found)
        self.code = 0 if chosen.use else NOT_USED
        if agmerge.rank() == 0:
            told = json.dumps({**asdict(found), **asdict(chosen)}) if self._as_json else advice.text(found, chosen)
            sys.stdout.write(told + "\n")
            sys.stdout.flush()
        agmerge.barrier()
        raise Enough

    def give_up(self, why: str) -> NoReturn:
        """End the script: no advice can be given."""
        self.say(f": {why}")
        self.code = NO_ANSWER
        raise Enough

    def say(self, what: str) -> None:
        """Write a line about the script: what is so on every rank on the first one alone, where a launcher tells."""
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"agmerge advise: {self.script}{what}\n")
            sys.stderr.flush()

    def spawns(self, *_: object, **__: object) -> None:
        """End the script, which starts workers by itself."""
        self.give_up(SPAWNS)

    def leave_if_done(self) -> None:
        """End the process where the script has caught what was to end it, and goes on."""
        if self.code is not None:
            sys.stdout.flush()
            os._exit(self.exit_code())

    def end(self, code: Any) -> None:
        """Note the exit code with which the script has ended itself."""
        self.ended = f", by itself with exit code {code}" if code else ""

    def exit_code(self) -> int:
        """Return this process's exit code, and write the script's into the file of ``--result``."""
        code = self.code
        if code is None:  # the script has come to its end
            seen = f"{self.steps} steps of an optimizer, {len(advise_script.models())} DistributedDataParallel"
            hint = ". More epochs, or a smaller batch, would do" if self.steps else ""
            self.say(f" ended too early{self.ended}, after {seen}; {STEPS} steps are needed{hint}")
            code = NO_ANSWER
        if self._result and os.environ.get("RANK") == "0":
            Path(self._result).write_text(str(code))
        return 0 if self._result or code == NOT_USED else code


def advised(advisor: Advisor) -> type[agmerge.DistributedOptimizer]:
    """Return the optimizer that takes the place of the script's: it compresses by turns, and ends the script."""

    class AdvisedOptimizer(agmerge.DistributedOptimizer):
        def _set_up(self, optimizer: Any, named: Any, options: Options, *, are_new: bool) -> None:
            advisor.uses_ours(has_default=options.compression == AUTO and options.density is None)
            advisor.leave_if_done()
            dear = isinstance(options.merging, str) and spelling(options.merging) == "dear"
            if options.sync == UPDATES or dear or options.process_set is not None:
                advisor.give_up(
                    "it has sync='updates', merging='dear' or process_set=: only exchanges of gradients are compared"
                )
            self._turns = Turns(optimizer, lambda _: self, as_it_is=False)
            super()._set_up(optimizer, named, replace(options, **GIVEN, density=None, exchange="auto"), are_new=are_new)

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            advisor.leave_if_done()
            loss = super().step(closure)
            advisor.steps += 1
            if agmerge.size() == 1:
                advisor.give_up(ONE_WORKER)
            if self._turns.step():
                found = {
                    "model": advise_script.holding(self._inner),
                    "optimizer": lambda each: each is self,
                    "plain": lambda each: each is self._inner,
                }
                advisor.conclude(self._turns, self._inner, advise_script.described(advisor.script, advice.OURS, found))
            return loss

    return AdvisedOptimizer
