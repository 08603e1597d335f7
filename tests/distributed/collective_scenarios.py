# SPDX-License-Identifier: Apache-2.0
"""The module's own collectives of every kind, on real workers as in memory: numbers are such that sums are exact."""

from __future__ import annotations

from typing import Any

import torch

import agmerge
from agmerge import testing

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def every_collective() -> dict[str, Any]:
    """What this rank gets from each of them: lists of numbers."""
    rank, size = agmerge.rank(), agmerge.size()
    seen: dict[str, Any] = {}
    for dtype in (*INTEGERS, *FLOATS):
        tensor = torch.tensor([rank + 1, 3, 2 - rank if dtype.is_signed else 2]).to(dtype)
        for op in (agmerge.Average, agmerge.Sum, agmerge.Min, agmerge.Max, agmerge.Product):
            seen[f"{op.value} {dtype}"] = agmerge.allreduce(tensor, op=op).tolist()
        seen[f"scattered {dtype}"] = agmerge.reducescatter(tensor.repeat(3), op=agmerge.Sum).tolist()
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.float64):
        rows = torch.arange(2 * rank).reshape(rank, 2).to(dtype)
        seen[f"gathered {dtype}"] = str(agmerge.allgather(rows).tolist())
        seen[f"equal {dtype}"] = str(agmerge.allgather(torch.ones(2, 2, dtype=dtype)).tolist())
        seen[f"broadcast {dtype}"] = str(agmerge.broadcast(torch.full((2,), rank).to(dtype), size - 1).tolist())
        splits = [(rank + other) % 3 for other in range(size)]
        sent = torch.full((sum(splits), 2), rank).to(dtype)
        rows, received = agmerge.alltoall(sent, splits)
        seen[f"exchanged {dtype}"] = [str(rows.tolist()), received.tolist()]
    seen["complex"] = str(agmerge.allreduce(torch.tensor([complex(rank, 1)]), op=agmerge.Sum).tolist())
    seen["empty"] = [
        agmerge.allreduce(torch.empty(0, 3)).shape,
        agmerge.allgather(torch.empty(0, 3)).shape,
        agmerge.broadcast(torch.empty(0), 0).shape,
        agmerge.alltoall(torch.empty(0, 2)).shape,
        agmerge.reducescatter(torch.empty(0, 2)).shape,
    ]
    seen["objects"] = agmerge.allgather_object({"rank": rank, "more": "x" * rank})
    return {**seen, **under_way(), **gradients(), **of_some_ranks(), **alone_and_wrong()}


def under_way() -> dict[str, Any]:
    """Many at once, asked for in the opposite order on odd ranks."""
    rank, size = agmerge.rank(), agmerge.size()
    place = torch.full((4,), float(rank))
    handles = [agmerge.allreduce_async(torch.full((i,), rank), op=agmerge.Sum) for i in range(1, 9)]
    handles += [agmerge.allreduce_async_(place, op=agmerge.Sum), agmerge.allgather_async(torch.ones(rank))]
    handles += [agmerge.broadcast_async(torch.tensor([rank]), 1, name="named")]
    handles += [agmerge.grouped_allreduce_async([torch.ones(2), torch.ones(3).double()], op=agmerge.Sum)]
    for handle in handles if rank % 2 else reversed(handles):
        agmerge.synchronize(handle)
    assert all(agmerge.poll(handle) for handle in handles)
    total = [agmerge.synchronize(handle) for handle in handles]
    joined = [agmerge.allreduce(torch.ones(1), op=agmerge.Sum).item() for _ in range(rank)]
    return {
        "sums": [one.tolist() for one in total[:8]],
        "in place": [place.tolist(), total[8] is place],
        "others": [len(total[9]), total[10].item(), *(one.tolist() for one in total[11])],
        "joined": [joined, agmerge.join(), size],
    }


def gradients() -> dict[str, Any]:
    """Of the three that scripts differentiate, in one loss."""
    rank, size = agmerge.rank(), agmerge.size()
    leaf = torch.full((rank + 1,), 2.0, requires_grad=True)
    everyone = agmerge.allgather(leaf)
    mean = agmerge.allreduce(leaf.sum())
    rooted = agmerge.synchronize(agmerge.broadcast_async(leaf.sum().reshape(1), size - 1))
    (everyone.sum() * size + mean * (rank + 1) * size + rooted.sum() * size).backward()
    assert leaf.grad is not None
    return {"gradients": leaf.grad.tolist()}


def of_some_ranks() -> dict[str, Any]:
    """The last rank alone, and all the others together."""
    rank, size = agmerge.rank(), agmerge.size()
    sets = [agmerge.add_process_set(range(size - 1)), agmerge.add_process_set([size - 1])]
    mine = sets[rank == size - 1]
    found = [
        agmerge.allreduce(torch.tensor([rank]), op=agmerge.Sum, process_set=mine).item(),
        agmerge.allgather(torch.tensor([rank]), process_set=mine.ranks).tolist(),
        agmerge.broadcast(torch.tensor([rank]), mine.ranks[-1], process_set=mine).item(),
    ]
    agmerge.barrier(mine)
    for one in sets:
        agmerge.remove_process_set(one)
    return {"some ranks": found}


def alone_and_wrong() -> dict[str, Any]:
    """Ranks that make different calls are told so, all of them, and go on."""
    rank, told = agmerge.rank(), []
    for odd, even in (
        (lambda: agmerge.allgather(torch.ones(2)), lambda: agmerge.allreduce(torch.ones(2))),
        (lambda: agmerge.barrier(), lambda: agmerge.broadcast_object("x")),
        (lambda: agmerge.allreduce_async(torch.ones(2), name="a"), lambda: agmerge.allreduce(torch.ones(2), name="b")),
    ):
        try:
            (odd if rank % 2 else even)()
        except agmerge.RankMismatchError as error:
            told.append(str(error))
    return {"told": told}


def in_memory(workers: int) -> list[dict[str, Any]]:
    """What ranks of one process see."""
    return testing.run(workers, lambda rank: every_collective())
