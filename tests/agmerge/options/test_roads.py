# SPDX-License-Identifier: Apache-2.0
"""Every road to a wrapper refuses the same arguments with the same text: they are prepared in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support import mlp, sgd
from torch.nn.parallel import DistributedDataParallel

import agmerge
import sparsifiers
from agmerge.integrations import ddp


def optimizer_of(**options: Any) -> agmerge.DistributedOptimizer:
    model = mlp()
    return agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def local_of(sync: str, **options: Any) -> None:
    model = mlp()
    agmerge.LocalOptimizer(sgd(model), model.named_parameters(), **options)


def hooks_of(sync: str, **options: Any) -> None:
    model = mlp()
    agmerge.LocalSync(model, sgd(model), **options)


def model_of(**options: Any) -> None:
    model = mlp()
    ddp.compress(DistributedDataParallel(model), optimizer=sgd(model), **options)


def changed(**options: Any) -> None:
    optimizer = optimizer_of(compression="topk", memory="residual")
    try:
        optimizer.set_compressor(**options)
    finally:
        optimizer.close()


ROADS: dict[str, tuple[Callable[..., Any], ...]] = {
    "gradients": (optimizer_of, model_of, changed),
    "updates": (optimizer_of, model_of, local_of, hooks_of),
}
CHANGES = {"compression", "density", "rank", "memory", "warmup"}  # arguments of set_compressor()
TOPK, FACTORS = {"compression": "topk"}, {"compression": "powersgd"}
EITHER: list[dict[str, Any]] = [  # whatever sync= is
    TOPK | {"density": 0},
    TOPK | {"density": {}},
    TOPK | {"density": "no"},
    TOPK | {"density": {"(": 0.1}},
    {"compression": "tokp"},
    {"compression": 3},
    {"compression": {}},
    {"compression": []},
    {"compression": ["none", "topk"]},
    {"compression": {".*": "fp16", "a": "topk"}},
    {"compression": "none", "warmup": 4},
    {"compression": sparsifiers.get("topk", 0.1), "density": 0.2},
    {"compression": sparsifiers.low_rank("powersgd", 2), "rank": 3},
    {"compression": {"0.*": sparsifiers.low_rank("powersgd", 2), ".*": "none"}, "rank": 3},
    TOPK | {"rank": 4},
    TOPK | {"warmup": "no"},
    TOPK | {"density": {".*": 0.1}, "warmup": lambda step: 0.1},
    TOPK | {"wire": "no"},
    TOPK | {"wire": "sign", "exchange": "masked"},
    TOPK | {"dense": "no"},
    TOPK | {"dense": ["("]},
    FACTORS | {"rank": 0},
    FACTORS | {"wire": "sign"},
    FACTORS | {"dense": "partial"},
    {"exchange": "no"},
    {"sparsify": "no"},
    {"dense_sum": "no"},
    {"nonfinite": "no"},
    {"scaler": 3},
    {"timeout": -1},
    {"check_every": -1},
    {"merging": "no"},
    {"merging": 3},
]
WRONG = [(sync, each) for sync in ROADS for each in EITHER]
WRONG += [
    ("gradients", each)
    for each in (
        TOPK | {"memory": "no"},
        TOPK | {"memory": 3},
        FACTORS | {"memory": "dgc"},
        {"compression": "none", "memory": "residual"},
        FACTORS | {"exchange": "two-level"},
        TOPK | {"density": "importance", "exchange": "two-level"},
        {"op": agmerge.Min},
        {"gradient_predivide_factor": 0},
        {"carry": "hold"},
        {"every": 2},
    )
]
WRONG += [
    ("updates", each)
    for each in (
        {"every": 0},
        {"carry": "no"},
        {"decay": 2, "carry": "hold"},
        {"decay": 0.5},
        {"outer": 3},
        {"outer": len},
        {"every": 2, "fragments": 9},
        {"every": 2, "overlap": 3},
        {"every": 2, "overlap": 1, "carry": "hold"},
        {"exchange": "two-level"},
        {"op": agmerge.Sum},
        {"gradient_predivide_factor": 2.0},
        TOPK | {"memory": "dgc"},
        FACTORS | {"carry": "hold"},
    )
]


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """One worker, which torch.distributed knows of."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    agmerge.init("torch")
    yield
    agmerge.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("sync", "options"), WRONG, ids=lambda one: str(one)[:60])
def test_a_wrong_argument_is_refused_with_the_same_text_on_every_road(sync: str, options: dict[str, Any]) -> None:
    said = set()
    for road in ROADS[sync]:
        if road is changed and not options.keys() <= CHANGES:
            continue
        with pytest.raises((ValueError, TypeError)) as raised:
            road(**options if road is changed else {"sync": sync, **options})
        said.add((raised.type, str(raised.value)))
    assert len(said) == 1, said
