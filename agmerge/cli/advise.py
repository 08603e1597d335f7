# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge advise script.py ...``: try compressors in the first steps of a script, and say what to do.

The script is one that has never heard of this library, or one that uses it. It runs in workers that are started here,
or under its own launcher, and is ended on every rank after some eighty steps. Its file is not changed.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

import agmerge
from agmerge.backends import registry
from agmerge.backends.horovod_mpi import cores
from agmerge.cli.advise_turns import OTHERS, STEPS, Enough, Swappable, Turns
from agmerge.options.arguments import Options
from agmerge.options.named_costs import told_cost
from agmerge.planning import advice
from agmerge.step.updates import UPDATES
from sparsifiers.quantising.choice import NONE
from sparsifiers.registry import spelling

# No plan changes while steps are timed.
GIVEN: dict[str, Any] = {"compression": NONE, "merging": "threshold", "check_every": 0}
NOT_USED, NO_ANSWER = 3, 4  # exit codes: "do not use agmerge here", and that nothing can be said
ONE_WORKER = "one worker exchanges nothing: start at least two, for example by --workers 2, without a launcher"
# By the modules that call a model.
CALLERS = {
    "transformers.trainer": advice.TRAINER,
    "lightning": advice.LIGHTNING,
    "pytorch_lightning": advice.LIGHTNING,
}


class Advisor:
    """Watch over one script. ``as_json``: print the result as JSON. There is one in a process."""

    def __init__(self, script: str, as_json: bool, result: str) -> None:
        self.script, self._as_json, self._result = script, as_json, result
        self.models: list[DistributedDataParallel] = []
        self.code: int | None = None  # the exit code, once it is known
        self.steps = 0  # of the first optimizer that steps
        self._ours = False  # the script has a DistributedOptimizer
        self._main: torch.optim.Optimizer | None = None
        self._turns: Turns | None = None
        self._framework = ""

    # -- what the script has ------------------------------------------------------------------------------------------

    def called(self, module: torch.nn.Module, *_: object) -> None:
        """Note a model that exchanges its gradients, at its first forward pass, and the framework that calls it."""
        if not isinstance(module, DistributedDataParallel) or any(module is model for model in self.models):
            return
        self.models.append(module)
        frame, callers = sys._getframe(1), []
        while frame.f_back is not None:
            frame = frame.f_back
            callers.append(str(frame.f_globals.get("__name__", "")))
        found = (name for start, name in CALLERS.items() if any(caller.startswith(start) for caller in callers))
        self._framework = next(found, advice.ACCELERATE if uses_accelerate() else advice.DDP)

    def uses_ours(self) -> None:
        """Note that the script has an optimizer of this library's, which tells of its steps by itself."""
        self._ours = True

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
            self._check()
            self._turns = Turns(optimizer, self._compressed)
        if self._turns.step():
            self.conclude(self._turns, optimizer, self._framework)

    def _check(self) -> None:
        """End the script with a message where no answer can be had."""
        if len(self.models) != 1:
            self.give_up(
                f"its optimizer steps, and it has {len(self.models)} DistributedDataParallel models; one is needed. "
                "A script without one trains each worker by itself: put the line for plain PyTorch into it, and ask "
                "again"
            )
        if self.models[0].process_group.size() == 1:
            self.give_up(ONE_WORKER)

    def _compressed(self, optimizer: torch.optim.Optimizer) -> Swappable:
        exchange: Swappable = agmerge.integrations.ddp.compress(self.models[0], optimizer=optimizer, **GIVEN)
        return exchange

    # -- the end ------------------------------------------------------------------------------------------------------

    def conclude(self, turns: Turns, optimizer: torch.optim.Optimizer, framework: str) -> None:
        """Collective. Print the advice on rank 0, and end the script on every rank."""
        seconds = {name: advice.median_of_slowest(agmerge.allgather_object(own)) for name, own in turns.seconds.items()}
        candidates = tuple(
            advice.Candidate(name, took, name in turns.defaults, told_cost(name, OTHERS.get(name), optimizer))
            for name, took in seconds.items()
            if name
        )
        parameters = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
        now = seconds.get("", seconds.get(NONE, 0.0))
        found = advice.Facts(framework, type(optimizer).__name__, agmerge.size(), parameters, now, candidates)
        chosen = advice.choose(found)
        self.code = 0 if chosen.use else NOT_USED
        if agmerge.rank() == 0:
            told = json.dumps({**asdict(found), **asdict(chosen)}) if self._as_json else advice.text(found, chosen)
            sys.stdout.write(told + "\n")
            sys.stdout.flush()
        agmerge.barrier()
        raise Enough

    def give_up(self, why: str) -> None:
        """End the script: no advice can be given."""
        sys.stderr.write(f"agmerge advise: {self.script}: {why}\n")
        sys.stderr.flush()
        self.code = NO_ANSWER
        raise Enough

    def leave_if_done(self) -> None:
        """End the process where the script has caught what was to end it, and goes on."""
        if self.code is not None:
            sys.stdout.flush()
            os._exit(self.exit_code())

    def exit_code(self) -> int:
        """Return this process's exit code, and write the script's into the file of ``--result``."""
        code = self.code
        if code is None:  # the script has come to its end
            seen = f"{self.steps} steps of an optimizer, {len(self.models)} DistributedDataParallel"
            sys.stderr.write(f"agmerge advise: {self.script} ended too early, after {seen}; {STEPS} steps are needed\n")
            code = NO_ANSWER
        if self._result and os.environ.get("RANK") == "0":
            Path(self._result).write_text(str(code))
        return 0 if self._result or code == NOT_USED else code


def uses_accelerate() -> bool:
    """Return whether the script has an Accelerator."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.PartialState._shared_state)


def advised(advisor: Advisor) -> type[agmerge.DistributedOptimizer]:
    """Return the optimizer that takes the place of the script's: it compresses by turns, and ends the script."""

    class AdvisedOptimizer(agmerge.DistributedOptimizer):
        def _set_up(self, optimizer: Any, named: Any, options: Options, *, are_new: bool) -> None:
            advisor.uses_ours()
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
                advisor.conclude(self._turns, self._inner, advice.OURS)
            return loss

    return AdvisedOptimizer


def start(script: str, arguments: Sequence[str], flags: Sequence[str], workers: int) -> int:
    """Start workers on this machine, by torchrun, each of which runs ``script``; return the exit code."""
    sys.stderr.write(f"agmerge advise: runs {STEPS} steps or so of {script}, which writes what it writes in them\n")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", "-m", "agmerge", "advise"]
        environment = {"OMP_NUM_THREADS": str(max(1, cores() // workers)), **os.environ}
        subprocess.run([sys.executable, *run, *flags, "--result", str(file), script, *arguments], env=environment)
        return int(file.read_text()) if file.exists() else NO_ANSWER


def main(script: str, arguments: Sequence[str], *, as_json: bool, patience: float, workers: int, result: str) -> int:
    """Run ``script`` with ``arguments`` until enough was measured, ``patience`` seconds at most; return the exit code.

    Without a launcher it is started by so many ``workers``. ``result``: a file for the exit code, which a launcher
    would take for a failure.
    """
    if not os.path.isfile(script):
        sys.stderr.write(f"agmerge advise: there is no script {script}\n")
        return NO_ANSWER
    if workers < 2 or not patience > 0:
        sys.stderr.write(
            f"agmerge advise: --workers {workers} --patience {patience:g}: two workers and more, seconds > 0\n"
        )
        return NO_ANSWER
    if not registry.has_launcher(os.environ):
        flags = [*(["--json"] if as_json else []), "--patience", str(patience)]
        return start(script, arguments, flags, workers)
    return watched(Advisor(script, as_json, result), arguments, patience)


def watched(advisor: Advisor, arguments: Sequence[str], patience: float) -> int:
    """Run the script of ``advisor`` until it ends; return the exit code."""
    script = advisor.script
    agmerge.DistributedOptimizer = agmerge.optimizer.DistributedOptimizer = advised(advisor)  # type: ignore[misc]
    hooks = register_module_forward_pre_hook(advisor.called), register_optimizer_step_post_hook(advisor.stepped)
    over = threading.Event()

    def guard() -> None:
        if not over.wait(patience):
            told = f"{script}: {advisor.steps} of {STEPS} steps in {patience:g} s (--patience)"
            sys.stderr.write(f"agmerge advise: {told}\n")
            sys.stderr.flush()
            os._exit(NO_ANSWER)

    threading.Thread(target=guard, name="agmerge advise", daemon=True).start()
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except (Enough, SystemExit):
        pass
    finally:
        over.set()
        for hook in hooks:
            hook.remove()
    return advisor.exit_code()
