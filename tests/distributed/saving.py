# SPDX-License-Identifier: Apache-2.0
"""One launch saves, another one loads: ``python saving.py save|load FOLDER FROM [CELL ...]``.

``FROM``: how many ranks have saved. ``CELL``: a name of `CELLS`; without any, all of them.

``save`` trains every cell, saves it in the middle in three ways (a file a rank, all ranks in one file, and
``torch.distributed.checkpoint``), and goes on; ``load`` starts from each of them. Every rank writes what it saw.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent.parent)]  # tests/ has folders of these names
from support import mlp, seeded, sgd, train, wrap  # noqa: E402

import agmerge  # noqa: E402
import merging  # noqa: E402
import sparsifiers  # noqa: E402

HALF, STEPS = 6, 10
SMALL = merging.get("threshold", bytes=4096)
DGC: dict[str, Any] = {"compression": "dgc", "memory": sparsifiers.memory("dgc", momentum=0.9)}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{one}, sgd": ("sgd", {"compression": one}) for one in ("topk", "adtopk", "redsync", "sidco-e", "none")},
    **{f"{one}, adamw": ("adamw", {"compression": one}) for one in ("adtopk", "gaussiank", "fp16")},
    "dgc": ("plain", DGC),
    "dgc, sgd": ("sgd", {"compression": "dgc"}),
    "no memory": ("sgd", {"compression": "topk", "memory": "none"}),
    "ordered": ("sgd", {"compression": "none", "dense_sum": "ordered"}),
    "oktopk": ("sgd", {"compression": "topk", "exchange": "oktopk"}),
    "powersgd": ("sgd", {"compression": "powersgd"}),
    "acpsgd": ("adamw", {"compression": "acpsgd"}),
    "updates": ("adamw", {"compression": "topk", "sync": "updates", "carry": "hold"}),
    "several": ("muon and adamw", {"compression": "topk"}),
}


def started(cell: str) -> tuple[torch.nn.Module, Any]:
    inner, options = CELLS[cell]
    model = seeded(mlp)
    made: Any = {
        "sgd": lambda: sgd(model, weight_decay=0.1),
        "plain": lambda: sgd(model, momentum=0.0),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
        "muon and adamw": lambda: [
            getattr(torch.optim, "Muon", torch.optim.RMSprop)([p for p in model.parameters() if p.dim() == 2], lr=0.02),
            torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=0.01),
        ],
    }[inner]()
    return model, wrap(model, made, merging=SMALL, **options)


def waiting(optimizer: Any) -> dict[str, float]:
    """The sum of everything that is still to come, residuals and momenta, as an update, over all ranks."""
    section = optimizer.state_dict()["agmerge"]
    found = {}
    for kind in ("residuals", "momenta"):
        for name in ("0.weight", "2.weight"):
            mine = float(section[kind].get(name, torch.zeros(1)).double().sum())
            found[f"{kind} {name}"] = float(agmerge.allreduce(torch.tensor([mine], dtype=torch.float64)))
    return found


def everything(cell: str, model: torch.nn.Module, optimizer: Any, path: Path | None) -> dict[str, Any]:
    parts = {"model": model.state_dict(), "residuals": agmerge.ResidualState(optimizer, path)}
    if cell == "updates":  # each rank's own is in the residuals
        return parts
    return {**parts, "optimizer": get_optimizer_state_dict(model, optimizer.optimizers)}


def save(cell: str, folder: Path) -> dict[str, Any]:
    """Train, save in three ways, go on."""
    model, optimizer = started(cell)
    train(model, optimizer, agmerge.rank(), range(HALF))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / f"{cell}.{agmerge.rank()}.pt")
    together = agmerge.gather_state(optimizer)
    if together is not None:
        torch.save({**state, "optimizer": together}, folder / f"{cell}.pt")
    dcp.save(everything(cell, model, optimizer, None), checkpoint_id=folder / f"{cell}.dcp")
    before = waiting(optimizer)
    seen = train(model, optimizer, agmerge.rank(), range(HALF, STEPS))
    optimizer.close()
    return {"waiting": before, "seen": seen}


def load(cell: str, folder: Path, way: str) -> dict[str, Any]:
    """Start from what was saved in ``way``, without a warning, and go on."""
    model, optimizer = started(cell)
    if way == "dcp":
        path = folder / f"{cell}.dcp"
        state = everything(cell, model, optimizer, path)
        dcp.load(state, checkpoint_id=path)
        if "optimizer" in state:
            set_optimizer_state_dict(model, optimizer.optimizers, state["optimizer"])
        model.load_state_dict(state["model"])
    else:
        rank = f".{agmerge.rank()}" if way == "by rank" else ""
        state = torch.load(folder / f"{cell}{rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    before = waiting(optimizer)
    seen = train(model, optimizer, agmerge.rank(), range(HALF, STEPS))
    optimizer.close()
    return {"waiting": before, "seen": seen}


def main(what: str, folder: Path, saved_by: int, cells: list[str]) -> None:
    agmerge.init()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AGM40[12]")
        for cell in cells or CELLS:
            if what == "save":
                found[cell] = save(cell, folder)
                continue
            ways = ["together", "dcp", *(["by rank"] if agmerge.size() == saved_by else [])]
            found[cell] = {way: load(cell, folder, way) for way in ways}
    (folder / f"{what}{agmerge.size()}.{agmerge.rank()}.json").write_text(json.dumps(found))
    agmerge.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
