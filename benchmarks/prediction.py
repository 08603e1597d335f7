# SPDX-License-Identifier: Apache-2.0
"""Does the model know when a step's exchange ends? Predicted against measured finish, two workers on a shaped link.

    python benchmarks/prediction.py                                  # 200mbit and 1gbit, two models, all planners
    python benchmarks/prediction.py --rates 100mbit --models gpt2

Every worker is a process in a network namespace of its own (root needed). A model is trained with each plan; costs
are measured once per model and rate, in its first run, and the predictions for all plans come from them alone. The
finish is that of the last exchange, from the first gradient on, the mean over workers of the medians over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - first: it says where this checkout's packages are

# isort: split

from lab.worker_results import received_results, send_result

PLANNERS = ("layerwise", "single", "count", "threshold", "mgwfbp", "agmerge")
SETTINGS = (("none", "auto"), ("topk", "behind"), ("topk", "ahead"))
BATCH = {"gpt2": 2, "resnet50": 2, "cnn": 8}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="predicted against measured finish on a shaped link")
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50"])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--steps", type=int, default=15, help="measured, per plan")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("runs/prediction.jsonl"), help="one line a plan")
    parser.add_argument("--worker", metavar="MODEL", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(args: argparse.Namespace) -> None:
    """One rank: train with every plan, and print predicted and measured finish."""
    import models
    import torch

    import agmerge
    import merging
    from agmerge.planning.measuring import predicted
    from agmerge.step.agreed_state import with_mode

    agmerge.init()
    torch.set_num_threads(1)

    def trained(plan: Any, compression: str, sparsify: str, steps: int, measure: bool) -> Any:
        torch.manual_seed(0)
        work = models.build(args.worker, BATCH[args.worker], 64)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(work.model.parameters(), lr=0.001),
            work.model.named_parameters(),
            compression=compression,
            density=args.density,
            exchange="sparse",
            merging=plan,
            sparsify=sparsify,
        )
        for _ in range(steps):
            optimizer.zero_grad()
            work.loss().backward()
            optimizer.step()
        measured = optimizer.measure() if measure else None
        times = optimizer._reducer.exchange.agreed.times.typical()
        mean = float(agmerge.allreduce(torch.tensor([times.finish], dtype=torch.float64)))
        optimizer.close()
        return measured, mean

    for compression, sparsify in SETTINGS:
        steps = args.steps if compression != "none" else max(4, args.steps // 3)  # seconds each
        measured, _ = trained("threshold", compression, sparsify, steps, True)
        for name in PLANNERS:
            mode = measured.modes[0]
            plan = with_mode(merging.get(name).plan(measured.profile, measured.costs, mode), mode)
            _, mean = trained(plan, compression, sparsify, steps, False)
            found = {
                "compression": compression,
                "sparsify": sparsify,
                "planner": name,
                "buffers": len(plan.counts),
                "predicted": predicted(plan, measured).finish,
                "measured": mean,
            }
            if agmerge.rank() == 0:
                send_result(found)
    agmerge.shutdown()


def main() -> None:
    """Launch the workers for every model and rate, then print the table."""
    args = arguments()
    if args.worker:
        worker(args)
        return
    from lab.network import Network

    args.out.parent.mkdir(parents=True, exist_ok=True)
    errors = []
    for model in args.models:
        for rate in args.rates:
            with Network(2, rate) as network:
                command = [sys.executable, "-W", "ignore", __file__, "--worker", model, "--steps", str(args.steps)]
                output = network.run([*command, "--density", str(args.density)], timeout=1800)[0]
            for found in received_results(output):
                with args.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps({"model": model, "rate": rate, **found}) + "\n")
                error = found["predicted"] / found["measured"] - 1
                errors.append(abs(error))
                print(
                    f"{model:9} {rate:8} {found['compression']:5} {found['sparsify']:7} {found['planner']:10}"
                    f" {found['buffers']:4} merge buffers  predicted {1e3 * found['predicted']:8.1f} ms"
                    f"  measured {1e3 * found['measured']:8.1f} ms  {100 * error:+6.1f} %",
                    flush=True,
                )
    worst = 100 * max(errors)
    print(f"error: median {100 * statistics.median(errors):.1f} %, worst {worst:.1f} %, {len(errors)} plans")


if __name__ == "__main__":
    main()
