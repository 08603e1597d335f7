# SPDX-License-Identifier: Apache-2.0
"""Refuse models and options that ``ddp.compress`` cannot take, by name, each with advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agmerge.options import keywords
from agmerge.options.arguments import Options
from agmerge.runtime import workers
from agmerge.step.updates import UPDATES

# By class, and the package that it is of: advice for a model in it.
OTHERS = {
    ("torch", "DataParallel"): "start a process for each GPU, by torchrun, and use DistributedDataParallel",
    ("torch", "FullyShardedDataParallel"): (
        "it shards parameters, and flattens them: use fully_shard() instead, and wrap its optimizer in "
        "agmerge.DistributedOptimizer (docs/with_fsdp2.md)"
    ),
    ("torch", "FSDPModule"): (
        "it shards parameters: wrap its optimizer in agmerge.DistributedOptimizer, with process_set= the ranks that "
        "hold the same shard (docs/with_fsdp2.md)"
    ),
    ("torch", "DDP"): "replicate() has no place for another exchange: use DistributedDataParallel",
    ("deepspeed", "DeepSpeedEngine"): (
        "DeepSpeed averages gradients in its own engine: with ZeRO stage 0 use DistributedDataParallel instead"
    ),
    ("torchft", "DistributedDataParallel"): (
        "torchft's takes the one hook that there is, and its groups change between steps: use torch's "
        "DistributedDataParallel"
    ),
}

# Options of DistributedOptimizer that mean nothing here, and what to do instead of each.
SAID_ELSEWHERE = {
    "backward_passes_per_step": "accumulate in model.no_sync(), and leave it for the last backward pass of a step",
    "groups": "merging= says which gradients share a message",
    "num_groups": "merging= says which gradients share a message",
    "process_set": "it is the model's process_group",
    "model": "it is the first argument",
    "sparse_as_dense": "build embeddings with sparse=False",
    "unused": "what no rank has used is left alone, as find_unused_parameters=True has it",
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
            raise TypeError(f"ddp.compress(): the model is a {type(model).__name__} of {kind.__module__}: {advice}")
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ddp.compress() takes a DistributedDataParallel, not {type(model).__name__}: wrap the model first, or "
            "leave it as it is and wrap its optimizer in agmerge.DistributedOptimizer"
        )
    for problem in _problems(model):
        raise ValueError(f"ddp.compress(): {problem}")
    return model


def _problems(model: DistributedDataParallel) -> Iterator[str]:
    """Yield the reasons why gradients do not go through the one hook, each with advice."""
    if model.mixed_precision is not None:
        yield "mixed_precision= takes the one hook that there is; use torch.autocast instead"
    if _logged(model).get("comm_hook"):
        hooks = [str(getattr(hook, "__module__", "")) for hook, _ in getattr(model, "_comm_hooks", ())]
        ours = any(module.startswith("agmerge.") for module in hooks)
        other = "it is compressed already, by what the first compress() has returned" if ours else (
            "leave out the other: fp16_compress_hook is compression='fp16'"
        )
        yield f"a hook is registered already, and DistributedDataParallel takes one; {other}"
    if model._delay_all_reduce_params:
        yield "delay_all_reduce_named_params= averages gradients outside of the hook; leave it out"
    if getattr(model, "skip_all_reduce_unused_params", False):
        yield (
            "skip_all_reduce_unused_params=True leaves out buckets, in which others may have sent something; leave it "
            "out: what no rank has used is left alone anyway"
        )
    if getattr(model, "_use_python_reducer", False):
        yield "torch._dynamo.config.optimize_ddp='python_reducer' has no buckets; leave it at its default"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        yield "optimizers step in its backward pass, before gradients are combined; step after it"
    embeddings = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    if any(embedding.sparse for embedding in embeddings):
        yield "an embedding has sparse=True, whose gradients have no place in a message; build it with sparse=False"


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
            raise ValueError(f"ddp.compress() takes no {name}=: {SAID_ELSEWHERE[name]}")
    keywords.refuse_unknown("ddp.compress", given)
    merging = given.get("merging")
    if (getattr(merging, "name", None) or merging) == "dear":
        raise ValueError(
            "merging='dear' applies updates in the next forward, and DistributedDataParallel has them at the end of "
            "backward(): use another merging, or the plain model with agmerge.DistributedOptimizer"
        )
    _check_workers()
    options = Options(**given, process_set=_process_set(model))
    if options.sync == UPDATES and model.static_graph:
        raise ValueError(
            "sync='updates': DistributedDataParallel(static_graph=True) cannot run its first pass without averaging; "
            "leave static_graph out, as no gradient is averaged"
        )
    return options


def _process_set(model: DistributedDataParallel) -> list[int] | None:
    """Return the ranks of the world that the model averages over; None: all."""
    ranks = sorted(dist.get_process_group_ranks(model.process_group))
    return None if len(ranks) == dist.get_world_size() else ranks


def _check_workers() -> None:
    """Collective. Take the workers of torch.distributed; raise ``ValueError`` where agmerge has others already."""
    if not dist.is_initialized():
        raise ValueError("ddp.compress(): the process group of the model is destroyed; make both anew")
    if not workers.is_initialized():
        workers.init("torch")
    if workers.backend_name() != "torch" and dist.get_world_size() > 1:
        raise ValueError(
            f"agmerge.init() has taken {workers.backend_name()!r}, and the workers of a DistributedDataParallel are "
            "torch.distributed's: call agmerge.init('torch') instead, or leave it out"
        )
