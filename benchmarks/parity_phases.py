# SPDX-License-Identifier: Apache-2.0
"""How many bits does each phase of a quantised all-reduce need, and when is a gather of fewer bits as good?

    python benchmarks/parity_phases.py --workers 4 8 --steps 400
    python benchmarks/parity_phases.py --workers 3 --bits 2+2 1+1 1+2 1 2      # two phases: a+b, one phase: a

Trains the small GPT of ``parity.py`` with AdamW, clipped to a norm of 1, in one process that makes every worker's
gradient in turn and sends it through the library's own encoders and decoders: what an exchange with these bits would
give. The library itself takes equal bits in both phases, and one phase for two workers. Every row has the same weights
and batches. ``bits sent`` are those that leave a worker for each coordinate: (W-1)/W times both phases, or W-1 times
the one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are
import torch

# isort: split

from accuracy import parity_optimizers, parity_tasks

import sparsifiers
from agmerge.step.config import is_small
from sparsifiers.quantising.base import block_size, blocks_in
from sparsifiers.quantising.draws import Draws, key_of

BITS = ("none", "1+1", "1+2", "2+2", "2+4", "4+4", "1", "2")
SCALE_BITS = 16 / 256  # of a block's scale, a coordinate


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="bits of the phases of a quantised all-reduce")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--bits", nargs="+", default=BITS, help="a+b: of two phases; a: of a gather; none: dense")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="times the best learning rate of dense")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/phases.jsonl"), help="one line a run; kept")
    parser.add_argument("--report", action="store_true", help="run nothing")
    return parser.parse_args(line)


def phases_of(bits: str) -> list[Any]:
    """Return the quantiser of each phase; none for a dense exchange."""
    return [] if bits == "none" else [sparsifiers.quantiser(f"eden-{each}") for each in bits.split("+")]


def combined(rows: Sequence[torch.Tensor], phases: Sequence[Any], facts: tuple[int, ...]) -> torch.Tensor:
    """Return the mean of ``rows``, one tensor of each worker, as receivers read it; ``facts`` are of its keys."""
    if not phases:
        return torch.stack(list(rows)).mean(0)
    size = block_size(rows[0].shape)
    count = blocks_in(rows[0].numel(), size)
    messages, draws = [], []
    for rank, row in enumerate(rows):
        draws.append(Draws(key_of(*facts, 0, rank)))
        messages.append(torch.zeros(count * phases[0].record_bytes(size), dtype=torch.uint8))
        phases[0].encode(row.reshape(-1), size, draws[-1], messages[-1])
    out = torch.empty(rows[0].numel())
    if len(phases) == 1:
        phases[0].decode_sum(messages, draws, size, 1 / len(rows), out)
        return out.view_as(rows[0])
    second, own = phases[1], Draws(key_of(*facts, 1))
    message = torch.zeros(count * second.record_bytes(size), dtype=torch.uint8)
    phases[0].encode_sum(messages, draws, size, 1 / len(rows), second, own, message)
    second.decode_sum([message], [own], size, 1.0, out)
    return out.view_as(rows[0])


def train(workers: int, bits: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Return the held-out loss after ``steps``, and the seconds it took."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    case = parity_tasks.Case(task="lm", optimizer="adamw", workers=workers, clip=1.0, rate=rate, seed=seed)
    recipe = case.recipe(steps)
    task = parity_tasks.TASKS["lm"](0, seed, recipe["batch"])
    model, phases = task.model, phases_of(bits)
    named = dict(model.named_parameters())
    (optimizer,) = parity_optimizers.made("adamw", model, recipe["lr"], recipe["decay"])
    schedule = parity_tasks.schedule_of(case, optimizer, steps)
    small = {name for name, parameter in named.items() if is_small(name, parameter)}
    for step in range(steps):
        gradients: list[dict[str, torch.Tensor]] = []
        for rank in range(workers):
            model.zero_grad()
            task.loss(model, *task.batch(step, rank, workers)).backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in named.items()})
        for number, (name, parameter) in enumerate(named.items()):
            rows = [each[name] for each in gradients]
            parameter.grad = combined(rows, [] if name in small else phases, (seed, step, number))
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return {"loss": task.score(model, True), "seconds": time.perf_counter() - start}


def sent(workers: int, bits: str) -> float:
    """Return the bits that leave a worker for each coordinate."""
    if bits == "none":
        return 2 * (workers - 1) / workers * 32
    each = [float(one) + SCALE_BITS for one in bits.split("+")]
    return (workers - 1) / workers * sum(each) if len(each) == 2 else (workers - 1) * each[0]


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return what was found, as a table: differences to the dense run with the same weights and batches, in %."""
    lines = ["| workers | rate | bits | bits sent | loss | against dense, % |", "|---|---|---|---|---|---|"]
    dense = {(one["workers"], one["rate"], one["seed"]): one["loss"] for one in records if one["bits"] == "none"}
    for workers, rate, bits in dict.fromkeys((one["workers"], one["rate"], one["bits"]) for one in records):
        runs = [one for one in records if (one["workers"], one["rate"], one["bits"]) == (workers, rate, bits)]
        pairs = [100 * (one["loss"] / dense[workers, rate, one["seed"]] - 1) for one in runs if bits != "none"]
        loss = sum(one["loss"] for one in runs) / len(runs)
        found = ", ".join(f"{each:+.2f}" for each in pairs)
        lines.append(f"| {workers} | {rate:.2g} | {bits} | {sent(workers, bits):.2f} | {loss:.4f} | {found} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    args = arguments()
    lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    records = [one for one in map(json.loads, lines) if one["steps"] == args.steps]
    wanted = [
        {"workers": workers, "rate": rate, "bits": bits, "seed": seed, "steps": args.steps}
        for seed in range(args.seeds)
        for workers in args.workers
        for rate in args.rates
        for bits in dict.fromkeys(("none", *args.bits))
    ]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for one in wanted if not args.report else []:
        if any(one.items() <= record.items() for record in records):
            continue
        records.append(one | train(one["workers"], one["bits"], one["rate"], one["seed"], one["steps"]))
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(records[-1]) + "\n")
        print(json.dumps(records[-1]), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
