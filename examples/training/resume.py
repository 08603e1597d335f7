# SPDX-License-Identifier: Apache-2.0
"""Say what a checkpoint of a training holds, and go on from one, with the same number of workers or another."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

import torch
from replicas import averaged_buffers
from torch.optim.lr_scheduler import ReduceLROnPlateau

import agmerge
from training.checkpoints import Checkpoints, State
from training.loop import COUNTED, Loop, Progress


def save(loop: Loop, checkpoints: Checkpoints, about: dict[str, Any]) -> None:
    """Collective. Write all that going on needs: parameters, the optimizer with its residuals, random states, counts.

    about: what is equal on all workers and goes into the files, too. With ``overlap=`` or DeAR what is under way is
    taken in first.
    """
    loop.optimizer.flush()
    common = {
        **about,
        "workers": agmerge.size(),
        "progress": asdict(progress_so_far(loop)),
        "schedule": loop.schedule.state_dict() if isinstance(loop.schedule, ReduceLROnPlateau) else {},
        "highest": loop.highest,
        "scaler": loop.scaler.state_dict(),
    }
    own = {"task": loop.task.state_dict(), "random": random_state(loop.device)}
    model = loop.task.model.state_dict()
    if agmerge.rank():  # parameters are rank 0's; running statistics are each worker's own
        model = {name: buffer for name, buffer in loop.task.model.named_buffers() if name in model}
    shared = None
    if checkpoints.portable:
        gathered = agmerge.gather_state(loop.optimizer)
        with averaged_buffers(loop.task.model), loop.optimizer.shared():
            whole = {name: value.clone() for name, value in loop.task.model.state_dict().items()}
        if agmerge.rank() == 0:
            shared = {**common, "model": whole, "optimizer": gathered}
    state = {**common, **own, "model": model, "optimizer": loop.optimizer.state_dict()}
    checkpoints.save(loop.progress.step, state, shared)


def progress_so_far(loop: Loop) -> Progress:
    """Return the progress with this run's totals in it; the loop's own goes on counting from before."""
    totals = loop.stats()
    return Progress(**{**vars(loop.progress), "counted": {name: totals[name] for name in COUNTED}})


def begin(loop: Loop, checkpoints: Checkpoints, job: str, resuming: bool) -> State | None:
    """Collective. Go on from the last checkpoint of all workers, if ``resuming``; return it, or None where none is.

    Raises ``ValueError`` where there are checkpoints that this run would mix its own with: of another job, of other
    numbers of workers, or any where it begins anew.
    """
    if resuming:
        return go_on(loop, checkpoints, job)
    if any(agmerge.allgather_object(checkpoints.steps())):
        raise ValueError(f"{checkpoints.folder} has checkpoints: --resume goes on from them, or choose another folder")
    return None


def go_on(loop: Loop, checkpoints: Checkpoints, job: str) -> State | None:
    """Collective. Put the last checkpoint of all workers back; return it, or None where there is none.

    Raises ``ValueError`` where there are some, but none for so many workers, or of another job.
    """
    newest = checkpoints.newest()
    if newest is None:
        if any(agmerge.allgather_object(checkpoints.steps())):
            raise ValueError(checkpoints.describe())
        return None
    step, portable = newest
    state = checkpoints.load(step, portable)
    if state["job"] != job:
        raise ValueError(f"--resume: {checkpoints.folder} has checkpoints of {state['job']}, not of {job}")
    groups = [dict(group) for group in loop.optimizer.param_groups]
    loop.task.model.load_state_dict(state["model"], strict=False)
    agmerge.broadcast_parameters(list(loop.task.model.named_parameters()), root_rank=0)
    loop.optimizer.load_state_dict(state["optimizer"])
    loop.scaler.load_state_dict(state["scaler"])
    loop.progress = Progress(**state["progress"])
    if agmerge.rank():
        loop.progress.loss = state["progress"]["loss"] if not portable else 0.0
    find_place(loop, state["workers"])
    restore_rates(loop, groups, state)
    if not portable:
        loop.task.load_state_dict(state["task"])
        restore_random(state["random"], loop.device)
    return state


def find_place(loop: Loop, before: int) -> None:
    """Find the place in the epoch, where ``before`` workers were at it.

    As many of its samples were taken as if these workers had done so, to a step of all of them.
    """
    now, passes = loop.progress, loop.way.passes
    now.place = min(now.place * before // (agmerge.size() * passes), loop.steps()) * passes


def restore_rates(loop: Loop, groups: list[dict[str, Any]], state: State) -> None:
    """Give the optimizer the rates of this run's recipe at the place that was reached.

    groups: those that the schedule was made with, whose rates are for so many workers, and as the command line says. A
    schedule that goes by the metric stays as far below its highest rate as it was.
    """
    before = state["optimizer"]["param_groups"]
    lowered = [group["lr"] / highest for group, highest in zip(before, state["highest"], strict=True)]
    for group, fresh in zip(loop.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in fresh.items() if key != "params"})
    if isinstance(loop.schedule, ReduceLROnPlateau):
        loop.schedule.load_state_dict(state["schedule"])
        for group, by in zip(loop.optimizer.param_groups, lowered, strict=True):
            group["lr"] *= by
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer comes before these
        loop.advance(loop.progress.epoch * loop.steps() + loop.progress.place // loop.way.passes)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's own generators, which dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what :func:`random_state` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
