# SPDX-License-Identifier: Apache-2.0
"""Measure the Trainer of transformers on a slow network: seconds a step and loss, by itself and compressed.

    python benchmarks/frameworks.py                          # 2 workers, 200 Mbit/s full duplex; half an hour
    python benchmarks/frameworks.py --rate 100mbit --link shared --blocks 5 --steps 50 --layers 2

A GPT-2 from its config learns the source of Python's standard library, a byte a token, with AdamW as the Trainer has
it. Contenders differ by one line, the call of ``compress``.

Times: every contender is started once, and takes blocks of steps in turn, every round in another order, while the
others are frozen. A step is everything from the end of one to the end of the next. Bytes are what left the
network interfaces, per step and worker. Losses: afterwards each trains ``--steps`` steps from the same start, without a
limit to the rate, since that changes no bit where the exchange is named; the loss is of the held-out text, with the
parameters that all ranks have in common. Needs root (network namespaces).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from checkout import ROOT  # first: it says where this checkout's packages are

# isort: split

from lab.interleaved import Stage, serve
from lab.intervals import interval
from lab.network import LINKS, named
from lab.worker_results import received_results, send_result

CONTENDERS: dict[str, dict[str, Any] | None] = {
    "its own DDP": None,
    "compress(trainer)": {},
    'compress(trainer, sync="updates")': {"sync": "updates"},
    'compress(trainer, sync="updates", overlap=1)': {"sync": "updates", "overlap": 1},
}
WARM = 24  # steps: plans are made by what the first ones took
LENGTH, WIDTH, HEADS = 128, 384, 6  # tokens of a sample; of the model
HELD_OUT = 64  # samples


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="the Trainer on a slow network, by itself and compressed")
    parser.add_argument("--rate", default="200mbit", help="as tc writes it, or none")
    parser.add_argument("--link", choices=LINKS, default="duplex", help="what has the rate, see network.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6, help="of the model: 1.8 million parameters each")
    parser.add_argument("--batch", type=int, default=4, help="samples of a worker and step")
    parser.add_argument("--blocks", type=int, default=20, help="turns of every contender")
    parser.add_argument("--block", type=int, default=3, metavar="STEPS", help="of a turn")
    parser.add_argument("--steps", type=int, default=300, help="for the losses; 0: measure none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "frameworks.jsonl", help="a line a measurement")
    parser.add_argument("--worker", nargs=2, metavar=("CONTENDER", "WHAT"), help=argparse.SUPPRESS)
    return parser.parse_args()


# -- in a worker ------------------------------------------------------------------------------------------------


def trained(args: argparse.Namespace, name: str, steps: int, **more: Any) -> Any:
    """Return a Trainer of a contender."""
    import torch
    from gpt import VOCABULARY, corpus, windows
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    import agmerge

    torch.set_num_threads(1)
    set_seed(args.seed)
    shape = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": args.layers, "n_head": HEADS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **shape))
    train, held_out = corpus()

    def samples(text: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
        starts = torch.randint(0, len(text) - LENGTH - 1, (count,), generator=torch.Generator().manual_seed(args.seed))
        return [{"input_ids": row, "labels": row} for row in windows(text, starts, LENGTH)[0]]

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(ROOT / "runs" / "frameworks"),
            max_steps=steps,
            per_device_train_batch_size=args.batch,
            per_device_eval_batch_size=args.batch,
            learning_rate=1e-3,
            warmup_steps=20,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=args.seed,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=samples(train, min(steps, 2000) * args.batch * args.workers),
        eval_dataset=samples(held_out, HELD_OUT),
    )
    options = CONTENDERS[name]
    if options is not None:
        agmerge.integrations.transformers.compress(trainer, **options, **more)
    return trainer


def take_turns(args: argparse.Namespace, name: str) -> None:
    """Train for ever, a step whenever this contender may."""
    from transformers import TrainerCallback

    class Gate(TrainerCallback):
        """Stop after every step until the next one is asked for."""

        def __init__(self) -> None:
            self.may, self.done = threading.Semaphore(0), threading.Semaphore(0)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step >= WARM:
                self.done.release()
                self.may.acquire()

        def step(self) -> None:
            self.may.release()
            self.done.acquire()

        def turns(self) -> None:
            self.done.acquire()  # it is warm
            serve(self.step, dict, int(os.environ["RANK"]))
            os._exit(0)  # the other thread waits for a turn that does not come

    trainer, gate = trained(args, name, 100_000), Gate()
    trainer.add_callback(gate)
    threading.Thread(target=gate.turns, daemon=True).start()
    trainer.train()


def learn(args: argparse.Namespace, name: str) -> None:
    """Tell the loss of the held-out text after so many steps."""
    named_exchange = {} if CONTENDERS[name] is None else {"exchange": "sparse"}
    trainer = trained(args, name, args.steps, **named_exchange)
    trainer.train()
    send_result({"loss": trainer.evaluate()["eval_loss"]})


# -- what starts them -------------------------------------------------------------------------------------------


def command(args: argparse.Namespace, name: str, what: str) -> list[str]:
    """Return the command line of a worker."""
    line = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--worker", name, what]
    for option in ("workers", "layers", "batch", "steps", "seed"):
        line += [f"--{option}", str(getattr(args, option))]
    return line


def times(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Let all take turns: seconds a step and bytes, by contender."""
    rate = None if args.rate == "none" else args.rate
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "bytes": []} for name in CONTENDERS}
    with LINKS[args.link](args.workers, rate) as network, Stage(network) as stage:
        jobs = {name: stage.start(name, command(args, name, "turns")) for name in CONTENDERS}
        for number in range(args.blocks):
            for name in random.Random(number).sample(list(jobs), len(jobs)):
                before = network.sent()
                ranks = jobs[name].block(args.block)
                found[name]["bytes"].append((network.sent() - before) / args.block / len(ranks))
                found[name]["seconds"].append(statistics.fmean(statistics.median(one["seconds"]) for one in ranks))
    return found


def losses(args: argparse.Namespace) -> dict[str, float]:
    """Let each train by itself: the loss, by contender."""
    found = {}
    for name in CONTENDERS:
        start = time.perf_counter()
        with LINKS[args.link](args.workers, None) as network:
            found[name] = received_results(network.run(command(args, name, "loss"), timeout=3600)[0])[0]["loss"]
        print(f"  {name}: {found[name]:.4f} after {args.steps} steps, {time.perf_counter() - start:.0f} s", flush=True)
    return found


def table(found: dict[str, Any]) -> str:
    """Return what was found as text; ratios are of the same rounds."""
    first = next(iter(CONTENDERS))
    lines = ["| | s a step | times faster | MB a step | loss |", "|---|---|---|---|---|"]
    for name, one in found["times"].items():
        pairs = zip(found["times"][first]["seconds"], one["seconds"], strict=True)
        middle, low, high = interval([theirs / ours for theirs, ours in pairs])
        loss = found["losses"].get(name)
        change = "" if loss is None else f"{loss:.4f} ({100 * (loss / found['losses'][first] - 1):+.1f} %)"
        lines.append(
            f"| {name} | {statistics.median(one['seconds']):.3f} | {middle:.2f} ({low:.2f} to {high:.2f}) "
            f"| {statistics.median(one['bytes']) / 1e6:.2f} | {change} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Be a worker, or measure all."""
    args = arguments()
    if args.worker:
        {"turns": take_turns, "loss": learn}[args.worker[1]](args, args.worker[0])
        return
    kept = {key: str(value) for key, value in vars(args).items() if key != "worker"}
    found = {"date": datetime.date.today().isoformat(), "arguments": kept, "times": times(args)}
    found["losses"] = losses(args) if args.steps else {}
    print(f"\nGPT-2 of {args.layers} layers, {args.workers} workers, {named(args.rate, args.link)}\n\n{table(found)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
