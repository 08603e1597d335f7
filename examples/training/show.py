# SPDX-License-Identifier: Apache-2.0
"""Show, as text: the jobs, what one of them would do, and what came of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jobs
import torch
from options import described, planned
from torch import nn

import agmerge
from agmerge import testing
from training import optimizers
from training.options import library_options, recipe_of

CHECKED = ("nworkers", "nwpernode", "init_checkpoint", "vocab_file")  # flags that a training looks at, and no dry run
SHARES = ("accuracy", "top5", "f1", "exact")  # metrics that are parts of a whole


def table(results: dict[str, Any]) -> str:
    """Return the results, for people."""
    r = results
    link, dense = r["link_bytes"], r["link_bytes_dense"]
    rows = {
        "workers": f"{r['workers']} ({r['backend']} backend)",
        "compressor": described(r["settings"]),
        "plan": planned(r["settings"], r["buffers"]),
        **{
            f"test {name}": f"{value:.2%}" if name in SHARES else f"{value:.3f}" for name, value in r["metrics"].items()
        },
        **r["notes"],
        "elements sent": f"{r['density']:.2%} of all, small tensors included",
        "bytes sent": f"{r['bytes_sent'] / 1e6:.2f} MB per worker; dense {r['bytes_dense'] / 1e6:.2f} MB",
        "on the link": f"{link / 1e6:.2f} MB leave a worker; dense {dense / 1e6:.2f} MB"
        + (f" ({dense / link:.1f}x)" if link else ""),
        "seconds per step": f"{r['seconds_per_step']:.4f} (median)",
        "replicas": "bitwise equal" if r["replicas_equal"] else "DIFFERENT",
    }
    if r["reason"] not in ("done", "max-steps"):
        rows["ended"] = f"by {r['reason']}, after {r['step']} steps"
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def listing() -> str:
    """Return the jobs, a line each."""
    width = max(map(len, jobs.JOBS))
    return "\n".join(f"{name:<{width}}  {job.about}" for name, job in jobs.JOBS.items())


def plans(args: Namespace) -> str:
    """Return what would be trained, and how: nothing is read, and no memory is taken for the network.

    Raises ``TypeError`` or ``ValueError`` for options that do not go together, as training does.
    """
    job = jobs.get(args.job)
    model = outlined(partial(job.network, tiny=args.tiny))
    tensors = [parameter.numel() for parameter in model.parameters()]
    options = library_options(args, job, model)
    recipe = recipe_of(job, args)
    settings = settings_of(optimizers.plain(recipe, model, recipe.lr), model, options, args.local_steps)
    options.pop("model", None)
    how = ", ".join(f"{key}={value!r}" for key, value in options.items())
    wrapper = f"LocalOptimizer(every={args.local_steps}, " if args.local_steps else "DistributedOptimizer("
    lines = [f"{job.name}: {job.about}", f"{sum(tensors):,} parameters in {len(tensors)} tensors"]
    about = [f"  {key} {value}" for key, value in vars(recipe).items()]
    about += [f"  {flag} {value}" for flag in CHECKED if (value := getattr(args, flag)) is not None]
    return "\n".join([*lines, *about, f"agmerge.{wrapper}{how})", f"  {described(settings)}"])


def outlined(network: Callable[[], nn.Module]) -> nn.Module:
    """Return a network of ``network()`` whose parameters have their shapes and next to no memory.

    Each is one number in all its places: the library takes no parameters on the meta device.
    """
    with torch.device("meta"):
        model = network()
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}  # so that what layers share stays shared
    for module in model.modules():
        for name, own in list(module.named_parameters(recurse=False)):
            number = torch.zeros((), dtype=own.dtype)
            stand_in = nn.Parameter(number.expand(own.shape), own.requires_grad)
            setattr(module, name, stand_ins.setdefault(own, stand_in))
    return model


def settings_of(
    optimizer: torch.optim.Optimizer, model: nn.Module, options: Mapping[str, Any], local_steps: int | None
) -> dict[str, str]:
    """Return what the library makes of ``options`` with this optimizer, by a worker that is alone and trains nothing.

    Args:
        optimizer: of the parameters of ``model``, which may be :func:`outlined`.
        options: what the library is given.
        local_steps: steps that workers make by themselves between two exchanges; None: they exchange in every step.
    """

    def worker(rank: int) -> dict[str, str]:
        local = {} if local_steps is None else {"every": local_steps}
        kind = agmerge.DistributedOptimizer if local_steps is None else agmerge.LocalOptimizer
        wrapped = kind(optimizer, model.named_parameters(), **local, **options)
        wrapped.close()
        return dict(wrapped.settings)

    return testing.run(1, worker)[0]
