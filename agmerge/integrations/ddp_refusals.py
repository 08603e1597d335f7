# SPDX-License-Identifier: Apache-2.0
"""Refuse models and options that ``ddp.compress`` cannot take, by name, each with advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agmerge.options import typed
from agmerge.options.typed import Options
from agmerge.runtime import workers
from agmerge.step.config import UPDATES

# By class, and the package that it is of: advice for a model in it.
OTHERS = {
    ("torch", "DataParallel"): "start one process for each GPU with torchrun, and use DistributedDataParallel",
    ("torch", "FullyShardedDataParallel"): (
        "it shards and flattens parameters. Use fully_shard() instead, and wrap its optimizer in "
        "agmerge.DistributedOptimizer (docs/with_fsdp2.md)"
    ),
    ("torch", "FSDPModule"): (
        "it shards parameters. Wrap its optimizer in agmerge.DistributedOptimizer, with process_set= the ranks that "
        "hold the same shard (docs/with_fsdp2.md)"
    ),
    ("torch", "DDP"): "replicate() does not allow another exchange. Use DistributedDataParallel",
    ("deepspeed", "DeepSpeedEngine"): (
        "DeepSpeed averages gradients in its own engine. With ZeRO stage 0, use DistributedDataParallel instead"
    ),
    ("torchft", "DistributedDataParallel"): (
        "torchft uses the only communication hook, and its groups change between steps. Use torch's "
        "DistributedDataParallel"
    ),
}

# Options of DistributedOptimizer that mean nothing here, and what to do instead of each.
SAID_ELSEWHERE = {
    "backward_passes_per_step": "accumulate inside model.no_sync(), and run the last backward pass of a step outside",
    "groups": "merging= sets which gradients share a message",
    "num_groups": "merging= sets which gradients share a message",
    "process_set": "it is always the model's process_group",
    "model": "it is the first argument",
    "sparse_as_dense": "build embeddings with sparse=False",
    "unused": "parameters that no rank used are not changed, as with find_unused_parameters=True",
}


def checked_model(model: Any) -> DistributedDataParallel:
    """Return the DistributedDataParallel that ``model`` is, or that torch.compile has wrapped.

    Raises ``TypeError`` for anything else, and ``ValueError`` for one with gradients that do not go through its hook.
    """
    if isinstance(model, nn.Module):
        model = model._modules.get("_orig_mod", model)
    for kind in type(model).__mro__:
        advice = OTHERS.get((kind.__module__.partition(".")[0], kind.__name__))
        if advice is not None:
            raise TypeError(
                f"ddp.compress(): a model of type {type(model).__name__} of {kind.__module__} is not supported: "
                f"{advice}"
            )
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ddp.compress() requires a DistributedDataParallel, got {type(model).__name__}. Wrap the model first, or "
            "wrap only its optimizer in agmerge.DistributedOptimizer."
        )
    for problem in _problems(model):
        raise ValueError(f"ddp.compress(): {problem}")
    return model


def _problems(model: DistributedDataParallel) -> Iterator[str]:
    """Yield the reasons why gradients do not go through the one hook, each with advice."""
    if model.mixed_precision is not None:
        yield "mixed_precision= uses the only communication hook. Use torch.autocast instead"
    if _logged(model).get("comm_hook"):
        hooks = [str(getattr(hook, "__module__", "")) for hook, _ in getattr(model, "_comm_hooks", ())]
        ours = any(module.startswith("agmerge.") for module in hooks)
        other = (
            "use the object that the first compress() returned"
            if ours
            else ("remove the other hook (fp16_compress_hook is compression='fp16')")
        )
        yield f"DistributedDataParallel already has a communication hook, and supports only one: {other}"
    if model._delay_all_reduce_params:
        yield "delay_all_reduce_named_params= averages gradients outside the hook. Remove it"
    if getattr(model, "skip_all_reduce_unused_params", False):
        yield (
            "skip_all_reduce_unused_params=True skips buckets in which other ranks may have sent values. Remove it: "
            "parameters that no rank used are not changed"
        )
    if getattr(model, "_use_python_reducer", False):
        yield "torch._dynamo.config.optimize_ddp='python_reducer' has no buckets. Use its default"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        yield "optimizers step inside its backward pass, before gradients are averaged. Call step() afterwards"
    embeddings = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    if any(embedding.sparse for embedding in embeddings):
        yield "an embedding has sparse=True, and sparse gradients are not supported. Create it with sparse=False"


def _logged(model: DistributedDataParallel) -> Mapping[str, Any]:
    """Return DistributedDataParallel's logging data; nothing else knows of hooks that are built in."""
    return dict(model._get_ddp_logging_data())  # type: ignore[no-untyped-call]


def checked_options(given: Mapping[str, Any], model: DistributedDataParallel) -> Options:
    """Collective. Return the options of ``compress``: those of DistributedOptimizer that mean something here.

    Joins the workers, if that has not happened. Raises ``TypeError`` for names that it does not know, and
    ``ValueError`` for options that are said elsewhere.
    """
    for name in given:
        if name in SAID_ELSEWHERE:
            raise ValueError(f"ddp.compress() does not support {name}=: {SAID_ELSEWHERE[name]}")
    typed.refuse_unknown("ddp.compress", given)
    merging = given.get("merging")
    if (getattr(merging, "name", None) or merging) == "dear":
        raise ValueError(
            "merging='dear' is not supported with DistributedDataParallel, which needs averaged gradients at the end "
            "of backward(). Use another merging, or the plain model with agmerge.DistributedOptimizer."
        )
    _check_workers()
    options = Options(**given, process_set=_process_set(model))
    if options.sync == UPDATES and model.static_graph:
        raise ValueError(
            "sync='updates' is not supported with DistributedDataParallel(static_graph=True), which averages "
            "gradients in its first pass. Remove static_graph."
        )
    return options


def _process_set(model: DistributedDataParallel) -> list[int] | None:
    """Return the ranks of the world that the model averages over; None: all."""
    ranks = sorted(dist.get_process_group_ranks(model.process_group))
    return None if len(ranks) == dist.get_world_size() else ranks


def _check_workers() -> None:
    """Collective. Take the workers of torch.distributed; raise ``ValueError`` where agmerge has others already."""
    if not dist.is_initialized():
        raise ValueError(
            "ddp.compress(): the process group of the model is destroyed. Create a new group and a new "
            "DistributedDataParallel."
        )
    if not workers.is_initialized():
        workers.init("torch")
    if workers.backend_name() != "torch" and dist.get_world_size() > 1:
        raise ValueError(
            f"ddp.compress() requires torch.distributed, but agmerge.init() uses {workers.backend_name()!r}. Call "
            "agmerge.init('torch') instead, or remove the call."
        )
