# SPDX-License-Identifier: Apache-2.0
"""How many images a second are trained with, on random data: Horovod's synthetic benchmark on this library.

The flags of Horovod's script mean what they mean there, and its lines of output come first and unchanged.
Gradients are exchanged as there, too, unless ``--compression`` says otherwise.

    horovodrun -np 2 python examples/synthetic_benchmark.py --compression topk --density 0.01
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/synthetic_benchmark.py \\
        --model cnn --image-size 32 --compression topk --json figures.json

The flags of the ACP-SGD project's two benchmarks are here, too, so that its lines run with the script's name changed.
``--each`` compares compressors in one run:

    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/synthetic_benchmark.py \\
        --model bert_base --sentence-len 64 --batch-size 32 --rank 32 --threshold 25 --each s-sgd powersgd acpsgd
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compressor_table
import torch
from launchers import launcher
from models import Workload, build
from options import add_options, count, described, given, planned

import agmerge as hvd

TOTALS = ("bytes_sent", "bytes_dense", "link_bytes", "link_bytes_dense", "elements_sent", "exposed_seconds")


def arguments(argv: Sequence[str] | None = None) -> Namespace:
    """The command line: Horovod's flags, then ours."""
    parser = argparse.ArgumentParser(description="agmerge's synthetic benchmark")
    add = parser.add_argument
    add("--fp16-allreduce", action="store_true", help="exchange gradients in 16 bits; the same as --compression fp16")
    models = "resnet50, resnet152, cnn, gpt2, bert_base, bert_large, or a classifier's name in torchvision"
    add("--model", default="resnet50", help=models)
    add("--batch-size", type=count, default=32, help="items per worker and backward pass")
    add("--num-warmup-batches", type=int, default=10, help="batches that are not measured")
    add("--num-batches-per-iter", type=count, default=10, help="batches per measurement")
    add("--num-iters", type=count, default=10, help="measurements")
    add("--no-cuda", action="store_true", help="train on the CPU")
    add("--use-adasum", action="store_true", help="refused")
    add("--image-size", type=count, default=224, help="pixels, both ways")
    add("--sentence-len", type=count, default=64, help="tokens a sentence, of bert_base and bert_large")
    add_options(parser, "none, as in Horovod's script")
    add("--each", nargs="+", metavar="NAME", help="train with each of these in turn (s-sgd: none), and compare them")
    add("--opt", metavar="NAME", help="--compression in the words of ACP-SGD: ssgd, powersgd, acpsgd; dear: --merging")
    add("--local_rank", "--local-rank", type=int, help="the launcher's number, which is in the environment, too")
    add("--rdma", action="store_true", help="refused")
    add("--backward-passes-per-step", type=count, default=1, help="batches per exchange (rounds up)")
    add("--json", type=Path, metavar="PATH", help="write all figures there, too")
    args = parser.parse_args(argv)
    if args.use_adasum:
        parser.error("--use-adasum: agmerge does not combine gradients by Adasum; leave it out to average them")
    if args.fp16_allreduce and args.compression not in (None, "fp16"):
        parser.error(f"--fp16-allreduce and --compression {args.compression} contradict each other; give one")
    if args.each and (args.fp16_allreduce or args.compression):
        parser.error("--each names compressors, and so does --compression or --fp16-allreduce; give one")
    if args.rdma:
        parser.error("--rdma: costs are measured here; launch.py --interface IF chooses the network")
    if args.opt and (args.each or args.fp16_allreduce or args.compression):
        parser.error("--opt names a compressor, and so does --compression, --each or --fp16-allreduce; give one")
    if args.opt and args.opt.casefold() == compressor_table.DEAR and args.merging:
        parser.error(f"--opt {args.opt} names a planner, and so does --merging; give one")
    if args.each and not compressor_table.names(args.each):
        parser.error("--each: no name")
    if args.opt and args.opt.casefold() == compressor_table.DEAR:
        args.merging = compressor_table.DEAR
    elif args.opt:
        args.compression = compressor_table.compression(args.opt)
    args.compression = "fp16" if args.fp16_allreduce else args.compression or "none"
    if args.threshold is None:
        args.merging = args.merging or "threshold"  # a plan that no measurement changes
    return args


def log(line: str) -> None:
    """Print on one worker."""
    if hvd.rank() == 0:
        print(line, flush=True)


def wrapped(args: Namespace, work: Workload) -> Any:
    """Plain SGD, distributed; all workers start from worker 0's parameters."""
    scale = hvd.size() * args.backward_passes_per_step
    optimizer = torch.optim.SGD(work.model.parameters(), lr=work.rate * scale)
    options = given(args, work.model)
    if args.fp16_allreduce:
        options["compression"] = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=work.model.named_parameters(),
        backward_passes_per_step=args.backward_passes_per_step,
        **options,
    )
    hvd.broadcast_parameters(work.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer


def stepper(work: Workload, optimizer: Any, passes: int) -> Callable[[int], float]:
    """A function that trains for some steps and returns how many seconds they took."""
    cuda = work.x.is_cuda

    def train(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(passes):
                (work.loss() / passes).backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize()  # kernels run on after the calls have returned
        return time.perf_counter() - start

    return train


def benchmark(args: Namespace, work: Workload, optimizer: Any, device: str) -> dict[str, Any]:
    """Train and measure; returns all figures."""
    passes = args.backward_passes_per_step
    train = stepper(work, optimizer, passes)
    warmup = -(-args.num_warmup_batches // passes)
    steps = -(-args.num_batches_per_iter // passes)

    log("Running warmup...")
    train(warmup)
    before = optimizer.stats()
    log("Running benchmark...")
    rates = []
    for number in range(args.num_iters):
        rates.append(args.batch_size * passes * steps / train(steps))
        log(f"Iter #{number}: {rates[-1]:.1f} {work.unit}/sec per {device}")
    after = optimizer.stats()

    told = {**given(args, work.model), **{key: value for key, value in vars(args).items() if value is not None}}
    return {
        "settings": told,
        "agreed": optimizer.settings,
        "launcher": launcher(),
        "backend": hvd.backend_name(),
        "workers": hvd.size(),
        "device": device,
        "unit": f"{work.unit}/sec",
        "rates": rates,
        "mean": statistics.fmean(rates),
        "interval": 1.96 * statistics.pstdev(rates),
        "parameters": sum(parameter.numel() for parameter in work.model.parameters()),
        "buffers": after["buffers"],
        "steps": args.num_iters * steps,
        **{key: after[key] - before[key] for key in TOTALS},  # of worker 0, in the measured steps
    }


def report(figures: dict[str, Any]) -> None:
    """Horovod's last two lines, and then ours."""
    f = figures
    unit, device, workers = f["unit"], f["device"], f["workers"]
    log(f"{unit[0].upper()}{unit[1:]} per {device}: {f['mean']:.1f} +-{f['interval']:.1f}")
    log(f"Total {unit} on {workers} {device}(s): {workers * f['mean']:.1f} +-{workers * f['interval']:.1f}")

    sent, dense = f["bytes_sent"] / f["steps"], f["bytes_dense"] / f["steps"]
    log(f"Compression: {described(f['agreed'])}")
    log(f"Plan: {planned(f['agreed'], f['buffers'])}")
    log(f"Bytes sent per step and worker: {sent:.0f} (dense {dense:.0f}, {dense / max(sent, 1):.1f}x)")
    link, dense = f["link_bytes"] / f["steps"], f["link_bytes_dense"] / f["steps"]
    log(f"Bytes on the link per step and worker: {link:.0f} (dense {dense:.0f}, {dense / max(link, 1):.1f}x)")
    log(f"Exposed seconds per step: {f['exposed_seconds'] / f['steps']:.6f}")
    log(f"Backend: {f['backend']}, launcher: {f['launcher']}")


def run(args: Namespace, device: torch.device) -> dict[str, Any]:
    """Collective. Train with one compressor; show its figures, and return them. Exits where options contradict."""
    torch.manual_seed(hvd.rank())  # the same model and the same batches for every compressor
    try:
        work = build(args.model, args.batch_size, args.image_size, args.sentence_len).to(device)
    except ValueError as error:
        raise SystemExit(f"--model: {error}") from None
    kind = "GPU" if work.x.is_cuda else "CPU"
    try:
        optimizer = wrapped(args, work)
    except (TypeError, ValueError) as error:  # options that do not go together
        raise SystemExit(f"synthetic_benchmark.py: {error}") from None
    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    figures = benchmark(args, work, optimizer, kind)
    report(figures)
    optimizer.close()
    return figures


def compare(args: Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Collective. Train with each compressor in turn; show a table, and return the figures of each."""
    runs = []
    for name in compressor_table.names(args.each):
        log(f"--- {name}")
        runs.append((name, run(Namespace(**{**vars(args), "compression": compressor_table.compression(name)}), device)))
    log(f"--- {args.model}, {hvd.size()} workers\n{compressor_table.table(runs)}")
    return [figures for _, figures in runs]


def main() -> None:
    """Set up, measure, and show the figures."""
    args = arguments()
    hvd.init()
    cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())  # workers may share one
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    figures = compare(args, device) if args.each else run(args, device)
    if args.json is not None and hvd.rank() == 0:
        args.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main()
