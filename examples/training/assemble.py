# SPDX-License-Identifier: Apache-2.0
"""Put together what ``train.py`` trains, from its command line: a task, its optimizer, their loop."""

from __future__ import annotations

from argparse import Namespace

import jobs
import torch
from jobs.base import Recipe, Settings

import agmerge
from training import optimizers
from training.loop import Loop, Way
from training.options import library_options, recipe_of


def loop_of(args: Namespace) -> tuple[Loop, int]:
    """Collective. Return the loop, which has trained nothing yet, and how many epochs the recipe has.

    Raises ``OSError``, ``TypeError`` or ``ValueError`` as :func:`train.train` does.
    """
    job = jobs.get(args.job)
    recipe, device = recipe_of(job, args), device_of(args)
    torch.manual_seed(args.seed)
    task = job.make(settings_of(args, recipe, device))
    torch.manual_seed(args.seed * agmerge.size() + agmerge.rank() + 1)  # for dropout: another one on every worker
    passes, options = args.batches_per_allreduce, library_options(args, job, task.model)
    updates = args.local_steps is not None or options.get("sync") == "updates"
    way = Way(passes, recipe.clip, args.amp, updates, args.uneven)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    if scaler.is_enabled() and not updates:
        options["scaler"] = scaler
    plain = optimizers.plain(recipe, task.model, optimizers.rate(recipe, agmerge.size(), passes))
    optimizer = optimizers.wrapped(plain, task.model, options, args.local_steps, passes)
    highest = [group["lr"] for group in optimizer.param_groups]  # before a schedule has its say
    steps = int(agmerge.allreduce(torch.tensor(task.passes(0) // passes), op=agmerge.Max))
    schedule = recipe.schedule.of(optimizer, max(1, steps), recipe.epochs, agmerge.size())
    if args.measure_selection:
        optimizer.measure_selection()
    return Loop(task, optimizer, schedule, way, scaler, device, highest), recipe.epochs


def settings_of(args: Namespace, recipe: Recipe, device: torch.device) -> Settings:
    """Return what the task is made from."""
    return Settings(
        recipe,
        args.data,
        args.seed,
        args.tiny,
        args.weights,
        args.tokenizer,
        agmerge.rank(),
        agmerge.size(),
        args.uneven,
        args.readers,
        device,
        args.init_checkpoint,
        args.vocab_file,
    )


def device_of(args: Namespace) -> torch.device:
    """Return this worker's GPU, if there are any, or the CPU. Workers share GPUs where there are fewer of them."""
    if args.no_cuda or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", agmerge.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
