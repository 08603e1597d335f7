# SPDX-License-Identifier: Apache-2.0
"""Watch over one script, for ``python -m agmerge advise``: its steps, their exchanges, the advice at their end."""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.cli import advice, advise_script
from agmerge.cli.advise_script import Script
from agmerge.cli.advise_watch import WATCHED, Watch
from agmerge.options.defaults import candidates_for, kinds_of, sparsifier_for, told_cost
from agmerge.options.typed import Options
from agmerge.step.config import AUTO, UPDATES
from sparsifiers.catalogue import spelling
from sparsifiers.quantising.base import NONE

# A turn of ``sync="updates"``, after which model and optimizer are as they were; and its cost in loss.

# Least and highest mean increase in benchmarks/prove, with AdamW, the largest batch and uncompressed training's rate.
COST_OF_UPDATES = "0 to 1.1 %"
KINDS = ("AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "Lion")  # optimizers that it is for


@contextmanager
def exchanging_updates(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, **given: Any
) -> Iterator[None]:
    """Collective. Exchange updates in the steps inside; then each worker's parameters and state are those of before.

    With updates each worker's optimizer sees its own gradients, so that the states of ranks come to differ.

    Args:
        model: in DistributedDataParallel, without any exchange of ours.
        optimizer: the one that steps.
        given: options of ``ddp.compress`` beside ``sync``.
    """
    restore = kept(optimizer)
    compressed = agmerge.integrations.ddp.compress(model, optimizer=optimizer, sync="updates", **given)
    yield  # an error inside ends the script, and nothing is restored
    compressed.close()
    restore()


def kept(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that sets parameters and state to what they are now. The copies are in the host's memory."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [copied(parameter.detach()) for parameter in parameters]
    states = [
        (optimizer.state[parameter], {key: (value, copied(value)) for key, value in optimizer.state[parameter].items()})
        for parameter in parameters
        if parameter in optimizer.state
    ]

    @torch.no_grad()
    def restore() -> None:
        for parameter, saved in zip(parameters, before, strict=True):
            parameter.copy_(saved)
        for state, entries in states:
            for key, (value, saved) in entries.items():
                state[key] = value.copy_(saved) if isinstance(value, torch.Tensor) else saved

    return restore


def copied(value: Any) -> Any:
    """Return a copy of an entry of a state, of a tensor in the host's memory."""
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def takes_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``sync="updates"`` is for this optimizer: AdamW and its kind, where selection costs most."""
    return any(kind in KINDS for kind in kinds_of(optimizer))


def told_cost_of_updates(optimizer: torch.optim.Optimizer) -> str:
    """Return in words how much ``sync="updates"`` increases the loss."""
    if "AdamW" not in kinds_of(optimizer):
        return "not measured with this optimizer"
    return f"{COST_OF_UPDATES} higher in our tests"


# Turns of compressors: each has some steps, several times, and is timed.

WARM = 3  # steps before anything is timed: first touches of memory, first connections
TURN = 4  # steps of a turn that are timed; one before them is not
ROUNDS = 2  # turns of each compressor
# By name, beside the default's, with the density or the rank that their cost in loss is of.
OTHERS: dict[str, float | None] = {"eden-1": None, "topk": 0.01, "dgc": 0.01, "acpsgd": 4}
# What these, and updates, are for: the end of "To ...".
USES = {
    "eden-1": "halve the traffic of 2 bits",
    "topk": "send 1 % of each gradient",
    "dgc": "send very little with SGD and momentum",
    "acpsgd": "send low-rank factors of large matrices",
    UPDATES: "hide messages with AdamW",
}
STEPS = (1 + WARM) + ROUNDS * 9 * (1 + TURN)  # at most


class Enough(BaseException):
    """Signal that ends a script with measured steps. No error, and not for ``except Exception`` to catch."""


class Swappable(Protocol):
    """Whatever exchanges gradients, with a compressor that can be changed between steps."""

    def set_compressor(self, compression: Any, **options: Any) -> None:
        """Collective. Compress otherwise from the next step on."""


class Turns:
    """Turns of one script: of the script as it is, of updates, then of gradients by compressor.

    ``begin``: puts an exchange of gradients in place of the script's, for good, and returns it. ``updates``: puts one
    of updates there for a while; None: it cannot.

    ``tell``: is given, after each turn, the compressor and the seconds of its steps.

    ``seconds``: of the timed steps on this rank, by compressor; ``""``: as the script was, if ``as_it_is`` was timed,
    and ``UPDATES``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        begin: Callable[[torch.optim.Optimizer], Swappable],
        updates: Callable[[torch.optim.Optimizer], AbstractContextManager[None]] | None = None,
        *,
        as_it_is: bool = True,
        tell: Callable[[str, list[float]], None] = lambda name, seconds: None,
    ) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.defaults = candidates_for(optimizer)
        left_out = "dgc" if sparsifier_for(optimizer) == "topk" else "topk"
        self._names = [*self.defaults, *(name for name in OTHERS if name not in (left_out, *self.defaults))]
        self._begin, self._as_it_is, self._tell = begin, as_it_is, tell
        self._updates = updates if takes_updates(optimizer) else None
        self._story = self._in_turns(optimizer)
        next(self._story)

    def step(self) -> bool:
        """Count a step that has ended; return whether all turns are over. The same on all ranks."""
        return next(self._story, True) is True

    def _in_turns(self, optimizer: torch.optim.Optimizer) -> Iterator[bool]:
        """Yield False until the next step has ended."""
        yield from self._timed(WARM, None)
        for _ in range(ROUNDS):
            if self._as_it_is:
                yield from self._turn("")
            if self._updates is not None:
                with self._updates(optimizer):
                    yield from self._turn(UPDATES)
        exchange = self._begin(optimizer)
        for _ in range(ROUNDS):
            for name in self._names:
                exchange.set_compressor(name)
                yield from self._turn(name)

    def _turn(self, name: str) -> Iterator[bool]:
        """Yield False until the steps of a turn have ended."""
        seconds = self.seconds.setdefault(name, [])
        yield from self._timed(TURN, seconds)
        self._tell(name, seconds[-TURN:])

    def _timed(self, steps: int, seconds: list[float] | None) -> Iterator[bool]:
        """Yield False until so many steps have ended, and one before them; note how long they took."""
        yield False
        for _ in range(steps):
            began = time.perf_counter()
            yield False
            if seconds is not None:
                seconds.append(time.perf_counter() - began)


def leave_out_notices() -> None:
    """Hide this library's warnings from now on: they are about compressors that the script has not named itself."""
    warnings.filterwarnings("ignore", message=r"AGM\d{3}: ")


# The watch.

# No plan changes while steps are timed.
STILL: dict[str, Any] = {"merging": "threshold", "check_every": 0}
GIVEN: dict[str, Any] = {"compression": NONE, **STILL}
LINK = "AGMERGE_LINK"
NOT_USED, NO_ANSWER = 3, 4  # exit codes: "do not use agmerge here", and no answer
ONE_WORKER = "only one worker runs, so nothing is exchanged. Start at least two, for example with --workers 2"
SEVERAL = (
    "the script has {count} DistributedDataParallel models, but advise can only time one. You can still add a line for "
    "each of them (docs/with_ddp.md)"
)
NO_MODEL = (
    "no DistributedDataParallel contains the parameters of its {optimizer}. If nothing else averages gradients, each "
    "worker trains a model of its own. For Horovod and FSDP2 see docs/use_with.md. Otherwise, the following makes it a "
    "script for several workers. Then run advise again"
)
OTHER_MODEL = (
    "its {optimizer} updates parameters that are not in its DistributedDataParallel, so each worker trains them alone. "
    "Put their model into DistributedDataParallel, then run advise again"
)
SPAWNS = (
    "it starts its workers itself (torch.multiprocessing), so advise cannot time them. For this test, call the "
    "function that each worker runs directly. Take its rank and the number of workers from RANK and WORLD_SIZE, which "
    "torchrun sets"
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
        self._watch: Watch | None = Watch(script)  # None: the script's model is in DistributedDataParallel
        self._pairs: list[tuple[str, str]] = []  # of a plain script: its names of optimizers and their models
        self._is_plain = False
        self._found: Script | None = None  # at the first step

    # -- what the script has ------------------------------------------------------------------------------------------

    def uses_ours(self, *, has_default: bool) -> None:
        """Note that the script has an optimizer of this library's, which tells of its steps by itself."""
        self._ours, self._has_default = True, has_default
        self._watch_no_more()

    def follows(self, turns: Turns, optimizer: torch.optim.Optimizer) -> None:
        """Note the turns of the script's own optimizer of this library's, for the table so far."""
        self._turns, self._main = turns, optimizer
        self._found = Script(advice.OURS, None, {})

    def watch(self) -> None:
        """Look, from now on, at what the script does by itself."""
        if self._watch is not None:
            self._watch.install()

    def _watch_no_more(self) -> None:
        if self._watch is not None:
            self._watch.uninstall()
            self._watch = None

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step of any optimizer of torch's."""
        if self._ours:
            return
        self.leave_if_done()
        if self._watch is not None:
            self._watch.stepped(optimizer)
        self._main = self._main or optimizer
        if optimizer is not self._main:
            return
        self.steps += 1
        if self._turns is None and not self._is_plain:
            self._begin(optimizer)
        if self._watch is not None and self._is_plain:
            self._pairs = advise_script.pairs(self.script, [*self._watch.habits]) or self._pairs
            if self.steps > WATCHED:
                self.give_up(self._plain())
            return
        assert self._turns is not None and self._found is not None
        try:
            over = self._turns.step()
        except (TypeError, ValueError) as refused:  # on all ranks alike, before anything is exchanged
            self.give_up(f"not supported: {refused}")
        if over:
            self.conclude(self._turns, optimizer, self._found)

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the script, and begin to take turns; end it with a message where no answer can be had."""
        models = advise_script.models()
        if len(models) > 1:
            self.give_up(SEVERAL.format(count=len(models)))
        framework = advice.DDP if models else advice.PLAIN
        holding = advise_script.is_model(models[0]) if models else advise_script.holding(optimizer)
        all_of_model = advise_script.optimizers_of(models[0]) if models else []
        found = {"model": holding, "optimizer": lambda each: each is optimizer}
        if len(all_of_model) > 1:
            found |= advise_script.known_as(all_of_model)
        self._found = script = advise_script.described(self.script, framework, found)
        if models and not advise_script.holds(models[0], optimizer):
            self.give_up(OTHER_MODEL.format(optimizer=type(optimizer).__name__))
        if not models:
            self._is_plain = True
            return
        self._watch_no_more()
        model, stepping = models[0], all_of_model if len(all_of_model) > 1 else optimizer
        optimizer = min(all_of_model or [optimizer], key=lambda each: len(candidates_for(each)))  # the strictest
        if model.process_group.size() == 1:
            self.give_up(ONE_WORKER)

        def compressed(_: torch.optim.Optimizer) -> Swappable:
            line = agmerge.integrations.ddp.compress
            exchange: Swappable = line(model, optimizer=stepping, scaler=script.scaler, **GIVEN)
            return exchange

        def updates(_: torch.optim.Optimizer) -> AbstractContextManager[None]:
            return exchanging_updates(model, optimizer, **STILL)

        # A GradScaler leaves out steps of one worker then, and the others would count on.
        refused = model.static_graph or script.scaler is not None or len(all_of_model) > 1
        offered = None if refused else updates
        self._turns = Turns(optimizer, compressed, offered, as_it_is=not self._link, tell=self._tell_turn)

    def _plain(self) -> str:
        """Return what to do with a script without DistributedDataParallel: lines to paste, and what else to change."""
        assert self._watch is not None and self._main is not None and self._found is not None
        watch, scaled = self._watch, self._found.scaler is not None
        watch.uninstall()
        told = NO_MODEL.format(optimizer=type(self._main).__name__)
        edits = watch.edits(self.script, dict(zip(watch.habits, (name for name, _ in self._pairs), strict=False)))
        if watch.averages is not None:
            return edits[0]
        passes = [max(habits.passes, default=1) for habits in watch.habits.values()]
        if len(self._pairs) != len(passes) or any(len(habits.passes) > 1 for habits in watch.habits.values()):
            return "\n".join([told, "", *edits, *advice.template(advice.PLAIN, scaled=scaled)])
        lines = advice.plain_lines(self._pairs, passes, self._found.names.get("scaler", "") if scaled else "")
        return "\n".join([told, "", *advice.changes(lines, edits, several=len(passes) > 1, scaled=scaled)])

    # -- the end ------------------------------------------------------------------------------------------------------

    def conclude(self, turns: Turns, optimizer: torch.optim.Optimizer, script: Script) -> None:
        """Collective. Print the advice on rank 0, and end the script on every rank."""
        seconds = agmerge.allgather_object(turns.seconds)
        found = self._facts(turns, optimizer, script, agmerge.size(), seconds)
        chosen = advice.choose(found)
        self.code = 0 if chosen.use else NOT_USED
        if agmerge.rank() == 0:
            told = json.dumps({**asdict(found), **asdict(chosen)}) if self._as_json else advice.text(found, chosen)
            sys.stdout.write(told + "\n")
            sys.stdout.flush()
        agmerge.barrier()
        raise Enough

    def _facts(
        self,
        turns: Turns,
        optimizer: torch.optim.Optimizer,
        script: Script,
        workers: int,
        of_workers: Sequence[Mapping[str, list[float]]],
    ) -> advice.Facts:
        """Return what was found. ``of_workers``: the seconds of steps by compressor, of those workers that tell."""
        candidates = []
        for name in of_workers[0]:
            told = told_cost(name, OTHERS.get(name), optimizer)
            if name == UPDATES:
                told = told_cost_of_updates(optimizer)
            everyones = [own[name] for own in of_workers]
            count = max(1, min(map(len, everyones)) // TURN)  # of turns
            by_turn = [[each[turn * TURN :][:TURN] for each in everyones] for turn in range(count)]
            took = tuple(map(advice.median_of_slowest, by_turn))
            whole = advice.median_of_slowest(everyones)
            candidates.append(advice.Candidate(name, whole, name in turns.defaults, told, took, USES.get(name, "")))
        base = next(one for name in ("", NONE) for one in candidates if one.name == name)
        return advice.Facts(
            script.framework,
            type(optimizer).__name__,
            workers,
            sum(one.numel() for group in optimizer.param_groups for one in group["params"]),
            base.seconds,
            tuple(one for one in candidates if one.name),
            base.turns,
            script.names,
            script.scaler is not None,
            self._has_default,
            self._link,
        )

    def stopped(self, why: str) -> NoReturn:
        """End the process, from another thread: print the table so far, of rank 0's own steps, and no advice."""
        self.say(f": {why} after {self.steps} of at most {STEPS} steps. No advice, but here is the table so far")
        turns, main, script = self._turns, self._main, self._found
        if os.environ.get("RANK", "0") == "0" and turns is not None and main is not None and script is not None:
            workers = int(os.environ.get("WORLD_SIZE", "1"))  # the first turns are before agmerge.init()
            timed = {name: [*own] for name, own in turns.seconds.items() if own}
            if "" in timed or NONE in timed:
                sys.stdout.write("\n".join(advice.table(self._facts(turns, main, script, workers, [timed]))) + "\n")
        self.code = NO_ANSWER
        code = self.exit_code()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _tell_turn(self, name: str, seconds: list[float]) -> None:
        """Write a line about a turn that has ended."""
        took = advice.milliseconds(statistics.median(seconds))
        self.say(f": step {self.steps} of at most {STEPS}: {took} per step {f'with {name}' if name else 'unmodified'}")

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
        if code is None and self._is_plain:  # a script of few steps has come to its end
            self.say(f": {self._plain()}")
            code = NO_ANSWER
        if code is None:  # the script has come to its end
            seen = f"{self.steps} steps of an optimizer, {len(advise_script.models())} DistributedDataParallel"
            hint = ". Use more epochs, or a smaller batch" if self.steps else ""
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
                    "sync='updates', merging='dear' and process_set= are not supported: advise only compares exchanges "
                    "of gradients"
                )
            self._turns = Turns(optimizer, lambda _: self, as_it_is=False, tell=advisor._tell_turn)
            advisor.follows(self._turns, optimizer)
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
