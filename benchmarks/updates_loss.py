# SPDX-License-Identifier: Apache-2.0
"""Loss of a small language model after local steps, beside that of dense training, with paired seeds.

    python benchmarks/updates_loss.py                                        # W = 2 and 4, 300 steps, three seeds
    python benchmarks/updates_loss.py --workers 4 --steps 1200 --seeds 5 --ways default signs "no following"
    python benchmarks/updates_loss.py --optimizers adamw sgd lion --ways default
    python benchmarks/updates_loss.py --report                               # only read what has been measured

The model is a transformer of 0.25 million parameters on bytes of Python's standard library, 48 of context, 16 sequences
a step for all workers together; the rate rises for a tenth of the steps and falls by a cosine; gradients are clipped by
``optimizer.clip_grad_norm_(1.0)``. Workers are ranks in memory, of one process, with the library's own optimizers,
exchanges and codecs. Dense training is one worker with the whole batch. The loss is that of the shared parameters on
the last tenth of the text. Each run is a line of ``--out``; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import agmerge
from agmerge import testing

CONTEXT, WIDTH, LAYERS, BATCH, HELD_OUT = 48, 96, 2, 16, 512
FOLDERS = ("email", "concurrent", "json", "ctypes", "multiprocessing", "asyncio")
DENSE = "dense"
SCHEME: dict[str, Any] = {"compression": "eden-2", "every": 2, "fragments": 2}
WAYS: dict[str, dict[str, Any]] = {
    DENSE: {},
    "default": {"exchange": "sparse"},
    "own moments": {**SCHEME, "moments": "own"},
    "no following": {**SCHEME},
    "no scaling": {**SCHEME},
    "in time": {**SCHEME, "overlap": 0},
    "one fragment": {"compression": "eden-2"},
    "three fragments": {"compression": "eden-2", "every": 3, "fragments": 3},
    "one bit": {"compression": "eden-1"},
    "one bit, three fragments": {"compression": "eden-1", "every": 3, "fragments": 3},
    "four bits": {"compression": "eden-4"},
    "four bits, two fragments": {"compression": "eden-4", "every": 2, "fragments": 2},
    "unbiased scale": {**SCHEME},
    "eight bits, in time": {"compression": "int8", "overlap": 0},
    "eight bits": {"compression": "int8"},
    "signs": {"compression": "topk", "exchange": "sparse"},
    "gradients, eden-2": {"sync": "gradients", "compression": "eden-2"},
}
OPTIMIZERS = ("adamw", "fused", "nadam", "rmsprop", "sgd", "lion", "muon")
RATES = {"adamw": 3e-3, "fused": 3e-3, "nadam": 3e-3, "rmsprop": 1e-3, "sgd": 0.3, "lion": 5e-4, "muon": 0.02}


# The task.


class Transformer(nn.Module):
    """Causal transformer on bytes below 128."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, bytes_: Tensor) -> Tensor:
        """Return the logits of each next byte."""
        length = bytes_.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(bytes_) + self.places.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def text() -> Tensor:
    """Return Python sources as bytes, int64; those above 127 are 127."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    data = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(data, dtype=torch.uint8).long().clamp_(max=127)


def rows(data: Tensor, starts: list[int]) -> Tensor:
    """Return sequences of one byte more than the context, which begin there."""
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def loss_of(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean cross-entropy of each next byte, in nats."""
    return cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())


@torch.no_grad()
def held_out(model: nn.Module, data: Tensor) -> float:
    """Return the loss on the last tenth of the text."""
    first, last = len(data) * 9 // 10, len(data) - CONTEXT - 1
    starts = torch.linspace(first, last, HELD_OUT).long().tolist()
    return statistics.fmean(loss_of(model, part).item() for part in rows(data, starts).split(64))


# Optimizers.


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(torch.lerp(momentum, parameter.grad, 0.1).sign_(), alpha=group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


def optimizers(kind: str, model: nn.Module, factor: float) -> Any:
    """Return one of ``OPTIMIZERS``, or a list of several."""
    parameters, rate = list(model.parameters()), RATES[kind] * factor
    if kind == "muon":
        inner = [p for p in model.layers.parameters() if p.dim() == 2]  # type: ignore[union-attr]
        known = set(inner)
        others = [p for p in parameters if p not in known]
        return [torch.optim.Muon(inner, lr=rate), torch.optim.AdamW(others, lr=RATES["adamw"] * factor)]
    if kind in ("adamw", "fused"):
        return torch.optim.AdamW(parameters, lr=rate, fused=kind == "fused")
    if kind == "nadam":
        return torch.optim.NAdam(parameters, lr=rate)
    if kind == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=rate)
    return Lion(parameters, rate) if kind == "lion" else torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the rate at a step, counted from 0."""
    return min((step + 1) / (0.1 * steps), 0.5 * (1 + math.cos(math.pi * step / steps)) + 1e-3)


# One run.


def ablate(way: str) -> None:
    """Leave out the part of the scheme that the name of an ablation says."""
    from agmerge.engine import mean_moments
    from agmerge.exchanges.quantised import exchange

    if way == "no following":
        mean_moments.MeanMoments.follow = lambda *_: None  # type: ignore[method-assign]
    if way == "no scaling":
        mean_moments.MeanMoments.stepping = lambda *_: None  # type: ignore[method-assign]
    if way == "unbiased scale":
        exchange.contraction = lambda _: 1.0


def trained(way: str, optimizer: str, workers: int, steps: int, seed: int, factor: float) -> float:
    """Train, and return the loss."""
    torch.set_num_threads(1)
    ablate(way)
    data, cut = text(), 0
    cut = len(data) * 9 // 10 - CONTEXT - 1
    torch.manual_seed(seed)
    first = Transformer()
    ranks, share = (1, BATCH) if way == DENSE else (workers, BATCH // workers)

    def train(rank: int) -> float:
        model = Transformer()
        model.load_state_dict(first.state_dict())
        inner = optimizers(optimizer, model, factor)
        each = inner if isinstance(inner, list) else [inner]
        began = [group["lr"] for one in each for group in one.param_groups]
        wrapped: Any = None
        if way != DENSE:
            options = {"sync": "updates", **WAYS[way]}
            wrapped = agmerge.DistributedOptimizer(inner, model.named_parameters(), **options)
        for step in range(steps):
            for group, rate in zip([g for one in each for g in one.param_groups], began, strict=True):
                group["lr"] = rate * schedule(step, steps)
            source = torch.Generator().manual_seed(10_000 * seed + step)
            starts = torch.randint(0, cut, (BATCH,), generator=source).tolist()[rank * share : (rank + 1) * share]
            model.zero_grad()
            loss_of(model, rows(data, starts)).backward()
            if wrapped is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for one in each:
                    one.step()
            else:
                wrapped.clip_grad_norm_(1.0)
                wrapped.step()
        if wrapped is not None:
            wrapped.close()  # the parameters are the shared ones
        return held_out(model, data)

    losses: list[float] = testing.run(ranks, train)
    assert len(set(losses)) == 1, losses
    return losses[0]


# The matrix.


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """Return what says which run it is."""
    return tuple(run[name] for name in ("way", "optimizer", "workers", "steps", "seed", "rate"))


def measure(todo: list[dict[str, Any]], jobs: int, out: Path) -> None:
    """Make the runs that are not in ``out``, so many at a time, each in a process of its own."""

    def run(one: dict[str, Any]) -> None:
        began = time.monotonic()
        words = [sys.executable, "-W", "ignore", __file__, "--run", json.dumps(one)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("loss ")]
        if not lines:
            print(f"{one}: {done.stderr[-1500:]}", flush=True)
            return
        with out.open("a", encoding="utf-8") as file:
            found = {**one, "loss": float(lines[0].split()[1]), "seconds": round(time.monotonic() - began, 1)}
            file.write(json.dumps(found) + "\n")

    known = {key_of(one) for one in read(out)}
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [one for one in todo if key_of(one) not in known]))


def read(out: Path) -> list[dict[str, Any]]:
    """Return the runs that have been made."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def report(found: list[dict[str, Any]]) -> None:
    """Print the mean excess over dense by way, over seeds, with its standard error."""
    by_key = {key_of(one): one["loss"] for one in found}
    print("| optimizer | steps | W | way | rate | dense | excess, % | by seed |\n|---|---|---|---|---|---|---|---|")
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for one in found:
        if one["way"] != DENSE:
            group = (one["optimizer"], one["steps"], one["workers"], one["way"], one["rate"])
            groups.setdefault(group, {})[one["seed"]] = one["loss"]
    for (optimizer, steps, workers, way, rate), losses in sorted(groups.items()):
        dense = {seed: by_key.get((DENSE, optimizer, 1, steps, seed, rate)) for seed in losses}
        excess = [100 * (losses[s] / d - 1) for s, d in sorted(dense.items()) if d is not None]
        if not excess:
            continue
        error = statistics.stdev(excess) / len(excess) ** 0.5 if len(excess) > 1 else float("nan")
        mean = statistics.fmean(d for d in dense.values() if d is not None)
        seeds = ", ".join(f"{one:+.1f}" for one in excess)
        print(
            f"| {optimizer} | {steps} | {workers} | {way} | {rate:g} | {mean:.4f} | "
            f"{statistics.fmean(excess):+.2f} ± {error:.2f} | {seeds} |"
        )


def main() -> None:
    """Measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["default", "signs"], choices=[*WAYS], metavar="WAY")
    parser.add_argument("--optimizers", nargs="+", default=["adamw"], choices=OPTIMIZERS)
    parser.add_argument("--rate", type=float, default=1.0, help="times the usual learning rate")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/updates_loss.jsonl"), help="one line a run")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run = args.run
        names = ("way", "optimizer", "workers", "steps", "seed")
        print("loss", trained(*(run[name] for name in names), run["rate"]))
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    todo = [
        {"way": way, "optimizer": optimizer, "workers": workers, "steps": args.steps, "seed": seed, "rate": args.rate}
        for optimizer in args.optimizers
        for workers, ways in [(1, [DENSE]), *((workers, args.ways) for workers in args.workers)]
        for way in ways
        for seed in range(args.seeds)
    ]
    if not args.report:
        measure(todo, args.jobs, args.out)
    report(read(args.out))


if __name__ == "__main__":
    main()
