# SPDX-License-Identifier: Apache-2.0
"""Run ``python -m agmerge advise script.py ...``: predict each strategy's step time on this machine and network.

An unchanged training script runs, under its launcher, with an optimizer that watches itself. Once enough steps have
been measured, rank 0 prints the predicted step time of each strategy, and the script is ended on every rank.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import agmerge
from agmerge.options.arguments import Options
from agmerge.options.compressors import cast_name
from agmerge.planning import advice
from sparsifiers.registry import spelling

STEPS = 12  # trained before the table is printed, and one or two more where plans change


class Enough(BaseException):
    """Signal that ends a script with measured steps. No error, and not for ``except Exception`` to catch."""


class AdvisedOptimizer(agmerge.DistributedOptimizer):
    """Optimizer that ends the script with :class:`Enough` after ``STEPS`` steps."""

    def _set_up(self, optimizer: Any, named: Any, options: Options, *, are_new: bool) -> None:
        """Set up the optimizer with options that allow more than one strategy."""
        self._ended: list[float] = []  # when each step did, in seconds of perf_counter()
        super()._set_up(optimizer, named, widened(options), are_new=are_new)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Take a step; after the last one that is measured, print the table and end the script."""
        loss = super().step(closure)
        self._ended.append(time.perf_counter())
        exchange = self._reducer.exchange
        # Where the plan has just changed, on all ranks, no step has been measured with it.
        if len(self._ended) > STEPS and not exchange.group.outside and exchange.agreed.times.typical() is not None:
            self._conclude()
        return loss

    def _conclude(self) -> None:
        """Collective. Print the predicted times of strategies, on rank 0, and raise :class:`Enough` on every rank."""
        reducer, comm, measured = self._reducer, self._reducer.exchange.group.comm, self.measure()
        assert comm is not None
        typical = reducer.exchange.agreed.times.typical()
        seconds = float(np.median(np.diff(self._ended[-STEPS - 1 :])))
        if comm.rank == 0 and typical is not None:
            predicted = advice.predicted_step(self.plan, measured, max(0.0, seconds - typical.finish))
            rows = advice.compare(measured, seconds, typical.finish)
            sys.stdout.write(advice.text(rows, seconds, predicted, type(self._inner).__name__) + "\n")
            assert reducer.exchange.agreed.plans is not None  # it has measured
            now = reducer.exchange.agreed.plans.status()
            if now.wire != "auto":
                sys.stdout.write(f"with selected values in {now.wire}: {now.wire_why}\n")
            sys.stdout.flush()
        comm.barrier("advise").wait(reducer.exchange.agreed.config.guards.timeout)
        raise Enough


def widened(options: Options) -> Options:
    """Return the optimizer's options, changed so that there is more than one strategy.

    A script that sends every element is measured with exact top-k for these few steps.
    """
    if isinstance(options.merging, str) and spelling(options.merging) == "dear":
        return options
    if cast_name(options.compression) is not None:
        options = replace(options, compression="topk", memory="residual")
    return replace(options, exchange="auto")


def main(script: str, arguments: Sequence[str]) -> int:
    """Run ``script`` with ``arguments`` until its optimizer has measured enough. Return the exit code."""
    agmerge.DistributedOptimizer = agmerge.optimizer.DistributedOptimizer = AdvisedOptimizer  # type: ignore[misc]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except Enough:
        return 0
    sys.stderr.write(f"{script} ended before its optimizer had made {STEPS} steps: give it more to do\n")
    return 1
