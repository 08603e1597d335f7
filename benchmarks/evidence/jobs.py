# SPDX-License-Identifier: Apache-2.0
"""Trainings side by side: processes with one thread each that make one training after another.

A process says each second how far it is. It ends when its standard input does, so that none outlives the command.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from evidence.models import SIZES, loss_of
from evidence.text import Corpus
from evidence.training import Stopped, Training, first_model, train_in_memory

TRIAL, TRIAL_STEPS = "trial", 6  # a message's kind; steps that are timed
LATER = 1.15  # a training may take so many times the seconds that others took for as many tokens
CLOSING = 15.0  # seconds that the last checkpoints, the table and the picture may take


class Failed(RuntimeError):
    """Training that has ended with an error."""


class Job:
    """Process that makes trainings. ``number``: its place among all; ``heard``: where its messages go."""

    def __init__(self, number: int, heard: queue.Queue[tuple[int, dict[str, Any]]], device: str) -> None:
        self.training: Training | None = None  # under way
        self.first: int | None = None  # step that it began or resumed at; None: not heard yet
        self.step = 0  # that it is at
        self.began = 0.0  # when it began
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(Path(__file__).parents[1] / "prove.py"), "--job", f"{number}:{device}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        threading.Thread(target=self._listen, args=(number, heard), daemon=True).start()

    def begin(self, training: Training, corpus: Corpus, folder: Path) -> None:
        """Begin a training, or resume it from its checkpoint in ``folder``."""
        self.training, self.first, self.step, self.began = training, None, 0, time.monotonic()
        place = {"folder": corpus.folder, **corpus.facts()}
        self.say({"training": asdict(training), "corpus": place, "checkpoint": str(folder / f"{training.name}.pt")})

    def at(self, step: int) -> None:
        """Note how far the training is."""
        self.first = step if self.first is None else self.first
        self.step = step

    def end(self) -> None:
        """Note that the training has ended."""
        self.training = None

    def say(self, message: dict[str, Any]) -> None:
        """Send a message, unless the process has ended."""
        if self._process.stdin is not None and self._process.poll() is None:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _listen(self, number: int, heard: queue.Queue[tuple[int, dict[str, Any]]]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard.put((number, json.loads(line)))
        heard.put((number, {"error": f"the process ended with status {self._process.wait()}"}))


class Jobs:
    """Several processes, and what they are to do.

    Args:
        count: trainings side by side.
        device: "cpu" or one of torch's names of a GPU.
        tell: is called with a line for the user.
        deadline: of ``time.monotonic()``; None: there is none.
    """

    def __init__(self, count: int, device: str, tell: Callable[[str], None], deadline: float | None = None) -> None:
        self._heard: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._jobs = [Job(number, self._heard, device) for number in range(count)]
        self._tell, self._deadline = tell, deadline
        self._spent: dict[str, list[float]] = {}  # seconds for a token of one job, by contender
        self._told = time.monotonic()  # when progress was told

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.close()

    def seconds_per_token(self, size: str, batch: int) -> float:
        """Return the seconds that a token of dense training takes each job, while all of them train."""
        for job in self._jobs:
            job.say({TRIAL: {"size": size, "batch": batch}})
        answers = []
        while len(answers) < len(self._jobs):
            answer = self._heard.get()[1]
            if "error" in answer:
                raise Failed(answer["error"])
            answers.append(answer[TRIAL])
        return max(answers)

    def make(
        self,
        todo: Sequence[Training],
        corpus: Corpus,
        folder: Path,
        on_row: Callable[[dict[str, Any]], None],
    ) -> list[Training]:
        """Make these trainings, in order, and return those that there was no time for.

        Args:
            todo: the trainings.
            corpus: their text.
            folder: of checkpoints.
            on_row: is called with the row of each training that has ended.

        Raises:
            Failed: If a training has ended with an error.
            KeyboardInterrupt: After all checkpoints were written.
        """
        left, total, stopped = list(todo), len(todo), []
        interrupted, stopping = False, None  # the time at which all were asked to stop
        while True:
            for job in self._jobs:
                if job.training is None and left and stopping is None and self._fits(left[0]):
                    job.begin(left.pop(0), corpus, folder)
            busy = [job for job in self._jobs if job.training is not None]
            if not busy or (stopping is not None and time.monotonic() - stopping > CLOSING - 5.0):
                break
            try:
                self._answer(self._heard.get(timeout=1.0), on_row, stopped)
            except queue.Empty:
                pass
            except KeyboardInterrupt:
                interrupted = True
                self._tell("interrupted: writing checkpoints")
            late = self._deadline is not None and time.monotonic() > self._deadline - CLOSING
            if (late or interrupted) and stopping is None:
                stopping = time.monotonic()
                for job in busy:
                    job.say({"stop": True})
            if time.monotonic() - self._told > 20.0:
                self._progress(left, total)
        if interrupted:
            raise KeyboardInterrupt
        return [*stopped, *(job.training for job in busy if job.training is not None), *left]

    def _answer(
        self, heard: tuple[int, dict[str, Any]], on_row: Callable[[dict[str, Any]], None], stopped: list[Training]
    ) -> None:
        job, answer = self._jobs[heard[0]], heard[1]
        if "step" in answer:
            job.at(answer["step"])
        elif job.training is not None and "row" in answer:
            made = job.training.tokens * (1 - (job.first or 0) / job.training.steps)  # since it was resumed
            took = time.monotonic() - job.began
            self._spent.setdefault(job.training.contender, []).append(took / made)
            job.end()
            on_row(answer["row"])
        elif job.training is not None and "stopped" in answer:
            stopped.append(job.training)
            job.end()
        elif "error" in answer:
            raise Failed(f"{job.training}: {answer['error']}")

    def _fits(self, training: Training) -> bool:
        """Return whether there is time for a training."""
        needed = self._needed(training)
        if self._deadline is None or needed is None:
            return True
        return time.monotonic() + LATER * needed < self._deadline - CLOSING

    def _needed(self, training: Training) -> float | None:
        """Return the seconds that a training takes, by those before it; None: there were none."""
        known = self._spent.get(training.contender) or [one for spent in self._spent.values() for one in spent]
        return training.tokens * sum(known) / len(known) if known else None

    def _progress(self, left: Sequence[Training], total: int) -> None:
        """Tell how many trainings have ended, where the others are, and the time left."""
        self._told = time.monotonic()
        busy = [(job, job.training) for job in self._jobs if job.training is not None]
        here = ", ".join(
            f"{one.contender} W={one.workers} seed {one.seed} {job.step / one.steps:.0%}" for job, one in busy
        )
        now = time.monotonic()
        under_way = [
            (self._needed(one), now - job.began, (job.first or 0) / one.steps, job.step / one.steps)
            for job, one in busy
        ]
        seconds = seconds_left(under_way, [self._needed(training) for training in left])
        ends = (
            f"about {seconds / len(self._jobs) / 60:.0f} min left"
            if any(job.step > (job.first or 0) for job, _ in busy)
            else ""
        )
        if self._deadline is not None:
            ends = f"at most {max(0.0, self._deadline - time.monotonic()) / 60:.1f} min left"
        most = "" if self._deadline is None else "at most "
        count = f"{total - len(left) - len(busy)} of {most}{total} trainings"
        self._tell("; ".join(part for part in (count, here, ends) if part))


def seconds_left(
    under_way: Sequence[tuple[float | None, float, float, float]], waiting: Sequence[float | None]
) -> float:
    """Return the seconds that trainings still take, one after another.

    Args:
        under_way: of each training that has begun: the seconds that one like it took (None: unknown), the seconds since
            it was begun or resumed, the part that was done then (below 1), and the part that is done now (up to 1).
        waiting: of each other training: the seconds that one like it took (None: unknown).
    """
    wholes, ahead = [], 0.0
    for needed, spent, before, done in under_way:
        known = spent / (done - before) if needed is None and done > before else needed or 0.0
        here = max(known * (1 - before), spent)
        wholes.append(here / (1 - before))
        ahead += here - spent
    usual = sum(wholes) / max(1, len(wholes))
    return ahead + sum(usual if needed is None else needed for needed in waiting)


# In the process of a job.


def serve(job: str, source: TextIO, answers: TextIO) -> None:
    """Make the trainings that lines of ``source`` ask for, until it ends.

    Args:
        job: number of the job and its device, such as "0:cpu".
        source: a line of JSON for each training.
        answers: where lines of JSON go.
    """
    number, _, device = job.partition(":")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command asks for a checkpoint then
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU; nothing on the host
    if device == "cpu" and hasattr(os, "sched_setaffinity"):
        # Ranks are threads of which one has Python's lock at a time: it must not wander between cores.
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[int(number) % len(allowed)]})
    asked: queue.Queue[dict[str, Any]] = queue.Queue()
    stop = threading.Event()

    def listen() -> None:
        for line in source:
            message = json.loads(line)
            stop.set() if "stop" in message else asked.put(message)
        os._exit(0)  # the command has ended, however it did

    threading.Thread(target=listen, daemon=True).start()

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    while True:
        try:
            answer(_answer_to(asked.get(), device, stop, answer))
        except Stopped:
            answer({"stopped": True})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def _answer_to(
    message: dict[str, Any], device: str, stop: threading.Event, answer: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    if TRIAL in message:
        return {TRIAL: timed(message[TRIAL]["size"], message[TRIAL]["batch"], device)}
    training, corpus = Training(**message["training"]), Corpus(**message["corpus"])
    told = [0.0]

    def on_progress(step: int) -> None:
        if time.monotonic() - told[0] > 1.0:
            told[0] = time.monotonic()
            answer({"step": step})

    place = Path(message["checkpoint"])
    return {"row": train_in_memory(training, corpus, place, device=device, stop=stop, on_progress=on_progress)}


def timed(size: str, batch: int, device: str) -> float:
    """Return the seconds of a token in a few steps of a model."""
    training = Training(size, "dense", "adamw", 1, batch, batch, 0, 0.0)
    model = first_model(training).to(device)
    rows = torch.zeros(batch // SIZES[size].context, SIZES[size].context + 1, dtype=torch.long, device=device)
    for step in range(TRIAL_STEPS + 2):
        if step == 2:
            began = time.perf_counter()
        loss_of(model, rows).backward()
        rows[0, 0].item()  # waits for a GPU
    return (time.perf_counter() - began) / TRIAL_STEPS / batch
